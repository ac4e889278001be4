"""Requests that a page of another site has a browser send: they are refused, since no site but our own page asks from
a browser. So nobody's browser is a way in to a gateway that needs no key.

A page can also have its own name lead to this machine (DNS rebinding): to the browser it then asks its own site, and
only the name that it asks for gives it away."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool

from pipeline.gateway.http.error_mapping import api_error
from pipeline.gateway.http.errors import ApiError
from pipeline.ports import PipelineError

_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9_.-]{1,253}))(?::[0-9]{1,5})?", re.IGNORECASE)


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


class HostGuard:
    """Refuses what asks for a name that isn't ours, as long as nobody needs a key.

    Args:
        names: ours, besides "localhost". Addresses need no mention: no name leads astray where there is none.
        is_open: whether anybody may ask, without a key; may wait for a server.
    """

    def __init__(self, names: Iterable[str], is_open: Callable[[], bool]) -> None:
        self._names = {"localhost", *(name.lower() for name in names)}
        self._is_open = is_open

    async def check(self, headers: Mapping[str, str]) -> None:
        """Raises `ApiError` (403)."""
        host = headers.get("host")
        if host is None or self._is_ours(host):
            return
        try:
            refused = await run_in_threadpool(self._is_open)
        except PipelineError as error:
            raise api_error(error) from error
        if refused:
            message = (
                f"{host[:80]!r} is no name of this gateway, which needs no keys; add it to TOKENMILL_GATEWAY__HOSTS"
            )
            raise ApiError(403, "other_host", message)

    def _is_ours(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = (found[1] or found[2]).lower()
        if name in self._names:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True
