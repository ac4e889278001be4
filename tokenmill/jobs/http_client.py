"""The command line's HTTP client of a gateway. Calls have time-outs, are retried where that is safe and useful, and
report errors in one line.

The key comes from the environment only, because options are visible in process lists and stored in shell histories.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from tokenmill.errors import InputUnusable, UserError
from tokenmill.jobs.backend import is_id

KEYS: Final = ("TOKENMILL_API_KEY", "OPENAI_API_KEY")
TIMES: Final = httpx2.Timeout(60.0, connect=10.0)
"""Gateways send a keep-alive on a stream every 15 s."""
UPLOAD_TIMES: Final = httpx2.Timeout(60.0, connect=10.0, read=900.0)
"""The response to an upload comes when the root has stored it: a gateway may first send gigabytes to a bucket."""

ATTEMPTS: Final = 6
MAX_WAIT_SECONDS: Final = 60.0
_AGAIN: Final = (429, 503)
_MAX_ERROR_BYTES: Final = 1 << 20

Json = dict[str, Any]


class GatewayClient:
    """A gateway at `url`: http(s)://HOST[:PORT], with or without /v1.

    Args:
        key: None: none is sent.
        sleep: waits between two attempts (seconds).

    Raises:
        UserError: the URL is invalid, or carries credentials.
    """

    def __init__(self, url: str, key: str | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self.url = _checked(url)
        self._sleep = sleep
        headers = {"User-Agent": "tokenmill"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._client = httpx2.Client(base_url=self.url, headers=headers, follow_redirects=False)

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Json:
        """GET a JSON document. Raises `UserError`."""
        return self._document("GET", path, params=query)

    def post(self, path: str, body: Json, *, key: str | None = None) -> Json:
        """POST a JSON body. Raises `UserError`.

        Args:
            key: idempotency key; with it the request is retried after a broken connection, too.
        """
        return self._document("POST", path, json=body, headers={} if key is None else {"Idempotency-Key": key})

    def upload(self, path: Path, key: str) -> Json:
        """Upload a file of requests, once for each idempotency key. Raises `UserError`."""
        try:
            stream = path.open("rb")
        except OSError as error:
            raise InputUnusable(f"{path}: can't be read: {error.strerror}; check the input's path") from error
        with stream:

            def make_body() -> dict[str, Any]:
                stream.seek(0)
                return {"files": {"file": (path.name, stream)}, "data": {"purpose": "batch"}}

            headers = {"Idempotency-Key": key}
            answer = self._send("POST", "/v1/files", make_body, headers=headers, stream=False, times=UPLOAD_TIMES)
            return self._read(answer)

    @contextmanager
    def stream(self, method: str, path: str, body: Json | None = None) -> Iterator[httpx2.Response]:
        """A streamed response, closed with the block. Raises `UserError`, also for a connection that breaks in the
        block."""
        more = {} if body is None else {"json": body}
        answer = self._send(method, path, lambda: more, headers={}, stream=True)
        try:
            yield answer
        except httpx2.HTTPError as error:
            raise UserError(f"{self.url}: the answer broke off ({_reason(error)}); ask again") from error
        finally:
            answer.close()

    def _document(self, method: str, path: str, **what: Any) -> Json:
        headers = what.pop("headers", {})
        return self._read(self._send(method, path, lambda: what, headers=headers, stream=False))

    def _read(self, answer: httpx2.Response) -> Json:
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.url}: the answer is no JSON object; is a tokenmill gateway there?")
        return found

    def _send(
        self,
        method: str,
        path: str,
        what: Callable[[], dict[str, Any]],
        *,
        headers: Mapping[str, str],
        stream: bool,
        times: httpx2.Timeout | None = None,
    ) -> httpx2.Response:
        """A successful response. Retries where the gateway asks for it, or can't be reached."""
        repeatable = method == "GET" or "Idempotency-Key" in headers
        for attempt in range(1, ATTEMPTS + 1):
            try:
                request = self._client.build_request(method, path, headers=headers, timeout=times or TIMES, **what())
                answer = self._client.send(request, stream=True)  # an error's body is read only up to a limit
                if answer.status_code < 300 and not stream:
                    with closing(answer):
                        answer.read()
            except httpx2.HTTPError as error:
                # Without a connection nothing was sent.
                if attempt == ATTEMPTS or not (repeatable or isinstance(error, httpx2.ConnectError)):
                    raise UserError(
                        f"{self.url}: can't be reached: {_reason(error)}; check the URL, and that a gateway runs there"
                    ) from error
                self._sleep(_backoff(attempt))
                continue
            if answer.status_code < 300:
                return answer
            if answer.status_code in _AGAIN and attempt < ATTEMPTS and _is_worth_retrying(answer):
                wait = _retry_delay(answer, attempt)
                answer.close()
                self._sleep(wait)
                continue
            raise _error_of(self.url, answer)
        raise AssertionError("the last attempt returns or raises")


def open_gateway(url: str) -> GatewayClient:
    """A client of the gateway, with the key of the environment, if there is one. Raises `UserError`."""
    key = next((os.environ[name].strip() for name in KEYS if os.environ.get(name, "").strip()), None)
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError("the API key in the environment has letters that no key has; copy it again")
    return GatewayClient(url, key)


def path_of(job: str) -> str:
    """The route of a batch. Raises `InputUnusable` for an invalid id, which might be another route."""
    if not is_id(job):
        raise InputUnusable(f"{job[:200]}: is no job's id; 'tokenmill jobs list --url URL' shows them")
    return f"/v1/batches/{job}"


def error_of(document: Any) -> str:
    """The message of an error document."""
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UserError(f"{url}: is no URL: {error}; give http(s)://HOST:PORT") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{url}: is no gateway; give http(s)://HOST:PORT, as 'tokenmill serve' shows it")
    if "@" in parts.netloc:
        raise UserError("the URL carries credentials; set TOKENMILL_API_KEY in place of them")
    if parts.query or parts.fragment:
        raise UserError(f"{url}: has a query or a fragment; give http(s)://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _is_worth_retrying(answer: httpx2.Response) -> bool:
    """Whether the gateway's retry-after is short enough to wait for."""
    wait = answer.headers.get("retry-after", "")
    return not wait.isdigit() or int(wait) <= MAX_WAIT_SECONDS


def _retry_delay(answer: httpx2.Response, attempt: int) -> float:
    """Seconds to wait: the gateway's retry-after, plus some jitter."""
    wait = answer.headers.get("retry-after", "")
    return int(wait) + random.uniform(0, 0.5) if wait.isdigit() else _backoff(attempt)


def _backoff(attempt: int) -> float:
    return min(0.5 * 2.0 ** (attempt - 1), 10.0) * random.uniform(0.75, 1.25)


def _error_of(url: str, answer: httpx2.Response) -> UserError:
    data = bytearray()
    document: Any = None
    with suppress(httpx2.HTTPError, ValueError):
        for piece in answer.iter_bytes():
            data += piece
            if len(data) > _MAX_ERROR_BYTES:
                break
        document = json.loads(bytes(data))
    answer.close()
    status = answer.status_code
    message = error_of(document) or f"answered with status {status}; is a tokenmill gateway there?"
    if status == 401:
        message += f"; the key is read from {' or '.join(KEYS)}"
    return UserError(f"{url}: {message}")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
