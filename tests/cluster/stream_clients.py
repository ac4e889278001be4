"""Clients that read streams, in a process of their own, so that they take no time from the tests' process. Many clients
share one event loop, each with its own socket. They record the bytes with their times, and check them at the end.

    python -m tests.cluster.stream_clients < PLAN.json > REPORT.json

Most read to the end. Some stop reading in the middle (with small socket buffers, so the server is affected), and some
hang up. A stream is correct when it has all events in order, the model's whole text, and its end.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import orjson

ROOT: Final = Path(__file__).parents[2]
CHAT: Final = "/v1/chat/completions"
LITTLE: Final = 4_096
"""Socket buffer of the clients that will stop reading, in bytes."""

Kind = Literal["reads", "stalls", "leaves"]


@dataclass(frozen=True, slots=True)
class Reader:
    """One client.

    Attributes:
        body: of its request.  text: the expected answer.
        delay: seconds after the beginning when it comes.
        until: seconds after all clients have got something when it stops reading, or hangs up.
    """

    body: dict[str, Any]
    text: str
    kind: Kind = "reads"
    delay: float = 0.0
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """All clients of a process.

    Attributes:
        url: of the gateway.  timeout_seconds: seconds after which a client gives up.
        wake: seconds after which clients that stopped reading read the rest; None: never.
    """

    url: str
    readers: tuple[Reader, ...]
    timeout_seconds: float = 120.0
    wake: float | None = None


@dataclass(slots=True)
class ClientReport:
    """What a client received. Times are `time.monotonic` of this machine.

    Attributes:
        stream: its id.
        wrong: the violation; empty: none. Only the beginning is checked after a hang-up.
        begun: the request was sent.  arrivals: when bytes came.  ended: the last byte came, or it hung up.
        stopped: it read no more, or hung up.
        code: of the error that ended it.
    """

    kind: Kind
    stream: str = ""
    begun: float = 0.0
    ended: float = 0.0
    stopped: float = 0.0
    status: int = 0
    events: int = 0
    code: str | None = None
    wrong: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)


def run_clients(plan: Plan) -> subprocess.Popen[bytes]:
    """Start the process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.cluster.stream_clients"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    process.stdin.write(orjson.dumps(asdict(plan)))
    process.stdin.close()
    return process


def report_of(process: subprocess.Popen[bytes]) -> list[ClientReport]:
    """The reports of its clients, once all are done; in the plan's order."""
    assert process.stdout is not None
    report = process.stdout.read()
    assert process.wait() == 0, "the clients' process failed"
    return [ClientReport(**one) for one in orjson.loads(report)]


class _Arrivals:
    """Records when the last of several clients has received data. `last`: `time.monotonic`; infinite before."""

    def __init__(self, clients: int) -> None:
        self.last = float("inf")
        self._missing = clients

    def record(self) -> None:
        """Another has."""
        self._missing -= 1
        if not self._missing:
            self.last = time.monotonic()


class _Client:
    """One connection, from its first byte to its last."""

    def __init__(self, reader: Reader, plan: Plan, begin: float, arrivals: _Arrivals) -> None:
        self._reader = reader
        self._arrivals = arrivals
        self._plan = plan
        self._begin = begin
        self._report = ClientReport(reader.kind)
        self._data = bytearray()

    async def run(self) -> ClientReport:
        await asyncio.sleep(max(0.0, self._begin + self._reader.delay - time.monotonic()))
        try:
            async with asyncio.timeout(self._plan.timeout_seconds):
                await self._talk()
        except TimeoutError:
            self._report.wrong.append(f"no end within {self._plan.timeout_seconds:g} s")
        except OSError as error:
            self._report.wrong.append(f"{type(error).__name__}: {error}")
        self._report.ended = time.monotonic()
        return self._report

    async def _talk(self) -> None:
        loop, url = asyncio.get_running_loop(), urlsplit(self._plan.url)
        with socket.socket() as sock:
            if self._reader.kind == "stalls":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LITTLE)
            sock.setblocking(False)
            await loop.sock_connect(sock, (url.hostname, url.port))
            self._report.begun = time.monotonic()
            body = orjson.dumps(self._reader.body)
            head = (
                f"POST {CHAT} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
                f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            await loop.sock_sendall(sock, head.encode() + body)
            while more := await loop.sock_recv(sock, 65_536):
                if not self._report.arrivals:
                    self._arrivals.record()
                self._report.arrivals.append(time.monotonic())
                self._data += more
                if self._reader.kind != "reads" and not self._report.stopped and self._is_time():
                    self._report.stopped = self._report.arrivals[-1]
                    if self._reader.kind == "leaves" or self._plan.wake is None:
                        return
                    await asyncio.sleep(self._plan.wake)

    def _is_time(self) -> bool:
        return time.monotonic() >= self._arrivals.last + self._reader.until

    def judge(self) -> ClientReport:
        """Check the received events."""
        report, wrong = self._report, self._report.wrong
        head, _, chunked = bytes(self._data).partition(b"\r\n\r\n")
        report.status = int(head.split(b" ", 2)[1]) if head else 0
        if report.status != 200:
            wrong.append(f"status {report.status}: {chunked[:200]!r}")
            return report
        report.stream = re.search(rb"\r\nx-stream-id: (\S+)", head)[1].decode()  # type: ignore[index]
        body, whole = _unchunked(chunked)
        events = body.split(b"\n\n")[:-1]
        numbers, datas = _parsed(events)
        report.events = len(datas)
        if numbers != list(range(len(numbers))):
            wrong.append(f"events are numbered {numbers[:50]}")
        self._judge_text([orjson.loads(data) for data in datas if data != b"[DONE]"])
        if report.kind == "leaves" or (report.kind == "stalls" and self._plan.wake is None):
            return report
        if not whole or datas[-1:] != [b"[DONE]"]:
            wrong.append("it ends without [DONE]")
        return report

    def _judge_text(self, chunks: Sequence[Mapping[str, Any]]) -> None:
        """All choices have the same text. Clients that read to the end have all of it, the others its beginning."""
        report, expected = self._report, self._reader.text
        texts: defaultdict[int, str] = defaultdict(str)
        reasons: dict[int, str] = {}
        for chunk in chunks:
            if "error" in chunk:
                report.code = chunk["error"]["code"]
                continue
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
        for text in texts.values():
            if not expected.startswith(text):
                at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, text, strict=False)))
                report.wrong.append(f"another text from character {at} on: {text[at:][:40]!r}")
            elif report.kind == "reads" and text != expected:
                report.wrong.append(f"{len(text)} of {len(expected)} characters")
        if report.kind == "reads" and (set(reasons.values()), len(reasons), report.code) != (
            {"length"},
            len(texts),
            None,
        ):
            report.wrong.append(f"it ended by {reasons}, error {report.code}")


def _unchunked(data: bytes) -> tuple[bytes, bool]:
    """The body of as many chunks as are whole, and whether the last one is there."""
    parts, at = [], 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end], 16)
        if not size:
            return b"".join(parts), True
        if end + 2 + size + 2 > len(data):
            break
        parts.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(parts), False


def _parsed(events: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    """Numbers and data, without comments."""
    numbers, datas = [], []
    for event in events:
        lines = [line for line in event.split(b"\n") if not line.startswith(b":")]  # a keep-alive precedes an event
        if not lines:
            continue
        first, second = lines
        numbers.append(int(first.removeprefix(b"id: ")))
        datas.append(second.removeprefix(b"data: "))
    return numbers, datas


async def _run(plan: Plan) -> list[ClientReport]:
    begin, arrivals = time.monotonic(), _Arrivals(len(plan.readers))
    clients = [_Client(reader, plan, begin, arrivals) for reader in plan.readers]
    await asyncio.gather(*(client.run() for client in clients))
    return [client.judge() for client in clients]


def main() -> None:
    given = orjson.loads(sys.stdin.buffer.read())
    readers = tuple(Reader(**one) for one in given.pop("readers"))
    seen = asyncio.run(_run(Plan(readers=readers, **given)))
    sys.stdout.buffer.write(orjson.dumps([asdict(one) for one in seen]))


if __name__ == "__main__":
    main()
