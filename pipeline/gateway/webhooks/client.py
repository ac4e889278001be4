"""Delivery of a webhook event: a signed POST (`pipeline.gateway.webhooks.signature`) that follows no redirects.

The endpoint's host name is resolved once, and the connection goes to the address that was checked. So neither a name of
a private network nor DNS rebinding gives access to the internal network (SSRF).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import h11

from pipeline.ports import PipelineError

_NAT64: Final = IPv6Network("64:ff9b::/96")
_UNICAST: Final = IPv6Network("2000::/3")
_NOT_PUBLIC: Final = (IPv4Network("192.88.99.0/24"), IPv6Network("3fff::/20"))
"""6to4 relays (RFC 7526) and documentation addresses (RFC 9637), which `ipaddress` classifies as global."""
_READ_BYTES: Final = 4_096
_MAX_HEADER_BYTES: Final = 32 * 1024


class NotDelivered(PipelineError):
    """Raised when an event can't be delivered. The message doesn't hold the URL's path, which may be a secret."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A webhook endpoint of a tenant.

    Attributes:
        id: its name in the store and in the log, derived from tenant and URL.
        url: http or https.  secret: the key of the signatures.
        events: the event types that it subscribes to.
    """

    id: str
    tenant: str
    url: str = field(repr=False)
    secret: bytes = field(repr=False)
    events: frozenset[str]

    @property
    def host(self) -> str:
        """The host name, for the log."""
        return urlsplit(self.url).hostname or ""


class WebhookSender(Protocol):
    """The interface of a sender of webhook events."""

    async def post(self, endpoint: Endpoint, headers: Mapping[str, str], payload: bytes) -> int:
        """Send an event; returns the HTTP status of the response. Raises `NotDelivered`."""
        ...


class Sender:
    """Sends webhook events over HTTP.

    Args:
        seconds: the time-out from the DNS lookup to the response's status.
        allow_private: allow endpoints on this machine or its private network.
        context: the TLS context; None: the system's certificate authorities are trusted.
    """

    def __init__(
        self, seconds: float = 10.0, *, allow_private: bool = False, context: ssl.SSLContext | None = None
    ) -> None:
        self._seconds = seconds
        self._allow_private = allow_private
        self._context = context or ssl.create_default_context()

    async def post(self, endpoint: Endpoint, headers: Mapping[str, str], payload: bytes) -> int:
        """Send an event; returns the HTTP status of the response. Raises `NotDelivered`."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._post(endpoint.url, headers, payload)
        except TimeoutError:
            raise NotDelivered(f"no answer within {self._seconds:g} s") from None
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            raise NotDelivered(f"can't be reached: {reason}") from None
        except h11.ProtocolError:
            raise NotDelivered("its response is no valid HTTP") from None

    async def _post(self, url: str, headers: Mapping[str, str], payload: bytes) -> int:
        parts = urlsplit(url)
        secure, host = parts.scheme == "https", parts.hostname or ""
        port = parts.port or (443 if secure else 80)
        reader, writer = await self._connect(host, port, secure)
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            sent = {
                "Host": parts.netloc,
                "User-Agent": "tokenmill",
                "Content-Type": "application/json",
                "Content-Length": str(len(payload)),
                "Connection": "close",
                **headers,
            }
            http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEADER_BYTES)
            request = h11.Request(method="POST", target=target, headers=list(sent.items()))
            data = (http.send(request), http.send(h11.Data(data=payload)), http.send(h11.EndOfMessage()))
            writer.write(b"".join(part or b"" for part in data))
            await writer.drain()
            while True:
                event: Any = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(_READ_BYTES))
                elif isinstance(event, h11.Response):
                    return event.status_code
        finally:
            writer.transport.abort()  # the response's body isn't read

    async def _connect(self, host: str, port: int, secure: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        if not self._allow_private:
            addresses = [address for address in addresses if is_public(address)]
            if not addresses:
                raise NotDelivered(f"{host} is an address of a private network, and those are not allowed")
        failure: OSError | None = None
        for address in addresses:
            try:
                if secure:
                    return await asyncio.open_connection(address, port, ssl=self._context, server_hostname=host)
                return await asyncio.open_connection(address, port)
            except OSError as error:
                failure = error
        raise failure or OSError("no address")


def is_public(address: str) -> bool:
    """Whether the address, and an IPv4 address embedded in it, is on the public Internet, so that it can't reach this
    machine or a private network."""
    found: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        inner = IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else found.ipv4_mapped
        if inner is None and (found not in _UNICAST or found.sixtofour or found.teredo):
            return False
        found = inner or found
    if any(found in network for network in _NOT_PUBLIC):
        return False
    return found.is_global and not found.is_multicast and not found.is_reserved
