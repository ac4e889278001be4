"""The HTTP client of a guard model's server: tokenmill's gateway, or another OpenAI-compatible server.

A call ends within its time-out, whatever the server does. A server that can't be reached is left alone for a moment:
texts fail at once then, instead of each waiting for its own time-out. So do a tenant's texts when the last ones took
too long, and only this tenant's.
"""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import Any, Final

import httpx2
import orjson

from workers.errors import WorkerError
from workers.policies.guard_admission import CircuitBreaker, TenantBreakers, TenantSlots
from workers.policies.retry import PolicyUnavailable

_MAX_ANSWER_BYTES: Final = 4 << 20
_AWAY: Final = (404, 429, 502, 503)
"""Statuses of a server that doesn't serve the guard at present, whatever the text."""

_TIMED_OUT: Final = (408, 504)


class GuardFailed(WorkerError):
    """Raised when a guard model could not be asked, or its answer is none of its labels."""


class GuardTimeout(GuardFailed, PolicyUnavailable):
    """Raised when the guard's answer didn't come in time."""


class GuardUnavailable(GuardFailed, PolicyUnavailable):
    """Raised when the guard's server can't be reached, or reports that it can't answer."""


class GuardRejected(GuardFailed):
    """Raised when the guard's server rejects the request, as it does for a text that is too long."""


class GuardAnswerInvalid(GuardFailed):
    """Raised when the guard's answer is none of its labels, or no answer at all."""


class GuardServer:
    """The server of a guard model. Thread-safe.

    Args:
        concurrency: requests at a time.
        key: None: it needs none.
    """

    def __init__(self, url: str, concurrency: int, key: str | None = None) -> None:
        headers = {"User-Agent": "tokenmill"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        # Proxies of the environment are not for a server of the installation.
        self._client = httpx2.Client(base_url=url, headers=headers, limits=limits, trust_env=False)
        self._slots = TenantSlots(concurrency)
        self._breaker = CircuitBreaker()
        self._tenants = TenantBreakers()

    def call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_seconds: float, tenant: str | None = None
    ) -> dict[str, Any]:
        """The JSON object that the server answers with. `tenant`: whose text it is; None: nobody's. Raises
        `GuardFailed`."""
        if tenant is not None and not self._tenants.of(tenant).admits():
            raise GuardUnavailable("the guard's server did not answer the tenant's last requests")
        if not self._breaker.admits():
            raise GuardUnavailable("the guard's server did not answer its last requests")
        began = time.monotonic()
        deadline = began + timeout_seconds
        if not self._slots.acquire(tenant, timeout_seconds):
            raise GuardTimeout("too many texts waited for the guard")
        try:
            status, data = self._send_in_time(method, path, body, deadline, tenant)
        except GuardUnavailable:
            self._breaker.record(False, began)
            raise
        except GuardFailed:
            self._record_text(tenant, False, began)
            raise
        self._breaker.record(status not in _AWAY, began)
        if status not in _AWAY:
            self._record_text(tenant, status < 500 and status not in _TIMED_OUT, began)
        if status in _TIMED_OUT:
            raise GuardTimeout(f"the guard's server answered with status {status}")
        if status >= 500 or status in _AWAY:
            raise GuardUnavailable(f"the guard's server answered with status {status}")
        if status != 200:
            raise GuardRejected(f"the guard's server answered with status {status}")
        try:
            answer = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise GuardAnswerInvalid("the guard's answer is no JSON") from error
        if not isinstance(answer, dict):
            raise GuardAnswerInvalid("the guard's answer is no JSON object")
        return answer

    def forget_failures(self) -> None:
        """All texts are asked about again, whatever failed before."""
        self._tenants.clear()

    def _record_text(self, tenant: str | None, answered: bool, began: float) -> None:
        if tenant is not None:
            self._tenants.of(tenant).record(answered, began)

    def _send_in_time(
        self, method: str, path: str, body: dict[str, Any] | None, deadline: float, tenant: str | None
    ) -> tuple[int, bytes]:
        """As `_send`, on a thread of its own: the client's time-out is of each socket operation alone, and a server may
        send a header for ever. Such a thread keeps its slot."""
        answer: SimpleQueue[tuple[int, bytes] | Exception] = SimpleQueue()

        def send() -> None:
            try:
                answer.put(self._send(method, path, body, deadline))
            except Exception as error:  # noqa: BLE001 - raised by the waiting thread
                answer.put(error)
            finally:
                self._slots.release(tenant)

        threading.Thread(target=send, name="guard", daemon=True).start()
        try:
            found = answer.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise GuardTimeout("the guard did not answer in time") from None
        if isinstance(found, Exception):
            raise found
        return found

    def _send(self, method: str, path: str, body: dict[str, Any] | None, deadline: float) -> tuple[int, bytes]:
        """Status and body of the response; sends again where the connection was closed while it was idle."""
        try:
            return self._send_once(method, path, body, deadline)
        except httpx2.RemoteProtocolError:
            pass
        except httpx2.TimeoutException as error:
            raise GuardTimeout("the guard did not answer in time") from error
        except httpx2.HTTPError as error:
            raise GuardUnavailable(f"the guard can't be reached: {type(error).__name__}") from error
        try:
            return self._send_once(method, path, body, deadline)
        except httpx2.TimeoutException as error:
            raise GuardTimeout("the guard did not answer in time") from error
        except httpx2.HTTPError as error:
            raise GuardUnavailable(f"the guard can't be reached: {type(error).__name__}") from error

    def _send_once(self, method: str, path: str, body: dict[str, Any] | None, deadline: float) -> tuple[int, bytes]:
        left = deadline - time.monotonic()
        if left <= 0:
            raise GuardTimeout("the guard did not answer in time")
        data = bytearray()
        content = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        with self._client.stream(method, path, content=content, headers=headers, timeout=left) as response:
            for piece in response.iter_bytes():
                data += piece
                if len(data) > _MAX_ANSWER_BYTES:
                    raise GuardAnswerInvalid(f"the guard's answer is larger than {_MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > deadline:  # each wait is limited, and a slow server may send many pieces
                    raise GuardTimeout("the guard did not answer in time")
            return response.status_code, bytes(data)
