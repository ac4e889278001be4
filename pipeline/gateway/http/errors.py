"""What is answered when something can't be done: OpenAI's error object, with a status that its clients know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pipeline.ports import PipelineError
from schemas.requests.errors import error_body

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error"}

RETRY_SECONDS: Final = 5
"""After which a caller may ask again, where nothing better is known."""


class ApiError(PipelineError):
    """Raised when a request is answered with an error.

    Attributes:
        status: of HTTP.  code: a short, stable name of the reason.  message: what is wrong, and what to do.
        param: the field that is to blame.  headers: more of the answer's.
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
        """As OpenAI's clients read it."""
        found = error_body(self.code, self.message, self.status, self.param)
        if self.status in _TYPES:
            found["error"]["type"] = _TYPES[self.status]
        return found


def bad_request(message: str, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """Something that was sent can't be used."""
    return ApiError(400, code, message, param=param)


def not_found(what: str, name: str, param: str = "id") -> ApiError:
    """There is no such thing, or it is another tenant's: who asks can't tell which."""
    return ApiError(404, f"{what}_not_found", f"no {what} {name[:80]!r} is here; list yours with GET", param=param)


def disconnected() -> ApiError:
    """Who asked has gone: for the log alone, since nobody hears it. (nginx's status for that.)"""
    return ApiError(499, "disconnected", "the client went away")


def nothing_here() -> ApiError:
    """No route has this path."""
    return ApiError(404, "not_found", "there is nothing here; docs/http.md lists what there is")


def internal_error() -> ApiError:
    """Something is broken that the caller can do nothing about."""
    return ApiError(500, "internal_error", "something broke here; tell the operator, with x-request-id")


def unavailable(message: str, code: str = "unavailable", seconds: int = RETRY_SECONDS) -> ApiError:
    """It can't be done now."""
    return ApiError(503, code, message, headers={"Retry-After": str(seconds)})


def storage_full() -> ApiError:
    """Nothing can be stored before somebody makes room; what is stored can be read."""
    return ApiError(507, "storage_full", "there is no room to store this; tell the operator, and send it again later")
