"""API errors: OpenAI's error object, or Anthropic's on its paths, with a status that their clients handle; and the
mapping from pipeline errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import structlog
from starlette.responses import JSONResponse  # without FastAPI, whose import costs each command 0.2 s
from starlette.types import Scope

from pipeline.ledger.ledger import JobNotFound, ResultsRemoved
from pipeline.ports import PipelineError, StoreError, StoreFull
from pipeline.runtime.availability import ServiceUnavailable
from schemas.requests.errors import error_body

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error"}

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ANTHROPIC_PATH: Final = "/v1/messages"

REQUEST_ID_SCOPE: Final = "tokenmill.request_id"
"""The key of the request's id in the ASGI scope."""

RETRY_SECONDS: Final = 5
"""The default of Retry-After."""

logger = structlog.get_logger(__name__)


class ApiError(PipelineError):
    """Raised when a request is answered with an error.

    Attributes:
        status: the HTTP status.  code: a short, stable name of the reason.  message: what is wrong, and what to do.
        param: the field that caused the error.  headers: additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's error object."""
        found = error_body(self.code, self.message, self.status, self.param)
        if self.status in _TYPES:
            found["error"]["type"] = _TYPES[self.status]
        return found

    def anthropic_body(self, request_id: str | None = None) -> dict[str, Any]:
        """The error as Anthropic's error object; `details.error_code` is our code."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        error = {"type": kind, "message": self.message, "details": {"error_code": self.code}}
        return {"type": "error", "error": error, "request_id": request_id}


def bad_request(message: str, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """The request is invalid (400)."""
    return ApiError(400, code, message, param=param)


def not_found(what: str, name: str, param: str = "id") -> ApiError:
    """The object doesn't exist or belongs to another tenant (404); the response is the same for both."""
    return ApiError(404, f"{what}_not_found", f"no {what} {name[:80]!r} is here; list yours with GET", param=param)


def disconnected() -> ApiError:
    """The client has disconnected. Only the log has this status: it is nginx's 499."""
    return ApiError(499, "disconnected", "the client went away")


def route_not_found() -> ApiError:
    """No route has this path (404)."""
    return ApiError(404, "not_found", "there is nothing here; docs/http.md lists what there is")


def internal_error() -> ApiError:
    """An unexpected error in the gateway (500)."""
    return ApiError(500, "internal_error", "something broke here; tell the operator, with x-request-id")


def unavailable(message: str, code: str = "unavailable", seconds: int = RETRY_SECONDS) -> ApiError:
    """The gateway can't handle the request now (503), with Retry-After."""
    return ApiError(503, code, message, headers={"Retry-After": str(seconds)})


def storage_full() -> ApiError:
    """The storage is full (507): writes fail until space is freed, and reads still work."""
    return ApiError(507, "storage_full", "there is no room to store this; tell the operator, and send it again later")


def api_error(error: Exception) -> ApiError:
    """Map a pipeline error to an API error. Paths and addresses go to the log, not into the response."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ResultsRemoved):
        return ApiError(410, "results_removed", "the results have expired and were removed; submit the batch again")
    if isinstance(error, JobNotFound):
        return ApiError(404, "batch_not_found", "there is no such batch")
    if isinstance(error, StoreFull):
        logger.error("storage_full", reason=str(error))
        return storage_full()
    if isinstance(error, StoreError | ServiceUnavailable):
        logger.error("unavailable", reason=str(error))
        return unavailable("storage or a server behind it can't be reached now; try again")
    logger.error("pipeline_error", reason=str(error))
    return ApiError(500, "internal_error", "something that is stored can't be read; tell the operator")


def is_anthropic(scope: Scope) -> bool:
    """Whether the request is to Anthropic's API."""
    path: str = scope["path"]
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """The HTTP response for an error, in the form of the API that the request is to."""
    body = error.anthropic_body(scope.get(REQUEST_ID_SCOPE)) if is_anthropic(scope) else error.body()
    return JSONResponse(body, error.status, headers=error.headers)
