"""Result rows, and their Arrow table. A row is a plain slotted class, because a job has millions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from operator import attrgetter

import pyarrow as pa

from schemas.jobs.arrow_schemas import RESULT_FIELDS
from schemas.requests.errors import STATUS_CODES, RowError, RowErrorCode


class RowStatus(StrEnum):
    """How a row ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


STATUS_OF_ERROR: dict[RowErrorCode, RowStatus] = {
    RowErrorCode.BATCH_EXPIRED: RowStatus.EXPIRED,
    RowErrorCode.BATCH_CANCELLED: RowStatus.CANCELLED,
    RowErrorCode.SPEND_LIMIT: RowStatus.CANCELLED,
}
"""All other errors end a row as failed."""


def line_of_input(row: int) -> str:
    """Where messages say that a row is: by its line, from 1."""
    return f"line {row + 1} of the input"


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A row of `schemas.jobs.arrow_schemas.RESULT_FIELDS`, in its order. Times are aware, UTC.

    Attributes:
        row: the line's index in the input, from 0.
        response: the OpenAI response body as JSON.
        cached_tokens: prompt tokens not computed again.
        embedding: float32 values, for embeddings only.
        reasoning: the model's thought before the text, if it marks one.
        truncated_tokens: that the prompts lost, which were too long; None: none.
        content_policies: the verdicts of content policies as JSON (`schemas.requests.policy_report`); None: all of its
            texts simply passed.
        served_by: name of the model of the worker that took the row; filled when its part is made.
        request_key: in hex; filled likewise.  reused_from: the id of the job that computed the answer; None: this one.
        tries: how often it was asked, for an answer that was judged; the tokens are those of all tries. None: it was
            not judged.
    """

    custom_id: str | None
    row: int
    status: RowStatus
    status_code: int
    text: str | None = None
    finish_reason: str | None = None
    response: str | None = None
    error_code: RowErrorCode | None = None
    error_message: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    embedding: Sequence[float] | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempt: int | None = None
    reasoning: str | None = None
    truncated_tokens: int | None = None
    content_policies: str | None = None
    served_by: str | None = None
    request_key: str | None = None
    reused_from: str | None = None
    tries: int | None = None

    @classmethod
    def from_error(
        cls,
        row: int,
        custom_id: str | None,
        error: RowError,
        *,
        model: str | None = None,
        created_at: datetime | None = None,
        started_at: datetime | None = None,
        finished_at: datetime | None = None,
        attempt: int | None = None,
    ) -> ResultRow:
        """The result of a row that ends with `error`. The message contains the line number: in the whole input, or in
        the file that the error names if that number is another."""
        where = line_of_input(row) if error.line in (None, row + 1) else f"line {error.line}"
        return cls(
            custom_id=custom_id,
            row=row,
            status=STATUS_OF_ERROR.get(error.code, RowStatus.FAILED),
            status_code=STATUS_CODES[error.code],
            error_code=error.code,
            error_message=f"{where}: {error.message}",
            model=model,
            created_at=created_at,
            started_at=started_at,
            finished_at=finished_at,
            attempt=attempt,
        )


_VALUES = attrgetter(*(field.name for field in fields(ResultRow)))


def results_table(rows: Iterable[ResultRow]) -> pa.Table:
    """The rows as a table of `RESULT_FIELDS`, in the order given (carried columns are the caller's to append)."""
    values = [_VALUES(row) for row in rows]
    columns = zip(*values, strict=True) if values else [()] * len(RESULT_FIELDS)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, RESULT_FIELDS, strict=True)]
    return pa.table(arrays, schema=pa.schema(RESULT_FIELDS))
