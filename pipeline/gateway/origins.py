"""Requests that a page of another site has a browser send: they are refused, since no site but our own page asks from
a browser. So nobody's browser is a way in to a gateway that needs no key."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from pipeline.gateway.errors import ApiError


def check_origin(headers: Mapping[str, str]) -> None:
    """Raises `ApiError` (403) for what another site's page sends."""
    origin = headers.get("origin")
    if origin is None:
        return
    try:
        place = urlsplit(origin).netloc
    except ValueError:
        place = ""
    if not place or place != headers.get("host", ""):
        raise ApiError(403, "other_origin", f"pages of {origin[:80]!r} may not ask here")
