"""The tests' servers restart on their port, don't respond when paused, and never outlive the tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaConsumer, KafkaProducer

from tests.servers.kafka import KafkaBroker
from tests.servers.moto import MotoServer
from tests.servers.plugin import started
from tests.servers.process import MissingServer, ServerFailed, ServerProcess, script
from tests.servers.redis import RedisServer
from tests.servers.seaweedfs import SeaweedServer
from tests.waiting import HANG_SECONDS

START_ONE = """
import sys
from pathlib import Path
from tests.servers.redis import RedisServer
server = RedisServer(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def lives(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def send_command(server: RedisServer, *words: str, timeout_seconds: float = HANG_SECONDS) -> bytes:
    """One command, one answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS) as connection:
        connection.sendall(" ".join(words).encode() + b"\r\n")
        connection.settimeout(timeout_seconds)
        return connection.recv(4096)


@pytest.mark.slow
def test_given_a_server_that_was_killed_when_it_starts_again_then_it_is_on_its_port_with_its_data(
    redis_server: RedisServer,
) -> None:
    port, first = redis_server.port, redis_server.pid
    assert send_command(redis_server, "SET", "key", "value") == b"+OK\r\n"

    redis_server.kill()
    with pytest.raises(OSError, match="refused"):
        send_command(redis_server, "PING")
    redis_server.start()

    assert (redis_server.port, redis_server.pid != first) == (port, True)
    assert send_command(redis_server, "GET", "key") == b"$5\r\nvalue\r\n"
    redis_server.start_empty()
    assert send_command(redis_server, "GET", "key") == b"$-1\r\n"


def test_given_a_paused_server_then_nothing_answers_until_it_is_resumed(redis_server: RedisServer) -> None:
    redis_server.pause()
    with pytest.raises(TimeoutError):
        send_command(redis_server, "PING", timeout_seconds=0.5)
    redis_server.resume()
    assert send_command(redis_server, "PING") == b"+PONG\r\n"


def test_given_a_server_that_a_test_left_killed_or_paused_when_it_is_revived_then_it_answers(
    redis_server: RedisServer,
) -> None:
    redis_server.pause()
    redis_server.revive()
    assert send_command(redis_server, "PING") == b"+PONG\r\n"
    redis_server.kill()
    redis_server.revive()
    assert send_command(redis_server, "PING") == b"+PONG\r\n"


@pytest.mark.parametrize("paused", [False, True])
def test_given_tests_that_are_killed_then_their_servers_end(
    tmp_path: Path, redis_server: RedisServer, paused: bool
) -> None:
    tests = subprocess.Popen(
        [sys.executable, "-c", START_ONE, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert tests.stdout is not None
    server = int(tests.stdout.readline())
    assert lives(server)
    if paused:
        os.kill(server, signal.SIGSTOP)

    tests.kill()
    tests.wait()

    deadline = time.monotonic() + HANG_SECONDS
    while lives(server):
        assert time.monotonic() < deadline, "the server outlived the tests"
        time.sleep(0.02)


def test_given_a_server_that_cannot_start_then_the_error_holds_its_last_words(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    second = RedisServer(tmp_path)
    second.port = redis_server.port
    second.is_ready = lambda: False  # type: ignore[method-assign]  # else the first one's answer would count
    with pytest.raises(ServerFailed, match=r"(?s)redis on port .* ended at once.*[Aa]ddress already in use"):
        second.start()
    assert not second.running


def test_a_program_that_is_not_installed_is_named_with_its_package() -> None:
    with pytest.raises(
        MissingServer, match="nothing-of-this-name is missing; install it with: pip install some-package"
    ):
        script("nothing-of-this-name", "some-package")


@pytest.mark.parametrize("kind", [MotoServer, SeaweedServer, KafkaBroker])
@pytest.mark.slow
def test_each_server_starts_answers_and_ends(
    tmp_path: Path,
    kind: Callable[[Path], ServerProcess],
    s3_server: MotoServer,
    durable_s3_server: SeaweedServer,
    kafka_broker: KafkaBroker,
) -> None:
    """The session's own are requested so that one that is not installed is reported as such."""
    with kind(tmp_path) as server:
        assert server.is_ready()
        pid = server.pid
        server.restart()
        assert server.is_ready()
        assert not lives(pid)
        pid = server.pid
    assert not lives(pid)


@pytest.mark.slow
def test_given_a_broker_on_s3_that_was_killed_when_it_starts_again_then_it_has_its_records(
    durable_kafka_broker: KafkaBroker, unique_name: Callable[[], str]
) -> None:
    topic = unique_name()
    # Idempotent producers may lose on this broker what it acknowledged before it was killed.
    producer = KafkaProducer(bootstrap_servers=durable_kafka_broker.bootstrap, enable_idempotence=False)
    for number in range(5):
        producer.send(topic, b"%d" % number).get(timeout=HANG_SECONDS)
    producer.close()

    durable_kafka_broker.restart()

    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=durable_kafka_broker.bootstrap,
        auto_offset_reset="earliest",
        consumer_timeout_ms=5_000,
    )
    found = sorted(next(consumer).value for _ in range(5))  # of several partitions
    consumer.close()
    assert found == [b"0", b"1", b"2", b"3", b"4"]


class MissingServerProgram(RedisServer):
    """A server whose package isn't installed."""

    def command(self) -> list[str]:
        return [script("nothing-of-this-name", "some-package")]


def test_a_missing_server_is_an_error_in_ci_and_a_skip_elsewhere(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="some-package; in CI every server must be there"):
        next(started(MissingServerProgram(tmp_path), pytestconfig))
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="NOT TESTED HERE: nothing-of-this-name is missing"):
        next(started(MissingServerProgram(tmp_path), pytestconfig))
