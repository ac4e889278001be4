"""The answers of former results: which row gets which, and files that are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.planner import BrokenInput, SourceFile
from pipeline.results.former_answers import BATCH_ROWS, StoredFormerAnswers
from schemas.jobs.results import ResultRow, RowStatus, results_table

ROUTED = '{"tokenmill": {"content_policies": {"verdicts": [{"action": "route"}]}}}'
SPARED = '{"tokenmill": {"content_policies": {"verdicts": [{"action": "flag", "failed": true}]}}}'
FLAGGED = '{"tokenmill": {"content_policies": {"verdicts": [{"action": "flag"}]}}}'


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")  # most of them end with zeros


def rows_of(keys: Sequence[int], **changes: Any) -> pa.Table:
    """Results with these keys; their texts are their positions."""
    common = {"status": RowStatus.SUCCEEDED, "status_code": 200, "response": "{}", **changes}
    return results_table(
        ResultRow(custom_id=str(row), row=row, text=str(row), request_key=key(number).hex(), **common)
        for row, number in enumerate(keys)
    )


@pytest.fixture
def open_tables(tmp_path: Path) -> Callable[..., StoredFormerAnswers]:
    def open_tables(*tables: pa.Table, max_rows: int = 10_000, job: str | None = "job-a") -> StoredFormerAnswers:
        files = []
        for number, table in enumerate(tables):
            path = tmp_path / f"part-{number}.parquet"
            pq.write_table(table, path, compression="zstd")
            files.append(SourceFile(str(path), lambda path=path: path.open("rb")))  # type: ignore[misc]
        return StoredFormerAnswers(files, tmp_path, max_rows, job)

    return open_tables


def texts(former: StoredFormerAnswers, numbers: Sequence[int], *, shareable: bool) -> list[str | None]:
    found = former.find([key(number) for number in numbers], [shareable] * len(numbers))
    taken = iter(former.take(found[found >= 0])["text"].to_pylist() if (found >= 0).any() else [])
    return [next(taken) if index >= 0 else None for index in found.tolist()]


def test_given_answers_that_may_be_shared_when_found_then_equal_requests_get_the_first(open_tables: Any) -> None:
    former = open_tables(rows_of([7, 300, 7]), rows_of([5]))
    assert texts(former, [7, 5, 7, 6, 7, 300], shareable=True) == ["0", "0", "0", None, "0", "1"]
    assert texts(former, [], shareable=True) == []


def test_given_sampled_answers_when_found_then_each_is_given_once_in_any_number_of_calls(open_tables: Any) -> None:
    former = open_tables(rows_of([7, 5, 7, 7]))
    assert texts(former, [7, 7], shareable=False) == ["0", "2"]
    assert texts(former, [5, 7, 5, 7], shareable=False) == ["1", "3", None, None]

    again = open_tables(rows_of([7, 5, 7, 7]))
    again.mark_given([key(7), key(9), key(7)])
    assert texts(again, [7, 7, 5], shareable=False) == ["3", None, "1"]


def test_given_more_rows_than_a_batch_when_found_in_any_order_then_each_key_has_its_answer(open_tables: Any) -> None:
    count = BATCH_ROWS + 900
    former = open_tables(rows_of(range(3_000)), rows_of(range(3_000, count)))
    wanted = [count - 1, 0, BATCH_ROWS, BATCH_ROWS - 1, 2_999, 3_000, count]
    assert texts(former, wanted, shareable=True) == ["1995", "0", "1096", "1095", "2999", "0", None]


def test_given_rows_without_a_reusable_answer_when_read_then_they_are_left_out(open_tables: Any) -> None:
    refused = rows_of([5])
    refused = refused.set_column(refused.column_names.index("request_key"), "request_key", pa.nulls(1, pa.string()))
    former = open_tables(
        rows_of([1], status=RowStatus.FAILED, response=None),
        rows_of([2], response=ROUTED),
        rows_of([3], response=SPARED),
        rows_of([4], response=FLAGGED),
        refused,
        rows_of([]),
    )
    assert texts(former, [1, 2, 3, 4, 5], shareable=True) == [None, None, None, "0", None]
    assert former.take(np.array([0]))["reused_from"].to_pylist() == ["job-a"]


def replaced(name: str, values: Any) -> pa.Table:
    table = rows_of([1, 2])
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def bomb() -> pa.Table:
    """Two gigabytes in some kilobytes: a long text in each row."""
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2_048, np.int32)), pa.array(["x" * (1 << 20)]))
    table = rows_of(range(2_048))
    return table.set_column(table.column_names.index("text"), "text", long)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rows_of([1]).drop_columns(["request_key"]), "has no column request_key, so it is no result"),
        (lambda: pa.table({"a": [1]}), "has no column custom_id"),
        (lambda: replaced("text", [1, 2]), "its column text is int64, but must be string"),
        (lambda: replaced("embedding", [[1], [2]]), "its column embedding is list<item: int64>, but must be list<"),
        (lambda: replaced("request_key", ["x", "y"]), "its column request_key has values that are no keys"),
        (lambda: replaced("request_key", ["0" * 31, "0" * 32]), "its column request_key has values that are no keys"),
        (lambda: replaced("response", ["{}", "[]"]), "its column response has texts that are no responses"),
        (lambda: replaced("response", ["{}", None]), "its column response has texts that are no responses"),
        (
            lambda: replaced("response", ["{}", '{"tokenmill": 1}']),
            "its column response has texts that are no responses",
        ),
        (lambda: rows_of([0] * 101), "these are more than 100 results"),
    ],
)
def test_given_a_file_that_is_no_result_when_read_then_the_error_names_it(
    open_tables: Any, tmp_path: Path, make: Callable[[], pa.Table], message: str
) -> None:
    with pytest.raises(BrokenInput) as raised:
        open_tables(make(), max_rows=100)
    assert str(raised.value).startswith(f"{tmp_path / 'part-0.parquet'}: {message}")


@pytest.mark.slow
def test_given_a_file_that_decodes_to_gigabytes_when_read_then_it_is_refused(open_tables: Any) -> None:
    with pytest.raises(BrokenInput, match="decode to more than 1073741824 bytes"):
        open_tables(bomb())


def test_given_a_file_that_is_no_parquet_when_read_then_the_error_names_it(tmp_path: Path) -> None:
    path = tmp_path / "some.parquet"
    path.write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1")
    with pytest.raises(BrokenInput, match=r"some\.parquet is not a Parquet file"):
        StoredFormerAnswers([SourceFile(str(path), lambda: path.open("rb"))], tmp_path, 10)


def test_given_results_of_unknown_jobs_when_read_without_a_job_then_they_are_refused(open_tables: Any) -> None:
    with pytest.raises(BrokenInput, match="its column reused_from has no job's id"):
        open_tables(rows_of([1]), job=None)
    former = open_tables(rows_of([1], reused_from="job-b"), job=None)
    assert former.take(np.array([0]))["reused_from"].to_pylist() == ["job-b"]
