"""A proxy in front of any server (Kafka, Redis, KV blocks) that can delay, cut, refuse, damage or swallow its traffic.

It doesn't parse the traffic. `delay` is added to each direction; in `silence` connections stay open and nothing
arrives until `restore`, as when a cable is pulled.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from tests.waiting import HANG_SECONDS

PIECE = 65_536
NUM_INVERTED = 256
"""Bytes that a fault inverts."""


@dataclass(frozen=True, slots=True)
class AnswerFault:
    """What becomes of a server's answer at its byte `at`: some bytes from there on are inverted, or the answer ends
    before it."""

    kind: Literal["invert", "cut"]
    at: int


class FaultyTcp:
    """A proxy at `port`, in front of the local server at `upstream_port`, whose port may change with a restart.

    Attributes:
        spoiled: faults of the answers to the next connections, one for each.
    """

    def __init__(self, upstream_port: int, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.upstream_port = upstream_port
        self.delay = 0.0
        self._refusing = False
        self._open = threading.Event()
        self._open.set()
        self._closing = False
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.spoiled: deque[AnswerFault] = deque()
        self._listener = socket.create_server(address, backlog=256)
        self._listener.settimeout(None)  # Celery's threads change the default of the process now and then
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def cut(self) -> None:
        """Close every connection there is; new ones are let in."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            _close(connection)

    def refuse(self) -> None:
        """Close every connection, and each new one at once, until `restore`."""
        self._refusing = True
        self.cut()

    def silence(self) -> None:
        """Carry nothing until `restore`; connections stay open."""
        self._open.clear()

    def restore(self) -> None:
        """As at the beginning, without delay."""
        self.delay, self._refusing = 0.0, False
        self._open.set()

    def __enter__(self) -> FaultyTcp:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        _close(self._listener)
        self.cut()
        self.restore()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                _close(client)
                continue
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._open.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self.upstream_port), timeout=HANG_SECONDS)
        except OSError:
            _close(client)
            return
        for end in (client, server):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._connections |= {client, server}
        fault = self.spoiled.popleft() if self.spoiled else None
        for source, sink, spoiled in ((client, server, None), (server, client, fault)):
            threading.Thread(target=self._carry, args=(source, sink, spoiled), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, fault: AnswerFault | None) -> None:
        begin = 0
        try:
            while data := source.recv(PIECE):
                if self.delay:
                    time.sleep(self.delay)
                self._open.wait()
                at = len(data) if fault is None else fault.at - begin
                begin += len(data)
                if not 0 <= at < len(data):
                    sink.sendall(data)
                elif fault is not None and fault.kind == "cut":
                    sink.sendall(data[:at])
                    break
                else:
                    damaged = bytes(byte ^ 0xFF for byte in data[at : at + NUM_INVERTED])
                    sink.sendall(data[:at] + damaged + data[at + len(damaged) :])
        except OSError:
            pass
        finally:
            with self._lock:
                self._connections -= {source, sink}
            _close(source)
            _close(sink)


def _close(connection: socket.socket) -> None:
    """Also wakes the threads that wait in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
