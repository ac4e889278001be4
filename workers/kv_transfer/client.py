"""Fetches the KV blocks of a prompt from the worker that computed it.

What can't be fetched is computed: a fetch never fails a request. Blocks that arrived before a transfer broke off are
the beginning of the prefix, and are used.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

import structlog

from engine.cache.block_tier import BlockKey, Bytes
from schemas.workers.lane import KVSource
from workers.kv_transfer.shared_memory import machine_id, receive_shared
from workers.kv_transfer.wire import Deadline, Expected, TransferError, receive_blocks

logger = structlog.get_logger(__name__)

_CONNECT_SECONDS: Final = 2.0
_AVOID_SECONDS: Final = 5.0
"""How long a worker that could not be reached, or that was silent, isn't tried again."""

_Receive = Callable[[socket.socket, bytes, Expected, Deadline], Iterator[tuple[BlockKey, Bytes]]]


@dataclass(frozen=True, slots=True)
class FetchedBlocks:
    """Counts of a client. `failed`: transfers that broke off.  seconds: of all.  held_bytes: of the blocks that
    whole ones left out."""

    blocks: int = 0
    num_bytes: int = 0
    failed: int = 0
    seconds: float = 0.0
    held_bytes: int = 0


class BlockClient:
    """Fetches blocks; any thread may call it.

    Args:
        timeout_seconds: of one transfer, its waiting included.  use_shared_memory: with workers of this machine.
    """

    def __init__(self, timeout_seconds: float, *, use_shared_memory: bool = True) -> None:
        self._timeout_seconds = timeout_seconds
        self._use_shared_memory = use_shared_memory
        self._lock = threading.Lock()
        self._avoided: dict[tuple[str, int], float] = {}  # until when it isn't tried again
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self.fetched = FetchedBlocks()

    def deadline(self) -> Deadline:
        """The deadline of a fetch that is requested now."""
        return Deadline(self._timeout_seconds)

    def close(self) -> None:
        """Cut the transfers off that are running, and begin no more."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):  # it may have ended
                connection.shutdown(socket.SHUT_RDWR)

    def fetch(
        self, source: KVSource, expected: Expected, deadline: Deadline | None = None
    ) -> list[tuple[BlockKey, Bytes]]:
        """Return the verified blocks that arrived in time, the beginning of the prefix first."""
        found: list[tuple[BlockKey, Bytes]] = []
        began, failed = time.monotonic(), 0
        deadline = deadline or self.deadline()
        try:
            connection, receive = self._connect(source, deadline)
            with connection, self._open(connection):
                # One by one, so that those before an error are there.
                for block in receive(connection, bytes.fromhex(source.ticket), expected, deadline):
                    found.append(block)  # noqa: PERF402
        except (TransferError, OSError) as error:
            failed = 1
            if isinstance(error, TimeoutError):
                self._avoid(source)
            logger.warning(
                "blocks were not fetched whole; what is missing is computed",
                blocks=len(found), host=source.host, reason=str(error) or type(error).__name__,
            )  # fmt: skip
        with self._lock:
            before = self.fetched
            self.fetched = replace(
                before,
                blocks=before.blocks + len(found),
                num_bytes=before.num_bytes + sum(len(data) for _, data in found),
                failed=before.failed + failed,
                seconds=before.seconds + time.monotonic() - began,
                held_bytes=before.held_bytes + (0 if failed else expected.num_held * sum(expected.block_bytes)),
            )
        return found

    @contextmanager
    def _open(self, connection: socket.socket) -> Iterator[None]:
        """Let `close` cut this connection off until the block ends."""
        with self._lock:
            if self._is_closed:
                raise TransferError("the worker ends")
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _connect(self, source: KVSource, deadline: Deadline) -> tuple[socket.socket, _Receive]:
        now = time.monotonic()
        with self._lock:
            self._avoided = {one: until for one, until in self._avoided.items() if until > now}
            if (source.host, source.port) in self._avoided:
                raise TransferError("its worker could not be reached, or was silent, a moment ago")
        if self._use_shared_memory and source.machine == machine_id():
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                deadline.apply(local)
                local.connect(b"\0" + source.local_name.encode())
            except OSError:  # of another network namespace
                local.close()
            else:
                return local, receive_shared
        seconds = min(_CONNECT_SECONDS, deadline.left())
        try:
            return socket.create_connection((source.host, source.port), timeout=seconds), receive_blocks
        except OSError:
            self._avoid(source)
            raise

    def _avoid(self, source: KVSource) -> None:
        """Let the next fetches from this worker not wait for it: those from others would wait for them."""
        with self._lock:
            self._avoided[source.host, source.port] = time.monotonic() + _AVOID_SECONDS
