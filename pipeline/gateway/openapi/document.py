"""The OpenAPI document: what each route may answer, said once here.

A route names what it answers and the statuses that are its own: `responses=answers(File, 404)`. What any route may
answer is added. Refusals are the table below, which docs/http.md repeats; the tests hold every answer of the gateway
against the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

Json = dict[str, Any]

OPEN: Final = (400, 403, 503)
"""What even a route that needs no key may answer."""

KEYED: Final = (*OPEN, 401, 429, 500)
BODY: Final = (408, 413, 415)
"""What a route that reads a body may answer besides."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status that says no.

    Attributes:
        codes: `error.code` is one of them.  advice: what to do.
        headers: that it has besides; of `HEADERS`.
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
        "Correct what was sent.",
    ),
    401: Refusal(("invalid_api_key",), "No key, or one that is wrong, revoked or expired.", ("WWW-Authenticate",)),
    403: Refusal(
        ("missing_scope", "other_origin", "other_host"),
        "The key lacks a scope, a page of another site asks, or another host is asked for.",
    ),
    404: Refusal(
        ("file_not_found", "batch_not_found", "stream_not_found", "model_not_found", "not_found"),
        "There is none, or it is another tenant's.",
    ),
    405: Refusal(("method_not_allowed",), "The path is known by other methods.", ("Allow",)),
    408: Refusal(("request_timeout",), "The request stopped coming, or its time is over.", ("x-should-retry?",)),
    409: Refusal(
        ("file_in_use", "batch_ended", "nothing_to_retry", "idempotency_key_reused"), "It can't be done as things are."
    ),
    410: Refusal(("results_removed",), "The results were kept for as long as was asked."),
    413: Refusal(("file_too_large", "body_too_large"), "Send less."),
    415: Refusal(("unsupported_media_type",), "Send what the route takes."),
    416: Refusal(("range_not_satisfiable",), "The range lies behind the end.", ("Content-Range",)),
    429: Refusal(
        (
            "rate_limit_exceeded", "backlog_full", "lane_full", "too_many_streams", "too_many_websockets",
            "too_many_requests",
        ),
        "Wait for Retry-After; without it, ask for less.",
        ("Retry-After?", "x-should-retry?"),
    ),
    500: Refusal(("internal_error", "engine_error"), "Tell the operator, with x-request-id."),
    503: Refusal(
        (
            "no_model", "too_many_uploads", "too_many_requests", "too_many_connections", "draining", "unavailable",
            "lane_unavailable", "worker_lost",
        ),
        "Wait for Retry-After.",
        ("Retry-After",),
    ),
    507: Refusal(("storage_full",), "There is no room; tell the operator."),
}  # fmt: skip

_NUMBER: Final[Json] = {"type": "integer", "minimum": 0}
_AMOUNT: Final[Json] = {"type": "string", "pattern": "^([0-9]+m)?[0-9]+s$"}
HEADERS: Final[Mapping[str, tuple[str, Json]]] = {
    "x-request-id": ("Of this answer; the log repeats it.", {"type": "string"}),
    "x-stream-id": ("Of the request; by it a stream can be gone on with.", {"type": "string"}),
    "x-ratelimit-limit-requests": ("That may be sent a minute.", _NUMBER),
    "x-ratelimit-remaining-requests": ("That are left of them.", _NUMBER),
    "x-ratelimit-reset-requests": ("Until all are there again.", _AMOUNT),
    "x-ratelimit-limit-tokens": ("That may be used a minute.", _NUMBER),
    "x-ratelimit-remaining-tokens": ("That are left of them.", _NUMBER),
    "x-ratelimit-reset-tokens": ("Until all are there again.", _AMOUNT),
    "Retry-After": ("Seconds after which to ask again.", {"type": "integer", "minimum": 1}),
    "x-should-retry": ("That asking again is of no use.", {"const": "false"}),
    "WWW-Authenticate": ("How a key is sent.", {"const": "Bearer"}),
    "Allow": ("The methods by which the path is known.", {"type": "string"}),
    "Content-Range": ("Which bytes these are, and of how many.", {"type": "string", "pattern": "^bytes "}),
    "Accept-Ranges": ("That ranges may be asked for.", {"const": "bytes"}),
    "Content-Disposition": ("The file's name.", {"type": "string"}),
    "ETag": ("Of these bytes.", {"type": "string", "pattern": '^"[0-9a-f]+"$'}),
    "X-Incomplete": ("Whether more may come.", {"enum": ["true", "false"]}),
    "X-Parts": ("What `without` takes, to get only what is new.", {"type": "string"}),
}
_MAYBE: Final = ".maybe"
_LIMITS: Final = tuple(f"{name}?" for name in HEADERS if name.startswith("x-ratelimit-"))


def answers(
    shape: type[BaseModel] | Json | None,
    *refusals: int,
    keyed: bool | None = True,
    headers: tuple[str, ...] = (),
    others: Mapping[int | str, Json] | None = None,
) -> dict[int | str, Json]:
    """A route's `responses`.

    Args:
        shape: what it answers with 200: JSON of this shape; or content, by media type.
        refusals: statuses of its own.
        keyed: it needs a key; None: nor is anything else looked at before.
        headers: of the 200; a question mark behind a name says that it may be missing.
        others: statuses that are no refusals.
    """
    good: Json = {"headers": _headers(*headers, *(_LIMITS if keyed else ()))}
    if isinstance(shape, dict):
        good["content"] = shape
    elif shape is not None:
        good["model"] = shape
    found: dict[int | str, Json] = {200: good, **(others or {})}
    common = KEYED if keyed else () if keyed is None else OPEN
    for status in sorted({*refusals, *common}):
        found[status] = {
            "$ref": f"#/components/responses/{status}", "description": REFUSALS[status].advice,
        }  # fmt: skip
    return found


def other(description: str, content: Json | None = None, headers: tuple[str, ...] = ()) -> Json:
    """An answer that is neither 200 nor a refusal."""
    found: Json = {"description": description, "headers": _headers(*headers, *_LIMITS)}
    return found if content is None else found | {"content": content}


def takes(name: str, example: Json, *, required: bool = True) -> Json:
    """A route's `openapi_extra`: its body is JSON of the schema that has this name in `DocumentedApp`."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}, "example": example}}
    return {"requestBody": {"required": required, "content": content}}


class DocumentedApp(FastAPI):
    """An application whose document says what `answers` and `takes` refer to.

    Args:
        schemas: by name, those that routes refer to.
    """

    def __init__(self, schemas: Mapping[str, Json], **more: Any) -> None:
        super().__init__(**more)
        self._schemas = schemas

    def openapi(self) -> Json:
        """The document; made once. Raises `ValueError` where two shapes have the same name."""
        if self.openapi_schema is None:
            made = get_openapi(title=self.title, version=self.version, description=self.description, routes=self.routes)
            components = made.setdefault("components", {})
            schemas = {**components.get("schemas", {}), **self._schemas}
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            if clashing := [name for name in schemas if "__" in name]:
                raise ValueError(f"two shapes have the same name: {', '.join(clashing)}")
            components["schemas"] = dict(sorted(schemas.items()))
            components["responses"] = {str(status): _refusal(one) for status, one in REFUSALS.items()}
            components["headers"] = {name: _header(name) for bare in HEADERS for name in (bare, bare + _MAYBE)}
            for path in made["paths"].values():
                for operation in path.values():
                    _correct(operation["responses"])
            self.openapi_schema = made
        return self.openapi_schema


def _refusal(one: Refusal) -> Json:
    codes: Json = {"properties": {"error": {"properties": {"code": {"enum": list(one.codes)}}}}}
    schema = {"allOf": [{"$ref": "#/components/schemas/Error"}, codes]}
    listed = ", ".join(f"`{code}`" for code in one.codes)
    return {
        "description": f"{one.advice} {listed}",
        "headers": _headers(*one.headers, *_LIMITS),
        "content": {"application/json": {"schema": schema}},
    }


def _headers(*names: str) -> Json:
    """A question mark behind a name says that it may be missing."""
    components = {name.removesuffix("?"): name.replace("?", _MAYBE) for name in ("x-request-id", *names)}
    return {name: {"$ref": f"#/components/headers/{component}"} for name, component in components.items()}


def _header(name: str) -> Json:
    bare = name.removesuffix(_MAYBE)
    text, schema = HEADERS[bare]
    return {"description": text, "required": bare == name, "schema": schema}


def _correct(responses: Json) -> None:
    """FastAPI adds a refusal of its own, which nobody gets here, and what it knows of routes that return a dict."""
    responses.pop("422", None)
    for content in responses.get("200", {}).get("content", {}).values():
        if "$ref" in content.get("schema", {}):
            content["schema"] = {"$ref": content["schema"]["$ref"]}
