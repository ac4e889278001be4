"""The results of a table's job: those of their columns that become new columns of the table."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from schemas.jobs.arrow_schemas import RESULT_FIELDS
from tokenmill.frames.tasks.task import Task

COLUMNS: Final = ("row", "error_code", "error_message", "prompt_tokens", "cached_tokens", "completion_tokens",
                  "request_key", "reused_from", "tries")  # fmt: skip
"""Those that every task has."""


def result_columns(task: Task) -> list[str]:
    """The names of the columns that the task needs."""
    return [*COLUMNS, *task.results]


def no_results(task: Task) -> pa.Table:
    """The results of a table without rows."""
    wanted = set(result_columns(task))
    return pa.schema([field for field in RESULT_FIELDS if field.name in wanted]).empty_table()


def in_row_order(results: pa.Table, task: Task) -> pa.Table:
    """The results in the rows' order. A column that an earlier version did not write yet is null."""
    for field in RESULT_FIELDS:
        if field.name in result_columns(task) and field.name not in results.column_names:
            results = results.append_column(field, pa.nulls(results.num_rows, field.type))
    return large(results).sort_by("row")


def large(results: pa.Table) -> pa.Table:
    """The results with offsets of 64 bits: rows are sorted by copying a column whole, and texts or vectors may have
    more than 2^31 bytes or numbers."""
    types = {pa.string(): pa.large_string(), pa.list_(pa.float32()): pa.large_list(pa.float32())}
    return results.cast(pa.schema([field.with_type(types.get(field.type, field.type)) for field in results.schema]))
