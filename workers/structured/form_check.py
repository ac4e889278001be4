"""Checks whether an answer has the form that its request asks for.

The grammar enforces the form while the model writes, except where it can't: an answer may be cut off, and a schema may
have keywords that no grammar has, or that the request leaves to chance (`strict: false`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NoReturn

import jsonschema_rs
import orjson

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import CHAT_URL, Body, ChatBody

CACHED_SCHEMAS: Final = 64


def is_judged(url: str, body: Body) -> bool:
    """Whether the answer of a request is judged in a job with `max_tries`: it is a chat, with one answer that begins a
    message."""
    return url == CHAT_URL and isinstance(body, ChatBody) and body.n == 1 and not body.continue_final_message


def check_form(body: ChatBody, text: str, *, is_cut_off: bool) -> RowError | None:
    """Why the answer has not the form that the request asks for; None: it has.

    Args:
        is_cut_off: it has reached `max_tokens`.
    """
    if body.offered_tools or (body.response_format is None and body.structured_outputs is None):
        return None
    if is_cut_off:
        return RowError(
            RowErrorCode.INCOMPLETE_ANSWER, "it reached max_tokens before its end: answer shorter, or raise max_tokens"
        )
    schema = _schema_of(body)
    if schema is None:  # a regex, a choice or a grammar: what ends by itself has it
        return None
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return RowError(RowErrorCode.INVALID_ANSWER, f"it is not JSON: {error}")
    reason = _cached_check(orjson.dumps(schema))(value)
    return None if reason is None else RowError(RowErrorCode.INVALID_ANSWER, reason)


def _schema_of(body: ChatBody) -> dict[str, Any] | None:
    if body.response_format is not None:
        return body.response_format.schema_of_answer
    return None if body.structured_outputs is None else body.structured_outputs.json_schema


@lru_cache(maxsize=CACHED_SCHEMAS)
def _cached_check(schema: bytes) -> Callable[[Any], str | None]:
    """See `schema_check`. A schema that can't be used checks nothing: the grammar has its rules."""
    try:
        return schema_check(orjson.loads(schema))
    except ValueError:
        return lambda _: None


def schema_check(schema: dict[str, Any]) -> Callable[[Any], str | None]:
    """A function that returns the first error of a value, by a JSON schema; None: it has none. Nothing is fetched, and
    patterns take linear time. Raises `ValueError` for a schema that can't be used."""

    def refuse(uri: str) -> NoReturn:
        raise ValueError(f"{uri} is not in the schema itself")

    try:
        validator = jsonschema_rs.validator_for(schema, retriever=refuse, pattern_options=jsonschema_rs.RegexOptions())
    except jsonschema_rs.ValidationError as error:
        raise ValueError(str(error).splitlines()[0]) from error

    def first_error(value: Any) -> str | None:
        error = next(iter(validator.iter_errors(value)), None)
        if error is None:
            return None
        path = ".".join(map(str, error.instance_path))
        return f"{path}: {error.message}" if path else str(error.message)

    return first_error
