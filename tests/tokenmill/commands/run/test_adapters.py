"""`run --adapter`: one file for a model and its adapters, whose rows choose by `model`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.quant.quantize import write_quantized
from engine.quant.writing import Scheme
from tests.tokenmill.command_processes import ROOT

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
    assert (
        "adapters are for tokenmill's own code and vLLM" in tokenmill(*start, *given, "--engine", "transformers").error
    )
    settings = folder / "a0/adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"use_dora": True}))
    assert "DoRA is not supported" in tokenmill(*start, *given).error
    assert not (folder / "out/job.json").exists()


def test_given_an_adapter_to_merge_when_run_then_it_answers_in_the_models_place(
    tokenmill: Cli, folder: Path, model_folder: Path, given: list[str], chat: Chat, write_lines: Write, results: Results
) -> None:
    # Given rows of an adapter, and one that names the model, which nothing answers without the adapter,
    model, merging = ["--model", f"tiny={model_folder}", *FLOAT], [*given[:2], "--merge-adapter"]
    lines = [chat(f"{n}", text=f"number {n}", model="a0") for n in range(4)]
    path = write_lines(*lines, chat("of the model", model="tiny"))
    assert tokenmill("run", write_lines(*lines, name="a.jsonl"), "--model", "a0=m0", *FLOAT, "-o", "want").code == 0
    texts = [row["text"] for row in results(Path("want"))]
    # when it is merged, then rows have the answers of the model that PEFT would save,
    ended = tokenmill("run", path, *model, *merging, "-o", "out", "--json")
    assert ended.code == 0, ended.err
    *rows, refused = results(Path("out"))
    assert [row["text"] for row in rows] == texts
    assert {row["model"] for row in rows} == {"a0"}
    # and the other one is refused, with what to do.
    assert refused["error_code"] == "model_not_found"
    assert "(a0); a0 was merged into it: name a0, or leave out --merge-adapter" in refused["error_message"]
    # The folder belongs to the job with the merged one, as one without belongs to that, though in float32 the answers
    # of both are the same.
    apart = tokenmill("run", path, *model, *given[:2], "-o", "apart", "--reuse", "out")
    assert apart.code == 0, apart.err
    assert [row["text"] for row in results(Path("apart"))[:4]] == texts
    assert len(list(Path("apart").glob("plans/*/shards/*.parquet"))) == 1  # the model's row alone
    assert "merged_adapter was a0, now None" in tokenmill("run", path, *model, *given[:2], "-o", "out").error
    assert "merged_adapter was None, now a0" in tokenmill("run", path, *model, *merging, "-o", "apart").error
    assert tokenmill("run", path, *model, *merging, "-o", "out").code == 0
    # In bfloat16 they are not: the sum is rounded.
    rounded = ["run", path, *model[:2], "--dtype", "bfloat16", "--limit", 4]
    assert tokenmill(*rounded, *given[:2], "-o", "b").code == 0
    assert tokenmill(*rounded, *merging, "-o", "merged", "--reuse", "b").code == 0
    assert list(Path("merged").glob("plans/*/shards/*.parquet"))
    # A retry merges again.
    again = tokenmill("jobs", "retry", "out", "-o", "retried", "--only", "failed", "--include-invalid", "--json")
    assert again.code == 0, again.err
    assert [model["merged"] for model in json.loads(Path("retried/job.json").read_bytes())["models"]] == [True]


def test_given_what_can_not_be_merged_when_run_then_nothing_is_begun(
    tokenmill: Cli, folder: Path, model_folder: Path, given: list[str], chat: Chat, write_lines: Write
) -> None:
    start = ["run", write_lines(chat("one")), "-o", "out", "--merge-adapter", *FLOAT, "--model"]
    model, one = f"tiny={model_folder}", given[:2]
    assert "merges one --adapter into the model, not 0; give one" in tokenmill(*start, model).error
    assert "not 2; give one" in tokenmill(*start, model, *given).error
    assert "--max-loras is of adapters beside the model" in tokenmill(*start, model, *one, "--max-loras", 2).error
    assert "quantized to int8 at load" in tokenmill(*start, model, *one, "--quantize", "int8").error
    (folder / "small").mkdir()
    write_quantized(model_folder, folder / "small", Scheme("int8"))
    refused = tokenmill(*start, "tiny=small", *one).error
    assert "which is int8: the sum would be rounded" in refused
    assert "--quantize dense, which takes 4 bytes for each of" in refused
    assert not (folder / "out/job.json").exists()


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm")
def test_given_vllm_when_rows_name_adapters_then_their_answers_are_those_of_our_engine(
    folder: Path, vllm_model_folder: Path, adapters: ModuleType, chat: Chat, write_lines: Write, results: Results
) -> None:
    model = AutoModelForCausalLM.from_pretrained(vllm_model_folder, dtype=torch.float32)
    for number in range(2):
        adapters.make_adapter(model, folder / f"v{number}", number)
    names = ["tiny", "v0", "v1"]
    path = write_lines(*(chat(f"{name} {n}", text=f"number {n}", model=name) for n in range(4) for name in names))
    options = ["--model", f"tiny={vllm_model_folder}", *FLOAT, "--adapter", "v0=v0", "--adapter", "v1=v1"]
    answers = {}
    for engine in ("vllm", "tokenmill"):
        command = [sys.executable, "-m", "tokenmill", "run", str(path), *options, "--engine", engine, "-o", engine]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        answers[engine] = {row["custom_id"]: row["text"] for row in results(Path(engine))}

    assert answers["vllm"] == answers["tokenmill"]
    assert len({answers["vllm"][f"{name} 0"] for name in names}) == 3
