"""Export of results as OpenAI batch output lines.

In part order the export is one pass. In input order the parts, each sorted by row, are merged; only some are open at a
time, and larger jobs are merged in rounds through private files, so memory doesn't grow with the job. A job and its
retries are merged in the same way, because they number their rows alike; the best result of each row is exported.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow.parquet as pq

from pipeline.ledger.ledger import JobLedger, part_key
from pipeline.ports import PipelineError, StoreError, failure_type
from schemas.jobs.job import Job
from schemas.jobs.results import RowStatus

FAN_IN = 32
BATCH_ROWS = 256
_Part = tuple[int, JobLedger, int]
"""Index of the job among the merged jobs, its ledger, the part's number."""
_COLUMNS = ["row", "custom_id", "status", "status_code", "response", "error_code", "error_message"]
_HEADER = struct.Struct("<q?II")


class NotItsRetry(PipelineError):
    """Raised when a job to be merged is no retry of the others."""


@dataclass(frozen=True, slots=True, order=True)
class ExportedLine:
    """One line of the output: its row in the input, whether the row succeeded, the bytes without newline, and the index
    of its job among the merged jobs."""

    row: int
    succeeded: bool
    data: bytes
    job_index: int = 0


@dataclass(frozen=True, slots=True)
class ExportCounts:
    """Numbers of lines written, for succeeded rows and for the others."""

    succeeded: int
    others: int


def export(
    ledger: JobLedger,
    to: Path,
    *,
    errors_to: Path | None = None,
    in_input_order: bool = False,
    retries: Sequence[JobLedger] = (),
    fan_in: int = FAN_IN,
) -> ExportCounts:
    """Write the committed results as JSONL; each file appears complete, and replaces an older one.

    Args:
        errors_to: the file for rows that didn't succeed; None: they go to `to` as well.
        retries: retries of the job, or of each other. Each row has its succeeded result (of a cascade's steps the
            latest one), else that of the latest job, and rows are in input order.
        in_input_order: sort by row. With many parts it takes as much scratch space in the folder of `to` as the output.
        fan_in: maximum number of sorted runs that are merged, and so open, at a time.

    Raises:
        JobNotFound: there is no job.  StoreError: a file can't be written, or both are the same file.
        NotItsRetry: one of `retries` isn't a retry.  ResultsRemoved: the results of one are removed.
    """
    if errors_to is not None and errors_to.resolve() == to.resolve():
        raise StoreError(f"{errors_to}: is where the rows that succeeded go too; name another file for the others")
    merged = [ledger, *order_retries(ledger, retries)]
    for one in merged:
        one.check_results()
    parts = [(index, one, number) for index, one in enumerate(merged) for number in one.result_parts(one.manifest())]
    counts = {True: 0, False: 0}
    try:
        with ExitStack() as stack:
            good = stack.enter_context(_NewFile(to))
            bad = good if errors_to is None else stack.enter_context(_NewFile(errors_to))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".export-", dir=to.parent)))
            lines = _ordered(parts, folder, fan_in) if in_input_order or retries else _chained(parts)
            replaces = ledger.job().settings.cascade is not None
            for line in _best(lines, replaces=replaces) if retries else lines:
                counts[line.succeeded] += 1
                (good if line.succeeded else bad).write(line.data + b"\n")
    except OSError as error:
        raise failure_type(error)(f"{error.filename or to}: can't export: {error.strerror or error}") from error
    return ExportCounts(counts[True], counts[False])


def order_retries(ledger: JobLedger, retries: Sequence[JobLedger]) -> list[JobLedger]:
    """The retries of a job, and their retries, the earliest first. Raises `NotItsRetry` when one of them isn't.

    Each job comes after the job that it retries. Clocks, which may be set back between two jobs, only order retries of
    which neither derives from the other.
    """
    left: dict[str, tuple[Job, JobLedger]] = {}
    done = [ledger.job().id]
    for job, one in sorted(((one.job(), one) for one in retries), key=lambda pair: (pair[0].created_at, pair[0].id)):
        if job.id in left or job.id in done:
            raise NotItsRetry(f"{one.location()}: holds job {job.id}, which is given already; name each folder once")
        left[job.id] = (job, one)
    ordered: list[JobLedger] = []
    while left:
        following = next((id_ for id_, (job, _) in left.items() if job.retry_of in done), None)
        if following is None:
            job, one = min(left.values(), key=lambda pair: pair[0].retry_of in left)  # the first missing link
            of = "no retry" if job.retry_of is None else f"a retry of {job.retry_of}"
            raise NotItsRetry(
                f"{one.location()}: holds {of}, not one of {ledger.location()}; name the first job's folder first, and "
                "all retries between"
            )
        ordered.append(left.pop(following)[1])
        done.append(following)
    return ordered


def part_lines(job_index: int, ledger: JobLedger, number: int) -> Iterator[ExportedLine]:
    """A part's lines in row order, read in batches. `job_index`: of the job among the merged jobs."""
    job = ledger.job().id
    with ledger.store.open(ledger.prefix + part_key(number)) as stream:
        for batch in pq.ParquetFile(stream, pre_buffer=False).iter_batches(BATCH_ROWS, columns=_COLUMNS):
            for result in batch.to_pylist():
                yield _line(job, result, job_index)


def _best(lines: Iterable[ExportedLine], *, replaces: bool) -> Iterator[ExportedLine]:
    """The best of each row's adjacent lines: the earliest that succeeded (`replaces`: the latest, since a later job
    answers what wasn't accepted), else the latest error."""
    for _, found in groupby(lines, key=attrgetter("row")):
        yield max(
            found,
            key=lambda line: (line.succeeded, -line.job_index if line.succeeded and not replaces else line.job_index),
        )


def _line(job: str, result: dict[str, Any], job_index: int) -> ExportedLine:
    """The output line of a result. Ids are derived from the row's identity, so that exporting twice gives the same
    bytes."""
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
    return ExportedLine(result["row"], result["status"] == RowStatus.SUCCEEDED, orjson.dumps(values), job_index)


def _chained(parts: Sequence[_Part]) -> Iterator[ExportedLine]:
    for part in parts:
        yield from part_lines(*part)


def _ordered(parts: Sequence[_Part], folder: Path, fan_in: int) -> Iterator[ExportedLine]:
    """Merge in rounds: while there are too many sorted runs, groups of them become one run in a private file."""
    if len(parts) <= fan_in:
        yield from heapq.merge(*(part_lines(*part) for part in parts))
        return
    runs = [_spill(heapq.merge(*(part_lines(*part) for part in group)), folder) for group in _groups(parts, fan_in)]
    while len(runs) > fan_in:
        runs = [_spill(heapq.merge(*map(_run_lines, group)), folder) for group in _groups(runs, fan_in)]
    yield from heapq.merge(*map(_run_lines, runs))


def _groups(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _spill(lines: Iterator[ExportedLine], folder: Path) -> Path:
    descriptor, name = tempfile.mkstemp(dir=folder)
    with open(descriptor, "wb") as stream:
        for line in lines:
            stream.write(_HEADER.pack(line.row, line.succeeded, line.job_index, len(line.data)))
            stream.write(line.data)
    return Path(name)


def _run_lines(path: Path) -> Iterator[ExportedLine]:
    with path.open("rb") as stream:
        while header := stream.read(_HEADER.size):
            row, succeeded, job_index, length = _HEADER.unpack(header)
            yield ExportedLine(row, succeeded, stream.read(length), job_index)
    path.unlink()


class _NewFile:
    """A file that replaces its predecessor only when it is complete. Raises `StoreError`, which names the file
    itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._stream: BinaryIO | None = None

    def __enter__(self) -> BinaryIO:
        if self._path.is_dir():
            raise StoreError(f"{self._path}: can't export: it is a folder; name a file")
        if not self._path.parent.is_dir():
            raise StoreError(f"{self._path}: can't export: there is no folder {self._path.parent}; make it first")
        try:
            self._stream = self._temporary.open("wb")
        except OSError as error:
            raise self._failed(error) from error
        return self._stream

    def __exit__(self, kind: object, error: object, at: object) -> None:
        try:
            if self._stream is not None:
                self._stream.close()
            if kind is None:
                self._temporary.replace(self._path)
        except OSError as failure:
            raise self._failed(failure) from failure
        finally:
            self._temporary.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> StoreError:
        what = f"{self._path}: can't export: {error.strerror or error}; choose another folder or free space"
        return failure_type(error)(what)
