"""Results of a table's job as Arrow."""

from __future__ import annotations

import pyarrow as pa

from schemas.jobs.results import ResultRow, RowStatus, results_table
from tokenmill.frames.jobs.results import in_row_order, result_columns
from tokenmill.frames.tasks.chat import chat_task


def test_given_results_of_an_earlier_version_when_read_then_a_column_that_it_did_not_write_is_null() -> None:
    task = chat_task("{{ item }}", None, str, {})
    rows = [ResultRow(f"row-{row}", row, RowStatus.SUCCEEDED, 200, text=f"answer {row}") for row in (1, 0)]
    stored = results_table(rows).select([name for name in result_columns(task) if name != "tries"])

    found = in_row_order(stored, task)

    assert found["text"].to_pylist() == ["answer 0", "answer 1"]
    assert found["tries"].to_pylist() == [None, None]
    assert pa.types.is_int32(found["tries"].type)
