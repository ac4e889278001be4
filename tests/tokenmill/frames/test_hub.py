"""Datasets of Hugging Face's library in and out, and datasets as folders with a card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog
import yaml

import tokenmill as tm
from tests.tokenmill.command_processes import ROOT
from tests.tokenmill.frames.test_data import ADDED, ANSWERS, ROWS, SCHEMA, TABLE
from tests.tokenmill.test_examples import run_example
from tokenmill.errors import InvalidCall
from tokenmill.frames.data import dataset_folder
from tokenmill.frames.data.kinds import open_frame

pytestmark = pytest.mark.slow  # importing the library takes seconds


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The library, with a cache of its own."""
    import datasets as library  # noqa: PLC0415  # not at every collection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hub"))
        yield library


@pytest.fixture
def given(datasets: Any) -> Any:
    """The rows of every type, with a label and in an order of its own."""
    kinds = datasets.Features.from_arrow_schema(SCHEMA.remove(SCHEMA.get_field_index("grade")))
    kinds["grade"] = datasets.ClassLabel(names=["low", "mid", "high"])
    rows = [*ROWS[::-1], ROWS[0]]
    return datasets.Dataset.from_list(rows, kinds, split=datasets.Split.TEST).select([2, 1, 0])


@pytest.fixture
def model(folder: Path, model_folder: Path) -> Iterator[str]:
    yield f"tiny={model_folder}"
    structlog.reset_defaults()  # as the fixture `tokenmill` does


def test_given_a_dataset_of_chosen_rows_when_columns_are_added_then_it_keeps_its_split_and_labels_are_read_by_name(
    datasets: Any, given: Any
) -> None:
    found = open_frame(given).with_columns(ADDED)

    assert found.select_columns(given.column_names).to_list() == given.to_list()
    assert (found.split, found.format["type"]) == (datasets.Split.TEST, None)
    assert list(found["answer"]) == [1, None, 0]
    assert list(open_frame(found).cells(["answer", "grade"])) == [
        {"answer": new["answer"], "grade": row["grade"]} for row, new in zip(ROWS, ANSWERS, strict=True)
    ]
    assert list(open_frame(given).cells([])) == [{}] * 3
    assert len(open_frame(given).slice(1, 2)) == 2
    assert open_frame(given.select([])).with_columns(ADDED.slice(0, 0)).features == found.features


def test_given_a_dataset_with_a_format_when_columns_are_added_then_it_has_it_still(given: Any) -> None:
    shown = given.with_format("pandas", columns=["text"], output_all_columns=True)

    found = open_frame(shown).with_columns(ADDED)

    assert found.format == {**shown.format, "columns": ["text", *ADDED.column_names]}
    assert shown.format["columns"] == ["text"]


def test_given_several_splits_or_a_stream_when_opened_then_the_message_has_the_fix(datasets: Any, given: Any) -> None:
    cases = [
        (datasets.DatasetDict({"train": given}), 'is a DatasetDict; choose one of its splits, as data["train"]'),
        (given.to_iterable_dataset(), "is a IterableDataset; load it without streaming=True, or take rows"),
        (datasets.IterableDatasetDict({"a": given.to_iterable_dataset()}), "is a IterableDatasetDict; load it without"),
    ]
    for data, message in cases:
        with pytest.raises(InvalidCall) as raised:
            open_frame(data)
        assert message in str(raised.value)


def test_given_a_mapped_dataset_when_it_is_written_then_the_library_reads_it_and_the_card_says_how_it_was_made(
    datasets: Any, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_PRICE_PER_HOUR", "3600000")
    data = datasets.Dataset.from_dict({"item": ["a message", "a user", "message " * 4_000]})
    prompt = "Is it ```{{ item }}```?\nyes|no"
    arguments: Any = {"model": model, "prompt": prompt, "output": Literal["no", "yes"], "temperature": 0}
    found = tm.map(data, **arguments, output_dir=folder / "job")
    again = tm.map(data, **arguments, reuse=found, output_dir=folder / "other")
    assert list(again["answer"]) == list(found["answer"])
    assert list(again["answer_reused"]) == [True, True, False]

    written = tm.write_dataset(again, folder / "rated", job=[folder / "job", folder / "other"], split="validation")

    assert written == folder / "rated"
    assert [path.name for path in (written / "data").iterdir()] == ["validation-00000-of-00001.parquet"]
    loaded = datasets.load_dataset(str(written))["validation"]
    assert loaded.features == again.features
    assert loaded.to_list() == again.to_list()
    _, head, card = (written / "README.md").read_text().split("---\n", 2)
    facts = yaml.safe_load(head)
    assert facts["configs"][0]["data_files"] == [{"split": "validation", "path": "data/validation-*.parquet"}]
    assert facts["size_categories"] == ["n<1K"]
    manifest = json.loads((folder / "job/manifest.json").read_text())
    assert f"| digest | `{manifest['models'][0]['digest']}` |" in card
    assert "| model | `tiny`, float32 |" in card.replace("bfloat16", "float32")
    assert f"````jinja\n{prompt}\n````" in card
    assert "| rows | 3: 2 succeeded, 1 failed, 0 of a former job |" in card
    assert "| rows | 3: 2 succeeded, 1 failed, 2 of a former job |" in card
    assert f"{manifest['usage']['prompt']} of prompts" in card
    assert f"| cost | {manifest['cost']:.4g} |" in card
    assert "| temperature | `0` |" in card
    assert "| `answer` | `int64` | 1 |" in card
    assert str(folder) not in card


def test_given_a_table_of_another_kind_when_written_then_enums_are_texts_and_it_is_cut_into_files(
    datasets: Any, model: str, model_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tm.map([{"item": "a"}], prompt="{{ item }}", model=str(model_folder), max_tokens=1, output_dir=folder / "job")
    table = pa.concat_tables([TABLE.append_column("answer", ADDED["answer"])] * 4).combine_chunks()
    monkeypatch.setattr(dataset_folder, "MAX_FILE_BYTES", table.nbytes // 2)
    rows = [*({**row, "answer": new["answer"]} for row, new in zip(ROWS, ANSWERS, strict=True))] * 4
    for name, data in (
        ("arrow", table),
        ("polars", pl.from_arrow(table)),
        ("pandas", table.to_pandas()),
        ("dicts", rows),
    ):
        written = tm.write_dataset(data, folder / name, job=folder / "job")

        assert len(list((written / "data").iterdir())) > 1, name
        assert f"| model | `{model_folder.name}`, " in (written / "README.md").read_text()
        loaded = datasets.load_dataset(str(written), split="train")
        assert loaded.to_list() == rows, name
        assert loaded.features["answer"].dtype in ("string", "large_string")


def test_given_wrong_arguments_when_written_then_nothing_is_and_the_message_has_the_fix(
    model: str, folder: Path
) -> None:
    tm.map([{"item": "a"}], prompt="{{ item }}", model=model, max_tokens=1, output_dir=folder / "job")
    (folder / "full").mkdir()
    (folder / "full/a").touch()
    (folder / "open").mkdir()
    (folder / "open/call.json").write_bytes((folder / "job/call.json").read_bytes())
    (folder / "other").mkdir()
    (folder / "other/call.json").write_text("{}")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"folder": folder / "full"}, "is there already; give another one"),
        ({"split": "../a"}, "split: is '../a'"),
        ({"job": []}, "job: must be the output_dir of at least one call"),
        ({"job": folder / "full"}, "call.json: can't be read: No such file or directory; give the output_dir"),
        ({"job": folder / "open"}, "has not ended; the same call goes on there"),
        ({"job": folder / "other"}, "call.json: is no record of a call"),
        ({"table": pd.DataFrame({"a": [1, "a"]})}, "a column mixes types"),
        ({"table": pa.table([[1], [2]], names=["a", "a"])}, "several columns 'a'"),
        ({"table": {1}}, "is a set, but must be"),
    ]
    for changed, message in cases:
        arguments = {"table": [{"a": 1}], "folder": folder / "new", "job": folder / "job", **changed}
        with pytest.raises(InvalidCall) as raised:
            tm.write_dataset(**arguments)
        assert message in str(raised.value)
        assert not (folder / "new").exists()
    assert not list(folder.glob(".new*"))


def test_the_example_rephrases_documents_four_ways_and_cuts_long_ones_at_a_newline(
    folder: Path, model_folder: Path
) -> None:
    short, long = "a message", "from the user\n" * 200 + "x" * 8_000
    pq.write_table(pa.table({"text": [short, long, "y" * 9_000]}), folder / "documents.parquet")

    variables = {"HF_HOME": str(folder / "hub"), "TOKENMILL_MAX_OUTPUT_TOKENS__STANDARD": "2048"}
    run_example(folder, "rephrase", "documents.parquet", "rephrased", f"tiny={model_folder}", **variables)

    lines = [json.loads(line) for line in (folder / "out/rephrase/table/requests.jsonl").read_text().splitlines()]
    documents = [line["body"]["messages"][0]["content"].split("\n\n", 1)[1] for line in lines]
    assert documents == [short, ("from the user\n" * 200).strip(), "y" * 8_000]
    found = pq.read_table(folder / "rephrased/data")
    assert {"text", "faq", "math", "table", "tutorial"} <= set(found.column_names)
    assert (folder / "rephrased/README.md").read_text().count("```jinja") == 4
    assert len((ROOT / "examples/rephrase.py").read_text().splitlines()) <= 30
