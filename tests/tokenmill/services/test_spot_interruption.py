"""A spot instance's interruption notice stops a worker gracefully; other answers of the metadata service don't."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.servers.instance_metadata import MetadataServer
from tests.waiting import HANG_SECONDS
from tokenmill.services.instance_metadata import ENDPOINT_VARIABLE
from tokenmill.services.spot_interruption import watch_for_notice


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    server = MetadataServer()
    monkeypatch.setenv(ENDPOINT_VARIABLE, f"{server.endpoint}/")
    yield server
    server.close()


def test_the_notice_stops_the_worker_and_its_absence_or_an_error_does_not(metadata: MetadataServer) -> None:
    notice = '{"action": "terminate", "time": "2026-01-01T10:00:00Z"}'
    metadata.notices = [(404, ""), (500, "broken"), (404, ""), (200, notice)]
    stop = threading.Event()
    watch_for_notice(stop, poll_seconds=0.01)
    assert stop.is_set()
    assert metadata.noticed == 4


def test_without_a_metadata_service_work_goes_on(metadata: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLE, "http://127.0.0.1:9")
    stop = threading.Event()
    watching = threading.Thread(target=watch_for_notice, args=(stop, 0.01))
    watching.start()
    watching.join(0.3)
    assert watching.is_alive()
    assert not stop.is_set()
    stop.set()
    watching.join(HANG_SECONDS)
    assert not watching.is_alive()
