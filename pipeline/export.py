"""Results as OpenAI batch output lines.

In the order of the parts it is one pass. In input order the parts, each sorted by row, are merged; only some are open
at a time, and larger jobs are merged in rounds through private files: memory doesn't grow with them.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow.parquet as pq

from pipeline.ledger import JobLedger, part_key
from pipeline.ports import StoreError
from schemas.results import RowStatus

FAN_IN = 32
BATCH_ROWS = 256
_COLUMNS = ["row", "custom_id", "status", "status_code", "response", "error_code", "error_message"]
_HEADER = struct.Struct("<q?I")


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """One line of the output: its row in the input, whether the row succeeded, and the bytes without newline."""

    row: int
    succeeded: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class Exported:
    """Lines written: of rows that succeeded, and of the others."""

    succeeded: int
    others: int


def export(
    ledger: JobLedger,
    to: Path,
    *,
    errors_to: Path | None = None,
    in_input_order: bool = False,
    fan_in: int = FAN_IN,
) -> Exported:
    """Write what is committed as JSONL; each file appears whole, replacing an older one.

    Args:
        errors_to: where rows that didn't succeed go instead.
        in_input_order: sort by row; takes as much scratch space beside `to` as the output when there are many parts.
        fan_in: most sorted runs that are merged, and so open, at a time.

    Raises:
        JobNotFound: no job stands there.  StoreError: a file can't be written.
    """
    job = ledger.job().id
    numbers = [number for number, _ in ledger.parts()]
    counts = {True: 0, False: 0}
    try:
        with ExitStack() as stack:
            good = stack.enter_context(_NewFile(to))
            bad = good if errors_to is None else stack.enter_context(_NewFile(errors_to))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".export-", dir=to.parent)))
            for line in (
                _ordered(ledger, job, numbers, folder, fan_in) if in_input_order else _chained(ledger, job, numbers)
            ):
                counts[line.succeeded] += 1
                (good if line.succeeded else bad).write(line.data + b"\n")
    except OSError as error:
        raise StoreError(f"{error.filename or to}: can't export: {error.strerror or error}") from error
    return Exported(counts[True], counts[False])


def part_lines(ledger: JobLedger, job: str, number: int) -> Iterator[Line]:
    """A part's lines in row order, read in batches."""
    with ledger.store.open(ledger.prefix + part_key(number)) as stream:
        for batch in pq.ParquetFile(stream, pre_buffer=False).iter_batches(BATCH_ROWS, columns=_COLUMNS):
            for result in batch.to_pylist():
                yield _line(job, result)


def _line(job: str, result: dict[str, Any]) -> Line:
    """Ids are derived from the row's identity, so that exporting twice gives the same bytes."""
    identity = hashlib.sha256(f"{job}/{result['row']}".encode()).hexdigest()
    response = error = None
    if result["response"] is not None:
        response = {
            "status_code": result["status_code"],
            "request_id": f"req_{identity[24:48]}",
            "body": orjson.Fragment(result["response"]),
        }
    if result["error_code"] is not None:
        error = {"code": result["error_code"], "message": result["error_message"]}
    values = {
        "id": f"batch_req_{identity[:24]}",
        "custom_id": result["custom_id"],
        "response": response,
        "error": error,
    }
    return Line(result["row"], result["status"] == RowStatus.SUCCEEDED, orjson.dumps(values))


def _chained(ledger: JobLedger, job: str, numbers: Sequence[int]) -> Iterator[Line]:
    for number in numbers:
        yield from part_lines(ledger, job, number)


def _ordered(ledger: JobLedger, job: str, numbers: Sequence[int], folder: Path, fan_in: int) -> Iterator[Line]:
    """Merge in rounds: as long as there are too many sorted runs, groups of them become one run in a private file."""
    if len(numbers) <= fan_in:
        yield from heapq.merge(*(part_lines(ledger, job, number) for number in numbers))
        return
    runs = [
        _spill(heapq.merge(*(part_lines(ledger, job, number) for number in group)), folder)
        for group in _groups(numbers, fan_in)
    ]
    while len(runs) > fan_in:
        runs = [_spill(heapq.merge(*map(_run_lines, group)), folder) for group in _groups(runs, fan_in)]
    yield from heapq.merge(*map(_run_lines, runs))


def _groups(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _spill(lines: Iterator[Line], folder: Path) -> Path:
    descriptor, name = tempfile.mkstemp(dir=folder)
    with open(descriptor, "wb") as stream:
        for line in lines:
            stream.write(_HEADER.pack(line.row, line.succeeded, len(line.data)))
            stream.write(line.data)
    return Path(name)


def _run_lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as stream:
        while header := stream.read(_HEADER.size):
            row, succeeded, length = _HEADER.unpack(header)
            yield Line(row, succeeded, stream.read(length))
    path.unlink()


class _NewFile:
    """A file that replaces its predecessor only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._stream: BinaryIO | None = None

    def __enter__(self) -> BinaryIO:
        self._stream = self._temporary.open("wb")
        return self._stream

    def __exit__(self, kind: object, error: object, at: object) -> None:
        if self._stream is not None:
            self._stream.close()
        if kind is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)
