"""The messages of a transfer of KV blocks.

    client  MAGIC, ticket, identity, number of leading blocks that it holds
    server  status, number of blocks
            group, digest, checksum, bytes    once for each block, the beginning of the prefix first

Blocks that the client holds, of any group, are not sent. A ticket is a secret that the server made for these blocks
alone. The checksum (CRC-32) is of a block's name, tokens and bytes, so a damaged or renamed one is found out. Sizes are
not sent: both sides know them by their identity, which has to be the same (`engine.block_exchange`). So the client
allocates only what it expects.
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from engine.block_exchange import ExportedBlock
from engine.cache.block_tier import BlockKey, Bytes

MAGIC: Final = b"tmkv\x02"
TICKET_BYTES: Final = 32
SILENCE_SECONDS: Final = 2.0
"""A peer that sends nothing for so long has stopped, or can't be reached any more."""

IDENTITY_BYTES: Final = 32
_DIGEST_BYTES: Final = 16
_HELLO: Final = struct.Struct(f"!{TICKET_BYTES}s{IDENTITY_BYTES}sI")
"""What follows MAGIC."""
_ANSWER: Final = struct.Struct("!BI")
BLOCK: Final = struct.Struct(f"!H{_DIGEST_BYTES}sI")
"""What precedes a block's bytes: group, digest, checksum."""


class TransferError(Exception):
    """Raised when blocks can't be fetched; the message names the reason."""


class TransferStatus(IntEnum):
    """The server's answer to a ticket."""

    FOUND = 0
    UNKNOWN_TICKET = 1
    OTHER_IDENTITY = 2


@dataclass(frozen=True, slots=True)
class Expected:
    """The blocks that a client can use.

    Attributes:
        names: of `BlockExchange.block_keys`, behind the held blocks.  block_bytes: per cache group.
        identity: of the client's engine.
        num_held: leading blocks of the prompt that the client has in all groups, and the server leaves out.
    """

    names: Sequence[BlockKey]
    block_bytes: Sequence[int]
    identity: bytes
    num_held: int = 0


class Hello(NamedTuple):
    """What a client asks for. `num_held`: leading blocks that it has, as it says."""

    ticket: bytes
    identity: bytes
    num_held: int


class Deadline:
    """The time until which a transfer may take, for a socket's calls."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """The rest, in seconds. Raises `TransferError` when there is none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TransferError("the transfer took too long")
        return left

    def apply(self, connection: socket.socket) -> None:
        """Limit the socket's next call by the rest. Raises `TransferError` when there is none."""
        connection.settimeout(self.left())


# -- client


def request_blocks(connection: socket.socket, ticket: bytes, expected: Expected, deadline: Deadline) -> int:
    """Send a ticket; returns the number of blocks that the server sends. Raises `TransferError`, and OSError."""
    deadline.apply(connection)
    connection.sendall(MAGIC + _HELLO.pack(ticket, expected.identity, expected.num_held))
    status, count = _ANSWER.unpack(receive(connection, _ANSWER.size, deadline))
    if status == TransferStatus.UNKNOWN_TICKET:
        raise TransferError("the worker that computed the prompt doesn't have its blocks any more")
    if status == TransferStatus.OTHER_IDENTITY:
        raise TransferError("the blocks are of another model, version or layout")
    if status != TransferStatus.FOUND:
        raise TransferError(f"the answer's status {status} is unknown")
    return int(count)


def receive_blocks(
    connection: socket.socket, ticket: bytes, expected: Expected, deadline: Deadline
) -> Iterator[tuple[BlockKey, Bytes]]:
    """Ask for a ticket's blocks, and yield each once it is verified. Raises `TransferError`, and OSError; the blocks
    before that are good."""
    wanted = Wanted(expected)
    for _ in range(wanted.check_count(request_blocks(connection, ticket, expected, deadline))):
        group, digest, checksum = BLOCK.unpack(receive(connection, BLOCK.size, deadline))
        key = wanted.take(group, digest)
        data = receive(connection, expected.block_bytes[group], deadline)
        check_block(key, data, checksum)
        yield key, np.frombuffer(data, dtype=np.uint8)


class Wanted:
    """The blocks that are still to come."""

    def __init__(self, expected: Expected) -> None:
        self._names = {(name.group, name.digest): name for name in expected.names}

    def check_count(self, count: int) -> int:
        """Return a number of blocks that can be these. Raises `TransferError` for a larger one."""
        if count > len(self._names):
            raise TransferError(f"{count} blocks were sent, but {len(self._names)} of the prompt are missing")
        return count

    def take(self, group: int, digest: bytes) -> BlockKey:
        """Return the name of the next block. Raises `TransferError` if it is none of them, or was sent before."""
        key = self._names.pop((group, digest), None)
        if key is None:
            raise TransferError("a block was sent that isn't one of the prompt's missing ones")
        return key


def check_block(key: BlockKey, data: bytes | bytearray | memoryview, checksum: int) -> None:
    """Raise `TransferError` if the block isn't the one that was sent."""
    if checksum != block_checksum(key, data):
        raise TransferError("a block was damaged on its way")


# -- server


def read_hello(connection: socket.socket, deadline: Deadline) -> Hello:
    """Receive what a client asks for. Raises `TransferError`, and OSError."""
    # Alone first: other versions' messages have other sizes, and their peers should not wait for the rest of this one.
    if receive(connection, len(MAGIC), deadline) != MAGIC:
        raise TransferError("the peer speaks another protocol, or another version of it")
    return Hello(*_HELLO.unpack(receive(connection, _HELLO.size, deadline)))


def send_answer(connection: socket.socket, status: TransferStatus, count: int, deadline: Deadline) -> None:
    """Send what became of the ticket. Raises `TransferError`, and OSError."""
    deadline.apply(connection)
    connection.sendall(_ANSWER.pack(status, count))


def block_head(key: BlockKey, data: Bytes) -> bytes:
    """What precedes a block's bytes."""
    return BLOCK.pack(key.group, key.digest, block_checksum(key, data.data))


def send_blocks(connection: socket.socket, blocks: Sequence[ExportedBlock], deadline: Deadline) -> None:
    """Send blocks. The connection's buffers bound what is on the way: a slow client stops the server here. Raises
    `TransferError`, and OSError."""
    for block in blocks:
        data = block.content()
        deadline.apply(connection)
        connection.sendall(block_head(block.key, data))
        connection.sendall(data.data)


def block_checksum(key: BlockKey, data: bytes | bytearray | memoryview) -> int:
    """The checksum of a block: of its group, the digest of its prefix, its tokens and its bytes."""
    name = zlib.crc32(struct.pack("!HI", key.group, len(key.token_bytes)) + key.digest + key.token_bytes)
    return zlib.crc32(data, name)


def receive(connection: socket.socket, size: int, deadline: Deadline) -> bytearray:
    """Receive so many bytes. Raises `TransferError` if the peer closes the connection before or time is over, and
    `TimeoutError` if the peer is silent."""
    data = bytearray(size)
    view, begin = memoryview(data), 0
    while begin < size:
        left = deadline.left()
        connection.settimeout(min(left, SILENCE_SECONDS))
        try:
            count = connection.recv_into(view[begin:])
        except TimeoutError:
            if left < SILENCE_SECONDS:
                raise TransferError("the transfer took too long") from None
            raise
        if not count:
            raise TransferError("the peer closed the connection")
        begin += count
    return data
