"""Fixtures of real servers for all tests, one of each for a session, started when a test first requests it.

A test gets running servers, whatever the previous test did to them. They contain data of other tests, so names
(buckets, topics, key prefixes) should be unique: `unique_name` makes them. A server that isn't installed fails the
tests that need it in CI, and skips them elsewhere.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from tests.servers.kafka import BucketStorage, KafkaBroker
from tests.servers.moto import MotoServer
from tests.servers.process import MissingServer, ServerProcess
from tests.servers.redis import RedisServer
from tests.servers.seaweedfs import SeaweedServer

Server = TypeVar("Server", bound=ServerProcess)
SERVERS = pytest.StashKey[list[ServerProcess]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SERVERS] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    for server in item.config.stash[SERVERS]:
        server.revive()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the logs of a failed test's servers."""
    report: pytest.TestReport = yield
    if report.failed:
        used = item.funcargs.values() if isinstance(item, pytest.Function) else []
        for server in item.config.stash[SERVERS]:
            if server in used:
                report.sections.append((f"end of the log of {server.name} ({server.log})", server.log_end()))
    return report


def started(server: Server, config: pytest.Config) -> Iterator[Server]:
    """Run a server while the fixture that yields from this lives."""
    try:
        server.start()
    except MissingServer as error:
        if os.environ.get("CI"):
            pytest.fail(f"{error}; in CI every server must be there", pytrace=False)
        pytest.skip(f"NOT TESTED HERE: {error}")
    config.stash[SERVERS].append(server)
    try:
        yield server
    finally:
        config.stash[SERVERS].remove(server)
        server.close()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[MotoServer]:
    """S3 and SQS in memory."""
    yield from started(MotoServer(tmp_path_factory.mktemp("moto")), pytestconfig)


@pytest.fixture(scope="session")
def durable_s3_server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[SeaweedServer]:
    """S3 whose acknowledged objects survive a kill."""
    yield from started(SeaweedServer(tmp_path_factory.mktemp("seaweedfs")), pytestconfig)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[RedisServer]:
    """Redis; its data survives a kill, unless it is started empty."""
    yield from started(RedisServer(tmp_path_factory.mktemp("redis")), pytestconfig)


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[KafkaBroker]:
    """A broker in memory."""
    yield from started(KafkaBroker(tmp_path_factory.mktemp("kafka")), pytestconfig)


@pytest.fixture(scope="session")
def durable_kafka_broker(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, s3_server: MotoServer
) -> Iterator[KafkaBroker]:
    """A broker whose topics, records and offsets survive its kill: they lie in a bucket of `s3_server`."""
    bucket = f"kafka-{secrets.token_hex(4)}"
    s3_server.make_bucket(bucket)
    storage = BucketStorage(s3_server.endpoint, bucket, s3_server.access_key, s3_server.secret_key, s3_server.region)
    yield from started(KafkaBroker(tmp_path_factory.mktemp("kafka"), storage), pytestconfig)


@pytest.fixture
def unique_name(request: pytest.FixtureRequest) -> Callable[[], str]:
    """A function that makes unique names from the test's name and a few digits, valid for buckets, topics and keys."""
    stem = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    return lambda: f"{stem}-{secrets.token_hex(4)}"
