"""The HTTP client of a guard model's server: tokenmill's gateway, or another OpenAI-compatible server.

A call ends within its time-out, whatever the server does, and a server that doesn't answer is left alone for a moment:
texts fail at once then, instead of each waiting for its own time-out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final

import httpx2
import orjson

from workers.errors import WorkerError

_MAX_ANSWER_BYTES: Final = 4 << 20
FAILURES_UNTIL_DOWN: Final = 3
RETRY_SECONDS: Final = 1.0
"""A server that failed `FAILURES_UNTIL_DOWN` times in a row is asked once in this time."""


class GuardFailed(WorkerError):
    """Raised when a guard model could not be asked, or its answer is none of its labels."""


class GuardTimeout(GuardFailed):
    """Raised when the guard's answer didn't come in time."""


class GuardUnavailable(GuardFailed):
    """Raised when the guard's server can't be reached, or reports that it can't answer."""


class GuardRejected(GuardFailed):
    """Raised when the guard's server rejects the request, as it does for a text that is too long."""


class GuardAnswerInvalid(GuardFailed):
    """Raised when the guard's answer is none of its labels, or no answer at all."""


class CircuitBreaker:
    """Decides whether a server is asked. Thread-safe.

    Args:
        now: a monotonic clock (seconds).
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._failures = 0
        self._next_try = 0.0

    def admits(self) -> bool:
        """Whether the server may be asked now."""
        with self._lock:
            if self._failures < FAILURES_UNTIL_DOWN:
                return True
            if (now := self._now()) < self._next_try:
                return False
            self._next_try = now + RETRY_SECONDS
            return True

    def record(self, answered: bool) -> None:
        """Record whether the server answered."""
        with self._lock:
            self._failures = 0 if answered else self._failures + 1
            if not answered:
                self._next_try = self._now() + RETRY_SECONDS


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
        self._slots = threading.BoundedSemaphore(concurrency)
        self._breaker = CircuitBreaker()

    def call(self, method: str, path: str, body: dict[str, Any] | None, timeout_seconds: float) -> dict[str, Any]:
        """The JSON object that the server answers with. Raises `GuardFailed`."""
        deadline = time.monotonic() + timeout_seconds
        if not self._breaker.admits():
            raise GuardUnavailable("the guard's server did not answer its last requests")
        if not self._slots.acquire(timeout=timeout_seconds):
            raise GuardTimeout("too many texts waited for the guard")
        try:
            status, data = self._send_in_time(method, path, body, deadline)
        except GuardFailed:
            self._breaker.record(False)
            raise
        self._breaker.record(status < 500 and status != 429)
        if status >= 500 or status == 429:
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

    def _send_in_time(self, method: str, path: str, body: dict[str, Any] | None, deadline: float) -> tuple[int, bytes]:
        """As `_send`, on a thread of its own: the client's time-out is of each socket operation alone, and a server may
        send a header for ever. Such a thread keeps its slot."""
        answer: SimpleQueue[tuple[int, bytes] | Exception] = SimpleQueue()

        def send() -> None:
            try:
                answer.put(self._send(method, path, body, deadline))
            except Exception as error:  # noqa: BLE001 - raised by the waiting thread
                answer.put(error)
            finally:
                self._slots.release()

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
