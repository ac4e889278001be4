"""A release from its beginning to its outcome: what is copied, what is decided, and what is never read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.egress.release_events import ReleaseEventPublisher
from pipeline.ledger.ledger import JOBS
from pipeline.models.catalog import Catalog
from pipeline.models.registry import RELEASES, ReleaseError
from pipeline.models.request_samples import StoredSamples
from pipeline.models.shadow_client import POLL_INTERVAL_SECONDS, ShadowClient
from pipeline.models.shadow_results import ShadowCopies
from pipeline.ports import Message, NotConfirmed, ShardTask, queue_name
from pipeline.worker_client.ports import RevokedShards
from schemas.jobs.events import ReleaseEnded, read_event
from schemas.jobs.job import Tier
from schemas.releases import (
    AnswerSample,
    LogprobDrift,
    Release,
    ReleaseOutcome,
    RequestSample,
    RequestSamples,
    Traffic,
)
from tests.pipeline.made_jobs import MODEL, all_rows
from tests.pipeline.models.releases_harness import NEW, OLD, RULES, ReleasesHarness
from tests.pipeline.simulation import MemoryStore


@pytest.fixture
def harness(tmp_path: Path) -> ReleasesHarness:
    return ReleasesHarness(tmp_path)


def store_of(harness: ReleasesHarness) -> MemoryStore:
    assert isinstance(harness.world.store, MemoryStore)
    return harness.world.store


def test_given_a_candidate_when_it_comes_then_only_its_digest_names_it(harness: ReleasesHarness) -> None:
    catalog = Catalog(harness.world.store)
    assert [entry.pin.digest for entry in catalog.entries()] == [OLD.pin.digest]
    found = catalog.find(f"{MODEL}@{NEW.pin.digest}")
    assert found is not None
    assert found.pin.key == NEW.pin.key
    assert [entry.pin.digest for entry in catalog.versions(MODEL)] == [OLD.pin.digest, NEW.pin.digest]
    assert catalog.versions("other") == []


def test_given_answers_alike_when_enough_are_compared_then_it_is_promoted_and_no_copy_stays(
    harness: ReleasesHarness,
) -> None:
    ledger = harness.job("job-1", 5)
    before = all_rows(ledger)
    release = harness.begin()
    assert harness.shadow(release) == 5
    assert {key for key in store_of(harness).objects if "shadow" in key} == set(
        ShadowCopies(harness.world.store, release).standing()
    )
    harness.controller.poll()
    last = harness.registry.last(MODEL)
    assert last is not None
    assert last.outcome is not None
    assert (last.outcome.verdict, last.outcome.by) == ("promoted", "comparison")
    assert last.outcome.comparison is not None
    assert (last.outcome.comparison.shards, last.outcome.comparison.rows) == (4, 16), "a look sees so many and no more"
    entry = Catalog(harness.world.store).find(MODEL)
    assert entry is not None
    assert entry.pin == NEW.pin
    assert ShadowCopies(harness.world.store, release).standing() == []
    assert all_rows(ledger) == before
    assert harness.controller.metrics.ended == {(MODEL, "promoted"): 1}


def test_given_other_answers_when_enough_are_compared_then_it_is_rolled_back_and_says_why(
    harness: ReleasesHarness,
) -> None:
    harness.job("job-1", 6)
    release = harness.begin()
    harness.shadow(release, mark="other ")
    harness.controller.poll()
    last = harness.registry.last(MODEL)
    assert last is not None
    assert last.outcome is not None
    assert last.outcome.verdict == "rolled_back"
    assert last.outcome.reasons == ("agreement of answers: 0 (0 to 0), the limit is 0.8",)
    entry = Catalog(harness.world.store).find(MODEL)
    assert entry is not None
    assert entry.pin == OLD.pin


def test_given_a_release_when_it_was_decided_then_nothing_can_change_that_by_itself(harness: ReleasesHarness) -> None:
    # given a version that was rolled back
    harness.job("job-1", 6)
    release = harness.begin()
    harness.shadow(release, mark="other ")
    harness.controller.poll()
    # when its copies are all good after that, and its worker says again that it is there
    harness.shadow(release)
    harness.registry.publish(NEW)
    harness.registry.publish(NEW, candidate=True)
    harness.registry.end(release, "promoted", "comparison", harness.world.clock.now())
    harness.controller.poll()
    # then the name is still the old one's
    entry = Catalog(harness.world.store).find(MODEL)
    assert entry is not None
    assert entry.pin == OLD.pin
    # and a worker that looked too early, and took the name, is set right
    Catalog(harness.world.store).publish(NEW)
    harness.controller.poll()
    entry = Catalog(harness.world.store).find(MODEL)
    assert entry is not None
    assert entry.pin == OLD.pin


def test_given_an_old_version_whose_worker_comes_back_after_the_promotion_then_the_name_stays_the_new_ones(
    harness: ReleasesHarness,
) -> None:
    harness.registry.end(harness.begin(), "promoted", "operator", harness.world.clock.now())
    assert harness.registry.publish(OLD) is False
    entry = Catalog(harness.world.store).find(MODEL)
    assert entry is not None
    assert entry.pin == NEW.pin
    # until the promotion is rolled back
    harness.registry.roll_back_promoted(MODEL, harness.world.clock.now())
    assert harness.registry.publish(OLD) is True
    entry = Catalog(harness.world.store).find(MODEL)
    assert entry is not None
    assert entry.pin == OLD.pin
    assert [standing.release.number for standing in harness.registry.history(MODEL)] == [1, 2]


def test_given_too_little_to_compare_when_its_time_is_over_then_it_is_rolled_back(harness: ReleasesHarness) -> None:
    harness.job("job-1", 2)
    release = harness.begin(RULES.model_copy(update={"longest_seconds": 60.0}))
    harness.shadow(release)
    harness.controller.poll()
    assert harness.controller.metrics.open[MODEL].shards == 2
    harness.world.clock.sleep(61)
    harness.controller.poll()
    last = harness.registry.last(MODEL)
    assert last is not None
    assert last.outcome is not None
    assert (last.outcome.verdict, last.outcome.by) == ("rolled_back", "time")


def test_given_a_shadow_release_when_it_was_compared_then_an_operator_decides(harness: ReleasesHarness) -> None:
    harness.job("job-1", 8)
    release = harness.begin(mode="shadow")
    harness.shadow(release, mark="other ")
    harness.controller.poll()
    last = harness.registry.last(MODEL)
    assert last is not None
    assert last.outcome is None
    assert harness.controller.metrics.open[MODEL].shards == 8


def test_given_drift_beyond_the_limit_when_answers_agree_then_it_is_rolled_back(harness: ReleasesHarness) -> None:
    harness.job("job-1", 5)
    release = harness.begin()
    harness.registry.record_drift(release, LogprobDrift(mean=0.9, most=2.0, tokens=100))
    harness.shadow(release)
    harness.controller.poll()
    last = harness.registry.last(MODEL)
    assert last is not None
    assert last.outcome is not None
    assert last.outcome.reasons == ("log-probabilities differ by 0.9, the limit is 0.5",)


@pytest.mark.slow
def test_given_jobs_of_other_versions_and_a_share_when_copies_are_taken_then_only_of_what_belongs_to_it(
    harness: ReleasesHarness,
) -> None:
    other = OLD.pin.model_copy(update={"digest": "sha256:" + "2" * 64})
    harness.job("job-other", 3, other)
    harness.job("job-1", 60)
    release = harness.begin(RULES.model_copy(update={"share": 0.5}))
    taken = harness.shadow(release)
    assert 18 <= taken <= 42
    copies = ShadowCopies(harness.world.store, release)
    assert all("/job-1-" in key for key in copies.standing())
    again = ShadowClient("another", harness.world, release)
    assert again.take(0) is None, "all workers choose the same"


def test_given_a_candidate_at_work_when_the_release_ends_then_its_shards_are_revoked(harness: ReleasesHarness) -> None:
    harness.job("job-1", 3)
    release = harness.begin()
    client = ShadowClient("candidate", harness.world, release)
    work = client.take(0)
    assert work is not None
    assert client.find_revoked([work]) == RevokedShards()
    harness.registry.end(release, "rolled_back", "operator", harness.world.clock.now())
    assert client.find_revoked([work]).to_release == {("job-1", work.shard)}
    assert client.take(POLL_INTERVAL_SECONDS) is None
    assert client.finished()


def test_given_a_candidate_at_work_when_its_writes_are_read_then_none_is_below_jobs(harness: ReleasesHarness) -> None:
    harness.job("job-1", 5)
    release = harness.begin()
    written = len(store_of(harness).changes)
    harness.shadow(release)
    keys = [key for key, _ in store_of(harness).changes[written:]]
    assert len(keys) == 5
    assert all(key.startswith(f"{RELEASES}{release.id}/shadow/") for key in keys)
    assert not any(key.startswith(JOBS) for key in keys)


def test_given_two_that_begin_a_release_when_they_race_then_one_wins(harness: ReleasesHarness) -> None:
    release = harness.begin()
    with pytest.raises(ReleaseError, match="release 1 of tiny is not decided yet"):
        harness.begin()
    harness.registry.end(release, "rolled_back", "operator", harness.world.clock.now())
    with pytest.raises(ReleaseError, match="nothing is new"):
        harness.registry.begin(MODEL, OLD, RULES, harness.world.clock.now())
    with pytest.raises(ReleaseError, match="nothing to go back from"):
        harness.registry.roll_back_promoted(MODEL, harness.world.clock.now())
    with pytest.raises(ReleaseError, match="no worker has served other yet"):
        harness.registry.begin("other", NEW, RULES, harness.world.clock.now())


def test_given_a_worker_with_other_weights_under_the_name_when_a_job_is_open_then_it_never_takes_its_shards(
    harness: ReleasesHarness,
) -> None:
    ledger = harness.job("job-1", 1)
    store_of(harness).delete(f"{ledger.prefix}results/part-00001.parquet")  # as before it was computed
    right, queue = harness.worker([OLD.pin])
    wrong, others = harness.worker([NEW.pin])
    for one in (queue, others):
        one.put(queue_name(OLD.pin.key, Tier.STANDARD), ShardTask("job-1", 1))
    assert wrong.take(0) is None
    assert right.take(0) is not None


class FlakyMessages:
    """Takes messages, after `failures` failed sends."""

    max_bytes = 1_000_000

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.sent: list[Message] = []

    def send(self, messages: Sequence[Message]) -> None:
        if self.failures:
            self.failures -= 1
            raise NotConfirmed("the brokers are away", final=False)
        self.sent += messages


def test_given_ended_releases_when_announced_then_each_is_published_once_it_can_be_sent(
    harness: ReleasesHarness,
) -> None:
    topic = FlakyMessages(failures=1)
    publisher = ReleaseEventPublisher(harness.world.store, topic, "events")
    release = harness.begin()
    publisher.poll()
    assert topic.sent == []
    harness.registry.end(release, "promoted", "operator", harness.world.clock.now())
    harness.registry.roll_back_promoted(MODEL, harness.world.clock.now())
    with pytest.raises(NotConfirmed):
        publisher.poll()
    publisher.poll()
    ReleaseEventPublisher(harness.world.store, topic, "events").poll()
    events = [read_event(message.value or b"") for message in topic.sent]
    assert all(isinstance(event, ReleaseEnded) for event in events)
    published = [(event.release, event.verdict, event.candidate) for event in events if isinstance(event, ReleaseEnded)]
    assert published == [(1, "promoted", NEW.pin.digest), (2, "promoted", OLD.pin.digest)]


# -- callers' requests


MIRRORED = RULES.model_copy(update={"mirror": 0.5})
STAGED = RULES.model_copy(update={"mirror": 0.5, "canary": 0.1})
ANSWERED = AnswerSample(ttft_seconds=0.2, itl_seconds=0.01, tokens=20)
GOOD = RequestSample(stable=ANSWERED, candidate=ANSWERED, agreement=1.0)
OTHER = GOOD.model_copy(update={"agreement": 0.0})
LOST = RequestSample(stable=ANSWERED, candidate=AnswerSample(failed=True), lost=True)


def sample(harness: ReleasesHarness, release: Release, traffic: Traffic, groups: int, one: RequestSample) -> None:
    """A gateway compares so many groups of requests."""
    stored = StoredSamples(harness.world.store, release)
    for _ in range(groups):
        harness.world.clock.sleep(0.01)
        now = harness.world.clock.now()
        batch = RequestSamples(release=release.id, traffic=traffic, at=now, samples=(one,) * 16, dropped=1)
        stored.write(batch, harness.world.random.token(4).hex())
    harness.controller.poll()


def verdict_of(harness: ReleasesHarness) -> str | None:
    last = harness.registry.last(MODEL)
    assert last is not None
    return None if last.outcome is None else last.outcome.verdict


def outcome_of(harness: ReleasesHarness) -> ReleaseOutcome:
    last = harness.registry.last(MODEL)
    assert last is not None
    assert last.outcome is not None
    return last.outcome


def test_given_mirrored_requests_alike_when_enough_are_compared_then_it_is_promoted_without_shards(
    harness: ReleasesHarness,
) -> None:
    release = harness.begin(MIRRORED)
    sample(harness, release, "mirror", 3, GOOD)
    assert verdict_of(harness) is None
    assert harness.controller.metrics.open[MODEL].mirror is not None
    sample(harness, release, "mirror", 1, GOOD)
    outcome = outcome_of(harness)
    assert (outcome.verdict, outcome.by) == ("promoted", "comparison")
    assert outcome.comparison is not None
    assert outcome.comparison.mirror is not None
    assert (outcome.comparison.mirror.rows, outcome.comparison.mirror.dropped) == (64, 4)
    assert StoredSamples(harness.world.store, release).read("mirror", {}) == [], "the outcome has the comparison"


def test_given_mirrored_requests_when_only_shards_are_compared_then_it_is_not_promoted_by_them(
    harness: ReleasesHarness,
) -> None:
    harness.job("job-1", 5)
    release = harness.begin(MIRRORED)
    harness.shadow(release)
    harness.controller.poll()
    assert verdict_of(harness) is None
    sample(harness, release, "mirror", 4, GOOD)
    assert verdict_of(harness) == "promoted"


def test_given_other_answers_to_shards_when_requests_are_alike_then_it_is_rolled_back(
    harness: ReleasesHarness,
) -> None:
    harness.job("job-1", 6)
    release = harness.begin(MIRRORED)
    harness.shadow(release, mark="other ")
    sample(harness, release, "mirror", 4, GOOD)
    assert verdict_of(harness) == "rolled_back"


def test_given_a_canary_when_mirrored_requests_are_alike_then_its_stage_begins_and_its_own_requests_decide(
    harness: ReleasesHarness,
) -> None:
    release = harness.begin(STAGED)
    sample(harness, release, "mirror", 4, GOOD)
    assert verdict_of(harness) is None
    stage = harness.registry.canary(release)
    assert stage is not None
    sample(harness, release, "canary", 3, GOOD)
    assert verdict_of(harness) is None
    sample(harness, release, "canary", 1, GOOD)
    assert verdict_of(harness) == "promoted"
    assert harness.registry.canary(release) == stage, "the first record counts"


@pytest.mark.parametrize(("traffic", "began"), [("mirror", False), ("canary", True)])
def test_given_other_answers_to_callers_when_compared_then_it_is_rolled_back(
    harness: ReleasesHarness, traffic: Traffic, began: bool
) -> None:
    release = harness.begin(STAGED)
    if began:
        sample(harness, release, "mirror", 4, GOOD)
    sample(harness, release, traffic, 4, OTHER)
    outcome = outcome_of(harness)
    assert outcome.verdict == "rolled_back"
    assert outcome.reasons[0].startswith("agreement of answers")
    assert (harness.registry.canary(release) is not None) is began


def test_given_one_lost_request_when_compared_then_it_is_rolled_back_at_once(harness: ReleasesHarness) -> None:
    release = harness.begin(STAGED)
    stored = StoredSamples(harness.world.store, release)
    batch = RequestSamples(release=release.id, traffic="mirror", at=harness.world.clock.now(), samples=(GOOD, LOST))
    stored.write(batch, "a")
    harness.controller.poll()
    assert outcome_of(harness).reasons == ("its workers lost 1 of the callers' requests",)


def test_given_a_canary_without_mirrored_requests_then_shards_begin_its_stage(harness: ReleasesHarness) -> None:
    harness.job("job-1", 5)
    release = harness.begin(RULES.model_copy(update={"canary": 0.1}))
    harness.shadow(release)
    harness.controller.poll()
    assert verdict_of(harness) is None
    assert harness.registry.canary(release) is not None
    sample(harness, release, "canary", 4, GOOD)
    assert verdict_of(harness) == "promoted"


def test_a_shadow_release_compares_requests_and_decides_nothing(harness: ReleasesHarness) -> None:
    release = harness.begin(MIRRORED, mode="shadow")
    sample(harness, release, "mirror", 8, OTHER)
    assert verdict_of(harness) is None
    compared = harness.controller.metrics.open[MODEL].mirror
    assert compared is not None
    assert compared.agreement is not None
    assert compared.agreement.mean == 0
