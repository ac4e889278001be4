"""A model's own sampling defaults, as a user meets them: in the answers, the manifest, a resumed job, `models show`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]
Results = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def model(folder: Path, model_folder: Path) -> Path:
    """A model whose authors recommend greedy answers of 6 tokens at most."""
    path = folder / "recommending"
    shutil.copytree(model_folder, path)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 6, "top_k": 5}))
    return path


def bare(line: dict[str, Any]) -> dict[str, Any]:
    """The line without sampling parameters."""
    for name in ("temperature", "max_tokens"):
        del line["body"][name]
    return line


@pytest.mark.slow
def test_requests_without_sampling_parameters_get_the_models_own(
    tokenmill: Cli, folder: Path, model: Path, chat: Chat, write_lines: Write, results: Results
) -> None:
    lines = write_lines(
        bare(chat("default")), chat("null", temperature=None, max_tokens=None), bare(chat("same")),
        chat("greedy", temperature=0, max_tokens=6), chat("hot", temperature=1.0, max_tokens=12),
    )  # fmt: skip
    engine = ("--model", f"tiny={model}", "--dtype", "float32", "--threads", 1)
    done = tokenmill("run", lines, "--output", "out", *engine)
    assert done.code == 0, done.err
    rows = {row["custom_id"]: row for row in results(folder / "out")}
    answer = rows["greedy"]["text"]
    assert rows["default"]["text"] == rows["null"]["text"] == rows["same"]["text"] == answer
    assert rows["default"]["completion_tokens"] <= 6
    assert rows["hot"]["text"][: len(answer)] != answer
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    named = {"temperature": 0.0, "max_new_tokens": 6, "top_k": 5}
    assert manifest["models"][0]["sampling_defaults"] == named
    assert manifest["usage"]["completion"] < sum(row["completion_tokens"] for row in rows.values()), "copies, once"

    # Given the same command without them, then it is another job, and says so.
    other = tokenmill("run", lines, "--output", "out", *engine, "--generation-config", "ignore")
    assert other.code == 1
    assert "sampling_defaults" in other.error
    ignoring = tokenmill("run", lines, "--output", "plain", *engine, "--generation-config", "ignore")
    assert ignoring.code == 0, ignoring.err
    plain = {row["custom_id"]: row for row in results(folder / "plain")}
    assert plain["greedy"]["text"] == answer
    assert plain["default"]["text"] != answer
    assert "sampling_defaults" not in json.loads((folder / "plain" / "manifest.json").read_text())["models"][0]


def test_models_show_names_them(tokenmill: Cli, model: Path) -> None:
    assert tokenmill("models", "show", model, "--json").json()["sampling_defaults"] == {
        "temperature": 0.0, "top_k": 5, "max_new_tokens": 6,
    }  # fmt: skip
    assert "temperature 0.0, top_k 5, max_new_tokens 6" in tokenmill("models", "show", model).out.replace("\n", " ")
