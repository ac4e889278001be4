"""Open releases as a gateway sees them: what is copied, and whom a candidate answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.models.open_releases import MAX_WAITING, OpenReleases
from pipeline.ports import StoreUnavailable
from schemas.models import CatalogEntry
from schemas.releases import AnswerSample, LogprobDrift, RequestSample
from schemas.requests.tokenizing import TOKENIZE_URL
from schemas.workers.lane import LaneRequest
from tests.pipeline.made_jobs import MODEL
from tests.pipeline.models.releases_harness import NEW, OLD, RULES, ReleasesHarness
from tests.pipeline.simulation import MemoryStore

LOST = RequestSample(stable=AnswerSample(ttft_seconds=1), candidate=AnswerSample(failed=True), lost=True)


class Load:
    """A lane with so many waiting requests, by model."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}

    def waiting(self, models: Collection[str]) -> Mapping[str, int]:
        return {model: self.requests.get(model, 0) for model in models}


@pytest.fixture
def harness(tmp_path: Path) -> ReleasesHarness:
    return ReleasesHarness(tmp_path)


@pytest.fixture
def load() -> Load:
    return Load()


def opened(harness: ReleasesHarness, load: Load, **rules: Any) -> OpenReleases:
    harness.begin(RULES.model_copy(update=rules))
    releases = OpenReleases(harness.world, load)
    releases.refresh()
    return releases


def begin_canary(harness: ReleasesHarness, releases: OpenReleases) -> None:
    last = harness.registry.last(MODEL)
    assert last is not None
    harness.registry.begin_canary(last.release, harness.world.clock.now(), ())
    releases.refresh()


def request(number: int, text: str = "hello", model: CatalogEntry = OLD) -> LaneRequest:
    return LaneRequest(f"r{number}", model.pin.key, {"messages": [{"role": "user", "content": text}]})


def copies(releases: OpenReleases, count: int = 400) -> int:
    return sum(releases.copied(request(number), None) is not None for number in range(count))


def callers(releases: OpenReleases, count: int = 400, entry: CatalogEntry = OLD) -> set[int]:
    return {number for number in range(count) if releases.canary_of(entry, f"default\0{number}") is not None}


def test_a_share_of_the_stable_versions_requests_is_copied(harness: ReleasesHarness, load: Load) -> None:
    releases = opened(harness, load, mirror=0.25)
    assert 60 < copies(releases) < 140
    found = next(found for number in range(99) if (found := releases.copied(request(number), None)))
    assert (found.traffic, found.copies_go_to) == ("mirror", NEW.pin.key)
    assert releases.copied(request(1, model=NEW), None) is None, "it is the candidate's already"
    tokenizing = LaneRequest("r1", OLD.pin.key, {"prompt": "a"}, url=TOKENIZE_URL)
    assert releases.copied(tokenizing, None) is None


def test_all_turns_of_a_conversation_are_copied_or_none(harness: ReleasesHarness, load: Load) -> None:
    releases = opened(harness, load, mirror=0.5)
    for conversation in range(20):
        text = f"conversation {conversation} " + "x" * 300
        assert len({releases.copied(request(turn, text), None) is None for turn in range(9)}) == 1


def test_chats_with_one_system_prompt_are_copied_by_the_share(harness: ReleasesHarness, load: Load) -> None:
    releases = opened(harness, load, mirror=0.25)
    system = {"role": "system", "content": "You answer questions about one product. " * 20}
    bodies = [{"messages": [system, {"role": "user", "content": f"question {number}"}]} for number in range(400)]
    sent = [replace(request(number), body=body) for number, body in enumerate(bodies)]
    assert 60 < sum(releases.copied(one, None) is not None for one in sent) < 140


def test_without_a_release_with_requests_nothing_is_copied(harness: ReleasesHarness, load: Load) -> None:
    assert copies(opened(harness, load)) == 0


def test_a_candidate_answers_callers_from_the_canary_stage_on_and_always_the_same_ones(
    harness: ReleasesHarness, load: Load
) -> None:
    releases = opened(harness, load, mirror=1.0, canary=0.25)
    assert callers(releases) == set()
    begin_canary(harness, releases)
    chosen = callers(releases)
    assert 60 < len(chosen) < 140
    assert callers(releases) == chosen
    other = OpenReleases(harness.world, load)
    other.refresh()
    assert callers(other) == chosen, "all gateways choose alike"
    named = OLD.model_copy(update={"pin": OLD.pin.model_copy(update={"name": f"{MODEL}@{OLD.pin.digest}"})})
    assert callers(releases, entry=named) == set(), "they name the version"


def test_in_the_canary_stage_only_its_requests_are_copied_to_the_stable_version(
    harness: ReleasesHarness, load: Load
) -> None:
    releases = opened(harness, load, mirror=1.0, canary=1.0)
    begin_canary(harness, releases)
    assert copies(releases) == 0
    canary = releases.canary_of(OLD, "default\0a")
    assert canary is not None
    found = releases.copied(request(1, model=NEW), canary)
    assert found is not None
    assert (found.traffic, found.copies_go_to) == ("canary", OLD.pin.key)


def test_a_busy_version_gets_no_copies_and_they_are_counted(harness: ReleasesHarness, load: Load) -> None:
    releases = opened(harness, load, mirror=1.0, canary=1.0)
    load.requests[NEW.pin.key] = MAX_WAITING
    releases.refresh()
    assert copies(releases, 5) == 0
    assert releases.counts()["dropped"] == 5
    begin_canary(harness, releases)
    assert callers(releases) == set()
    load.requests.clear()
    releases.refresh()
    assert len(callers(releases)) == 400


def test_a_candidate_that_died_gets_nothing_for_a_while(harness: ReleasesHarness, load: Load) -> None:
    releases = opened(harness, load, mirror=1.0, canary=1.0)
    begin_canary(harness, releases)
    canary = releases.canary_of(OLD, "default\0a")
    assert canary is not None
    releases.fell_back(canary, is_dead=False)
    assert callers(releases, 5)
    releases.fell_back(canary, is_dead=True)
    assert callers(releases) == set()
    harness.world.clock.sleep(31)
    assert callers(releases, 5)


def test_no_more_is_copied_than_can_be_judged(harness: ReleasesHarness, load: Load) -> None:
    releases = opened(harness, load, mirror=1.0, least_shards=4, most_shards=4)
    found = releases.copied(request(1), None)
    assert found is not None
    for _ in range(4 * 16):
        releases.add_sample(found, LOST.model_copy(update={"lost": False}))
    assert releases.copied(request(1), None) is None


def test_a_release_that_ends_gets_nothing_more(harness: ReleasesHarness, load: Load) -> None:
    releases = opened(harness, load, mirror=1.0)
    assert copies(releases, 3) == 3
    harness.controller.poll()
    last = harness.registry.last(MODEL)
    assert last is not None
    harness.registry.end(last.release, "rolled_back", "operator", harness.world.clock.now())
    releases.refresh()
    assert copies(releases, 3) == 0


def test_while_the_store_is_away_nothing_is_copied(
    harness: ReleasesHarness, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = opened(harness, load, mirror=1.0)
    monkeypatch.setattr(MemoryStore, "folders", lambda *_: (_ for _ in ()).throw(StoreUnavailable("away")))
    with capture_logs() as logs:
        releases.refresh()
    assert [log["event"] for log in logs] == ["releases can't be read: no request is copied"]
    assert copies(releases, 3) == 0


@pytest.mark.parametrize(("drift", "shares"), [(None, False), (0.1, True), (9.0, False)])
def test_tokens_are_shared_only_where_the_versions_were_compared_on_them(
    harness: ReleasesHarness, load: Load, drift: float | None, shares: bool
) -> None:
    releases = opened(harness, load, mirror=1.0)
    last = harness.registry.last(MODEL)
    assert last is not None
    if drift is not None:
        harness.registry.record_drift(last.release, LogprobDrift(mean=drift, most=drift, tokens=9))
    releases.refresh()
    found = releases.copied(request(1), None)
    assert found is not None
    assert found.shares_tokens is shares
