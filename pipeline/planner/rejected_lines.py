"""Invalid input lines: each becomes an error row of the results."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import pyarrow as pa

from schemas.jobs.arrow_schemas import result_schema
from schemas.jobs.results import ResultRow, results_table
from schemas.requests.errors import RowError


class RejectedLine(NamedTuple):
    """An invalid line, whose result is `error`. `position`: in its batch, blank lines not counted."""

    position: int
    row: int
    custom_id: str | None
    model: str | None
    error: RowError


def error_rows(
    lines: Sequence[RejectedLine],
    carried: pa.Table | None,
    columns: pa.Schema | None,
    *,
    created_at: datetime,
    at: datetime,
) -> pa.Table:
    """The result rows of one batch's invalid lines, in the schema of the results (`result_schema(columns)`).

    Args:
        carried: the batch's carried columns, by position; None: the input has none.
        columns: the input's carried columns.
        created_at: of the job.  at: the time of the results.
    """
    rows = results_table(
        ResultRow.from_error(
            line.row, line.custom_id, line.error, model=line.model, created_at=created_at, finished_at=at
        )
        for line in lines
    )
    arrays = list(rows.columns)
    if carried is not None:
        arrays += carried.take(pa.array([line.position for line in lines], pa.int64())).columns
    return pa.table(arrays, schema=result_schema(columns))
