"""Tables whose rows are answered by adapters of one model: a column names each row's."""

from __future__ import annotations

import json
import shutil
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
from tokenmill.errors import InvalidCall, UserError
from tokenmill.frames.clusters.blocks import BlockMapper
from workers.model.loaded_model import LoadedModel

Cli = Callable[..., Any]

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
    options = [part for name in given for part in ("--adapter", f"{name}={name}")]
    ended = tokenmill(
        "run", "in.parquet", "--model", model, "--output", "out", "--prompt", "prompt.txt", "--adapter-column",
        "customer", *options, "--sampling", "max_tokens=6", "--sampling", "temperature=0", "--dtype", "float32",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert pl.read_parquet(folder / "out/table.parquet").equals(found)
    # With other files under its name only the rows of that adapter are computed again.
    settings = given["a0"] / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_alpha": 3}))
    changed = tm.map(table, model=model, reuse=folder / "out", **asked)
    assert answers_of(changed, "a0") != texts["a0"]
    assert set(changed.filter("answer_reused")["customer"]) == {None, "tiny", "a1"}
    assert not changed.filter(customer="a0")["answer_reused"].any()


@pytest.mark.slow
def test_given_a_resident_model_with_adapters_when_called_then_it_is_loaded_once_for_the_same_files(
    model: str, folder: Path, given: dict[str, Path], table: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[LoadedModel] = []
    load = LoadedModel.load
    monkeypatch.setattr(LoadedModel, "load", lambda *args, **options: loads.append(load(*args, **options)) or loads[-1])
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
    for of_pipeline, of_step in ((both, {}), ({}, both), ({}, {"adapter_column": "customer"})):
        steps = tm.pipeline([tm.step("reply", prompt=PROMPT, **of_step)], model=model, **of_pipeline)
        with pytest.raises(InvalidCall, match="step 'reply': adapters: pipelines take none"):
            steps.run(rows)
