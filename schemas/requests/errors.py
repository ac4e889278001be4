"""Error codes of rows, shared by planner, workers and results."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class RowErrorCode(StrEnum):
    """`error_code` of a result row."""

    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    UNSUPPORTED_URL = "unsupported_url"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    CONTENT_FILTER = "content_filter"
    REQUEST_TIMEOUT = "request_timeout"
    BATCH_EXPIRED = "batch_expired"
    BATCH_CANCELLED = "batch_cancelled"
    SPEND_LIMIT = "spend_limit"
    INCOMPLETE_ANSWER = "incomplete_answer"
    INVALID_ANSWER = "invalid_answer"
    INPUT_FAILED = "input_failed"
    ENGINE_ERROR = "engine_error"


STATUS_CODES: dict[RowErrorCode, int] = {
    RowErrorCode.INVALID_JSON: 400,
    RowErrorCode.INVALID_REQUEST: 400,
    RowErrorCode.DUPLICATE_CUSTOM_ID: 400,
    RowErrorCode.UNSUPPORTED_URL: 400,
    RowErrorCode.UNSUPPORTED_PARAMETER: 400,
    RowErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    RowErrorCode.MODEL_NOT_FOUND: 404,
    RowErrorCode.CONTENT_FILTER: 400,
    RowErrorCode.REQUEST_TIMEOUT: 408,
    RowErrorCode.BATCH_EXPIRED: 408,
    RowErrorCode.BATCH_CANCELLED: 409,
    RowErrorCode.SPEND_LIMIT: 402,
    RowErrorCode.INCOMPLETE_ANSWER: 422,
    RowErrorCode.INVALID_ANSWER: 422,
    RowErrorCode.INPUT_FAILED: 424,
    RowErrorCode.ENGINE_ERROR: 500,
}
"""The HTTP status of each error code."""


class RowError(Exception):
    """Raised when a request can't be answered. It ends as a failed row; other rows aren't affected.

    Attributes:
        code: the kind of error.  message: the problem and its remedy.  param: the invalid field of the body, if any.
        fields: the fields that the message itself names, in their order, so that a dialect can give them its own names;
            by default `param`, if the message begins with it. The rest of the message may quote the caller.
        line: 1-based line of the input file, when known.
    """

    def __init__(
        self,
        code: RowErrorCode,
        message: str,
        *,
        param: str | None = None,
        fields: Sequence[str] | None = None,
        line: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        starts = (param,) if param and message.startswith(param) else ()
        self.fields: tuple[str, ...] = starts if fields is None else tuple(fields)
        self.line = line


def invalid_request(message: str, param: str | None) -> RowError:
    """The error of an invalid request."""
    return RowError(RowErrorCode.INVALID_REQUEST, message, param=param)


def error_body(code: str, message: str, status: int, param: str | None = None) -> dict[str, dict[str, str | None]]:
    """An error body in OpenAI's format; `status`: the HTTP status."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
