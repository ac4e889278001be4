"""Parts: the result files that users read, one for each shard; each is built in private, then published at once.

A part's footer carries its counts and token usage, so adding up a job reads footers and never rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.ledger.ledger import JobLedger, LedgerError, parse_stored, part_key
from pipeline.ledger.records import PartSummary
from pipeline.ports import PipelineError, StoreError, failure_type
from schemas.jobs.arrow_schemas import RESULT_FIELDS, SHARD_FIELDS
from schemas.jobs.checkpoints import ROW_USAGE
from schemas.jobs.outcome import Counts, Usage
from schemas.jobs.results import RowStatus

FOOTER_KEY = "tokenmill"
COMPRESSION = "zstd"
ROWS_PER_GROUP = 16_384


class RowsMismatch(PipelineError):
    """Raised when the results given for a shard are not exactly one for each of its rows."""


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A part and its footer; `size` in bytes."""

    number: int
    rows: int
    size: int
    summary: PartSummary


class PartWriter:
    """Writes a part's rows to a private file, batch by batch; memory doesn't grow with the part.

    Raises:
        StoreError: the disk is full or broken.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.rows = 0
        self._statuses: Counter[str] = Counter()
        self._schema = schema
        try:
            self._writer = pq.ParquetWriter(path, schema, compression=COMPRESSION, write_page_checksum=True)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _write_failed(path, error) from error

    def append(self, table: pa.Table) -> None:
        """Append rows; they must be in row order over all calls."""
        try:
            self._writer.write_table(table.cast(self._schema), row_group_size=ROWS_PER_GROUP)
        except OSError as error:
            raise _write_failed(self.path, error) from error
        self.rows += table.num_rows
        for pair in pc.value_counts(table["status"]).to_pylist():
            self._statuses[pair["values"]] += pair["counts"]

    def counts(self) -> Counts:
        """The numbers of appended rows, by status."""
        return Counts(total=self.rows, **{status.value: self._statuses[status.value] for status in RowStatus})

    def finish(self, summary: PartSummary) -> None:
        """Write the footer and close; the file is then ready to become the part."""
        try:
            self._writer.add_key_value_metadata({FOOTER_KEY: summary.model_dump_json(exclude_none=True)})
            self._writer.close()
        except OSError as error:
            raise _write_failed(self.path, error) from error

    def abandon(self) -> None:
        """Close and delete the file, after a failure."""
        try:
            self._writer.close()
        except OSError:  # a full disk can't take the footer either; the file is deleted anyway
            pass
        finally:
            self.path.unlink(missing_ok=True)


def committed_tokens(rows: pa.Table) -> Usage:
    """The token usage of finished rows (`FINISHED_SCHEMA`)."""
    sums = {name: pc.sum(rows[f"usage_{name}"]).as_py() or 0 for name in ROW_USAGE}
    return Usage(**sums)


def shard_results(rows: pa.Table, shard: pa.Table) -> pa.Table:
    """The table of a part: `rows` (`RESULT_FIELDS`, other columns are dropped) sorted by row, with the columns that
    `shard` carries through. `served_by` is the shard's model in rows that a worker has taken, `request_key` the shard's
    `request_hash`, if it has that (a shard that was lost and rebuilt hasn't).

    Raises:
        RowsMismatch: `rows` are not exactly one for each row of `shard`, with its custom_id.
    """
    results = rows.select([field.name for field in RESULT_FIELDS]).sort_by("row")
    names = [name for name in shard.column_names if name not in {field.name for field in SHARD_FIELDS}]
    requested = shard.select(["row", "custom_id", *names]).sort_by("row")
    _check_rows(results, requested)
    ordered = shard.sort_by("row")
    results = _with(results, "served_by", pc.if_else(pc.is_valid(results["started_at"]), ordered["model"], None))
    if "request_hash" in ordered.column_names:
        results = _with(results, "request_key", _in_hex(ordered["request_hash"]))
    for name in names:
        results = results.append_column(requested.schema.field(name), requested[name])
    return results


def _with(results: pa.Table, name: str, values: pa.ChunkedArray) -> pa.Table:
    at = results.schema.get_field_index(name)
    return results.set_column(at, results.schema.field(at), values)


def _in_hex(keys: pa.ChunkedArray) -> pa.StringArray:
    """The texts of binary values without nulls, all of one width."""
    width: int = 2 * keys.type.byte_width
    text = b"".join(keys.to_pylist()).hex().encode()
    offsets = np.arange(len(keys) + 1, dtype=np.int32) * width
    return pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(text))


def part_schema(shard: pa.Schema) -> pa.Schema:
    """The schema of a job's parts, from the schema of any of its shards."""
    fixed = {field.name for field in SHARD_FIELDS}
    return pa.schema([*RESULT_FIELDS, *(field for field in shard if field.name not in fixed)])


def read_part(ledger: JobLedger, number: int) -> PartEntry:
    """Read a committed part's entry, from its footer only; raises `LedgerError` when it isn't tokenmill's."""
    where = ledger.location(part_key(number))
    with ledger.store.open(ledger.prefix + part_key(number)) as stream:
        try:
            footer = pq.read_metadata(stream)
        except (pa.ArrowInvalid, OSError) as error:
            raise LedgerError(f"{where}: is not a whole Parquet file ({error}); it was damaged or put there") from error
        size = stream.seek(0, 2)
    text = (footer.metadata or {}).get(FOOTER_KEY.encode())
    if text is None:
        raise LedgerError(f"{where}: was not written by tokenmill; move it elsewhere")
    summary = parse_stored(where, text, PartSummary)
    if summary.part != number or summary.counts.total != footer.num_rows:
        raise LedgerError(
            f"{where}: its footer is of part {summary.part} with {summary.counts.total} rows, but it is part "
            f"{number} with {footer.num_rows}; it was damaged or renamed"
        )
    return PartEntry(number, footer.num_rows, size, summary)


def _check_rows(results: pa.Table, requested: pa.Table) -> None:
    given, wanted = results["row"].to_numpy(), requested["row"].to_numpy()
    if len(given) != len(wanted) or not np.array_equal(given, wanted):
        missing = np.setdiff1d(wanted, given)
        unknown = np.setdiff1d(given, wanted)
        twice = len(given) - len(np.unique(given))
        raise RowsMismatch(
            f"a shard of {len(wanted)} rows got {len(given)} results: {len(missing)} rows have none"
            f"{_first(missing)}, {len(unknown)} are not the shard's{_first(unknown)}, {twice} came twice"
        )
    if not results["custom_id"].equals(requested["custom_id"]):
        different = pc.not_equal(results["custom_id"].combine_chunks(), requested["custom_id"].combine_chunks())
        first = pc.index(pc.fill_null(different, True), True).as_py()
        raise RowsMismatch(f"the result of row {wanted[first]} bears another row's custom_id")


def _first(rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    return f" (first: {rows[0]})" if len(rows) else ""


def _write_failed(path: Path, error: OSError) -> StoreError:
    return failure_type(error)(f"{path}: can't write results: {error.strerror or error}; free some space and run again")
