"""Tables whose rows are answered by adapters of one model: a column names each row's."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
import structlog
import torch
from transformers import AutoModelForCausalLM

import tokenmill as tm
from tests.tokenmill.chaos.watching import digests
from tests.tokenmill.command_processes import ROOT
from tests.waiting import wait_for
from tokenmill.errors import InvalidCall, UserError
from tokenmill.frames.clusters.blocks import BlockMapper
from workers.model.loaded_model import LoadedModel

Cli = Callable[..., Any]

PROGRAM = Path(__file__).with_name("adapter_pipeline_program.py")
PROMPT = "number {{ n }}"
NAMES = ["a0", None, "a1", "tiny", "a9"]
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "dtype": "float32"}


@pytest.fixture
def model(folder: Path, model_folder: Path) -> Iterator[str]:
    """The name of the model, in a working folder of its own."""
    yield f"tiny={model_folder}"
    structlog.reset_defaults()  # as the fixture `tokenmill` does


@pytest.fixture
def given(folder: Path, model_folder: Path, adapters: ModuleType) -> dict[str, Path]:
    """Adapters a0 and a1, and the model with each of them merged in m0 and m1."""
    for number in range(2):
        merged = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        made = adapters.make_adapter(merged, folder / f"a{number}", number)
        adapters.merge_adapter(merged, made)
        shutil.copytree(model_folder, folder / f"m{number}")
        merged.save_pretrained(folder / f"m{number}")
    return {f"a{number}": folder / f"a{number}" for number in range(2)}


@pytest.fixture
def table() -> pl.DataFrame:
    """The same four texts for each name."""
    return pl.DataFrame({"n": [n for n in range(4) for _ in NAMES], "customer": NAMES * 4})


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[LoadedModel]:
    """The models that are loaded."""
    found: list[LoadedModel] = []
    load = LoadedModel.load
    monkeypatch.setattr(LoadedModel, "load", lambda *args, **options: found.append(load(*args, **options)) or found[-1])
    return found


def change_alpha(adapter: Path) -> None:
    settings = adapter / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_alpha": 3}))


def answers_of(table: pl.DataFrame, name: str | None) -> list[str]:
    return table.filter(pl.col("customer").eq_missing(pl.lit(name, pl.String)))["answer"].to_list()


@pytest.mark.slow
def test_given_a_column_of_adapters_when_mapped_then_each_row_has_the_answer_of_its_merged_model(
    model: str, folder: Path, given: dict[str, Path], table: pl.DataFrame, tokenmill: Cli
) -> None:
    asked = {**ASKED, "adapters": given, "adapter_column": "customer"}

    found = tm.map(table, model=model, output_dir=folder / "out", **asked)

    want = {"a0": "m0", None: model, "a1": "m1", "tiny": model}
    numbers = pl.DataFrame({"n": range(4)})
    texts = {name: tm.map(numbers, model=str(source), **ASKED)["answer"].to_list() for name, source in want.items()}
    assert {name: answers_of(found, name) for name in want} == texts
    assert len({tuple(answers) for answers in texts.values()}) == 3
    # A name that there is not is its row's error.
    others = found.filter(customer="a9")["answer_error"].unique().to_list()
    assert all(error.startswith("model_not_found: ") and "(tiny, a0, a1)" in error for error in others)
    # Keys are those of the adapter: one that answers all rows has the same, and takes the others' answers.
    alone = tm.map(numbers, model=model, adapters={"x": folder / "a1"}, reuse=folder / "out", **ASKED)
    assert alone["answer"].to_list() == texts["a1"]
    assert alone["answer_key"].to_list() == found.filter(customer="a1")["answer_key"].to_list()
    assert alone["answer_reused"].all()
    merged = tm.map(numbers, model=model, adapters={"x": folder / "a1"}, merge_adapter=True, **ASKED)
    assert merged["answer"].to_list() == texts["a1"]
    assert found["answer_key"].n_unique() == 4 * 3 + 1  # and null
    # The command makes the same job.
    table.write_parquet(folder / "in.parquet")
    (folder / "prompt.txt").write_text(PROMPT)
    command = (
        "run", "in.parquet", "--model", model, "--prompt", "prompt.txt", "--sampling", "max_tokens=6", "--sampling",
        "temperature=0", "--dtype", "float32",
    )  # fmt: skip
    options = [part for name in given for part in ("--adapter", f"{name}={name}")]
    ended = tokenmill(*command, *options, "--adapter-column", "customer", "--output", "out")
    assert ended.code == 0, ended.err
    assert pl.read_parquet(folder / "out/table.parquet").equals(found)
    ended = tokenmill(*command, "--adapter", "x=a1", "--merge-adapter", "--output", "merged")
    assert ended.code == 0, ended.err
    all_by_one = pl.read_parquet(folder / "merged/table.parquet")
    assert all_by_one["answer"].to_list() == [texts["a1"][n] for n in table["n"]]
    # With other files under its name only the rows of that adapter are computed again.
    change_alpha(given["a0"])
    changed = tm.map(table, model=model, reuse=folder / "out", **asked)
    assert answers_of(changed, "a0") != texts["a0"]
    assert set(changed.filter("answer_reused")["customer"]) == {None, "tiny", "a1"}
    assert not changed.filter(customer="a0")["answer_reused"].any()


@pytest.mark.slow
def test_given_a_resident_model_with_adapters_when_called_then_it_is_loaded_once_for_the_same_files(
    model: str, folder: Path, given: dict[str, Path], table: pl.DataFrame, loads: list[LoadedModel]
) -> None:
    rows = table.filter(pl.col("customer") != "a9")
    question: dict[str, Any] = {"text": PROMPT, "labels": ["yes", "no"]}

    with tm.load_model(model, dtype="float32", adapters=given, max_loras=1) as resident:
        labels = tm.classify(rows, model=resident, adapter_column="customer", **question)
        again = tm.classify(rows, model=resident, adapter_column="customer", **question)
        assert len(loads) == 1
        shutil.copy(folder / "a1/adapter_model.safetensors", folder / "a0/adapter_model.safetensors")
        changed = tm.classify(rows, model=resident, adapter_column="customer", **question)
        assert len(loads) == 2
    # Processes of a cluster hold such a model.
    call = {"model": model, "dtype": "float32", "adapters": {"a1": folder / "a1"}, "adapter_column": "customer"}
    block = BlockMapper(tm.classify, {**call, **question})(rows.filter(customer="a1").to_arrow())

    of = {name: labels.filter(customer=name)["label_probability"].to_list() for name in ("a0", "a1", "tiny")}
    alone = tm.classify(rows.filter(customer="a0"), model="m1", dtype="float32", **question)["label_probability"]
    assert of["a1"] == pytest.approx(alone.to_list(), rel=1e-4)
    assert block["label_probability"].to_pylist() == pytest.approx(of["a1"], rel=1e-4)
    assert of["a0"] != of["a1"] != of["tiny"]
    assert again["label_probability"].to_list() == labels["label_probability"].to_list()
    assert changed.filter(customer="a0")["label_probability"].to_list() == of["a1"]


@pytest.mark.slow
def test_given_adapters_when_estimated_then_no_prefix_is_shared_between_them(
    model: str, folder: Path, given: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_KV_BLOCK_SIZE", "8")
    table = pl.DataFrame({"n": [0, 1, 2, 3] * 3, "customer": [name for name in (None, "a0", "a1") for _ in range(4)]})
    asked = {**ASKED, "prompt": f"{'once more said the user ' * 4}{PROMPT}", "model": model}
    named = {"adapters": given, "adapter_column": "customer", "max_loras": 1}

    estimate = tm.map(table, dry_run=True, **asked, **named)

    tm.map(table, output_dir=folder / "out", **asked, **named)
    usage = json.loads((folder / "out" / "manifest.json").read_text())["usage"]
    assert (estimate.rows, estimate.computed, estimate.prompt_tokens) == (12, 12, usage["prompt"])
    assert estimate.shared_prefix_tokens == usage["cached"] > 0
    # Of former answers those of the same adapter count.
    numbers = pl.DataFrame({"n": range(6)})
    one: dict[str, Any] = {"adapters": {"x": folder / "a1"}, "reuse": folder / "out", "dry_run": True}
    for merge in (False, True):
        rest = tm.map(numbers, merge_adapter=merge, **asked, **one)
        assert (rest.rows, rest.reused, rest.computed) == (6, 4, 2)


@pytest.mark.slow
def test_given_wrong_adapters_when_called_then_nothing_runs_and_the_message_has_the_fix(
    model: str, folder: Path, given: dict[str, Path]
) -> None:
    rows = [{"n": 1, "customer": "a0", "id": 17}]
    both = {"adapters": given}
    cases: list[tuple[dict[str, Any], str]] = [
        (both, r"several \(a0, a1\), and nothing says which one .* \(--adapter-column\), or one adapter"),
        ({"adapter_column": "customer"}, "'customer' is given without adapters"),
        ({**both, "adapter_column": "costumer"}, "no column 'costumer'; did you mean 'customer'"),
        ({**both, "adapter_column": "id"}, "row 0: adapter_column: is 17, but must be the name of an adapter, or null"),
        ({"adapters": {"a0": 3}}, "adapters: "),
        ({**both, "merge_adapter": True}, "merges one --adapter into the model, not 2"),
        ({"adapters": {"a0": "nowhere"}}, "adapters a0=nowhere: there is no such folder"),
        ({"adapters": {"tiny": given["a0"]}}, "adapter tiny: is the model's own name"),
        ({**both, "adapter_column": "customer", "engine": "transformers"}, "adapters are for tokenmill's own"),
        ({**both, "adapter_column": "customer", "root": folder}, "adapters: the workers of the installation decide"),
    ]
    for changes, message in cases:
        with pytest.raises(UserError, match=message):
            tm.map(rows, model=model, prompt=PROMPT, output_dir=folder / "out", **changes)
        assert not (folder / "out" / "job.json").exists()
    with pytest.raises(InvalidCall, match="adapters are of models that generate"):
        tm.classify(rows, model=model, text=PROMPT, adapter_column="customer")
    for changes, message in cases[:3]:
        steps = tm.pipeline([tm.step("reply", prompt=PROMPT, **changes)], model=model)
        with pytest.raises(InvalidCall, match=f"step 'reply': .*{message}"):
            steps.run(rows, output_dir=folder / "out")


@pytest.mark.slow
def test_given_steps_with_adapters_when_run_then_one_model_gives_the_answers_of_single_calls(
    model: str, folder: Path, given: dict[str, Path], table: pl.DataFrame, loads: list[LoadedModel]
) -> None:
    named = {"adapters": given, "adapter_column": "customer"}
    other = {"adapters": {"a0": shutil.copytree(given["a1"], folder / "a2")}}  # steps have other files of this name
    change_alpha(folder / "a2")
    asked = {"max_tokens": 6, "temperature": 0}
    steps: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
        ("reply", tm.map, {"prompt": PROMPT, **asked, **named}),
        ("draft", tm.map, {"prompt": "so {{ n }}", **asked}),
        ("legal", tm.map, {"prompt": "{{ draft }}!", **asked, **other}),
        ("route", tm.classify, {"text": "{{ draft }}", "labels": ["a0", "a1", "tiny"], "adapters": {"x": given["a0"]}}),
        ("sent", tm.map, {"prompt": PROMPT, **asked, "adapters": given, "adapter_column": "route"}),
        ("after", tm.map, {"prompt": "{{ reply }}", **asked}),
    ]
    made = tm.pipeline([tm.step(*call, **options) for *call, options in steps], model=model, dtype="float32")

    found = made.run(table, output_dir=folder / "out")

    assert len(loads) == 1
    single = table
    for name, function, options in steps[:-1]:
        single = function(single, model=model, dtype="float32", output_column=name, **options)
    kept = [name for name in single.columns if not name.endswith("_tokens")]
    assert found.select(kept).equals(single.select(kept))
    assert found["route"].n_unique() > 1, "else one model answers all of the next step"
    failed = found.filter(customer="a9")
    assert all("(tiny, a0, a1)" in error for error in failed["reply_error"])
    assert failed["after_error"].str.starts_with("input_failed: ").all()
    sent = made.plan(table).steps["sent"]
    assert sent is not None
    assert sent.computed == 4 * 2, "its adapters are assumed in turn"
    # The same adapter under another name has these answers.
    renamed = tm.step("legal", prompt="{{ draft }}!", **asked, adapters={"y": folder / "a2"})
    again = tm.pipeline([renamed], model=model, dtype="float32").run(found[["draft"]], reuse=folder / "out")
    assert again["legal_reused"].all()
    # The folder belongs to the names in the column, and to the adapters' files.
    with pytest.raises(InvalidCall, match="it is over other cells"):
        made.run(table.with_columns(customer=pl.lit("a0")), output_dir=folder / "out")
    change_alpha(given["a0"])
    with pytest.raises(InvalidCall, match=r"holds another job: models\[1\].digest was"):
        made.run(table, output_dir=folder / "out")


@pytest.mark.slow
def test_given_an_adapter_merged_and_beside_its_model_when_a_pipeline_runs_then_each_model_is_loaded_once(
    model: str, given: dict[str, Path], loads: list[LoadedModel]
) -> None:
    numbers = pl.DataFrame({"n": range(6)})
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "adapters": {"x": given["a0"]}}
    steps = {"merged": {**asked, "merge_adapter": True}, "beside": asked}
    made = tm.pipeline([tm.step(name, **call) for name, call in steps.items()], model=model, dtype="bfloat16")

    found = made.run(numbers)

    assert len(loads) == 2
    for name, call in steps.items():
        single = tm.map(numbers, model=model, dtype="bfloat16", output_column=name, **call)
        assert found[[name, f"{name}_key"]].equals(single[[name, f"{name}_key"]])


@pytest.mark.slow
def test_given_a_pipeline_with_adapters_when_killed_then_it_goes_on_to_the_same_table(
    folder: Path, model_folder: Path, given: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "8")
    monkeypatch.setenv("TOKENMILL_PLAN__FIRST_SEGMENT_ROWS", "32")
    argv = [str(PROGRAM), str(model_folder), "out", "out.parquet"]
    process = subprocess.Popen([sys.executable, *argv], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_for(lambda: len(committed(folder)) > 2 or process.poll() is not None)
    process.kill()
    process.wait()
    before = committed(folder)
    assert 2 < len(before) < 3 * 96 / 8

    for output in ("out", "whole"):
        monkeypatch.setattr(sys, "argv", [*argv[:2], output, f"{output}.parquet"])
        runpy.run_path(str(PROGRAM))

    assert before.items() <= committed(folder).items()
    found, whole = pl.read_parquet("out.parquet"), pl.read_parquet("whole.parquet")
    kept = [name for name in whole.columns if not name.endswith("_cached_tokens")]
    assert found.select(kept).equals(whole.select(kept))
    assert found["base_error"].null_count() == 96
    manifests = [json.loads(path.read_text()) for path in folder.glob("out/steps/*/manifest.json")]
    assert [manifest["usage"]["repeated"] for manifest in manifests] == [0, 0, 0]


def committed(folder: Path) -> dict[str, str]:
    """The committed parts of all steps, with the digest of each."""
    steps = sorted(folder.glob("out/steps/*"))
    return {f"{step.name}/{part}": digest for step in steps for part, digest in digests(step).items()}
