"""Blocks arrive as they were exported, by TCP and in shared memory; what is not as it should be is not used."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from engine.block_exchange import ExportedBlock
from engine.cache.block_tier import BlockKey, Bytes
from pipeline.adapters.system_clock import SystemClock
from schemas.settings.kv_transfer import KVTransferOptions
from schemas.workers.lane import KVSource
from tests.waiting import wait_for
from workers.kv_transfer import shared_memory, wire
from workers.kv_transfer.client import BlockClient
from workers.kv_transfer.server import BlockServer
from workers.kv_transfer.wire import BLOCK, Expected, block_head

SIZES = (4096, 640)
IDENTITY = b"i" * 32
NAMES = [BlockKey(group, bytes([block]) * 16, bytes([block]) * 32) for block in range(5) for group in (0, 1)]
EXPECTED = Expected(NAMES, SIZES, IDENTITY)
TCP, SHARED = BlockClient(5.0, use_shared_memory=False), BlockClient(5.0)


def content(key: BlockKey) -> Bytes:
    return np.random.default_rng([key.digest[0], key.group]).integers(0, 256, SIZES[key.group]).astype(np.uint8)


def exported(keys: Sequence[BlockKey] = NAMES) -> list[ExportedBlock]:
    return [ExportedBlock(key, key.digest[0], SIZES[key.group], lambda key=key: content(key)) for key in keys]


@contextmanager
def serving(**changes: object) -> Iterator[BlockServer]:
    options = KVTransferOptions.model_validate({"timeout_seconds": 5.0} | changes)
    with BlockServer(IDENTITY, SystemClock(), options).running() as server:
        yield server


def offer(server: BlockServer, keys: Sequence[BlockKey] = NAMES) -> KVSource:
    source = server.offer(exported(keys))
    assert source is not None
    return source


def same(found: Sequence[tuple[BlockKey, Bytes]], keys: Sequence[BlockKey]) -> bool:
    return [key for key, _ in found] == list(keys) and all((data == content(key)).all() for key, data in found)


@pytest.mark.parametrize("client", [TCP, SHARED], ids=["tcp", "shared memory"])
def test_blocks_arrive_once(client: BlockClient) -> None:
    with serving() as server:
        source = offer(server, NAMES[:7])
        assert same(client.fetch(source, EXPECTED), NAMES[:7])
        assert client.fetch(source, EXPECTED) == [], "a ticket ends with its transfer"
        # The server counts when it has read that the client is done.
        wait_for(lambda: (server.served.blocks, server.served.failed) == (7, 0), "all blocks are counted")
        assert server.served.num_bytes == sum(SIZES[key.group] for key in NAMES[:7])


@pytest.mark.parametrize("client", [TCP, SHARED], ids=["tcp", "shared memory"])
def test_another_ticket_or_identity_gets_nothing(client: BlockClient) -> None:
    with serving() as server:
        source = offer(server)
        assert client.fetch(replace(source, ticket="0" * 64), EXPECTED) == []
        assert client.fetch(source, replace(EXPECTED, identity=b"x" * 32)) == []
        assert same(client.fetch(source, EXPECTED), NAMES), "the offer is still there"


@pytest.mark.parametrize("client", [TCP, SHARED], ids=["tcp", "shared memory"])
@pytest.mark.parametrize("num_held", [0, 1, 4, 5])
def test_blocks_that_the_client_holds_are_not_sent(client: BlockClient, num_held: int) -> None:
    before = client.fetched
    windowed = [key for key in NAMES if key.group == 0 or key.digest[0] >= 3]  # group 1 needs its last two alone
    missing = [key for key in windowed if key.digest[0] >= num_held]
    with serving(max_bytes=sum(SIZES[key.group] for key in windowed)) as server:
        expected = replace(EXPECTED, names=NAMES[2 * num_held :], num_held=num_held)
        assert same(client.fetch(offer(server, windowed), expected), missing)
        assert client.fetched.failed == before.failed
        wait_for(lambda: server.served.blocks == len(missing) and server.has_room(1), "all of the offer is released")
        assert server.served.num_bytes == sum(SIZES[key.group] for key in missing)
        assert server.served.failed == 0
    assert client.fetched.held_bytes - before.held_bytes == num_held * sum(SIZES)


def test_a_server_leaves_out_no_more_than_there_is() -> None:
    hello = wire.MAGIC + struct.pack("!32s32sI", b"t" * 32, IDENTITY, 2**32 - 1)
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        source = offer(server)
        connection.sendall(hello.replace(b"t" * 32, bytes.fromhex(source.ticket)))
        assert connection.makefile("rb").read() == struct.pack("!BI", 0, 0), "no block is sent, and the end"
        assert server.served.failed == 0
        assert same(TCP.fetch(offer(server), EXPECTED), NAMES)


def test_shared_memory_is_used_on_one_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []

    def noted(name: str, receive: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            ways.append(name)
            return receive(*arguments)

        return call

    monkeypatch.setattr("workers.kv_transfer.client.receive_shared", noted("shared", shared_memory.receive_shared))
    monkeypatch.setattr("workers.kv_transfer.client.receive_blocks", noted("tcp", wire.receive_blocks))
    with serving() as server:
        assert SHARED.fetch(offer(server), EXPECTED)
        assert SHARED.fetch(replace(offer(server), machine="f" * 32), EXPECTED)
        assert SHARED.fetch(replace(offer(server), local_name="tokenmill-kv-of-another-namespace"), EXPECTED)
        assert TCP.fetch(offer(server), EXPECTED)
    assert ways == ["shared", "tcp", "tcp", "tcp"]


def test_what_is_offered_is_bounded_and_expires() -> None:
    size = sum(SIZES[key.group] for key in NAMES)
    with serving(max_bytes=2 * size, offer_seconds=0.05) as server:
        first = offer(server)
        assert server.offer(exported()) is not None
        assert server.offer(exported()) is None
        assert server.served.refused == 1
        threading.Event().wait(0.06)
        assert TCP.fetch(first, EXPECTED) == []
        assert server.offer(exported()) is not None
        assert server.served.expired == 2


def test_a_server_that_ends_serves_what_it_has_just_offered() -> None:
    with serving() as server:
        source = offer(server)
        found: list[tuple[BlockKey, Bytes]] = []
        fetch = threading.Timer(0.2, lambda: found.extend(TCP.fetch(source, EXPECTED)))
        fetch.start()
    fetch.join(20)
    assert same(found, NAMES)


@pytest.mark.slow
def test_a_server_that_ends_cuts_its_transfers_off() -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def blocking() -> Bytes:
        begun.set()
        assert may_go_on.wait(20)
        return content(NAMES[1])

    with serving() as server:
        source = server.offer([exported()[0], ExportedBlock(NAMES[1], 0, SIZES[1], blocking)])
        assert source is not None
        found: list[tuple[BlockKey, Bytes]] = []
        fetch = threading.Thread(target=lambda: found.extend(TCP.fetch(source, EXPECTED)))
        fetch.start()
        assert begun.wait(20)
    may_go_on.set()
    fetch.join(20)
    assert not fetch.is_alive()
    assert same(found, NAMES[:1]), "the beginning of the prefix is used"


# -- peers that are not what they should be

Peer = Callable[[socket.socket], None]


@contextmanager
def peer(serve: Peer) -> Iterator[KVSource]:
    """A server of one connection, which reads the request and does as it likes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5)
            assert connection.recv(4096).startswith(wire.MAGIC)
            serve(connection)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield KVSource("127.0.0.1", listener.getsockname()[1], "ab" * 32, "other", "none")
    finally:
        listener.close()
        thread.join(20)
        assert not thread.is_alive()


def frame(key: BlockKey) -> bytes:
    return block_head(key, content(key)) + content(key).tobytes()


def frames(count: int, *parts: bytes) -> Peer:
    def serve(connection: socket.socket) -> None:
        connection.sendall(struct.pack("!BI", 0, count) + b"".join(parts))

    return serve


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


GOOD = [frame(key) for key in NAMES]
HEAD = BLOCK.size


@pytest.mark.parametrize(
    ("serve", "good"),
    [
        pytest.param(frames(3, GOOD[0], GOOD[1], frame(NAMES[2])[:-1]), 2, id="truncated"),
        pytest.param(frames(2, GOOD[0], flipped(frame(NAMES[1]), HEAD + 7)), 1, id="a bit of a block"),
        pytest.param(frames(2, GOOD[0], flipped(frame(NAMES[1]), 5)), 1, id="a bit of a name"),
        pytest.param(frames(2, GOOD[0], flipped(frame(NAMES[1]), HEAD - 1)), 1, id="a bit of a checksum"),
        pytest.param(frames(2, GOOD[0], GOOD[0]), 1, id="twice"),
        pytest.param(frames(1, frame(BlockKey(0, b"z" * 16, b""))), 0, id="not of this prompt"),
        pytest.param(frames(1, BLOCK.pack(9, NAMES[0].digest, 7) + b"x" * 9), 0, id="of no group"),
        pytest.param(frames(2**32 - 1, GOOD[0]), 0, id="too many"),
        pytest.param(lambda connection: connection.sendall(b"\xff\0\0\0\1"), 0, id="an unknown status"),
        pytest.param(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n"), 0, id="HTTP"),
        pytest.param(lambda connection: None, 0, id="closed"),
    ],
)
def test_only_verified_blocks_are_used(serve: Peer, good: int) -> None:
    client = BlockClient(5.0, use_shared_memory=False)
    with peer(serve) as source:
        found = client.fetch(source, EXPECTED)
    assert same(found, NAMES[:good])
    assert client.fetched.failed == 1
    assert client.fetched.blocks == good


@pytest.mark.parametrize(
    ("serve", "good"),
    [
        pytest.param(frames(2, GOOD[4], GOOD[2]), 1, id="a held block"),
        pytest.param(frames(7, GOOD[4]), 0, id="more than are missing"),
    ],
)
def test_only_missing_blocks_are_used(serve: Peer, good: int) -> None:
    client = BlockClient(5.0, use_shared_memory=False)
    with peer(serve) as source:
        found = client.fetch(source, replace(EXPECTED, names=NAMES[4:], num_held=2))
    assert same(found, NAMES[4 : 4 + good])
    assert (client.fetched.failed, client.fetched.held_bytes) == (1, 0)


def test_a_silent_peer_is_left_in_time() -> None:
    may_end = threading.Event()
    client = BlockClient(0.05, use_shared_memory=False)
    with peer(lambda connection: (may_end.wait(20), None)[1]) as source:
        assert client.fetch(source, EXPECTED) == []
        may_end.set()
    assert client.fetched.failed == 1


def test_a_peer_that_stopped_is_not_tried_again_at_once_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 0.1)
    may_end, connections = threading.Event(), []
    client = BlockClient(20.0, use_shared_memory=False)

    def hang(connection: socket.socket) -> None:
        connections.append(connection)
        may_end.wait(20)

    with peer(hang) as silent, serving() as server:
        assert [client.fetch(silent, EXPECTED) for _ in range(3)] == [[], [], []]
        assert len(connections) == 1
        assert same(client.fetch(offer(server), EXPECTED), NAMES)
        may_end.set()
    assert client.fetched.failed == 3
    assert client.fetched.seconds >= 0.1, "or the link would count as fast"


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = BlockClient(1.0)
    assert client.fetch(KVSource("127.0.0.1", port, "ab" * 32, "other", "none"), EXPECTED) == []
    assert client.fetched.failed == 1


def test_a_machine_that_cannot_be_reached_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(address)
        raise TimeoutError("no route")

    monkeypatch.setattr(socket, "create_connection", refuse)
    client = BlockClient(5.0)
    for port in (1, 1, 2, 1):
        assert client.fetch(KVSource("192.0.2.1", port, "ab" * 32, "other", "none"), EXPECTED) == []
    assert tried == [("192.0.2.1", 1), ("192.0.2.1", 2)]
    assert client.fetched.failed == 4


@pytest.mark.slow
def test_a_fetch_that_waited_too_long_begins_no_transfer() -> None:
    client = BlockClient(5.0)
    with serving() as server:
        assert client.fetch(offer(server), EXPECTED, wire.Deadline(0.0)) == []


@pytest.mark.slow
def test_a_client_that_is_closed_leaves_its_transfers() -> None:
    may_end, begun = threading.Event(), threading.Event()
    client = BlockClient(20.0, use_shared_memory=False)

    def hang(connection: socket.socket) -> None:
        begun.set()
        may_end.wait(20)

    with peer(hang) as source:
        fetch = threading.Thread(target=client.fetch, args=(source, EXPECTED))
        fetch.start()
        assert begun.wait(20)
        client.close()
        fetch.join(10)
        assert not fetch.is_alive()
        may_end.set()
    with serving() as server:
        assert client.fetch(offer(server), EXPECTED) == []


@pytest.mark.parametrize(
    "garbage",
    [b"", b"GET / HTTP/1.1\r\n\r\n" + b" " * 64, wire.MAGIC + b"\0" * 68, b"\0" * 73, b"tmkv\x01" + b"\0" * 64],
    ids=["nothing", "HTTP", "an unknown ticket", "zeros", "an older version"],
)
def test_a_server_outlives_clients_that_send_garbage(garbage: bytes) -> None:
    with serving() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(garbage)
        assert same(TCP.fetch(offer(server), EXPECTED), NAMES)


@pytest.mark.parametrize("fault", ["not sealed", "too small", "a pipe", "no descriptor", "a changed byte"])
def test_shared_memory_is_verified(fault: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ticket, keys = b"t" * 32, NAMES[:2]
    data = b"".join(content(key).tobytes() for key in keys)
    if fault == "a changed byte":
        data = flipped(data, 11)
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(descriptor, data[:-1] if fault == "too small" else data)
    if fault != "not sealed":
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, shared_memory._SEALS)
    pipe = os.pipe()
    theirs.sendall(struct.pack("!BI", 0, len(keys)))
    sent = {"a pipe": [pipe[0]], "no descriptor": []}.get(fault, [descriptor])
    socket.send_fds(theirs, [b"\0"], sent)
    theirs.sendall(b"".join(block_head(key, content(key)) for key in keys))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(wire.TransferError):
        list(shared_memory.receive_shared(ours, ticket, EXPECTED, wire.Deadline(5)))
    assert len(os.listdir("/proc/self/fd")) == before, "received descriptors are closed"
    for number in (descriptor, *pipe):
        os.close(number)
    ours.close()
    theirs.close()
