"""A spot instance's notice ends a worker in order; whatever else the metadata service says doesn't."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tokenmill.instance_metadata import ENDPOINT_VARIABLE
from tokenmill.spot_notice import watch_for_notice


class Metadata(ThreadingHTTPServer):
    """What an instance can ask, in sessions only. `answers`: codes and bodies for the notice, the last one for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, str]] = [(404, "")]
        self.asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        right = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"].isdecimal()
        self._answer(200 if right else 400, "a-session")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "a-session":
            self._answer(401, "")
        elif self.path != "/latest/meta-data/spot/instance-action":
            self._answer(404, "")
        else:
            self.server.asked += 1
            answers = self.server.answers
            self._answer(*(answers.pop(0) if len(answers) > 1 else answers[0]))

    def _answer(self, code: int, body: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv(ENDPOINT_VARIABLE, f"http://127.0.0.1:{server.server_address[1]}/")
        yield server
        server.shutdown()
        thread.join()


def test_the_notice_stops_the_worker_and_its_absence_or_an_error_does_not(metadata: Metadata) -> None:
    notice = '{"action": "terminate", "time": "2026-01-01T10:00:00Z"}'
    metadata.answers = [(404, ""), (500, "broken"), (404, ""), (200, notice)]
    stop = threading.Event()
    watch_for_notice(stop, look_seconds=0.01)
    assert stop.is_set()
    assert metadata.asked == 4


def test_without_a_metadata_service_work_goes_on(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLE, "http://127.0.0.1:9")
    stop = threading.Event()
    watching = threading.Thread(target=watch_for_notice, args=(stop, 0.01))
    watching.start()
    watching.join(0.3)
    assert watching.is_alive()
    assert not stop.is_set()
    stop.set()
    watching.join(10)
    assert not watching.is_alive()
