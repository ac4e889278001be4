"""Blocks in shared memory, between workers of one machine: they are written once, and mapped by the other worker.

A Unix socket in the abstract namespace carries what precedes the blocks, and the file descriptor of the memory. Its
size and content are sealed (memfd_create(2), fcntl(2)): neither can change while the client reads it. Processes of
another network namespace don't find the socket, and use TCP.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path

import numpy as np

from engine.block_exchange import ExportedBlock
from engine.cache.block_tier import BlockKey, Bytes
from workers.kv_transfer.wire import (
    BLOCK,
    Deadline,
    Expected,
    TransferError,
    Wanted,
    block_head,
    check_block,
    receive,
    request_blocks,
)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@functools.cache
def machine_id() -> str:
    """A name of this machine since its start; workers with another one have no memory in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return blake2b(boot, digest_size=16).hexdigest()


def listen_locally(backlog: int) -> tuple[socket.socket, str]:
    """Return a listening socket, and its name."""
    name = f"tokenmill-kv-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0" + name.encode())
    listener.listen(backlog)
    return listener, name


def send_shared(connection: socket.socket, blocks: Sequence[ExportedBlock], deadline: Deadline) -> None:
    """Send blocks as shared memory. Raises `TransferError`, and OSError."""
    if not blocks:
        return
    descriptor = os.memfd_create("tokenmill-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        heads = []
        with open(os.dup(descriptor), "wb") as file:
            for block in blocks:
                data = block.content()
                heads.append(block_head(block.key, data))
                file.write(data.data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        deadline.apply(connection)
        socket.send_fds(connection, [b"\0"], [descriptor])
        deadline.apply(connection)
        connection.sendall(b"".join(heads))
    finally:
        os.close(descriptor)


def receive_shared(
    connection: socket.socket, ticket: bytes, expected: Expected, deadline: Deadline
) -> Iterator[tuple[BlockKey, Bytes]]:
    """As `receive_blocks`, over a Unix socket."""
    wanted = Wanted(expected)
    count = wanted.check_count(request_blocks(connection, ticket, expected, deadline))
    if not count:
        return
    deadline.apply(connection)
    message, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if len(message) != 1 or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise TransferError("no shared memory was sent")
    with closing(_Descriptor(descriptors[0])) as shared:
        heads = receive(connection, count * BLOCK.size, deadline)
        found = [BLOCK.unpack_from(heads, at * BLOCK.size) for at in range(count)]
        keys = [wanted.take(group, digest) for group, digest, _ in found]
        sizes = [expected.block_bytes[key.group] for key in keys]
        memory = np.frombuffer(shared.map(sum(sizes)), dtype=np.uint8)
    begin = 0
    for key, size, (_, _, checksum) in zip(keys, sizes, found, strict=True):
        data = memory[begin : begin + size]
        check_block(key, data.data, checksum)
        yield key, data.copy()  # one that is left over would hold the memory of all
        begin += size


class _Descriptor:
    """A received file descriptor."""

    def __init__(self, number: int) -> None:
        self._number = number

    def map(self, size: int) -> mmap.mmap:
        """Map its `size` bytes, which can't change any more. Raises `TransferError` if they could."""
        try:
            seals = fcntl.fcntl(self._number, fcntl.F_GET_SEALS)
        except OSError as error:
            raise TransferError("what was sent is no shared memory") from error
        if seals & _SEALS != _SEALS or os.fstat(self._number).st_size != size:
            raise TransferError("the shared memory isn't sealed, or has another size than the blocks")
        return mmap.mmap(self._number, size, prot=mmap.PROT_READ)

    def close(self) -> None:
        os.close(self._number)
