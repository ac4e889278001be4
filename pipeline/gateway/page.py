"""The web page at `/`: static files that are read once at startup and served by name.

A name that isn't in the table is answered with 404, so path traversal isn't possible. The Content-Security-Policy
allows only these scripts and no markup from text (Trusted Types).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Response

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.openapi.document import document_response, document_responses

FOLDER: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"

Tag = Annotated[str | None, Header(description="The ETag of the version that the client has.")]

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page with its media type and its ETag (a hash of its bytes)."""

    data: bytes
    media_type: str
    tag: str


def read_files(folder: Path = FOLDER) -> Mapping[str, StaticFile]:
    """Read the page's files; keys are their names."""
    return {path.name: _read(path) for path in sorted(folder.iterdir()) if path.suffix in _TYPES}


def page_router(files: Mapping[str, StaticFile]) -> APIRouter:
    """The routes `/` and `/static/NAME`. They need no key: the files are public parts of the package."""
    router = APIRouter(tags=["page"], default_response_class=Response)

    @router.get("/", responses=_documented(".html"))
    def index(if_none_match: Tag = None) -> Response:
        """The web page."""
        return _answer(files[INDEX], if_none_match)

    @router.get("/static/{name}", responses=_documented(*_TYPES, refusals=(404,)))
    def static(name: str, if_none_match: Tag = None) -> Response:
        """A script, style sheet or image of the web page."""
        file = files.get(name)
        if file is None:
            raise ApiError(404, "not_found", "the page has no such file")
        return _answer(file, if_none_match)

    return router


def _documented(*suffixes: str, refusals: tuple[int, ...] = ()) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {_TYPES[suffix].partition(";")[0]: {} for suffix in suffixes}
    same = document_response("Not modified: the client has this version.", headers=("ETag",))
    return document_responses(*refusals, content=content, keyed=False, headers=("ETag",), others={304: same})


def _read(path: Path) -> StaticFile:
    data = path.read_bytes()
    return StaticFile(data, _TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')


def _answer(file: StaticFile, if_none_match: str | None) -> Response:
    headers = {
        "ETag": file.tag,
        "Cache-Control": "no-cache",  # cached, but revalidated on each load: a new version shows at once
        "Content-Security-Policy": _POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    }
    if if_none_match in (file.tag, "*"):
        return Response(status_code=304, headers=headers)
    return Response(file.data, media_type=file.media_type, headers=headers)
