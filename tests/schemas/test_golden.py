"""Files of former versions are read by this one, and this one writes nothing that they lack but what may be left out.

What lies under golden/ was written by the version that its folder names (v1.1: when fields and kinds had been added to
version 1), and is never changed."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pipeline
import schemas
from schemas.stored import StoredModel
from tests.schemas.golden_samples import EVENTS, HEAD, RECORDS, SUMMARY, Golden, samples

FOLDER = Path(__file__).parent / "golden"
FILES = sorted(path for path in FOLDER.glob("v*/*") if path.is_file())
SAMPLES = samples()


def lacks(given: Any, wanted: Any, path: str = "") -> list[str]:
    """The paths where `given` differs from `wanted`; it may have more keys."""
    if isinstance(wanted, dict) and isinstance(given, dict):
        return [
            line
            for key, value in wanted.items()
            for line in (lacks(given[key], value, f"{path}.{key}") if key in given else [f"{path}.{key}: is not there"])
        ]
    if isinstance(wanted, list) and isinstance(given, list) and len(wanted) == len(given):
        pairs = enumerate(zip(given, wanted, strict=True))
        return [line for n, (one, other) in pairs for line in lacks(one, other, f"{path}[{n}]")]
    return [] if given == wanted else [f"{path}: {given!r}, not {wanted!r}"]


def test_given_the_current_models_when_golden_files_are_counted_then_each_kind_has_one() -> None:
    assert {path.name for path in FILES} == set(SAMPLES), "python -m tests.schemas.make_golden writes those that lack"


def test_given_all_records_with_a_format_version_then_each_has_a_golden_file() -> None:
    for package in (schemas, pipeline):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    ours = [
        kind for kind in below(StoredModel) if kind.__module__.partition(".")[0] != "tests"
    ]  # others' tests make more
    stored = {kind for kind in ours if numbered(kind) and not any(other in ours for other in kind.__subclasses__())}
    sampled = {type(record) for record in (*RECORDS.values(), *EVENTS.values(), SUMMARY, HEAD)}
    assert {kind.__name__ for kind in stored} == {kind.__name__ for kind in sampled if numbered(kind)}


def numbered(kind: type[StoredModel]) -> bool:
    """Whether the file has a format version."""
    return "version" in kind.model_fields and kind.model_fields["version"].default == 1


def below(kind: type[StoredModel]) -> Iterator[type[StoredModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from below(one)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_given_a_file_of_a_former_version_when_it_is_read_then_its_values_are_the_same(path: Path) -> None:
    golden = SAMPLES[path.name]
    read = golden.read(path.read_bytes())
    assert lacks(golden.read(golden.data), read) == [], "today's reader makes something else of it"
    if path.suffix == ".json" and isinstance(read, dict):
        assert lacks(read, json.loads(path.read_bytes())) == [], "the reader drops something of it"


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".json"], ids=lambda path: path.name)
def test_given_todays_writer_when_it_writes_the_same_then_nothing_of_the_former_file_is_missing(path: Path) -> None:
    assert lacks(json.loads(SAMPLES[path.name].data), json.loads(path.read_bytes())) == []


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".parquet"], ids=lambda path: path.name)
def test_given_todays_columns_when_compared_with_former_ones_then_only_nullable_ones_were_added_behind_ours(
    path: Path,
) -> None:
    former, now = pq.read_schema(path), pq.read_schema(pa.BufferReader(SAMPLES[path.name].data))
    assert added(former, now) is None


def added(former: pa.Schema, now: pa.Schema) -> str | None:
    """The first incompatible change of the columns, or None. Columns that are carried through from an
    input come last, and move back when ours become more."""
    carried = ["input_topic", "topic", "input_status"]
    ours = [field for field in former if field.name not in carried]
    for number, field in enumerate(ours):
        if now.field(number) != field:
            return f"column {number} is {now.field(number)}, and was {field}"
    new = [now.field(number) for number in range(len(ours), len(now.names)) if now.names[number] not in carried]
    return next((f"column {field.name} is new, and isn't nullable" for field in new if not field.nullable), None)


def test_given_other_changes_than_allowed_ones_when_compared_then_each_is_reported() -> None:
    former = pa.schema([pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.string())])
    assert added(former, former.append(pa.field("c", pa.string()))) is None
    assert "new" in (added(former, former.append(pa.field("c", pa.string(), nullable=False))) or "")
    assert "column 0" in (added(former, pa.schema([former.field(1), former.field(0)])) or "")
    assert "column 0" in (added(former, former.set(0, pa.field("a", pa.int64(), nullable=False))) or "")
    with pytest.raises(KeyError):
        SAMPLES["nothing.json"]
    assert lacks({"a": 1}, {"a": 1, "b": None}) == [".b: is not there"]
    assert lacks({"a": 1, "c": 3}, {"a": 2}) == [".a: 1, not 2"]


def test_given_a_record_with_an_unknown_field_when_it_is_read_then_it_is_refused() -> None:
    golden: Golden = SAMPLES["job.json"]
    with pytest.raises(Exception, match="a golden file"):
        golden.read(json.dumps(json.loads(golden.data) | {"unheard_of": 1}).encode())
    with pytest.raises(Exception, match="format version 2"):
        golden.read(json.dumps(json.loads(golden.data) | {"version": 2}).encode())
