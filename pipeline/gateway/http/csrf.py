"""Protection against cross-site requests (CSRF) and DNS rebinding.

Requests with the Origin of another site are refused: the gateway's own page is the only web page that calls it. So a
user's browser can't be used to reach a gateway that needs no key.

With DNS rebinding a page points its own host name to this machine. To the browser the request is then same-origin, and
only the Host header reveals it; so the gateway checks that header while it needs no key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool

from pipeline.gateway.http.errors import ApiError, api_error
from pipeline.ports import PipelineError

_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9_.-]{1,253}))(?::[0-9]{1,5})?", re.IGNORECASE)


def check_origin(headers: Mapping[str, str]) -> None:
    """Raises `ApiError` (403) for a request from a page of another site."""
    origin = headers.get("origin")
    if origin is None:
        return
    try:
        origin_host = urlsplit(origin).netloc
    except ValueError:
        origin_host = ""
    if not origin_host or origin_host != headers.get("host", ""):
        raise ApiError(403, "other_origin", f"pages of {origin[:80]!r} may not ask here")


class HostGuard:
    """Refuses requests whose Host header isn't a name of the gateway, while no key is needed.

    Args:
        names: host names of the gateway besides "localhost". IP addresses are always allowed: DNS rebinding needs a
            host name.
        is_open: whether requests need no key; may block on the store.
    """

    def __init__(self, names: Iterable[str], is_open: Callable[[], bool]) -> None:
        self._names = {"localhost", *(name.lower() for name in names)}
        self._is_open = is_open

    async def check(self, headers: Mapping[str, str]) -> None:
        """Raises `ApiError` (403)."""
        host = headers.get("host")
        if host is None or self._is_allowed(host):
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

    def _is_allowed(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = (match[1] or match[2]).lower()
        if name in self._names:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True
