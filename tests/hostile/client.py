"""The attacker's HTTP client: single requests, uploads, whole batches, raw bytes, and floods."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from tests.hostile.attack import Answer, Target, tally

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
ENDED: Final = ("completed", "failed", "expired", "cancelled")
POLL_SECONDS: Final = 0.5
BOUNDARY: Final = b"hostile-boundary"


def send(
    target: Target,
    method: str,
    path: str,
    body: object = None,
    *,
    key: str | None = "bad",
    headers: Mapping[str, str] | None = None,
    seconds: float = 60.0,
) -> tuple[int, bytes]:
    """Status and body of the answer; `body`: bytes as they are, anything else as JSON. Raises OSError and
    `http.client.HTTPException`."""
    sent = dict(headers or {})
    if key is not None:
        sent.setdefault("Authorization", f"Bearer {target.keys.get(key, key)}")
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        sent.setdefault("Content-Type", "application/json")
    connection = http.client.HTTPConnection(target.host, target.port, timeout=seconds)
    try:
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def request(target: Target, method: str, path: str, body: object = None, **options: Any) -> Answer:
    """The same as an `Answer`; never raises for what the network or the gateway does."""
    try:
        return answer_of(*send(target, method, path, body, **options))
    except TimeoutError as error:
        return Answer("timeout", "no answer", message=str(error))
    except (OSError, http.client.HTTPException) as error:
        return Answer("closed", "connection", message=f"{type(error).__name__}: {error}")


def answer_of(status: int, data: bytes) -> Answer:
    """An HTTP answer. An error that has not OpenAI's shape has the code "not_openai_error"."""
    if status < 400:
        return Answer("http", str(status), message=data[:200].decode(errors="replace"))
    try:
        error = json.loads(data)["error"]
        return Answer("http", str(status), error["code"], str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return Answer("http", str(status), "not_openai_error", data[:200].decode(errors="replace"))


def form_of(data: bytes, name: str) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an upload."""
    head = b"--%s\r\nContent-Disposition: form-data; name=" % BOUNDARY
    shown = json.dumps(name, ensure_ascii=False).encode()
    body = (
        head + b'"purpose"\r\n\r\nbatch\r\n' + head + b'"file"; filename=' + shown
        + b"\r\nContent-Type: application/octet-stream\r\n\r\n" + data + b"\r\n--" + BOUNDARY + b"--\r\n"
    )  # fmt: skip
    return body, {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}


def upload(target: Target, data: bytes, name: str, *, key: str = "bad", **headers: str) -> tuple[str | None, Answer]:
    """The id of the file, if it was taken, and the answer."""
    body, form = form_of(data, name)
    try:
        status, received = send(target, "POST", "/v1/files", body, key=key, headers={**form, **headers})
    except (OSError, http.client.HTTPException) as error:
        return None, Answer("closed", "connection", message=f"{type(error).__name__}: {error}")
    return (json.loads(received)["id"] if status == 200 else None), answer_of(status, received)


def create_batch(
    target: Target, file: str, endpoint: str = CHAT, *, key: str = "bad", **more: Any
) -> tuple[str | None, Answer]:
    """The id of the batch, if it was taken, and the answer."""
    order = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", **more}
    try:
        status, received = send(target, "POST", "/v1/batches", order, key=key)
    except (OSError, http.client.HTTPException) as error:
        return None, Answer("closed", "connection", message=f"{type(error).__name__}: {error}")
    return (json.loads(received)["id"] if status == 200 else None), answer_of(status, received)


def batch_end(target: Target, batch: str, *, key: str = "bad", seconds: float = 60.0) -> Answer:
    """How the batch ended, with its first error or that of its first failed row."""
    until, found = time.monotonic() + seconds, dict[str, Any]()
    while time.monotonic() < until:
        try:
            status, received = send(target, "GET", f"/v1/batches/{batch}", key=key, seconds=20)
            found = json.loads(received) if status == 200 else found
        except (OSError, http.client.HTTPException):
            pass  # it may be restarted meanwhile; the batch is still there then
        if found.get("status") in ENDED:
            return _ended(target, found, key)
        time.sleep(POLL_SECONDS)
    return Answer("job", "open", found.get("status"), f"{batch} had not ended after {seconds:.0f} s")


def run_file(
    target: Target, data: bytes, name: str, endpoint: str = CHAT, *, seconds: float = 60.0, **more: Any
) -> Answer:
    """Upload it, make a batch of it, and wait for its end; the first answer that is a refusal."""
    file, answer = upload(target, data, name)
    if file is None:
        return answer
    batch, answer = create_batch(target, file, endpoint, **more)
    return answer if batch is None else batch_end(target, batch, seconds=seconds)


def chat(content: str, max_tokens: int = 1, **more: Any) -> dict[str, Any]:
    """The body of a chat."""
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}


def line(custom_id: str, **more: Any) -> bytes:
    """A line of a batch's input."""
    row = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": chat(f"row {custom_id}"), **more}
    return json.dumps(row).encode() + b"\n"


def flood(calls: Iterable[Callable[[], Answer]], threads: int) -> list[Answer]:
    """All of them, so many at once; their answers, tallied."""
    with ThreadPoolExecutor(threads) as pool:
        return tally(future.result() for future in [pool.submit(call) for call in calls])


def dial(target: Target, seconds: float = 30.0) -> socket.socket:
    return socket.create_connection((target.host, target.port), timeout=seconds)


def rest_of(connection: socket.socket, seconds: float) -> Answer:
    """The answer that comes on this connection: whole by its length, or up to the server's end."""
    received, until = b"", time.monotonic() + seconds
    while not _is_whole(received):
        left = until - time.monotonic()
        try:
            connection.settimeout(max(left, 0.001))
            piece = connection.recv(65_536)
        except TimeoutError:
            return Answer("timeout", "still open", message=received[:200].decode(errors="replace"))
        except OSError as error:
            if not received:
                return Answer("closed", "connection", message=str(error))
            break
        if not piece:
            break
        received += piece
    if not received.startswith(b"HTTP/1.1 "):
        return Answer("closed", "connection", message=received[:200].decode(errors="replace"))
    return answer_of(int(received.split(b" ", 2)[1]), received.partition(b"\r\n\r\n")[2])


def _is_whole(received: bytes) -> bool:
    """Whether this is an answer with all of its body, by the length that it names."""
    head, end, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return bool(end) and length is not None and len(body) >= int(length[1])


def _ended(target: Target, batch: dict[str, Any], key: str) -> Answer:
    if batch["status"] != "completed":
        first = ((batch.get("errors") or {}).get("data") or [{}])[0]
        return Answer("job", batch["status"], first.get("code"), str(first.get("message") or ""))
    if not batch["error_file_id"]:
        return Answer("job", "completed")
    status, received = send(target, "GET", f"/v1/files/{batch['error_file_id']}/content", key=key)
    if status != 200:
        return answer_of(status, received)
    row = json.loads(received.split(b"\n", 1)[0])
    error = row.get("error") or (row.get("response") or {}).get("body", {}).get("error") or {}
    return Answer("job", "rows_failed", error.get("code"), str(error.get("message") or ""))
