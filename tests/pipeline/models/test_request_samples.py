"""Samples of callers' requests: how they are collected, stored, grouped and removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.models.request_samples import REQUESTS_PER_SAMPLE, SampleBuffer, StoredSamples, grouped
from pipeline.ports import StoreUnavailable
from schemas.releases import AnswerSample, Release, RequestSample, RequestSamples
from tests.pipeline.models.releases_harness import RULES, ReleasesHarness
from tests.pipeline.simulation import MemoryStore

ANSWERED = AnswerSample(ttft_seconds=0.2, itl_seconds=0.01, tokens=20)
GOOD = RequestSample(stable=ANSWERED, candidate=ANSWERED, agreement=1.0)


@pytest.fixture
def harness(tmp_path: Path) -> ReleasesHarness:
    return ReleasesHarness(tmp_path)


@pytest.fixture
def release(harness: ReleasesHarness) -> Release:
    return harness.begin(RULES.model_copy(update={"mirror": 0.5}))


def stored(harness: ReleasesHarness, release: Release) -> list[RequestSamples]:
    return StoredSamples(harness.world.store, release).read("mirror", {})


def test_samples_are_written_when_a_group_is_full_or_old(harness: ReleasesHarness, release: Release) -> None:
    buffer, open_ = SampleBuffer(harness.world), {release.id: release}
    for _ in range(REQUESTS_PER_SAMPLE - 1):
        buffer.add(release, "mirror", GOOD)
    buffer.flush(open_)
    assert stored(harness, release) == []
    buffer.add(release, "mirror", GOOD)
    buffer.flush(open_)
    (batch,) = stored(harness, release)
    assert (batch.samples, batch.dropped) == ((GOOD,) * REQUESTS_PER_SAMPLE, 0)
    buffer.count_dropped(release, "mirror")
    harness.world.clock.sleep(6)
    buffer.flush(open_)
    assert len(stored(harness, release)) == 1, "their number is not bounded"
    buffer.add(release, "mirror", GOOD)
    buffer.flush(open_)
    assert [(len(one.samples), one.dropped) for one in stored(harness, release)] == [(16, 0), (1, 1)]


def test_a_lost_request_is_written_at_once(harness: ReleasesHarness, release: Release) -> None:
    buffer = SampleBuffer(harness.world)
    lost = GOOD.model_copy(update={"candidate": AnswerSample(failed=True), "agreement": None, "lost": True})
    buffer.add(release, "mirror", lost)
    buffer.flush({release.id: release})
    assert [one.samples for one in stored(harness, release)] == [(lost,)]


def test_samples_of_a_release_that_ended_are_forgotten(harness: ReleasesHarness, release: Release) -> None:
    buffer = SampleBuffer(harness.world)
    for _ in range(REQUESTS_PER_SAMPLE):
        buffer.add(release, "mirror", GOOD)
    buffer.flush({})
    buffer.flush({release.id: release})
    assert stored(harness, release) == []


def test_samples_wait_while_the_store_is_away_and_their_number_is_bounded(
    harness: ReleasesHarness, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, open_ = SampleBuffer(harness.world), {release.id: release}
    for _ in range(1_200):
        buffer.add(release, "mirror", GOOD)
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(MemoryStore, "create", lambda *_: (_ for _ in ()).throw(StoreUnavailable("away")))
        buffer.flush(open_)
    assert [log["event"] for log in logs] == ["samples of requests can't be written"]
    buffer.flush(open_)
    batches = stored(harness, release)
    assert sum(len(batch.samples) for batch in batches) == 1_000
    assert sum(batch.dropped for batch in batches) == 200


def test_sixteen_requests_are_one_sample_of_the_evaluation() -> None:
    slow = AnswerSample(ttft_seconds=0.4, itl_seconds=0.02, tokens=40)
    failed = RequestSample(stable=ANSWERED, candidate=AnswerSample(failed=True))
    mended = RequestSample(stable=AnswerSample(failed=True), candidate=ANSWERED)
    slower = RequestSample(stable=ANSWERED, candidate=slow, agreement=0.5)
    samples = (failed, mended, *[slower] * 14, GOOD)
    batch = RequestSamples(release="r", traffic="mirror", at="2026-01-01T00:00:00Z", samples=samples)
    (group,) = grouped([batch], only_full=True)
    assert (group.rows, group.failed, group.mended, group.agreement) == (16, 1, 1, 0.5)
    assert (group.ttft, group.itl, group.length) == pytest.approx((0.6931,) * 3, abs=1e-3), "the logarithm of 2"
    assert group.latency is None
    assert [one.rows for one in grouped([batch], only_full=False)] == [16, 1]


def test_a_damaged_batch_is_left_out_and_logged(harness: ReleasesHarness, release: Release) -> None:
    samples = StoredSamples(harness.world.store, release)
    batch = RequestSamples(release=release.id, traffic="mirror", at=harness.world.clock.now(), samples=(GOOD,))
    samples.write(batch, "b")
    harness.world.store.create(f"releases/{release.id}/requests/mirror/0-a.json", b'{"version": 1, "samples": 3}')
    with capture_logs() as logs:
        assert samples.read("mirror", {}) == [batch]
    assert [log["event"] for log in logs] == ["samples of requests can't be read"]
    samples.remove()
    assert samples.read("mirror", {}) == []
