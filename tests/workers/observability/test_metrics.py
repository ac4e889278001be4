"""A worker's metrics, compared with the work that it did."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.cache.block_tier import TierStats
from engine.config import CacheConfig, EngineConfig, ScheduleConfig, SloConfig
from engine.engine import EngineStats
from engine.expert_load import ExpertLoad
from engine.scheduler.latency import BOUNDS, ClassStats, LatencyCounts
from engine.scheduler.slo_control import SloStats, SloTerms
from engine.speculative.stats import SourceCounts, SpeculationStats
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.client import CallSettings, answer
from pipeline.lane.memory import MemoryLane
from schemas.experiments import MAX_ARMS, SliceCounts
from schemas.jobs.job import Tier
from schemas.workers.lane import EndEvent, LaneRequest
from schemas.workers.metrics import (
    THROTTLE_REASONS,
    CacheTierMetrics,
    ExperimentMetrics,
    GpuMetrics,
    SloWeights,
    WorkerMetrics,
)
from tests.waiting import HANG_SECONDS
from tests.workers.observability.fake_nvml import FakeGpu, FakeNvml
from workers.lane.server import LaneServer
from workers.model.loaded_model import LoadedModel
from workers.observability.metrics import EndedRequests, MetricsReader, SideWorkMetrics
from workers.shards import heartbeats
from workers.shards.worker import ShardWorker

CLOCK = SystemClock()
CHAT = "/v1/chat/completions"


@pytest.fixture
def heartbeat_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers send a heartbeat in each iteration."""
    monkeypatch.setattr(heartbeats, "HEARTBEAT_SECONDS", 0.0)


@pytest.fixture
def model(model_folder: Any) -> LoadedModel:
    config = EngineConfig(
        dtype="float32", max_model_len=128, cache=CacheConfig(block_size=16, num_blocks=60),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64, slo=SloConfig()),
    )  # fmt: skip
    return LoadedModel.load(model_folder, name="tiny", config=config)


def samples(counts: Any) -> int:
    return sum(counts.counts)


def test_metrics_match_the_shards_usage(kit: Any, model: LoadedModel, heartbeat_each_iteration: None) -> None:
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
    metrics = sink.loads[-1].metrics
    # then its metrics for each tier equal those of its parts, and the engine's metrics its statistics.
    assert (metrics.model, set(metrics.tiers)) == ("tiny", {Tier.STANDARD, Tier.BULK})
    for tier, shard, answered, choices in ((Tier.STANDARD, 1, 7, 8), (Tier.BULK, 2, 1, 1)):
        counts = metrics.tiers[tier]
        usage = sink.usages[shard]
        assert counts.usage == usage
        assert usage.completion > 0
        assert (counts.answered, counts.failed) == (answered, 1 if shard == 1 else 0)
        assert (counts.running, counts.waiting) == (0, 0)
        assert samples(counts.whole) == answered
        assert samples(counts.ttft) == choices
        assert samples(counts.itl) == usage.completion - choices, "a sample for each token behind a first one"
        assert 0 < counts.ttft.seconds <= counts.whole.seconds * 2
    stats = model.engine.stats()
    assert (metrics.computed, metrics.generated, metrics.prompt) == (stats.computed, stats.generated, stats.prompt)
    assert metrics.generated == sum(usage.completion for usage in sink.usages.values())
    computed = sum(usage.prompt - usage.cached for usage in sink.usages.values())
    assert metrics.prompt >= computed > 0
    assert metrics.computed == metrics.prompt + metrics.generated - 9, "the last token of each choice is not computed"
    assert samples(metrics.steps) == stats.steps
    assert metrics.step_rows >= metrics.generated
    assert (metrics.kv_blocks, metrics.kv_blocks_used, metrics.preemptions) == (60, 0, 0)
    assert metrics.prefix_queried > 0
    assert metrics.pace is not None
    assert metrics.speculation is None


def test_waiting_rows_are_reported_by_tier(kit: Any, model: LoadedModel, heartbeat_each_iteration: None) -> None:
    sink = kit.MemorySink()
    works = [kit.make_work([kit.chat(f"{s}/{n}", max_tokens=6) for n in range(20)], shard=s) for s in (1, 2)]
    ShardWorker(model, kit.ListSource(works), sink, CLOCK, helper=kit.InlineExecutor()).run()
    seen = [load.metrics.tiers[Tier.STANDARD] for load in sink.loads if Tier.STANDARD in load.metrics.tiers]
    assert max(counts.running for counts in seen) == 4
    assert all(counts.running + counts.waiting + counts.answered <= 40 for counts in seen)
    assert max(counts.waiting for counts in seen) >= 16, "most of a shard waits, in the engine or before it"
    used = [load.metrics.kv_blocks_used for load in sink.loads]
    assert 4 <= max(used) <= 60
    assert used[-1] == 0


@pytest.mark.slow
def test_requests_of_the_lane_count_with_their_tier(
    kit: Any, model: LoadedModel, heartbeat_each_iteration: None
) -> None:
    lane, sink, stop = MemoryLane(CLOCK), kit.MemorySink(), threading.Event()
    server = LaneServer(model, lane.worker("w"), CLOCK)
    source = kit.ListSource([])
    source.finished = lambda: False

    def work() -> None:
        with server.running(stop) as side_work:
            ShardWorker(model, source, sink, CLOCK, beside=side_work).run(stop)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        usages = []
        for number in range(5):
            tier = Tier.INTERACTIVE if number < 3 else Tier.STANDARD
            body = {**kit.chat(f"hello {number}"), "max_tokens": 8}
            queue = ("", "@w", "@another", "@gone", "")[number]
            request = LaneRequest(f"r{number}", model.pin().key, body, CHAT, tier, queue=queue)
            events = list(answer(lane, request, CLOCK, CallSettings(poll_interval_seconds=0.01)))
            assert isinstance(events[-1], EndEvent)
            usages.append(events[-1].response["usage"])
        metrics = metrics_when(sink, lambda counts: sum(of.answered for of in counts.tiers.values()) == 5)
    finally:
        stop.set()
        worker.join()
    for tier, expected in ((Tier.INTERACTIVE, usages[:3]), (Tier.STANDARD, usages[3:])):
        counts = metrics.tiers[tier]
        assert (counts.answered, counts.failed) == (len(expected), 0)
        assert counts.usage.prompt == sum(usage["prompt_tokens"] for usage in expected)
        assert counts.usage.completion == sum(usage["completion_tokens"] for usage in expected)
        assert samples(counts.ttft) == samples(counts.whole) == len(expected)
    assert any(load.metrics.lane_open for load in sink.loads)
    assert metrics.lane_open == metrics.lane_waiting == 0
    assert metrics.lane_stolen == 2


def test_a_loaded_model_knows_its_gpus(model_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(dtype="float32", max_model_len=128, cache=CacheConfig(num_blocks=60))
    monkeypatch.setattr("workers.model.loaded_model.gpu_uuids", lambda given: (f"of {given.dtype}",))
    assert LoadedModel.load(model_folder, name="tiny", config=config).gpu_uuids == ("of float32",)
    null = LoadedModel.without_weights(model_folder, name="tiny", config=config, num_blocks=60, digest=None)
    assert null.gpu_uuids == (), "nothing computes there"


def test_a_workers_gpus_are_reported(
    kit: Any, model: LoadedModel, heartbeat_each_iteration: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.gpu_uuids == (), "on a CPU"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml({"GPU-b": FakeGpu(minor=3)}))  # type: ignore[arg-type]
    sink, on_gpu = kit.MemorySink(), replace(model, gpu_uuids=("b",))
    work = kit.make_work([kit.chat(f"number {n}", max_tokens=9) for n in range(6)])
    ShardWorker(on_gpu, kit.ListSource([work]), sink, CLOCK, helper=kit.InlineExecutor()).run()
    assert {gpu.device for load in sink.loads for gpu in load.metrics.gpus} == {"nvidia3"}


def metrics_when(sink: Any, so: Callable[[WorkerMetrics], bool]) -> WorkerMetrics:
    until = time.monotonic() + HANG_SECONDS
    while True:
        metrics: WorkerMetrics = sink.loads[-1].metrics
        if so(metrics):
            return metrics
        assert time.monotonic() < until, metrics
        time.sleep(0.01)


class FakeEngine:
    """An engine with given statistics."""

    def __init__(self) -> None:
        self.current = EngineStats(
            computed=0, recomputed=0, cached=0, generated=0, steps=0, step_times=LatencyCounts(), preemptions=0,
            running=0, waiting=0, free_blocks=0, total_blocks=0,
        )  # fmt: skip
        self.of_classes = (ClassStats(), ClassStats(), ClassStats())
        self.load: ExpertLoad | None = None

    def stats(self) -> EngineStats:
        return self.current

    def expert_load(self) -> ExpertLoad | None:
        return self.load

    def classes(self) -> tuple[ClassStats, ...]:
        return self.of_classes


def test_rates_are_of_the_last_seconds_and_fall_to_zero_in_idleness() -> None:
    engine: Any = FakeEngine()
    reader = MetricsReader("m", engine, 100.0)
    rates = []
    for beat in range(1, 13):
        if beat <= 4:  # 3 seconds each
            engine.current = replace(engine.current, prompt=900 * beat, generated=90 * beat, cached=30 * beat)
        rates.append(reader.read(100.0 + 3 * beat, {}, SideWorkMetrics()).rates)
    assert (rates[3].prompt, rates[3].generated, rates[3].cached) == pytest.approx((300, 30, 10))
    assert 0 < rates[5].generated < 30
    assert rates[8].generated == rates[-1].prompt == 0


def test_the_second_tiers_of_the_prefix_cache_are_reported_where_they_are() -> None:
    engine: Any = FakeEngine()
    reader = MetricsReader("m", engine, 100.0)
    assert reader.read(101.0, {}, SideWorkMetrics()).cache_tier is None
    engine.current = replace(engine.current, tier=TierStats(5, 4000, 3000, 2, is_on=False))
    expected = CacheTierMetrics(hits=5, rejected=2, bytes_read=4000, bytes_written=3000, is_on=False)
    assert reader.read(102.0, {}, SideWorkMetrics()).cache_tier == expected
    assert reader.read(103.0, {}, SideWorkMetrics()).host_tier is None
    engine.current = replace(engine.current, tier=None, host_tier=TierStats(6, 5000, 4000))
    found = reader.read(104.0, {}, SideWorkMetrics())
    assert found.cache_tier is None
    assert found.host_tier == CacheTierMetrics(hits=6, bytes_read=5000, bytes_written=4000)


def test_the_load_of_experts_is_of_the_last_seconds() -> None:
    # Given two layers, the second without experts, and four experts on two ranks, all busy alike until now
    engine: Any = FakeEngine()
    ranks = np.array([[0, 0, 1, 1], [0, 0, 1, 1]])
    engine.load = ExpertLoad(np.array([[100, 100, 100, 100], [0, 0, 0, 0]]), ranks)
    reader = MetricsReader("m", engine, 100.0)
    # When the first one computes most rows
    engine.load = ExpertLoad(np.array([[170, 110, 110, 110], [0, 0, 0, 0]]), ranks)
    metrics = reader.read(103.0, {}, SideWorkMetrics())
    # Then 70 and 80 rows are compared with 25 and 50
    assert (metrics.expert_load, metrics.rank_load) == (pytest.approx(2.8), pytest.approx(1.6))
    # In idleness, without whole experts, and without experts there is none
    metrics = [reader.read(103.0 + 10 * beat, {}, SideWorkMetrics()) for beat in (1, 2)][-1]
    assert (metrics.expert_load, metrics.rank_load) == (None, None)
    engine.load = ExpertLoad(engine.load.rows + 1)
    assert reader.read(126.0, {}, SideWorkMetrics()).expert_load == pytest.approx(1)
    assert reader.read(126.0, {}, SideWorkMetrics()).rank_load is None
    engine.load = None
    assert reader.read(127.0, {}, SideWorkMetrics()).expert_load is None


def test_metrics_have_a_bounded_size() -> None:
    engine: Any = FakeEngine()
    most = 10**15
    times = LatencyCounts(tuple(most + n for n in range(len(BOUNDS) + 1)), 1e12 + 1 / 3)
    terms = SloTerms(1 / 3, 1 / 3, 1 / 3, 1 / 3)
    engine.of_classes = (ClassStats(most, most, times, times, times),) * 3
    engine.current = EngineStats(
        most, most, most, most, most, times, most, most, most, 0, most, most, most, most,
        SpeculationStats({"ngram": SourceCounts((most,), (most,))}, -1e9 / 3, 1e9 / 3),
        SloStats(most, most, most, most, most, most, most, 0.1, 0.1, most, most, 1 / 3, 1 / 3, terms, terms),
    )  # fmt: skip
    counts = SliceCounts(**dict.fromkeys(SliceCounts.model_fields, most))
    arms = {f"{arm}" * 32: counts for arm in range(MAX_ARMS)}
    experiment = ExperimentMetrics(name="e" * 32, arm="0" * 32, arms=arms)
    side_work = SideWorkMetrics(most, dict.fromkeys(Tier, most), EndedRequests(), experiment=experiment)
    metrics = MetricsReader("m" * 100, engine, 0.0).read(1e9 / 3, dict.fromkeys(Tier, most), side_work)
    gpu = GpuMetrics(
        uuid=f"GPU-{'f' * 36}", device="nvidia15", memory_bytes=most, memory_used_bytes=most, utilization=1 / 3,
        power_watts=1e3 / 3, power_limit_watts=1e3 / 3, temperature_celsius=100, sm_clock_hertz=most,
        throttled=THROTTLE_REASONS,
    )  # fmt: skip
    metrics = metrics.model_copy(update={"gpus": (gpu,) * 8})
    data = metrics.model_dump_json(exclude_defaults=True)
    assert len(data) < 12_000
    assert WorkerMetrics.model_validate_json(data) == metrics
    assert metrics.pace is not None
    assert metrics.pace.weights == SloWeights(ttft=1 / 3, itl=1 / 3, utilisation=1 / 3, drops=1 / 3)
    assert metrics.pace.objective == pytest.approx(4 / 9)


def test_a_share_rounded_above_one_is_clamped() -> None:
    engine: Any = FakeEngine()
    engine.current = replace(engine.current, slo=SloStats(others=1.0000000000000002))
    metrics = MetricsReader("m", engine, 0.0).read(1.0, {}, SideWorkMetrics())
    assert metrics.pace is not None
    assert metrics.pace.others == 1.0
