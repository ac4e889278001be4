"""Rows that take the answers of a former job: they get their results in planning, and nothing is computed for them."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import orjson
import pyarrow as pa

from pipeline.planner.ports import FormerAnswers
from pipeline.planner.validate import CheckedBatch, ValidRow
from schemas.jobs.arrow_schemas import result_schema


def take_reusable(
    checked: CheckedBatch, former: FormerAnswers, columns: pa.Schema | None, *, created_at: datetime, at: datetime
) -> pa.Table | None:
    """Remove the rows whose answers `former` has from the valid ones of `checked`; returns their results, sorted by
    row (`result_schema(columns)`), or None if there are none.

    Args:
        columns: the input's carried columns.  created_at: of the job.  at: the time of the results.
    """
    found = former.find([row.request_key for row in checked.valid], [row.shareable for row in checked.valid])
    have_one = np.flatnonzero(found >= 0)
    if not len(have_one):
        return None
    answers = former.take(found[have_one])
    accepted = np.asarray(former.accepts([checked.valid[index] for index in have_one.tolist()], answers), dtype=bool)
    if not accepted.any():
        return None
    taken = set(have_one[accepted].tolist())
    rows = [row for index, row in enumerate(checked.valid) if index in taken]
    checked.valid = [row for index, row in enumerate(checked.valid) if index not in taken]
    results = _results(rows, answers.filter(pa.array(accepted)), created_at, at)
    arrays = list(results.columns)
    if checked.batch.carried is not None:
        arrays += checked.batch.carried.take(pa.array([row.position for row in rows], pa.int64())).columns
    return pa.table(arrays, schema=result_schema(columns))


def _results(rows: list[ValidRow], answers: pa.Table, created_at: datetime, at: datetime) -> pa.Table:
    """The answers as results of these rows, of which none costs a token."""
    count = len(rows)
    names = [row.requested_model for row in rows]
    own = {
        "custom_id": [row.custom_id for row in rows],
        "row": [row.row for row in rows],
        "model": names,
        "response": [
            _named(response, name) for response, name in zip(answers["response"].to_pylist(), names, strict=True)
        ],
        "prompt_tokens": np.zeros(count, np.int32),
        "cached_tokens": np.zeros(count, np.int32),
        "completion_tokens": np.zeros(count, np.int32),
        "created_at": [created_at] * count,
        "started_at": [None] * count,
        "finished_at": [at] * count,
        "attempt": [None] * count,
        "tries": [None] * count,
    }
    for name, values in own.items():
        field = answers.schema.field(name)
        answers = answers.set_column(answers.schema.get_field_index(name), field, pa.array(values, field.type))
    return answers


def _named(response: str, model: str) -> str:
    """The response with the requested name of the model: another one may have stood for the same weights."""
    body = orjson.loads(response)
    return response if body.get("model") == model else orjson.dumps(body | {"model": model}).decode()
