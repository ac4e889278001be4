"""`tokenmill run` with a guard model that `tokenmill serve` serves: a tiny random chat model, held to the labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.tokenmill.command_processes import Processes
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.exhaustive

TEXTS = [f"message number {number}" for number in range(40)]
QUESTION = "{{ text.split('user\\n')[-1].split('<end>')[0] }}"
LABELS = tuple("abcdefghijklmnopqrstuvwxyz")
CHOICES = {"structured_outputs": {"choice": LABELS}}


def label_of(url: str, text: str) -> str:
    """The guard's label of a text."""
    body = {"model": "guard", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body | CHOICES, timeout=HANG_SECONDS)
    return str(answer.json()["choices"][0]["message"]["content"])


def test_given_a_served_guard_then_a_run_refuses_what_it_labels_and_without_it_ends_as_its_file_says(
    processes: Processes,
    tokenmill: Callable[..., Any],
    folder: Path,
    model_folder: Path,
    chat: Callable[..., dict[str, Any]],
    write_lines: Callable[..., Path],
    results: Callable[[Path], list[dict[str, Any]]],
) -> None:
    served = processes.start(
        "-m", "tokenmill", "serve", "--data", "data", "--port", 0, "--model", f"guard={model_folder}", "--dtype",
        "float32", "--threads", 1,
    )  # fmt: skip
    url = processes.url(served)
    models = wait_for(
        lambda: httpx2.get(f"{url}/v1/models", timeout=HANG_SECONDS).json()["data"], "the guard serves nothing"
    )
    labels = {text: label_of(url, text) for text in TEXTS}
    (good, safe), *others = labels.items()
    planted, unsafe = next((text, label) for text, label in others if label != safe)

    def guard(how: str, model: str = "guard") -> str:
        path = folder / f"{how}.toml"
        path.write_text(
            f'url = "{url}/v1"\nmodel = "{model}"\non_failure = "{how}"\nprompt = "{QUESTION}"\n'
            + ("retry_seconds = 2\n" if how == "closed" else "")
            + "".join(f'[[label]]\nname = "{name}"\n' for name in LABELS if name != unsafe)
            + f'[[label]]\nname = "{unsafe}"\naction = "refuse"\n',
            encoding="utf-8",
        )
        return f"guard:{path}"

    lines = write_lines(chat("good", good), chat("planted", planted), chat("copy", good))
    run = ("run", lines, "--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1)
    ended = tokenmill(*run, "-o", folder / "out", "--content-policy", guard("closed"))
    assert ended.code == 0, ended.err
    rows = {row["custom_id"]: row for row in results(folder / "out")}
    assert {name: row["error_code"] for name, row in rows.items()} == {
        "good": None, "planted": "content_filter", "copy": None,
    }  # fmt: skip
    usage = {name: json.loads(rows[name]["content_policies"] or "null") for name in rows}
    assert usage["planted"]["verdicts"][0] == {"policy": "guard", "rule": unsafe, "action": "refuse", "on": "prompt"}
    assert all(usage[name]["usage"]["prompt_tokens"] > 0 for name in ("good", "planted"))
    assert planted not in ended.err

    process = processes.running[served]
    process.kill()
    process.wait()
    version = f"guard@{models[0]['tokenmill']['digest']}"
    for how, status, code in (("open", "succeeded", None), ("closed", "failed", "engine_error")):
        ended = tokenmill(*run, "-o", folder / how, "--content-policy", guard(how, version))
        assert ended.code == 0, ended.err
        found = {(row["status"], row["error_code"]) for row in results(folder / how)}
        assert found == {(status, code)}
    ended = tokenmill(*run, "-o", folder / "none", "--content-policy", guard("closed"))
    assert (ended.code, (folder / "none").exists()) == (1, False)
    assert "can't be asked for its models" in ended.error
