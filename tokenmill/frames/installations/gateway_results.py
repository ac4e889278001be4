"""Results of a batch that has ended, from a gateway: lines of OpenAI's output files.

They don't name the request's key, or the job that a stored answer is of.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson
import pyarrow as pa

from schemas.jobs.arrow_schemas import RESULT_FIELDS
from tokenmill.errors import UserError
from tokenmill.frames.jobs.results import result_columns
from tokenmill.frames.tasks.task import Task
from tokenmill.jobs.http_backend import whole_lines
from tokenmill.jobs.http_client import open_gateway, path_of

BATCH_ROWS: Final = 1_024
NOT_SENT: Final = ("reused_from",)
"""Columns of which a gateway says nothing. Their type is null: unknown."""

_CUSTOM_ID: Final = re.compile("row-([0-9]{1,18})")


def read_from_gateway(url: str, job: str, task: Task) -> pa.Table:
    """The columns of the batch's results that the task needs. Raises `UserError`."""
    fields = [field for field in RESULT_FIELDS if field.name in result_columns(task)]
    schema = pa.schema([field.with_type(pa.null()) if field.name in NOT_SENT else field for field in fields])
    batches = []
    with open_gateway(url) as gateway, gateway.stream("GET", f"{path_of(job)}/results") as answer:
        rows = (_row(line, url) for line in whole_lines(answer.iter_bytes()))
        while some := [row for _, row in zip(range(BATCH_ROWS), rows, strict=False)]:
            batches.append(pa.Table.from_pylist(some, schema))
    return pa.concat_tables(batches) if batches else schema.empty_table()


def _row(line: bytes, url: str) -> dict[str, Any]:
    """The values of a result, by column."""
    try:
        found = orjson.loads(line)
        number = _CUSTOM_ID.fullmatch(found["custom_id"])
        assert number is not None
        values: dict[str, Any] = {"row": int(number[1])}
        if found["error"] is not None:
            values |= {"error_code": found["error"]["code"], "error_message": found["error"]["message"]}
        return values if found["response"] is None else values | _of_body(found["response"]["body"])
    except (KeyError, IndexError, TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{url}: a line of the results can't be read; is a tokenmill gateway there?") from error


def _of_body(body: dict[str, Any]) -> dict[str, Any]:
    """The values that a response has."""
    usage = body["usage"]
    values = {
        "response": orjson.dumps(body).decode(), "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": usage.get("prompt_tokens_details", {}).get("cached_tokens"),
    }  # fmt: skip
    if "choices" in body:
        (choice,) = body["choices"]
        values |= {"text": choice["message"]["content"] or "", "finish_reason": choice["finish_reason"]}
    elif "embedding" in body["data"][0]:
        values["embedding"] = body["data"][0]["embedding"]
    return values
