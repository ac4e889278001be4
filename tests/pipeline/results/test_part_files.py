"""Parts: built from results and the shard's carried columns, checked row by row, described by their footers."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.ledger.ledger import JobLedger, LedgerError, part_key
from pipeline.ledger.records import PartSummary
from pipeline.results.part_files import PartWriter, RowsMismatch, part_schema, read_part, shard_results
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.arrow_schemas import RESULT_FIELDS, result_schema
from schemas.jobs.job import Job
from schemas.jobs.outcome import Counts
from schemas.jobs.results import ResultRow, RowStatus, results_table
from tests.pipeline.made_jobs import answers, order, shard_table
from tests.pipeline.simulation import START, MemoryStore


def work(table: pa.Table) -> ShardWork:
    wanted = order()
    job = Job(id="j", input=wanted.input, models=wanted.models, created_at=START)
    return ShardWork(job, 1, 1, "a1", table, START)


def summary(part: int, counts: Counts) -> PartSummary:
    return PartSummary(
        job="j", part=part, attempt_id="a1", worker="w", counts=counts, started_at=START,
        committed_at=START + timedelta(seconds=1),
    )  # fmt: skip


def test_results_are_sorted_by_row_and_keep_the_fixed_schema() -> None:
    shard = shard_table([9, 3, 4])
    table = shard_results(results_table(answers(work(shard))), shard)
    assert table.schema == result_schema()
    assert table["row"].to_pylist() == [3, 4, 9]
    assert table["status"].to_pylist() == ["succeeded", "failed", "failed"]
    assert table["text"].to_pylist() == ["answer 3", None, None]


def test_carried_columns_follow_their_rows() -> None:
    carried = pa.table(
        {
            "label": pa.array(["nine", None, "four"]).dictionary_encode(),
            "input_text": pa.array([["n", "i"], [], None], pa.list_(pa.string())),
            "meta": pa.array([{"a": 1}, {"a": 2}, None], pa.struct([("a", pa.int64())])),
        }
    )
    shard = shard_table([9, 3, 4], carried)
    table = shard_results(results_table(answers(work(shard))), shard)
    assert table.schema == part_schema(shard.schema)
    assert table.column_names == [*(field.name for field in RESULT_FIELDS), "label", "input_text", "meta"]
    assert table["label"].to_pylist() == [None, "four", "nine"]
    assert table["input_text"].to_pylist() == [[], None, ["n", "i"]]
    assert table["meta"].to_pylist() == [{"a": 2}, None, {"a": 1}]


def without(rows: list[ResultRow], row: int) -> list[ResultRow]:
    return [result for result in rows if result.row != row]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: without(rows, 3), r"3 rows got 2 results: 1 rows have none \(first: 3\)"),
        (lambda rows: [*rows, rows[0]], "3 rows got 4 results: 0 rows have none, 0 are not the shard's, 1 came twice"),
        (lambda rows: [*without(rows, 3), rows[0]], "1 rows have none .first: 3., 0 are not the shard's, 1 came twice"),
        (
            lambda rows: [*without(rows, 3), ResultRow("id-8", 8, RowStatus.SUCCEEDED, 200)],
            r"1 rows have none \(first: 3\), 1 are not the shard's \(first: 8\)",
        ),
        (
            lambda rows: [*without(rows, 3), ResultRow("id-9", 3, RowStatus.SUCCEEDED, 200)],
            "row 3 bears another row's custom_id",
        ),
        (lambda rows: [*without(rows, 3), ResultRow(None, 3, RowStatus.SUCCEEDED, 200)], "row 3 bears another"),
        (lambda rows: [], "3 rows got 0 results"),
    ],
)
def test_results_that_are_not_the_shards_are_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    shard = shard_table([9, 3, 4])
    with pytest.raises(RowsMismatch, match=message):
        shard_results(results_table(change(answers(work(shard)))), shard)


def test_a_parts_footer_says_what_is_in_it(tmp_path: Path) -> None:
    shard = shard_table(list(range(10)))
    table = shard_results(results_table(answers(work(shard))), shard)
    writer = PartWriter(tmp_path / "part", result_schema())
    writer.append(table.slice(0, 4))
    writer.append(table.slice(4))
    assert writer.counts() == Counts(total=10, succeeded=8, failed=2)
    writer.finish(summary(1, writer.counts()))
    ledger = JobLedger(MemoryStore())
    size = (tmp_path / "part").stat().st_size
    assert ledger.create_part(1, tmp_path / "part")
    entry = read_part(ledger, 1)
    assert (entry.number, entry.rows, entry.size, entry.summary.attempt_id) == (1, 10, size, "a1")
    assert entry.summary.counts == Counts(total=10, succeeded=8, failed=2)
    footer = pq.read_metadata(pa.BufferReader(ledger.store.read(part_key(1))))
    assert footer.row_group(0).column(0).compression == "ZSTD"
    assert pq.read_schema(pa.BufferReader(ledger.store.read(part_key(1)))).remove_metadata() == result_schema()


@pytest.mark.slow
def test_memory_does_not_grow_with_a_part(tmp_path: Path) -> None:
    """200,000 rejected rows pass through, batch by batch, in a few MB of Arrow memory."""
    shard = shard_table(list(range(5_000)))
    table = shard_results(results_table(answers(work(shard))), shard)
    writer = PartWriter(tmp_path / "part", result_schema())
    before = pa.total_allocated_bytes()
    for _ in range(40):
        writer.append(table)
    assert pa.total_allocated_bytes() - before < 8 << 20
    assert writer.rows == 200_000
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"", "not a whole Parquet file"), (b"PAR1 torn", "not a whole Parquet file")],
)
def test_a_damaged_part_is_reported(body: bytes, message: str) -> None:
    with pytest.raises(LedgerError, match=rf"part-00003.parquet: is {message}"):
        read_part(JobLedger(MemoryStore({part_key(3): body})), 3)


def test_a_foreign_parquet_file_is_not_a_part(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign")
    store = MemoryStore({part_key(3): (tmp_path / "foreign").read_bytes()})
    with pytest.raises(LedgerError, match="was not written by tokenmill"):
        read_part(JobLedger(store), 3)
