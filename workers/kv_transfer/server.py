"""Serves the KV blocks of prompts that this worker computed to the workers that go on with the answers.

Each offer of blocks has a ticket, a secret that is valid once, for some seconds. What all offers hold is bounded:
beyond that nothing is offered, and this worker goes on with the answer itself.

Workers of other machines connect by TCP; those of this one by a Unix socket, over which they get the blocks in shared
memory (`workers.kv_transfer.shared_memory`).
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from engine.block_exchange import ExportedBlock
from pipeline.ports import Clock
from schemas.settings.kv_transfer import KVTransferOptions
from schemas.workers.lane import KVSource
from workers.kv_transfer.shared_memory import listen_locally, machine_id, send_shared
from workers.kv_transfer.wire import (
    TICKET_BYTES,
    Deadline,
    TransferError,
    TransferStatus,
    read_hello,
    send_answer,
    send_blocks,
)

MAX_CONNECTIONS: Final = 32
"""Transfers at a time over TCP, and over the Unix socket; further connections wait."""

_DRAIN_SECONDS: Final = 2.0
_HELLO_SECONDS: Final = 2.0
"""Within which a client must say what it wants: a silent one takes another's place."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Offer:
    blocks: Sequence[ExportedBlock]
    num_bytes: int
    expires_at: float


@dataclass(slots=True)
class ServedBlocks:
    """Counts of a server. `refused`: offers for which there was no memory.  `failed`: transfers that broke off."""

    blocks: int = 0
    num_bytes: int = 0
    refused: int = 0
    expired: int = 0
    failed: int = 0


class BlockServer:
    """Offers blocks, and sends them to who has the ticket. Any thread may offer.

    Args:
        identity: of the engine that computes them (`BlockExchange.identity`).

    Raises:
        OSError: it can't listen where the settings say.
    """

    def __init__(self, identity: bytes, clock: Clock, settings: KVTransferOptions) -> None:
        self._identity = identity
        self._clock = clock
        self._settings = settings
        self._lock = threading.Lock()
        self._offers: dict[bytes, _Offer] = {}
        self._held_bytes = 0
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._listener = socket.create_server(
            (settings.host, settings.port),
            family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET,
            backlog=MAX_CONNECTIONS,
            dualstack_ipv6=settings.host == "::",
        )
        self._local, self._local_name = listen_locally(MAX_CONNECTIONS)
        self.served = ServedBlocks()

    def offer(self, blocks: Sequence[ExportedBlock]) -> KVSource | None:
        """Offer blocks to one client; returns where they are. None: there is no memory for them."""
        size = sum(block.num_bytes for block in blocks)
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._expire()
            if self._held_bytes + size > self._settings.max_bytes:
                self.served.refused += 1
                return None
            self._offers[ticket] = _Offer(blocks, size, self._clock.monotonic() + self._settings.offer_seconds)
            self._held_bytes += size
        return KVSource(
            host=self.host,
            port=self.port,
            ticket=ticket.hex(),
            machine=machine_id(),
            local_name=self._local_name,
        )

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes can be offered now; counted as refused if not."""
        with self._lock:
            self._expire()
            is_free = self._held_bytes + num_bytes <= self._settings.max_bytes
            self.served.refused += not is_free
            return is_free

    def expire(self) -> None:
        """Release the blocks of offers that are over."""
        with self._lock:
            self._expire()

    @property
    def host(self) -> str:
        """The address that other workers connect to."""
        return self._settings.advertised_host or self._settings.host

    @property
    def port(self) -> int:
        """The port of TCP connections."""
        return int(self._listener.getsockname()[1])

    @contextmanager
    def running(self) -> Iterator[BlockServer]:
        """Serve until the block ends, and then what is offered already for a moment longer; transfers that are running
        after that are cut off."""
        threads = [
            threading.Thread(target=self._accept, args=(listener, send), name=name, daemon=True)
            for listener, send, name in (
                (self._listener, send_blocks, "kv-blocks"),
                (self._local, send_shared, "kv-blocks-local"),
            )
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._drain()
            with self._lock:
                self._is_closed = True
                self._offers.clear()
                open_now = [self._listener, self._local, *self._connections]
            for one in open_now:
                with suppress(OSError):  # it may be closed, or not connected
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
            for thread in threads:
                thread.join()

    def _drain(self) -> None:
        """Wait a moment until all offers are fetched: other workers have just been given their tickets."""
        until = self._clock.monotonic() + _DRAIN_SECONDS
        while self._clock.monotonic() < until:
            with self._lock:
                self._expire()
                if not self._offers and not self._connections:
                    return
            self._clock.sleep(0.02)

    def _accept(self, listener: socket.socket, send: _Send) -> None:
        room = threading.Semaphore(MAX_CONNECTIONS)  # of this listener: the others' clients don't wait for its own
        while True:
            room.acquire()
            try:
                connection, _ = listener.accept()
            except OSError as error:
                room.release()
                if self._is_closed:
                    return
                logger.warning("a connection for blocks could not be accepted", reason=str(error))
                self._clock.sleep(0.1)  # no file descriptors are left, perhaps
                continue
            serving = partial(self._serve, connection, send, room)
            try:
                threading.Thread(target=serving, name="kv-transfer", daemon=True).start()
            except RuntimeError as error:  # there may be no more threads for now
                connection.close()
                room.release()
                logger.warning("blocks could not be sent", reason=str(error))

    def _serve(self, connection: socket.socket, send: _Send, room: threading.Semaphore) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            with connection:
                self._send(connection, send)
        except (TransferError, OSError) as error:
            self._count_failure()
            if not self._is_closed:
                logger.warning("blocks could not be sent", reason=str(error) or type(error).__name__)
        except Exception as error:  # noqa: BLE001 - of this transfer alone
            self._count_failure()
            logger.error("blocks could not be sent", error=f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._connections.discard(connection)
            room.release()

    def _send(self, connection: socket.socket, send: _Send) -> None:
        ticket, identity, num_held = read_hello(connection, Deadline(_HELLO_SECONDS))
        deadline = Deadline(self._settings.timeout_seconds)
        with self._lock:
            self._expire()
            offer = self._offers.get(ticket)
            if offer is not None and identity == self._identity:
                del self._offers[ticket]  # it is of no use to a second client
        if offer is None:
            send_answer(connection, TransferStatus.UNKNOWN_TICKET, 0, deadline)
        elif identity != self._identity:
            send_answer(connection, TransferStatus.OTHER_IDENTITY, 0, deadline)
        else:
            blocks = [block for block in offer.blocks if block.index >= num_held]
            try:
                send_answer(connection, TransferStatus.FOUND, len(blocks), deadline)
                send(connection, blocks, deadline)
            finally:
                with self._lock:
                    self._held_bytes -= offer.num_bytes
            with self._lock:
                self.served.blocks += len(blocks)
                self.served.num_bytes += sum(block.num_bytes for block in blocks)

    def _count_failure(self) -> None:
        with self._lock:
            self.served.failed += 1

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for ticket in [ticket for ticket, offer in self._offers.items() if offer.expires_at <= now]:
            self._held_bytes -= self._offers.pop(ticket).num_bytes
            self.served.expired += 1


_Send = Callable[[socket.socket, Sequence[ExportedBlock], Deadline], None]
"""Sends blocks over a connection."""
