"""`submit`, `jobs` and `chat` against a gateway, over HTTP."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

from pipeline.gateway.http.api_keys import Scope
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness
from tests.pipeline.gateway.lane_worker import words
from tests.pipeline.made_jobs import PIN
from tests.servers.faulty_http import Fault, FaultyHttp
from tests.waiting import HANG_SECONDS
from tokenmill.errors import UserError
from tokenmill.jobs import http_client as over_http
from tokenmill.jobs.http_client import GatewayClient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture
def source(folder: Path) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(lines(10))
    return path


@pytest.fixture
def harness(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpHarness]:
    for name in ("TOKENMILL_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with run_http_harness(folder / "harness") as made:
        yield made


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    """The gateway's logs must not come between the lines of the commands, which run in the same process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def test_a_file_is_submitted_watched_listed_shown_and_exported(
    harness: HttpHarness, source: Path, tokenmill: Any
) -> None:
    ended = tokenmill(
        "submit", source, "--to", harness.url, "--deadline", "6h", "--tier", "bulk", "--seed", 7,
        "--truncate-prompt", "right", "--watch",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    job = ended.out.strip()
    assert "completed, 10 of 10 rows done, 2 without an answer" in ended.err.splitlines()[-1]
    stored = harness.ledger(job).job()
    assert (stored.tier.value, stored.settings.seed, stored.settings.truncate_prompt) == ("bulk", 7, "right")
    assert stored.deadline is not None
    assert (stored.deadline - stored.created_at).total_seconds() == 6 * 3_600

    listed = tokenmill("jobs", "list", "--url", f"{harness.url}/v1/", "--json")
    assert [one["id"] for one in listed.json()] == [job]
    assert job in tokenmill("jobs", "list", "--url", harness.url).out
    assert tokenmill("jobs", "list", "--url", harness.url, "--active", "--json").json() == []
    shown = tokenmill("jobs", "show", job, "--url", harness.url)
    assert "bulk" in shown.out
    assert tokenmill("jobs", "show", job, "--url", harness.url, "--json").json()["status"] == "completed"
    assert tokenmill("jobs", "watch", job, "--url", harness.url).code == 0

    done = tokenmill("jobs", "export", job, "--url", harness.url, "--to", "good.jsonl", "--errors-to", "bad.jsonl")
    assert done.code == 0
    good, bad = (Path(name).read_bytes().splitlines() for name in ("good.jsonl", "bad.jsonl"))
    assert (len(good), len(bad)) == (8, 2)
    assert all(json.loads(line)["error"] is None for line in good)
    assert sorted(path.name for path in Path().iterdir()) == ["bad.jsonl", "good.jsonl", "harness", "in.jsonl"]

    refused = tokenmill("jobs", "retry", job, "--url", harness.url, "--only", "failed")
    assert (refused.code, "--include-invalid" in refused.error) == (1, True)
    retry = ("jobs", "retry", job, "--url", harness.url, "--deadline", "2h", "--include-invalid")
    tried = tokenmill(*retry, "--watch", "--json")
    assert tried.code == 0, tried.err
    again = tried.json()
    assert (again["tokenmill"]["retry_of"], again["request_counts"]["total"]) == (job, 2)
    late = tokenmill("jobs", "cancel", job, "--url", harness.url)
    assert (late.code, "completed already" in late.error) == (1, True)


def test_an_upload_may_take_longer_to_be_answered_than_anything_else(
    harness: HttpHarness, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_http, "TIMES", httpx2.Timeout(0.5))
    with FaultyHttp(harness.url) as proxy, GatewayClient(proxy.endpoint, sleep=lambda _: None) as gateway:
        late = proxy.add("late", seconds=1.5)
        file = gateway.upload(source, "key")
        assert (file["object"], late.hits) == ("file", 1)
        with pytest.raises(UserError, match="can't be reached"):
            gateway.get("/v1/files")


def test_the_list_goes_on_over_pages(harness: HttpHarness, source: Path, tokenmill: Any) -> None:
    made = [tokenmill("submit", source, "--to", harness.url).out.strip() for _ in range(3)]
    gateway = GatewayClient(harness.url)
    from tokenmill.jobs.http_backend import _batches  # noqa: PLC0415

    assert [one["id"] for one in _batches(gateway, 1)] == made[::-1]
    some = tokenmill("jobs", "list", "--url", harness.url, "--limit", 2, "--json")
    assert [one["id"] for one in some.json()] == made[:0:-1]
    assert "only the newest 2" in some.err


def test_a_job_is_cancelled_and_its_watching_ends(folder: Path, source: Path, tokenmill: Any) -> None:
    with run_http_harness(folder / "harness", permits=0) as harness:
        job = tokenmill("submit", source, "--to", harness.url).out.strip()
        cancelled = tokenmill("jobs", "cancel", job, "--url", harness.url, "--json").json()
        assert cancelled["status"] in ("cancelling", "cancelled")
        ended = tokenmill("jobs", "watch", job, "--url", harness.url, "--every", 0.1)
        assert (ended.code, "cancelled" in ended.err) == (0, True)
        assert tokenmill("jobs", "cancel", job, "--url", harness.url).code == 0, "again changes nothing"


def test_a_job_that_is_refused_as_a_whole_fails_the_command(harness: HttpHarness, source: Path, tokenmill: Any) -> None:
    source.write_bytes(lines(2) + b"{}\n")
    ended = tokenmill("submit", source, "--to", harness.url, "--watch")
    assert (ended.code, "failed as a whole: line 3" in ended.error) == (1, True)


def test_the_endpoint_is_that_of_the_first_line(harness: HttpHarness, source: Path, tokenmill: Any) -> None:
    source.write_bytes(lines(2, "/v1/completions"))
    job = tokenmill("submit", source, "--to", harness.url, "--watch").out.strip()
    assert harness.ledger(job).job().settings.url == "/v1/completions"
    refused = tokenmill("submit", source, "--to", harness.url, "--endpoint", "/v1/images")
    assert (refused.code, "endpoint" in refused.error) == (1, True)


def test_the_key_comes_from_the_environment(
    harness: HttpHarness, source: Path, tokenmill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = harness.keys.create("acme", tuple(Scope))
    refused = tokenmill("jobs", "list", "--url", harness.url)
    assert (refused.code, "TOKENMILL_API_KEY" in refused.error) == (1, True)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert tokenmill("submit", source, "--to", harness.url, "--watch").code == 0
    monkeypatch.setenv("TOKENMILL_API_KEY", "tm-wrong")
    refused = tokenmill("jobs", "list", "--url", harness.url)
    assert refused.code == 1
    assert key not in refused.err
    monkeypatch.setenv("TOKENMILL_API_KEY", "two words")
    assert "letters that no key has" in tokenmill("jobs", "list", "--url", harness.url).error


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://h", "no gateway"),
        ("http://", "no gateway"),
        ("http://u:p@h", "carries credentials"),
        ("http://h?x=1", "a query"),
        ("http://h:99999", "no URL"),
    ],
)
def test_urls_that_cannot_be_gateways_are_refused(tokenmill: Any, url: str, why: str) -> None:
    ended = tokenmill("jobs", "list", "--url", url)
    assert (ended.code, why in ended.error) == (1, True)


@pytest.mark.parametrize("job", ["..", "../files", "job?x=1", "a/cancel", "%2e%2e", "x" * 300])
def test_an_invalid_id_is_never_sent(tokenmill: Any, job: str) -> None:
    for command in ("show", "watch", "cancel", "retry"):
        ended = tokenmill("jobs", command, "--url", "http://127.0.0.1:9", "--", job)
        assert (ended.code, "no job's id" in ended.error) == (1, True)


@pytest.mark.parametrize(
    "given",
    [
        ("jobs", "list", "--url", "http://h", "--root", "r"),
        ("jobs", "show", "j", "--url", "http://h", "--root", "r"),
        ("jobs", "export", "j", "--url", "http://h", "--to", "f", "--in-input-order"),
        ("jobs", "retry", "j", "--url", "http://h", "--output", "o"),
        ("jobs", "retry", "j", "--url", "http://h", "--deadline", "5s"),
        ("submit", "none.jsonl", "--to", "http://127.0.0.1:9"),
        ("chat", " ", "--url", "http://h"),
    ],
)
def test_invalid_combinations_are_refused_before_a_request_is_sent(tokenmill: Any, given: tuple[str, ...]) -> None:
    ended = tokenmill(*given)
    assert ended.code in (1, 2)
    assert ended.err.count("error: ") == 1


# -- a gateway that is busy, or breaks off


@pytest.fixture
def faulty(harness: HttpHarness) -> Iterator[FaultyHttp]:
    with FaultyHttp(harness.url) as proxy:
        yield proxy


def test_requests_to_a_busy_gateway_are_retried_and_a_lost_upload_is_one_file(
    harness: HttpHarness, faulty: FaultyHttp, source: Path
) -> None:
    waited: list[float] = []
    with GatewayClient(faulty.endpoint, sleep=waited.append) as gateway:
        faulty.faults.append(Fault("status", status=503, times=2))
        assert gateway.get("/v1/models")["data"]
        assert len(waited) == 2
        faulty.faults.append(Fault("lost", method="POST", path="/v1/files", times=2))
        gateway.upload(source, "key")
    with harness.http() as http:
        assert len(http.get("/v1/files").json()["data"]) == 1, "the same upload again is the same file"


def test_a_gateway_that_stays_busy_is_given_up(faulty: FaultyHttp, tokenmill: Any) -> None:
    waited: list[float] = []
    faulty.faults.append(Fault("status", status=429))
    with GatewayClient(faulty.endpoint, sleep=waited.append) as gateway, pytest.raises(UserError):
        gateway.get("/v1/models")
    assert len(waited) == 5
    for attempt, seconds in enumerate(waited):
        assert 0.75 <= seconds / (0.5 * 2**attempt) <= 1.25, waited
    with (
        GatewayClient("http://127.0.0.1:9", sleep=waited.append) as unreachable,
        pytest.raises(UserError, match="can't be reached"),
    ):
        unreachable.get("/v1/models")


class EndlessError(BaseHTTPRequestHandler):
    """Answers with an error whose body never ends, until the client leaves."""

    sent = 0

    def do_GET(self) -> None:
        self.send_response(418)
        self.end_headers()
        with suppress(OSError):
            while True:
                type(self).sent += self.wfile.write(b"x" * 65_536)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


def test_an_error_of_any_size_is_read_up_to_a_limit() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), EndlessError) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with (
            GatewayClient(f"http://127.0.0.1:{server.server_port}") as gateway,
            pytest.raises(UserError, match="answered with status 418; is a tokenmill gateway there"),
        ):
            gateway.get("/v1/models")
        server.shutdown()
    assert EndlessError.sent < 64 << 20, "a megabyte is read; the rest lies in buffers of sockets"


def test_a_request_that_is_not_idempotent_is_not_retried_when_its_answer_is_lost(faulty: FaultyHttp) -> None:
    waited: list[float] = []
    faulty.faults.append(Fault("lost", method="POST"))
    with GatewayClient(faulty.endpoint, sleep=waited.append) as gateway, pytest.raises(UserError):
        gateway.post("/v1/batches/x/cancel", {})
    assert waited == []


def test_an_export_that_is_cut_off_leaves_no_file(
    harness: HttpHarness, faulty: FaultyHttp, source: Path, tokenmill: Any
) -> None:
    job = tokenmill("submit", source, "--to", harness.url, "--watch").out.strip()
    faulty.faults.append(Fault("cut", path="/results"))
    ended = tokenmill("jobs", "export", job, "--url", faulty.endpoint, "--to", "cut.jsonl")
    assert (ended.code, "broke off" in ended.error) == (1, True)
    assert not [path for path in Path().iterdir() if "cut" in path.name]


# -- chat


def chatting(harness: HttpHarness, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tokenmill", "chat", "--url", harness.url, *more],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_one_message_is_answered(harness: HttpHarness, tokenmill: Any) -> None:
    answer = tokenmill(
        "chat", "hello", "--url", harness.url, "--max-tokens", 4, "--system", "be brief", "--temperature", 0
    )
    assert (answer.code, answer.out) == (0, words(4) + "\n")
    (request,) = harness.worker.requests.values()
    assert [one["role"] for one in request.body["messages"]] == ["system", "user"]
    assert (request.body["model"], request.body["temperature"]) == (PIN.name, 0)
    failed = tokenmill("chat", "break", "--url", harness.url)
    assert (failed.code, "it broke" in failed.error) == (1, True)


def test_a_talk_goes_along_and_ends_with_its_input(harness: HttpHarness) -> None:
    out, err = chatting(harness, "--max-tokens", "2").communicate("one\n\ntwo\n", timeout=HANG_SECONDS)
    assert out.splitlines() == [words(2), words(2)], err
    messages = [one.body["messages"] for one in harness.worker.requests.values()]
    assert [one["content"] for one in messages[1]] == ["one", words(2), "two"]


def test_an_interrupt_cancels_the_answer_and_not_the_talk(harness: HttpHarness) -> None:
    harness.worker.pause = 0.05
    talk = chatting(harness, "--max-tokens", "1000")
    assert talk.stdin is not None
    assert talk.stdout is not None
    talk.stdin.write("one\n")
    talk.stdin.flush()
    assert talk.stdout.read(4) == words(1)[:4]
    talk.send_signal(signal.SIGINT)
    until = time.monotonic() + HANG_SECONDS
    while not harness.worker.unwanted:
        assert time.monotonic() < until, "the worker still answers"
        time.sleep(0.01)
    harness.worker.pause = 0.0
    killer = threading.Timer(60, talk.kill)
    killer.start()
    out, err = talk.communicate("two\n")
    killer.cancel()
    assert talk.returncode == 0, err
    assert "cancelled" in err
    assert out.rstrip().endswith("0.999")
    assert [one["content"] for one in list(harness.worker.requests.values())[-1].body["messages"]] == ["two"]
