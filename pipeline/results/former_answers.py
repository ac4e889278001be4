"""The answers of a former job's results, by request key, for a job that computes only what they lack.

Result files are read once, and bounded as any input is. The answers go to a scratch file; in memory are 32 bytes of
each: its key and its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.planner import BrokenInput, SourceFile
from pipeline.planner.readers.expansion import decoding
from pipeline.planner.readers.parquet import ParquetColumns
from pipeline.planner.readers.plain_types import plain_type
from pipeline.planner.spill import SpilledRows
from pipeline.planner.validate import ValidRow
from schemas.jobs.arrow_schemas import RESULT_FIELDS
from schemas.jobs.results import RowStatus
from schemas.requests.policy_report import may_be_repeated
from schemas.requests.request_key import KEY_BYTES

ADVICE: Final = "give the folder that a former run wrote, as it wrote it, or leave it out to compute all rows"
BATCH_ROWS: Final = 4_096
BATCH_BYTES: Final = 16 << 20
_SCHEMA: Final = pa.schema(RESULT_FIELDS)
_KEY: Final = f"^[0-9a-f]{{{2 * KEY_BYTES}}}$"

IsAcceptable = Callable[[ValidRow, str, str | None], bool]


class StoredFormerAnswers:
    """`FormerAnswers` of result files. Rows that failed have no answer here, and neither have those that a content
    policy sent to another model or could not judge.

    Args:
        files: Parquet files of results.
        scratch: an empty folder of its own.
        max_rows: of all files.
        job: the id of the former job; None: each row says it.
        is_acceptable: whether a row may have a former answer with this text and finish reason; None: each may.

    Raises:
        BrokenInput: a file can't be decoded, or holds no results or too many.  InputError: it can't be read.
        StoreError: the disk is full.
    """

    def __init__(
        self,
        files: Iterable[SourceFile],
        scratch: Path,
        max_rows: int,
        job: str | None = None,
        is_acceptable: IsAcceptable | None = None,
    ) -> None:
        self._is_acceptable = is_acceptable
        spilled = SpilledRows(scratch / "answers.arrow", _SCHEMA)
        spill, keys = _Spill(spilled), bytearray()
        rows = 0
        for file in files:
            columns = ParquetColumns(file, ADVICE)
            _check_columns(columns)
            for piece in columns.pieces():
                rows += piece.table.num_rows
                if rows > max_rows:
                    raise BrokenInput(f"{file.name}: these are more than {max_rows:,} results (limits.max_rows)")
                answers = _answers(file.name, piece.table, job)
                keys += bytes.fromhex("".join(answers["request_key"].to_pylist()))
                spill.add(answers)
        spill.flush()
        self._reader = spilled.open()
        found = np.frombuffer(bytes(keys), dtype=f"S{KEY_BYTES}")
        self._order = np.argsort(found, kind="stable")
        self._keys = found[self._order]
        self._given = np.zeros(len(found), dtype=np.int32)  # at the first of equal keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: Sequence[bytes], shareable: Sequence[bool]) -> NDArray[np.int64]:
        """See `FormerAnswers`: of equal requests each gets the next answer, shareable ones get the first."""
        found = np.full(len(keys), -1, dtype=np.int64)
        firsts, ends = self._places(keys)
        for index in np.flatnonzero(firsts < ends).tolist():
            place = int(firsts[index])
            if not shareable[index]:
                place += int(self._given[place])
                if place == ends[index]:
                    continue
                self._given[firsts[index]] += 1
            found[index] = self._order[place]
        return found

    def take(self, indices: NDArray[np.int64]) -> pa.Table:
        """See `FormerAnswers`."""
        return self._reader.take(indices)

    def accepts(self, rows: Sequence[ValidRow], answers: pa.Table) -> list[bool]:
        """See `FormerAnswers`."""
        check = self._is_acceptable
        if check is None:
            return [True] * len(rows)
        pairs = zip(answers["text"].to_pylist(), answers["finish_reason"].to_pylist(), strict=True)
        return [check(row, text or "", reason) for row, (text, reason) in zip(rows, pairs, strict=True)]

    def mark_given(self, keys: Sequence[bytes]) -> None:
        """See `FormerAnswers`."""
        firsts, ends = self._places(keys)
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            if first < end:
                self._given[first] = min(self._given[first] + 1, end - first)

    def _places(self, keys: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The range of each key in the sorted ones."""
        wanted = np.frombuffer(b"".join(keys), dtype=f"S{KEY_BYTES}")
        return np.searchsorted(self._keys, wanted, "left"), np.searchsorted(self._keys, wanted, "right")


class _Spill:
    """Joins rows to larger batches: rows in another order than the file's are read from fewer of them."""

    def __init__(self, to: SpilledRows) -> None:
        self._to = to
        self._tables: list[pa.Table] = []
        self._rows = self._bytes = 0

    def add(self, table: pa.Table) -> None:
        self._tables.append(table)
        self._rows += table.num_rows
        self._bytes += table.nbytes
        if self._rows >= BATCH_ROWS or self._bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        for batch in pa.concat_tables(self._tables).combine_chunks().to_batches() if self._tables else ():
            self._to.add(batch)
        self._tables, self._rows, self._bytes = [], 0, 0


def _check_columns(file: ParquetColumns) -> None:
    types = {field.name: field.type for field in file.schema}
    for field in RESULT_FIELDS:
        if field.name not in types:
            raise BrokenInput(f"{file.name}: has no column {field.name}, so it is no result to be reused")
        if types[field.name] != plain_type(field.type):
            found = types[field.name]
            raise BrokenInput(f"{file.name}: its column {field.name} is {found}, but must be {field.type}")


def _answers(name: str, table: pa.Table, job: str | None) -> pa.Table:
    """The reusable rows of some rows of a file, with the job that computed them."""
    with decoding(name):
        rows = table.select(_SCHEMA.names)
        rows = rows.filter(
            pc.and_(pc.equal(rows["status"], RowStatus.SUCCEEDED.value), pc.is_valid(rows["request_key"]))
        )
        rows.validate(full=True)
    if not pc.all(pc.match_substring_regex(rows["request_key"], _KEY), min_count=0).as_py():
        raise BrokenInput(f"{name}: its column request_key has values that are no keys")
    kept = [_is_reusable(name, response) for response in rows["response"].to_pylist()]
    rows = rows.filter(pa.array(kept, pa.bool_()))
    origins = rows["reused_from"]
    if job is not None:
        origins = pc.fill_null(origins, job)
    elif origins.null_count:
        raise BrokenInput(f"{name}: its column reused_from has no job's id")
    rows = rows.set_column(rows.schema.get_field_index("reused_from"), "reused_from", origins)
    with decoding(name):
        return rows.cast(_SCHEMA)


def _is_reusable(name: str, response: str | None) -> bool:
    """Whether other rows may get a response. Raises `BrokenInput` for one that is none."""
    try:
        body = orjson.loads(response or "")
        if isinstance(body, dict):
            return may_be_repeated(body)
    except (orjson.JSONDecodeError, AttributeError, TypeError, KeyError):
        pass
    raise BrokenInput(f"{name}: its column response has texts that are no responses")
