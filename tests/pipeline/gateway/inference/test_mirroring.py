"""Requests over HTTP while a new version of the model is on trial: what is copied, what is compared, and that callers
get what they would get without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.system_clock import SystemClock
from pipeline.gateway.inference import mirroring
from pipeline.gateway.limits.admission import RateSettings
from pipeline.lane.ports import LaneQueue, LaneSettings, OpenLane
from pipeline.lane.redis import RedisLane
from pipeline.models import open_releases, request_samples, virtual_models
from pipeline.models.catalog import Catalog
from pipeline.models.registry import ModelRegistry
from pipeline.models.request_samples import StoredSamples
from pipeline.models.rollout_controller import RolloutController
from schemas.models import CatalogEntry
from schemas.releases import Release, RequestSample, Traffic
from schemas.requests.limits import RateLimits
from schemas.settings.answers import AnswerOptions
from schemas.settings.releases import ReleaseRules
from schemas.workers.lane import HandBackEvent, LaneRequest, TokensEvent
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.pipeline.gateway.lane_worker import LaneWorker, words
from tests.pipeline.made_jobs import PIN
from tests.servers.redis import RedisServer
from tests.waiting import wait_for

CANDIDATE = CatalogEntry(pin=PIN.model_copy(update={"digest": "sha256:" + "9" * 64}), max_model_len=2_048)
RULES = ReleaseRules(
    mirror=1.0, canary=0.5, least_shards=4, most_shards=64, more_errors=0.2, slower_ttft=1e6, slower_itl=1e6
)  # fmt: skip
"""Both versions' workers are threads of one process: their times say nothing."""

BODY: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(autouse=True)
def samples_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_samples, "_MAX_AGE_SECONDS", 0.0)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HttpHarness]:
    with run_http_harness(tmp_path, cache=AnswerOptions()) as harness:
        yield harness


def begin(harness: HttpHarness, rules: ReleaseRules = RULES, *, canary: bool = False) -> Release:
    """Begin a release, and perhaps its canary stage; the gateway has read it."""
    registry, now = ModelRegistry(harness.world.store), harness.world.clock.now()
    registry.publish(CANDIDATE, candidate=True)
    release = registry.begin(PIN.name, CANDIDATE, rules, now)
    if canary:
        registry.begin_canary(release, now, ())
    harness.releases.refresh()
    return release


@contextmanager
def candidate(harness: HttpHarness, **options: Any) -> Iterator[LaneWorker]:
    """A worker with the candidate."""
    worker, stop = LaneWorker(harness.lane, model=CANDIDATE.pin.key, **options), threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        yield worker
    finally:
        stop.set()
        thread.join()


def ask(harness: HttpHarness, user: str = "u", **more: Any) -> str:
    """The text of one answer."""
    answer = harness.client().chat.completions.create(**BODY, user=user, **more)
    if more.get("stream"):
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    return str(answer.choices[0].message.content)


def sampled(harness: HttpHarness, release: Release, traffic: Traffic, count: int) -> list[RequestSample]:
    """The stored samples, once there are so many."""
    stored = StoredSamples(harness.world.store, release)

    def found() -> list[RequestSample]:
        harness.releases.refresh()
        samples = [one for batch in stored.read(traffic, {}) for one in batch.samples]
        return samples if len(samples) >= count else []

    return wait_for(found, "nothing is compared")


def count(harness: HttpHarness, kind: Any) -> int:
    return harness.releases.counts()[kind]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
def test_a_copy_goes_to_the_candidate_and_its_numbers_to_the_root(harness: HttpHarness, stream: bool) -> None:
    release = begin(harness)
    with candidate(harness, text="other ") as worker:
        assert ask(harness, stream=stream) == words(4)
        (one,) = sampled_later(harness, release, "mirror")
    (own,), (copy,) = harness.worker.requests.values(), worker.requests.values()
    assert (copy.sampled_as, copy.body, copy.tenant, copy.deadline) == (own.id, own.body, own.tenant, own.deadline)
    assert (one.stable.failed, one.candidate.failed, one.lost, one.agreement) == (False, False, False, 0.0)
    assert (one.stable.tokens, one.candidate.tokens) == (4, 4)
    assert one.stable.ttft_seconds is not None
    assert harness.parts.http_metrics.answers()["interactive", "answered"] == 1, "callers' metrics are without copies"
    stored = b"".join(harness.world.store.read(info.key) for info in harness.world.store.list("releases/"))
    assert b"hello" not in stored
    assert b"other" not in stored


def sampled_later(harness: HttpHarness, release: Release, traffic: Traffic, most: int = 1) -> list[RequestSample]:
    """The samples, once so many are compared and written."""
    wait_for(lambda: count(harness, "compared") >= most, "nothing is compared")
    return sampled(harness, release, traffic, most)


def test_a_candidate_that_never_answers_keeps_no_caller_waiting(harness: HttpHarness) -> None:
    begin(harness)
    for _ in range(3):
        assert ask(harness) == words(4)
    assert (count(harness, "compared"), harness.lane.waiting([CANDIDATE.pin.key])[CANDIDATE.pin.key] >= 1) == (0, True)


def test_what_comes_much_later_than_the_callers_answer_has_failed_and_is_cancelled(harness: HttpHarness) -> None:
    release = begin(harness, RULES.model_copy(update={"start_seconds": 0.05}))
    assert ask(harness) == words(4)
    (one,) = sampled_later(harness, release, "mirror")
    assert (one.candidate.failed, one.stable.failed, one.agreement) == (True, False, None)
    wait_for(lambda: harness.lane.waiting([CANDIDATE.pin.key]) == {CANDIDATE.pin.key: 0}, "the copy stays")


def test_a_copy_is_cancelled_with_the_callers_request(harness: HttpHarness) -> None:
    begin(harness)
    harness.worker.pause = 0.01
    stream = harness.client().chat.completions.create(**{**BODY, "max_tokens": 5_000}, stream=True)
    next(iter(stream))
    wait_for(lambda: harness.lane.waiting([CANDIDATE.pin.key])[CANDIDATE.pin.key], "there is no copy")
    stream.close()
    wait_for(lambda: not harness.lane.waiting([CANDIDATE.pin.key])[CANDIDATE.pin.key], "the copy stays")
    assert (count(harness, "compared"), count(harness, "dropped")) == (0, 1)


@pytest.mark.slow
def test_copies_beyond_the_bound_are_dropped(harness: HttpHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "MAX_OPEN_COPIES", 2)
    begin(harness)
    for _ in range(5):
        assert ask(harness) == words(4)
    assert count(harness, "dropped") == 3


def test_copies_count_against_no_limit_of_the_tenant(tmp_path: Path) -> None:
    rates = RateSettings(tenants={"default": RateLimits(requests_per_minute=3)})
    with run_http_harness(tmp_path, rates=rates) as harness:
        begin(harness)
        with candidate(harness):
            for _ in range(3):
                assert ask(harness) == words(4)
            wait_for(lambda: count(harness, "compared") == 3, "nothing is compared")


def test_errors_are_compared(harness: HttpHarness) -> None:
    release = begin(harness)
    with candidate(harness):
        refused: Any = {**BODY, "messages": [{"role": "user", "content": "refuse"}]}
        assert harness.http().post("/v1/chat/completions", json=refused).status_code == 400
        (one,) = sampled_later(harness, release, "mirror")
    assert (one.stable.failed, one.candidate.failed, one.agreement) == (True, True, None)


# -- the canary stage


ALL = RULES.model_copy(update={"canary": 1.0, "start_seconds": 0.3})


@pytest.mark.slow
def test_in_the_canary_stage_the_candidate_answers_and_the_stable_version_gets_the_copy(harness: HttpHarness) -> None:
    release = begin(harness, ALL, canary=True)
    with candidate(harness, text="other "):
        assert ask(harness) == "other " * 4
        assert ask(harness, stream=True) == "other " * 4
        first, second = sampled_later(harness, release, "canary", 2)
    assert [one.agreement for one in (first, second)] == [0.0, 0.0]
    assert len(harness.worker.requests) == 2
    assert {one.sampled_as is not None for one in harness.worker.requests.values()} == {True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
def test_a_header_names_the_version_that_answers(harness: HttpHarness, stream: bool) -> None:
    begin(harness, ALL, canary=True)

    def named() -> str:
        answer = harness.http().post("/v1/chat/completions", json={**BODY, "stream": stream})
        return answer.headers["x-tokenmill-model"]

    with candidate(harness):
        assert named() == f"tiny@{CANDIDATE.pin.digest}"
    assert named() == "tiny", "the stable version answers instead"


@pytest.mark.slow
def test_one_user_gets_answers_of_one_version(harness: HttpHarness) -> None:
    begin(harness, RULES, canary=True)
    with candidate(harness, text="other "):
        texts = {user: {ask(harness, user=user) for _ in range(3)} for user in map(str, range(12))}
    assert {len(found) for found in texts.values()} == {1}
    assert {next(iter(found)) for found in texts.values()} == {words(4), "other " * 4}


@pytest.mark.slow
def test_a_request_that_names_a_version_gets_it(harness: HttpHarness) -> None:
    Catalog(harness.world.store).publish_version(CatalogEntry(pin=PIN, max_model_len=2_048))
    begin(harness, ALL, canary=True)
    with candidate(harness, text="other "):
        answer = harness.client().chat.completions.create(**{**BODY, "model": f"tiny@{PIN.digest}"})
    assert answer.choices[0].message.content == words(4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
def test_a_candidate_that_does_not_begin_is_replaced_and_counts_as_lost(harness: HttpHarness, stream: bool) -> None:
    release = begin(harness, ALL, canary=True)
    assert ask(harness, stream=stream) == words(4)
    (one,) = sampled_later(harness, release, "canary")
    assert (one.lost, one.candidate.failed, one.stable.failed) == (True, True, False)
    assert ask(harness) == words(4)
    assert (count(harness, "fell_back"), count(harness, "canary")) == (1, 1), "it gets nothing for a while"


def taken(harness: HttpHarness) -> tuple[Any, LaneRequest]:
    """A worker of the candidate that has taken a request by hand."""
    worker = harness.lane.worker("by-hand")
    (request,) = wait_for(lambda: worker.take([LaneQueue(CANDIDATE.pin.key)], 1, 0.01), "there is no request")
    return worker, request


@pytest.mark.slow
def test_what_a_candidate_hands_back_is_answered_by_the_stable_version_alone(harness: HttpHarness) -> None:
    begin(harness, RULES.model_copy(update={"canary": 1.0}), canary=True)
    found: list[str] = []
    caller = threading.Thread(target=lambda: found.append(ask(harness)))
    caller.start()
    worker, request = taken(harness)
    worker.emit([TokensEvent(request.id, 1, 0, 0, (7,), "other "), HandBackEvent(request.id, 1, 1)])
    caller.join()
    assert found == [words(4)]
    again = [one for one in harness.worker.requests.values() if one.id == request.id]
    assert [(one.attempt, one.tokens) for one in again] == [(2, ())]
    assert (count(harness, "compared"), count(harness, "dropped")) == (0, 1), "it says nothing of the version"


@pytest.mark.slow
def test_the_answer_of_the_other_version_is_not_cached_as_the_candidates(
    harness: HttpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_releases, "_PAUSE_SECONDS", 0.0)
    begin(harness, ALL, canary=True)
    cached: Any = {"extra_body": {"tokenmill": {"cache": True}}}
    assert ask(harness, **cached) == words(4)
    with candidate(harness, text="other "):
        assert ask(harness, **cached) == "other " * 4
        assert ask(harness, **cached) == "other " * 4
    assert count(harness, "canary") == 3


@pytest.mark.slow
def test_after_a_promotion_the_old_version_ends_what_it_holds_and_new_requests_go_to_the_new_one(
    harness: HttpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual_models, "_CACHE_SECONDS", 0.0)
    release = begin(harness)
    harness.worker.pause = 0.005
    with candidate(harness, text="other "):
        stream = iter(harness.client().chat.completions.create(**{**BODY, "max_tokens": 200}, stream=True))
        begun = next(stream).choices[0].delta.content or ""
        ModelRegistry(harness.world.store).end(release, "promoted", "operator", harness.world.clock.now())
        assert ask(harness) == "other " * 4
        rest = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert begun + "".join(rest) == words(200)


# -- with a real Redis, and the decision


@pytest.fixture
def redis_lane(redis_server: RedisServer, unique_name: Callable[[], str]) -> Iterator[OpenLane]:
    lane = RedisLane(RedisSettings(redis_server.url, prefix=unique_name()), SystemClock(), LaneSettings())
    yield lane
    lane.close()


@pytest.mark.slow
@pytest.mark.parametrize(("text", "verdict"), [("other ", "rolled_back"), (None, "promoted")])
def test_a_version_is_decided_by_callers_requests_and_a_bad_one_answers_none(
    tmp_path: Path, redis_lane: OpenLane, text: str | None, verdict: str
) -> None:
    with ExitStack() as stack:
        harness = stack.enter_context(run_http_harness(tmp_path, lane=redis_lane))
        stack.enter_context(candidate(harness, text=text))
        release = begin(harness)
        controller = RolloutController(harness.world)
        registry = ModelRegistry(harness.world.store)
        http = stack.enter_context(harness.http())
        texts: set[str] = set()
        asked = 0

        def is_decided() -> bool:
            nonlocal asked
            asked += 1
            answer = http.post("/v1/chat/completions", json={**BODY, "user": f"user-{asked}"}).json()
            texts.add(answer["choices"][0]["message"]["content"])
            if asked % 8 == 0:
                harness.releases.refresh()
                controller.poll()
            last = registry.last(PIN.name)
            return last is not None and last.outcome is not None

        wait_for(is_decided, "the release isn't decided", pause_seconds=0)
        last = registry.last(PIN.name)
        assert last is not None
        assert last.outcome is not None
        assert (last.release.id, last.outcome.verdict) == (release.id, verdict), last.outcome
        assert texts == {words(4)}
        assert (count(harness, "canary") > 0) is (verdict == "promoted")
