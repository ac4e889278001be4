"""What a pipeline asks, in its folder: the same call goes on there, and another one is refused."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.inputs.regular_files import IrregularFile, open_regular_below
from pipeline.ports import ObjectStore
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from tokenmill.errors import InvalidCall
from tokenmill.frames.data.frame import Frame
from tokenmill.frames.pipelines.bound import BoundStep
from tokenmill.frames.pipelines.step_ledgers import STEPS
from tokenmill.frames.records import MAX_RECORD_BYTES, CallRecord, write_record

RECORD: Final = "pipeline.json"


class StepRecord(BaseModel):
    """A step. `filters`: the names of those before it; `check`: of the Python object that judges its answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    call: CallRecord
    filters: tuple[str, ...]
    check: str | None


class PipelineRecord(BaseModel):
    """A pipeline over a table of so many rows. `data`: the hash of the cells that its texts use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = 1
    rows: int
    data: str
    steps: tuple[StepRecord, ...]


def record_of(steps: Sequence[BoundStep], frame: Frame) -> PipelineRecord:
    """The record of these steps over a table."""
    made = tuple(
        StepRecord(
            name=one.name,
            call=one.call.record(),
            filters=tuple(each.name for each in one.filters),
            check=one.step.task.judging.name,
        )
        for one in steps
    )
    return PipelineRecord(rows=len(frame), data=_hash(steps, frame), steps=made)


def write_pipeline(record: PipelineRecord, store: ObjectStore, folder: Path) -> InputRef:
    """Write the record into a pipeline's folder, unless it is there, and each call into its step's. Returns the input
    of the steps' jobs: the record is all that their requests follow from.

    Raises:
        InvalidCall: the folder is another pipeline's.
    """
    data = record.model_dump_json(indent=1).encode()
    if not store.create(RECORD, data):
        check_same(read_pipeline(folder), record, folder)
    for one in record.steps:
        to = folder / STEPS / one.name
        to.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tokenmill-", dir=to) as scratch:
            write_record(one.call, Path(scratch), to)
    file = InputFile(uri=str(folder / RECORD), size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return InputRef(uri=str(folder / RECORD), format=InputFormat.STEP, files=(file,))


def check_same(old: PipelineRecord, new: PipelineRecord, folder: Path) -> None:
    """Raise `InvalidCall` if the pipeline in the folder is another one."""
    if old != new:
        raise InvalidCall(
            f"output_dir: {folder} holds another pipeline: {_difference(old, new)}; give another folder, or remove "
            "this one"
        )


def read_pipeline(folder: Path) -> PipelineRecord:
    """The record in a pipeline's folder. Raises `InvalidCall`."""
    path = folder / RECORD
    try:
        with open_regular_below(folder, path) as stream:
            return PipelineRecord.model_validate_json(stream.read(MAX_RECORD_BYTES))
    except (OSError, IrregularFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidCall(f"{path}: can't be read: {reason}; give the output_dir of a pipeline") from error
    except ValidationError as error:
        raise InvalidCall(f"{path}: is no record of a pipeline: {error.errors(include_url=False)[0]['msg']}") from error


def _hash(steps: Sequence[BoundStep], frame: Frame) -> str:
    used = {name for one in steps for name in one.step.task.columns}
    used |= {each.condition for one in steps for each in one.filters if isinstance(each.condition, str)}
    digest = hashlib.sha256()
    for line in _lines(frame, [name for name in dict.fromkeys(frame.columns) if name in used]):
        digest.update(line)
    return digest.hexdigest()


def _lines(frame: Frame, columns: Sequence[str]) -> Iterator[bytes]:
    options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    yield orjson.dumps(columns, option=options)
    for cells in frame.cells(columns):
        yield orjson.dumps([cells[name] for name in columns], default=str, option=options)


def _difference(old: PipelineRecord, new: PipelineRecord) -> str:
    if (names := [one.name for one in old.steps]) != [one.name for one in new.steps]:
        return f"its steps are {', '.join(names)}"
    for before, now in zip(old.steps, new.steps, strict=True):
        for name in ("call", "filters", "check"):
            if getattr(before, name) != getattr(now, name):
                what = {"call": "texts, output or parameters", "filters": "filters", "check": "function that judges"}[
                    name
                ]
                return f"its step {now.name!r} has other {what}"
    return f"it is over another table, of {old.rows:,} rows" if old.rows != new.rows else "it is over other cells"
