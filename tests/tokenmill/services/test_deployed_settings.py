"""Settings of the deployment, in real processes: CloudWatch metrics, and idle times of connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.servers.moto import MotoServer
from tests.servers.redis import RedisServer
from tests.tokenmill.command_processes import Processes
from tests.waiting import HANG_SECONDS, wait_for


@pytest.fixture
def processes(tmp_path: Path, redis_server: RedisServer) -> Iterator[Processes]:
    made = Processes(tmp_path, TOKENMILL_ROOT=str(tmp_path / "root"), TOKENMILL_REDIS_URL=redis_server.url)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_given_a_namespace_when_a_dispatcher_runs_then_cloudwatch_hears_of_it(
    processes: Processes, s3_server: MotoServer, unique_name: Callable[[], str]
) -> None:
    space = unique_name()
    processes.start(
        "-m", "tokenmill", "dispatcher",
        AWS_ENDPOINT_URL=s3_server.endpoint, AWS_DEFAULT_REGION="us-east-1", AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="testtest",
        TOKENMILL_CLOUDWATCH__NAMESPACE=space, TOKENMILL_CLOUDWATCH__INSTALLATION="it",
    )  # fmt: skip
    metrics = wait_for(
        lambda: s3_server.client("cloudwatch").list_metrics(Namespace=space)["Metrics"], "no metric was sent"
    )
    assert metrics == [
        {"Namespace": space, "MetricName": "OpenJobs", "Dimensions": [{"Name": "Installation", "Value": "it"}]}
    ]


def idles_for(url: str, timeout: float) -> float | None:
    """Seconds after an answer until the server hangs up; None: it didn't within `timeout`."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=timeout) as connection:
        connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: here\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        begun = time.monotonic()
        try:
            while connection.recv(4096):
                pass
        except TimeoutError:
            return None
        return time.monotonic() - begun


@pytest.mark.exhaustive
@pytest.mark.slow
def test_given_a_keep_alive_when_a_gateway_serves_then_idle_connections_stay_open_that_long(
    processes: Processes,
) -> None:
    serve = ("-m", "tokenmill", "gateway", "--port", 0)
    short = processes.start(*serve, TOKENMILL_GATEWAY__KEEP_ALIVE_SECONDS="1")
    long = processes.start(*serve)
    assert idles_for(processes.url(short), HANG_SECONDS) is not None
    assert idles_for(processes.url(long), 3) is None
