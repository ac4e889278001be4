"""An S3 server that is away for a while, refuses for a while, or has another time than this machine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.s3.outage import MAX_REPEAT_SECONDS, OutageLog
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from pipeline.adapters.store_clock import StoreClock
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.jobs.closing import find_closing
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import StoreError, StoreUnavailable, World
from tests.pipeline.made_jobs import plan_by_hand
from tests.pipeline.s3_stores import open_s3, settings_for
from tests.servers.faulty_http import FaultyHttp
from tests.servers.moto import MotoServer
from tokenmill import root as roots

HOUR = timedelta(hours=1)


class Clock(SystemClock):
    """Sleeps return at once and advance the clock; `ahead`: of the right time; `on_sleep`: called in each sleep."""

    def __init__(self, ahead: timedelta = timedelta(), on_sleep: Callable[[float], None] = lambda _: None) -> None:
        self.ahead = ahead
        self.slept = 0.0
        self._on_sleep = on_sleep

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def monotonic(self) -> float:
        return self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self._on_sleep(self.slept)


@pytest.fixture
def store(proxy: FaultyHttp, s3_server: MotoServer, bucket: str, tmp_path: Path) -> Callable[[Clock], S3Store]:
    def open_store(clock: Clock) -> S3Store:
        settings = settings_for(
            s3_server, tmp_path, endpoint=proxy.endpoint, retry_timeout_seconds=60.0, denied_retry_timeout_seconds=60.0
        )
        return S3Store(bucket, "root", S3Connection(settings, clock))

    return open_store


def heals_after(proxy: FaultyHttp, seconds: float) -> Callable[[float], None]:
    return lambda slept: proxy.clear() if slept > seconds else None


@pytest.mark.slow
def test_given_a_server_that_fails_for_a_while_then_it_is_logged_at_once_and_when_it_is_over(
    proxy: FaultyHttp, store: Callable[[Clock], S3Store]
) -> None:
    opened = store(Clock(on_sleep=heals_after(proxy, 20.0)))
    proxy.add("status", status=500, code="InternalError")
    with capture_logs() as logs:
        assert opened.create("key", b"data") is True
        assert opened.read("key") == b"data"
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert 2 <= len(warnings) <= 3, "at the first failure, after 5 s, and perhaps 10 s later: not one for each try"
    assert warnings[0]["seconds"] == 0
    assert warnings[0]["at"].endswith("/root/key")
    assert "was busy or failing (InternalError, 500)" in warnings[0]["reason"]
    assert [line["event"] for line in logs if line["log_level"] == "info"] == ["S3 answers again"]


def test_given_a_server_that_comes_and_goes_then_the_lines_are_limited() -> None:
    clock = Clock()
    outages = OutageLog(clock)
    with capture_logs() as logs:
        for _ in range(600):
            outages.record_failure("read it", "s3://b/k", "busy")
            clock.sleep(0.5)
            outages.record_success()
            clock.sleep(0.5)
    assert len([line for line in logs if line["log_level"] == "warning"]) <= 5 + 600 / MAX_REPEAT_SECONDS
    assert len(logs) <= 2 * (5 + 600 / MAX_REPEAT_SECONDS)


def test_given_one_operation_that_still_fails_when_another_succeeds_then_the_outage_is_not_over() -> None:
    outages = OutageLog(Clock())
    with capture_logs() as logs:
        outages.begin_retrying()
        outages.record_failure("read it", "s3://b/k", "busy")
        outages.record_success()
        assert [line["event"] for line in logs] == ["S3 fails, and is tried again"]
        outages.end_retrying()
        outages.record_success()
    assert logs[-1]["event"] == "S3 answers again"


@pytest.mark.slow
@pytest.mark.parametrize("code", ["AccessDenied", "ExpiredToken", "InvalidAccessKeyId"])
def test_given_a_refusal_for_some_seconds_where_the_store_has_worked_then_it_is_waited_for(
    code: str, proxy: FaultyHttp, store: Callable[[Clock], S3Store]
) -> None:
    opened = store(Clock(on_sleep=heals_after(proxy, 10.0)))
    proxy.add("status", status=403, code=code)
    assert opened.create("key", b"data") is True


@pytest.mark.slow
def test_given_a_refusal_that_stays_or_of_another_bucket_then_it_is_final(
    proxy: FaultyHttp, store: Callable[[Clock], S3Store], s3_server: MotoServer, tmp_path: Path
) -> None:
    clock = Clock()
    opened = store(clock)
    proxy.add("status", status=403, code="AccessDenied")
    with pytest.raises(StoreError, match=r"access is denied for 60 s; allow") as caught:
        opened.read("key")
    assert not isinstance(caught.value, StoreUnavailable)
    assert 60 <= clock.slept < 70
    slept = clock.slept
    with pytest.raises(StoreError, match=r"access is denied; allow"):
        S3Store("elsewhere", "", opened._connection)
    assert clock.slept == slept, "a bucket that never worked most likely has a wrong name"


@pytest.mark.exhaustive
def test_given_a_server_that_stays_away_then_the_error_says_that_it_may_come_back(
    proxy: FaultyHttp, store: Callable[[Clock], S3Store]
) -> None:
    opened = store(Clock())
    proxy.add("status", status=503, code="SlowDown")
    with pytest.raises(StoreUnavailable, match="was busy or failing"):
        opened.read("key")


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
@pytest.mark.slow
def test_given_a_machine_whose_clock_is_an_hour_wrong_then_the_stores_time_counts(
    ahead: timedelta, s3_server: MotoServer, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(ahead)
    monkeypatch.setattr(roots, "SystemClock", lambda: clock)
    with capture_logs() as logs:
        opened = S3Store(bucket, "", S3Connection(settings_for(s3_server, tmp_path), clock))
        world = roots._world(opened, False, roots.NO_TRACES)
    assert abs(world.clock.now() - datetime.now(UTC)) < timedelta(seconds=6)
    # Both times are named, once.
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert abs(datetime.fromisoformat(warning["own"]) - datetime.fromisoformat(warning["store"])) > HOUR / 2
    # And no job expires whose deadline is half an hour from now.
    ledger = JobLedger(opened)
    job = plan_by_hand(ledger, world, [[0, 1]]).model_copy(update={"deadline": datetime.now(UTC) + HOUR / 2})
    assert find_closing(ledger, job, world.clock.now()) is None
    expired = job.model_copy(update={"deadline": datetime.now(UTC) - HOUR / 2})
    closing = find_closing(ledger, expired, world.clock.now())
    assert closing is not None
    assert closing.kind == "expire"


def test_given_clocks_that_agree_then_this_machines_time_stands_to_the_microsecond(
    s3_server: MotoServer, bucket: str, tmp_path: Path
) -> None:
    opened = open_s3(s3_server, bucket, "", tmp_path)
    opened.info("key")
    assert opened.time_offset() == timedelta()
    world = World(opened, StoreClock(SystemClock(), opened.time_offset), SystemRandomness())
    before = datetime.now(UTC)
    assert before <= world.clock.now() <= datetime.now(UTC)


def test_given_an_answer_that_took_long_or_has_no_date_then_it_says_nothing(tmp_path: Path) -> None:
    connection = S3Connection(settings_without_a_server())
    late = "Thu, 01 Jan 2026 00:00:00 GMT"
    connection.time_offset.record_answer(late, request_timeout_seconds=30.0)
    connection.time_offset.record_answer(None, request_timeout_seconds=0.1)
    connection.time_offset.record_answer("no date", request_timeout_seconds=0.1)
    assert connection.time_offset() == timedelta()


def settings_without_a_server() -> S3Settings:
    return S3Settings(endpoint="http://127.0.0.1:9", access_key="a", secret_key="b")
