"""`run --adapter`: one file for a model and its adapters, whose rows choose by `model`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Results = Callable[[Path], list[dict[str, Any]]]
Write = Callable[..., Path]

pytestmark = pytest.mark.slow

FLOAT = ("--dtype", "float32")


@pytest.fixture
def given(folder: Path, model_folder: Path, adapters: ModuleType) -> list[str]:
    """Adapters a0 and a1, and the model with each of them merged in m0 and m1; the options that name the adapters."""
    for number in range(2):
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        made = adapters.make_adapter(model, folder / f"a{number}", number)
        adapters.merge_adapter(model, made)
        shutil.copytree(model_folder, folder / f"m{number}")
        model.save_pretrained(folder / f"m{number}")
    return ["--adapter", f"a0={folder / 'a0'}", "--adapter", "a1=a1"]


def test_given_rows_of_several_adapters_when_run_then_each_has_the_answer_of_its_merged_model(
    tokenmill: Cli, model_folder: Path, given: list[str], chat: Chat, write_lines: Write, results: Results
) -> None:
    # Given the same questions to the model and two adapters, shuffled, and one to an adapter that there is not,
    names = ["tiny", "a0", "a1"]
    lines = [chat(f"{name} {n}", text=f"number {n}", model=name) for n in range(6) for name in names]
    path = write_lines(*lines, chat("other", model="a9"))
    options = ["--model", f"tiny={model_folder}", *FLOAT, *given]

    # when it is run through one place for adapters,
    ended = tokenmill("run", path, *options, "-o", "out", "--max-loras", 1, "--json")
    assert ended.code == 0, ended.err
    *rows, other = results(Path("out"))

    # then each row has the answer that its merged model gives,
    texts = {}
    for name, source in zip(names, (model_folder, "m0", "m1"), strict=True):
        of_name = write_lines(*(line for line in lines if line["body"]["model"] == name), name=f"{name}.jsonl")
        assert tokenmill("run", of_name, "--model", f"{name}={source}", *FLOAT, "-o", f"out-{name}").code == 0
        texts.update((row["custom_id"], row["text"]) for row in results(Path(f"out-{name}")))
    assert {row["custom_id"]: row["text"] for row in rows} == texts
    assert len({texts[f"{name} 0"] for name in names}) == 3
    assert all(row["model"] == row["custom_id"].split()[0] for row in rows)
    # the unknown name fails by itself, with those that there are,
    assert other["error_code"] == "model_not_found"
    assert "(tiny, a0, a1)" in other["error_message"]
    # and answers are reused for the same adapter only.
    again = tokenmill("run", path, *options, "-o", "again", "--reuse", "out", "--json")
    assert again.code == 0, again.err
    assert not list(Path("again").glob("plans/*/shards/*.parquet"))
    shutil.copy(Path("a1/adapter_model.safetensors"), Path("a0/adapter_model.safetensors"))
    changed = tokenmill("run", path, *options, "-o", "changed", "--reuse", "out", "--json")
    assert changed.code == 0, changed.err
    assert [row["text"] for row in results(Path("changed"))[1::3]] == [texts[f"a1 {n}"] for n in range(6)]
    # A job that was begun with the old adapter does not go on with the new one.
    assert "digest" in tokenmill("run", path, *options, "-o", "out").error
    assert "is not the adapter any more that answered as a0" in tokenmill(
        "jobs", "retry", "out", "--output", "retried", "--only", "failed", "--include-invalid"
    ).error  # fmt: skip


def test_given_adapters_that_do_not_fit_when_run_then_nothing_is_begun(
    tokenmill: Cli, folder: Path, model_folder: Path, given: list[str], chat: Chat, write_lines: Write
) -> None:
    path = write_lines(chat("one"))
    start = ["run", path, "-o", "out", "--model", f"tiny={model_folder}"]
    assert "there is no such folder" in tokenmill(*start, "--adapter", "a=nowhere").error
    assert "two adapters have one name" in tokenmill(*start, *given, "--adapter", "a0=a0").error
    assert "is the model's own name" in tokenmill(*start, "--adapter", "tiny=a0").error
    assert "give one --model" in tokenmill(*start, "--model", "b=m0", *given).error
    assert "adapters are those of tokenmill's own code" in tokenmill(*start, *given, "--engine", "transformers").error
    settings = folder / "a0/adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"use_dora": True}))
    assert "DoRA is not supported" in tokenmill(*start, *given).error
    assert not (folder / "out/job.json").exists()
