"""What a worker tells of itself, against what it did."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig, SloConfig
from engine.engine import EngineStats
from engine.scheduler.latency import BOUNDS, ClassStats, LatencyCounts
from engine.scheduler.slo_control import PaceStats, PaceTerms
from engine.speculative.stats import SourceCounts, SpeculationStats
from pipeline.adapters.system import SystemClock
from pipeline.lane.client import CallSettings, answer
from pipeline.lane.memory import MemoryLane
from schemas.jobs.job import Tier
from schemas.workers.lane import EndEvent, LaneRequest
from schemas.workers.metrics import PaceWeights, WorkerMetrics
from tests.waiting import HANG_SECONDS
from workers.lane.server import LaneServer
from workers.model.loaded_model import LoadedModel
from workers.observability.metrics import EndedRequests, MetricsReader, SideWorkMetrics
from workers.shards import heartbeats
from workers.shards.worker import ShardWorker

CLOCK = SystemClock()
CHAT = "/v1/chat/completions"


@pytest.fixture
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers beat with every turn."""
    monkeypatch.setattr(heartbeats, "HEARTBEAT_SECONDS", 0.0)


@pytest.fixture
def model(model_folder: Any) -> LoadedModel:
    config = EngineConfig(
        dtype="float32", max_model_len=128, cache=CacheConfig(block_size=16, num_blocks=60),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64, pace=SloConfig()),
    )  # fmt: skip
    return LoadedModel.load(model_folder, name="tiny", config=config)


def samples(counts: Any) -> int:
    return sum(counts.counts)


def test_figures_say_what_the_shards_cost(kit: Any, model: LoadedModel, told_at_once: None) -> None:
    # Given a standard shard with a row that two copies share, one of two choices and one that is too long,
    long = kit.chat("x " * 300, max_tokens=4)
    bodies = [kit.chat(f"number {n}", max_tokens=9, temperature=0) for n in range(6)]
    bodies += [0, 0, kit.chat("twice", max_tokens=5, n=2, seed=3), long]
    standard = kit.make_work(bodies)
    bulk = replace(
        kit.make_work([kit.completion("The quick", max_tokens=12)], shard=2, first_row=50),
        job=kit.make_job().model_copy(update={"tier": Tier.BULK}),
    )
    sink = kit.MemorySink()
    # when a worker computes it, and a bulk one,
    ShardWorker(model, kit.ListSource([standard, bulk]), sink, CLOCK, helper=kit.InlineExecutor()).run()
    figures = sink.loads[-1].figures
    # then its figures say for each tier what its parts say, and the engine's what it did.
    assert (figures.model, set(figures.tiers)) == ("tiny", {Tier.STANDARD, Tier.BULK})
    for tier, shard, answered, choices in ((Tier.STANDARD, 1, 7, 8), (Tier.BULK, 2, 1, 1)):
        told = figures.tiers[tier]
        usage = sink.usages[shard]
        assert told.usage == usage
        assert usage.completion > 0
        assert (told.answered, told.failed) == (answered, 1 if shard == 1 else 0)
        assert (told.running, told.waiting) == (0, 0)
        assert samples(told.whole) == answered
        assert samples(told.ttft) == choices
        assert samples(told.itl) == usage.completion - choices, "a sample for each token behind a first one"
        assert 0 < told.ttft.seconds <= told.whole.seconds * 2
    stats = model.engine.stats()
    assert (figures.computed, figures.generated, figures.prompt) == (stats.computed, stats.generated, stats.prompt)
    assert figures.generated == sum(usage.completion for usage in sink.usages.values())
    computed = sum(usage.prompt - usage.cached for usage in sink.usages.values())
    assert figures.prompt >= computed > 0
    assert figures.computed == figures.prompt + figures.generated - 9, "the last token of each choice is not computed"
    assert samples(figures.steps) == stats.steps
    assert figures.step_rows >= figures.generated
    assert (figures.kv_blocks, figures.kv_blocks_used, figures.preemptions) == (60, 0, 0)
    assert figures.prefix_queried > 0
    assert figures.pace is not None
    assert figures.speculation is None


def test_rows_that_wait_are_told_by_tier_while_they_wait(kit: Any, model: LoadedModel, told_at_once: None) -> None:
    sink = kit.MemorySink()
    works = [kit.make_work([kit.chat(f"{s}/{n}", max_tokens=6) for n in range(20)], shard=s) for s in (1, 2)]
    ShardWorker(model, kit.ListSource(works), sink, CLOCK, helper=kit.InlineExecutor()).run()
    seen = [load.figures.tiers[Tier.STANDARD] for load in sink.loads if Tier.STANDARD in load.figures.tiers]
    assert max(told.running for told in seen) == 4
    assert all(told.running + told.waiting + told.answered <= 40 for told in seen)
    assert max(told.waiting for told in seen) >= 16, "most of a shard waits, in the engine or before it"
    used = [load.figures.kv_blocks_used for load in sink.loads]
    assert 4 <= max(used) <= 60
    assert used[-1] == 0


def test_requests_of_the_lane_count_with_their_tier(kit: Any, model: LoadedModel, told_at_once: None) -> None:
    lane, sink, stop = MemoryLane(CLOCK), kit.MemorySink(), threading.Event()
    server = LaneServer(model, lane.worker("w"), CLOCK)
    source = kit.ListSource([])
    source.finished = lambda: False

    def work() -> None:
        with server.running(stop) as beside:
            ShardWorker(model, source, sink, CLOCK, beside=beside).run(stop)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        usages = []
        for number in range(5):
            tier = Tier.INTERACTIVE if number < 3 else Tier.STANDARD
            body = {**kit.chat(f"hello {number}"), "max_tokens": 8}
            asked = LaneRequest(f"r{number}", model.pin().key, body, CHAT, tier)
            events = list(answer(lane, asked, CLOCK, CallSettings(look=0.01)))
            assert isinstance(events[-1], EndEvent)
            usages.append(events[-1].response["usage"])
        figures = told_when(sink, lambda told: sum(of.answered for of in told.tiers.values()) == 5)
    finally:
        stop.set()
        worker.join()
    for tier, asked_for in ((Tier.INTERACTIVE, usages[:3]), (Tier.STANDARD, usages[3:])):
        told = figures.tiers[tier]
        assert (told.answered, told.failed) == (len(asked_for), 0)
        assert told.usage.prompt == sum(usage["prompt_tokens"] for usage in asked_for)
        assert told.usage.completion == sum(usage["completion_tokens"] for usage in asked_for)
        assert samples(told.ttft) == samples(told.whole) == len(asked_for)
    assert any(load.figures.lane_open for load in sink.loads)
    assert figures.lane_open == figures.lane_waiting == 0


def told_when(sink: Any, so: Callable[[WorkerMetrics], bool]) -> WorkerMetrics:
    until = time.monotonic() + HANG_SECONDS
    while True:
        figures: WorkerMetrics = sink.loads[-1].figures
        if so(figures):
            return figures
        assert time.monotonic() < until, figures
        time.sleep(0.01)


class Told:
    """An engine that says what it is told to say."""

    def __init__(self) -> None:
        self.said = EngineStats(
            computed=0, recomputed=0, cached=0, generated=0, steps=0, step_times=LatencyCounts(), preemptions=0,
            running=0, waiting=0, free_blocks=0, total_blocks=0,
        )  # fmt: skip
        self.of_classes = (ClassStats(), ClassStats(), ClassStats())

    def stats(self) -> EngineStats:
        return self.said

    def classes(self) -> tuple[ClassStats, ...]:
        return self.of_classes


def test_rates_are_of_the_last_seconds_and_fall_to_zero_in_idleness() -> None:
    engine: Any = Told()
    reader = MetricsReader("m", engine, 100.0)
    rates = []
    for beat in range(1, 13):
        if beat <= 4:  # 3 seconds each
            engine.said = replace(engine.said, prompt=900 * beat, generated=90 * beat, cached=30 * beat)
        rates.append(reader.read(100.0 + 3 * beat, {}, SideWorkMetrics()).rates)
    assert (rates[3].prompt, rates[3].generated, rates[3].cached) == pytest.approx((300, 30, 10))
    assert 0 < rates[5].generated < 30
    assert rates[8].generated == rates[-1].prompt == 0


def test_figures_stay_small_whatever_a_worker_has_done() -> None:
    engine: Any = Told()
    most = 10**15
    times = LatencyCounts(tuple(most + n for n in range(len(BOUNDS) + 1)), 1e12 + 1 / 3)
    terms = PaceTerms(1 / 3, 1 / 3, 1 / 3, 1 / 3)
    engine.of_classes = (ClassStats(most, most, times, times, times),) * 3
    engine.said = EngineStats(
        most, most, most, most, most, times, most, most, most, 0, most, most, most, most,
        SpeculationStats({"ngram": SourceCounts((most,), (most,))}, -1e9 / 3, 1e9 / 3),
        PaceStats(most, most, most, most, most, 0.1, 0.1, most, most, 1 / 3, 1 / 3, terms, terms),
    )  # fmt: skip
    beside = SideWorkMetrics(most, dict.fromkeys(Tier, most), EndedRequests())
    figures = MetricsReader("m" * 100, engine, 0.0).read(1e9 / 3, dict.fromkeys(Tier, most), beside)
    data = figures.model_dump_json(exclude_defaults=True)
    assert len(data) < 8_000
    assert WorkerMetrics.model_validate_json(data) == figures
    assert figures.pace is not None
    assert figures.pace.weights == PaceWeights(ttft=1 / 3, itl=1 / 3, utilisation=1 / 3, drops=1 / 3)
    assert figures.pace.objective == pytest.approx(4 / 9)


def test_a_share_that_rounding_puts_above_one_stops_no_worker() -> None:
    engine: Any = Told()
    engine.said = replace(engine.said, pace=PaceStats(others=1.0000000000000002))
    figures = MetricsReader("m", engine, 0.0).read(1.0, {}, SideWorkMetrics())
    assert figures.pace is not None
    assert figures.pace.others == 1.0
