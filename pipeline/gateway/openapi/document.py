"""The OpenAPI document: the responses of each route, defined in one table.

A route returns its response model and declares its own error statuses: `responses=document_responses(404)`. Statuses
that every route may return are added. `REFUSALS` lists all error statuses, and docs/http.md repeats it; the tests
validate each response of the gateway against the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

Json = dict[str, Any]

OPEN: Final = (400, 403, 503)
"""Error statuses of every route, also of those that need no key."""

KEYED: Final = (*OPEN, 401, 429, 500)
BODY: Final = (408, 413, 415)
"""Additional error statuses of a route that reads a body."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error status.

    Attributes:
        codes: the possible values of `error.code`.  advice: the description, with what to do.
        headers: additional headers; names in `HEADERS`.
    """

    codes: tuple[str, ...]
    advice: str
    headers: tuple[str, ...] = ()


REFUSALS: Final[Mapping[int, Refusal]] = {
    400: Refusal(
        (
            "invalid_request", "invalid_json", "invalid_form", "unsupported_parameter", "unsupported_url",
            "context_length_exceeded", "cap_exceeded", "storage_quota_exceeded",
            "several_credentials",
        ),
        "The request is invalid; correct it.",
    ),
    401: Refusal(("invalid_api_key",), "The API key is missing, wrong, revoked or expired.", ("WWW-Authenticate",)),
    403: Refusal(
        ("missing_scope", "other_origin", "other_host"),
        "The API key lacks a scope, or the Origin or Host header isn't allowed.",
    ),
    404: Refusal(
        ("file_not_found", "batch_not_found", "stream_not_found", "model_not_found", "not_found"),
        "The object doesn't exist, or belongs to another tenant.",
    ),
    405: Refusal(("method_not_allowed",), "The path doesn't support this method.", ("Allow",)),
    408: Refusal(("request_timeout",), "The body was sent too slowly, or the request timed out.", ("x-should-retry?",)),
    409: Refusal(
        ("file_in_use", "batch_ended", "batch_not_ended", "nothing_to_retry", "idempotency_key_reused"),
        "The request conflicts with the current state of the object.",
    ),
    410: Refusal(("results_removed",), "The results have expired and were removed."),
    413: Refusal(("file_too_large", "body_too_large"), "The body is too large; send less."),
    415: Refusal(("unsupported_media_type",), "The route doesn't accept this media type."),
    416: Refusal(("range_not_satisfiable",), "The range begins after the file's end.", ("Content-Range",)),
    429: Refusal(
        (
            "rate_limit_exceeded", "backlog_full", "lane_full", "too_many_streams", "too_many_websockets",
            "too_many_requests", "overloaded",
        ),
        "A limit is exceeded: retry after Retry-After; without that header, send a smaller request.",
        ("Retry-After?", "retry-after-ms?", "x-should-retry?"),
    ),
    500: Refusal(("internal_error", "engine_error"), "Internal error; report it to the operator with x-request-id."),
    503: Refusal(
        (
            "no_model", "too_many_uploads", "too_many_requests", "too_many_connections", "draining", "unavailable",
            "lane_unavailable", "worker_lost",
        ),
        "The gateway can't handle the request now: retry after Retry-After.",
        ("Retry-After",),
    ),
    507: Refusal(("storage_full",), "The storage is full; report it to the operator."),
}  # fmt: skip

_NUMBER: Final[Json] = {"type": "integer", "minimum": 0}
_AMOUNT: Final[Json] = {"type": "string", "pattern": "^([0-9]+m)?[0-9]+s$"}
HEADERS: Final[Mapping[str, tuple[str, Json]]] = {
    "x-request-id": ("The id of the request, as in the gateway's log.", {"type": "string"}),
    "request-id": ("The same as `x-request-id`.", {"type": "string"}),
    "x-stream-id": ("The id of the inference request, with which its stream can be resumed.", {"type": "string"}),
    "x-tokenmill-model": (
        "The name of the model that answers; the rules of a virtual model choose it. NAME@DIGEST: a version on trial.",
        {"type": "string"},
    ),
    "x-ratelimit-limit-requests": ("The limit of requests per minute.", _NUMBER),
    "x-ratelimit-remaining-requests": ("The remaining requests of the limit.", _NUMBER),
    "x-ratelimit-reset-requests": ("The time until the full limit of requests is available again.", _AMOUNT),
    "x-ratelimit-limit-tokens": ("The limit of tokens per minute.", _NUMBER),
    "x-ratelimit-remaining-tokens": ("The remaining tokens of the limit.", _NUMBER),
    "x-ratelimit-reset-tokens": ("The time until the full limit of tokens is available again.", _AMOUNT),
    "Retry-After": ("Seconds to wait before a retry.", {"type": "integer", "minimum": 1}),
    "retry-after-ms": ("The same in milliseconds, exactly.", {"type": "integer", "minimum": 1}),
    "x-tokenmill-degraded": ("Steps of degradation that changed the request.", {"type": "string"}),
    "x-should-retry": ("Present when a retry can't succeed.", {"const": "false"}),
    "WWW-Authenticate": ("The authentication scheme.", {"const": "Bearer"}),
    "Allow": ("The methods that the path supports.", {"type": "string"}),
    "Content-Range": ("The range of the returned bytes and the total size.", {"type": "string", "pattern": "^bytes "}),
    "Accept-Ranges": ("The route supports byte ranges.", {"const": "bytes"}),
    "Content-Disposition": ("The file's name.", {"type": "string"}),
    "Content-Encoding": ("How the body is compressed, as Accept-Encoding asks.", {"enum": ["gzip", "zstd"]}),
    "Vary": ("The request header that the body depends on.", {"const": "Accept-Encoding"}),
    "ETag": (
        "The entity tag of the content; a weak one of compressed content.",
        {"type": "string", "pattern": '^(W/)?"[0-9a-f]+"$'},
    ),
    "X-Incomplete": ("Whether further results may follow.", {"enum": ["true", "false"]}),
    "X-Parts": ("The committed parts; send them as `without` to get only newer results.", {"type": "string"}),
}
_MAYBE: Final = ".maybe"
_LIMITS: Final = tuple(f"{name}?" for name in HEADERS if name.startswith("x-ratelimit-"))


def document_responses(
    *refusals: int,
    content: Json | None = None,
    keyed: bool | None = True,
    headers: tuple[str, ...] = (),
    others: Mapping[int | str, Json] | None = None,
    anthropic: bool = False,
) -> dict[int | str, Json]:
    """The `responses` of a route, besides the model that it returns.

    Args:
        refusals: the route's own error statuses.
        content: of the 200 response by media type; None: JSON of the model that the route returns.
        keyed: the route needs a key; None: the route is also exempt from all other checks.
        headers: of the 200 response; a question mark after a name marks it as optional.
        others: further statuses that aren't errors.
        anthropic: the errors have Anthropic's form.
    """
    more = ("request-id",) if anthropic else ()
    good: Json = {"headers": _headers(*headers, *more, *(_LIMITS if keyed else ()))}
    if content is not None:
        good["content"] = content
    found: dict[int | str, Json] = {200: good, **(others or {})}
    form = "anthropic-" if anthropic else ""
    common = KEYED if keyed else () if keyed is None else OPEN
    for status in sorted({*refusals, *common}):
        found[status] = {
            "$ref": f"#/components/responses/{form}{status}", "description": REFUSALS[status].advice,
        }  # fmt: skip
    return found


def document_response(description: str, content: Json | None = None, headers: tuple[str, ...] = ()) -> Json:
    """A response that is neither 200 nor an error."""
    found: Json = {"description": description, "headers": _headers(*headers, *_LIMITS)}
    return found if content is None else found | {"content": content}


def document_body(name: str, example: Json, *, required: bool = True) -> Json:
    """The `openapi_extra` of a route whose body is JSON of the schema with this name in `DocumentedApp`."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}, "example": example}}
    return {"requestBody": {"required": required, "content": content}}


class DocumentedApp(FastAPI):
    """A FastAPI application whose document defines the components that `document_responses` and `document_body` refer
    to.

    Args:
        schemas: the schemas that routes refer to, by name.
    """

    def __init__(self, schemas: Mapping[str, Json], **more: Any) -> None:
        super().__init__(**more)
        self._schemas = schemas

    def openapi(self) -> Json:
        """The document, built once. Raises `ValueError` when two schemas have the same name."""
        if self.openapi_schema is None:
            made = get_openapi(title=self.title, version=self.version, description=self.description, routes=self.routes)
            components = made.setdefault("components", {})
            schemas = {**components.get("schemas", {}), **self._schemas}
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            if clashing := [name for name in schemas if "__" in name]:
                raise ValueError(f"two schemas have the same name: {', '.join(clashing)}")
            components["schemas"] = dict(sorted(schemas.items()))
            components["responses"] = {str(status): _refusal(one) for status, one in REFUSALS.items()} | {
                f"anthropic-{status}": _anthropic_refusal(one) for status, one in REFUSALS.items()
            }
            components["headers"] = {name: _header(name) for bare in HEADERS for name in (bare, bare + _MAYBE)}
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # FastAPI's own; `RequestValidationError` is a 400 here
            self.openapi_schema = made
        return self.openapi_schema


def _refusal(one: Refusal) -> Json:
    codes: Json = {"properties": {"error": {"properties": {"code": {"enum": list(one.codes)}}}}}
    return _documented_error(one, {"allOf": [{"$ref": "#/components/schemas/Error"}, codes]})


def _anthropic_refusal(one: Refusal) -> Json:
    codes: Json = {"properties": {"error_code": {"enum": list(one.codes)}}}
    details: Json = {"properties": {"error": {"properties": {"details": codes}}}}
    schema: Json = {"allOf": [{"$ref": "#/components/schemas/AnthropicError"}, details]}
    return _documented_error(one, schema, "request-id")


def _documented_error(one: Refusal, schema: Json, *more: str) -> Json:
    listed = ", ".join(f"`{code}`" for code in one.codes)
    return {
        "description": f"{one.advice} {listed}",
        "headers": _headers(*one.headers, *more, *_LIMITS),
        "content": {"application/json": {"schema": schema}},
    }


def _headers(*names: str) -> Json:
    """References to headers; a question mark after a name marks it as optional."""
    components = {name.removesuffix("?"): name.replace("?", _MAYBE) for name in ("x-request-id", *names)}
    return {name: {"$ref": f"#/components/headers/{component}"} for name, component in components.items()}


def _header(name: str) -> Json:
    bare = name.removesuffix(_MAYBE)
    text, schema = HEADERS[bare]
    return {"description": text, "required": bare == name, "schema": schema}
