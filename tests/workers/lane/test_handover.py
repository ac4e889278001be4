"""A prefill worker hands requests over, a decode worker goes on: the events are those of one worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.client import CallSettings, answer
from pipeline.lane.memory import MemoryLane
from pipeline.lane.placement import LatencyTargets
from pipeline.ports import WorkerState
from schemas.jobs.job import Tier
from schemas.jobs.outcome import Usage
from schemas.settings.kv_transfer import KVTransferOptions, Role
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest, TokensEvent
from schemas.workers.metrics import HandoverMetrics, HistogramSample, TierMetrics, WorkerMetrics
from tests.waiting import HANG_SECONDS, wait_for
from tokenmill.services.handover import open_handover
from workers.lane.requests import LaneRules
from workers.lane.server import LaneServer, LaneServing
from workers.model.loaded_model import LoadedModel
from workers.shards.worker import ShardWorker, WorkerSettings

pytestmark = pytest.mark.slow

CLOCK = SystemClock()
CALL = CallSettings(silence_timeout_seconds=0.2, poll_interval_seconds=0.02)
LANE_SETTINGS = LaneSettings(worker_timeout_seconds=0.6)
OPTIONS = KVTransferOptions()


class NoShards:
    """A source that never has shards, and never finishes."""

    def take(self, timeout: float, tiers: Sequence[Tier] = ()) -> None:
        return None

    def finished(self) -> bool:
        return False


class RoleWorker:
    """A worker with a role, on threads."""

    def __init__(
        self,
        sink: Any,
        model: LoadedModel,
        lane: MemoryLane,
        name: str,
        role: Role,
        options: KVTransferOptions,
        beats: MemoryHeartbeats,
    ) -> None:
        self.model = model
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.server: LaneServer | None = None

        def run() -> None:
            try:
                with (
                    open_handover(role, model, CLOCK, options, beats, LatencyTargets(), None) as handover,
                    LaneServer(
                        model, lane.worker(name), CLOCK, LaneRules(caps={Tier.STANDARD: 300}),
                        LaneServing(emit_interval_seconds=0.01), LANE_SETTINGS, handover=handover,
                    ).running(self.stop) as self.server,
                ):  # fmt: skip
                    ShardWorker(
                        model, NoShards(), sink, CLOCK, WorkerSettings(checkpoint_seconds=0.05), beside=self.server
                    ).run(self.stop)
            except BaseException as error:  # noqa: BLE001 - checked by the test
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    @property
    def metrics(self) -> HandoverMetrics:
        assert self.server is not None
        found = self.server.metrics().handover
        assert found is not None
        return found

    def end(self) -> None:
        self.stop.set()
        self.thread.join(HANG_SECONDS)
        assert not self.thread.is_alive()
        assert self.error is None, self.error


@pytest.fixture(scope="module")
def models(model_folder: Path) -> dict[str, LoadedModel]:
    config = EngineConfig(
        dtype="float32", threads=1, cache=CacheConfig(block_size=8, num_blocks=200, exchange_bytes=1 << 24),
        schedule=ScheduleConfig(max_num_seqs=8),
    )  # fmt: skip
    return {name: LoadedModel.load(model_folder, name="tiny", config=config) for name in ("prefill", "decode", "alone")}


@pytest.fixture
def lane() -> MemoryLane:
    return MemoryLane(CLOCK, LANE_SETTINGS)


@pytest.fixture
def beats() -> MemoryHeartbeats:
    return MemoryHeartbeats(CLOCK, 60.0)


@pytest.fixture
def work(
    kit: Any, lane: MemoryLane, models: dict[str, LoadedModel], beats: MemoryHeartbeats
) -> Iterator[Callable[..., RoleWorker]]:
    """Starts a worker with this role: (role, options, on another lane)."""
    workers: list[RoleWorker] = []

    def work(
        role: Role, options: KVTransferOptions = OPTIONS, on: MemoryLane | None = None, model: str = ""
    ) -> RoleWorker:
        name = f"{role}-{len(workers)}"
        workers.append(RoleWorker(kit.MemorySink(), models[model or role], on or lane, name, role, options, beats))
        return workers[-1]

    yield work
    for worker in workers:
        worker.end()


def request(model: LoadedModel, body: dict[str, Any], name: str) -> LaneRequest:
    url = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    return LaneRequest(name, model.pin().key, body, url=url, tier=Tier.STANDARD)


def events_of(lane: MemoryLane, sent: LaneRequest) -> list[LaneEvent]:
    return list(answer(lane, sent, CLOCK, CALL))


def seen(events: Sequence[LaneEvent]) -> Any:
    """What a caller has of an answer: text and tokens of each choice, and the response."""
    last = events[-1]
    assert isinstance(last, EndEvent), last
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, TokensEvent):
            texts[event.choice] = texts.get(event.choice, "") + event.text
    return texts, last.response["choices"], last.response["usage"]


def bodies(kit: Any) -> list[dict[str, Any]]:
    greedy = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    story = "The quick brown fox jumps over the lazy dog, again and again. "
    return [
        kit.chat(story, **greedy),
        kit.completion(story * 2, **greedy),
        kit.chat(story + "dice", n=3, seed=5, temperature=1.2, max_tokens=25, ignore_eos=True),
        kit.chat(story + "naïve 日本語", logprobs=True, top_logprobs=2, **greedy),
        kit.chat(story + "stops", stop=["e", "ab"], n=2, seed=9, max_tokens=40),
        kit.completion(story, echo=True, **greedy),
        kit.completion(story, **greedy | {"max_tokens": 1}),
        kit.completion([story, "b c d"], **greedy),
        kit.completion(story, logprobs=1, echo=True, max_tokens=0),
    ]


def test_answers_are_those_of_one_worker(kit: Any, lane: MemoryLane, work: Any, models: dict[str, LoadedModel]) -> None:
    alone = MemoryLane(CLOCK, LANE_SETTINGS)
    work("both", on=alone, model="alone")
    prefill, decode = work("prefill"), work("decode")
    for number, body in enumerate(bodies(kit)):
        expected = seen(events_of(alone, request(models["alone"], body, f"r{number}")))
        before = models["decode"].engine.stats().prompt
        events = events_of(lane, request(models["prefill"], body, f"r{number}"))
        assert seen(events) == expected, body
        if events[-1].attempt == 2:  # each choice computes what is not a whole block
            assert models["decode"].engine.stats().prompt - before <= 8 * body.get("n", 1)
    assert prefill.metrics.offered_requests >= 5
    assert decode.metrics.fetched_requests == prefill.metrics.offered_requests
    assert decode.metrics.received_bytes == prefill.metrics.sent_bytes > 0
    assert decode.metrics.broken_transfers == prefill.metrics.broken_transfers == 0


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "tcp"])
def test_a_conversation_sends_only_its_new_blocks(
    shared_memory: bool, kit: Any, lane: MemoryLane, work: Any, models: dict[str, LoadedModel]
) -> None:
    alone, options = MemoryLane(CLOCK, LANE_SETTINGS), replace_options(shared_memory=shared_memory)
    work("both", on=alone, model="alone")
    prefill, decode = work("prefill", options), work("decode", options)
    story = f"A conversation over {shared_memory}: the old man, the sea and the boy. "
    received = [0]
    for turn in (1, 2, 3):
        body = kit.completion(story * turn, temperature=0, max_tokens=20, ignore_eos=True)
        events = events_of(lane, request(models["prefill"], body, f"r{turn}"))
        assert seen(events) == seen(events_of(alone, request(models["alone"], body, f"r{turn}")))
        assert events[-1].attempt == 2
        received.append(decode.metrics.received_bytes)
    first, second, third = (after - before for before, after in pairwise(received))
    assert 0 < second < 1.5 * first, "a turn longer than the last one"
    assert 0 < third < 1.5 * first
    token_bytes = decode.metrics.token_bytes
    assert decode.metrics.held_bytes == pytest.approx(3 * first, abs=4 * 8 * token_bytes), "one turn, and two"
    assert prefill.metrics.sent_bytes == decode.metrics.received_bytes == decode.metrics.used_bytes
    assert decode.metrics.fetched_requests == prefill.metrics.offered_requests == 3
    assert decode.metrics.broken_transfers == 0


def test_without_a_decode_worker_the_prefill_worker_goes_on(
    kit: Any, lane: MemoryLane, work: Any, models: dict[str, LoadedModel]
) -> None:
    prefill = work("prefill")
    events = events_of(lane, request(models["prefill"], bodies(kit)[0], "r1"))
    assert isinstance(events[-1], EndEvent)
    assert events[-1].attempt == 2
    assert prefill.metrics.offered_requests == 1


def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt(
    kit: Any, lane: MemoryLane, work: Any, models: dict[str, LoadedModel]
) -> None:
    decode = work("decode")
    events = events_of(lane, request(models["decode"], bodies(kit)[0], "r1"))
    assert isinstance(events[-1], EndEvent)
    assert events[-1].attempt == 1
    assert decode.metrics.fetched_requests == 0


def test_without_memory_for_the_blocks_the_prefill_worker_completes_the_answer(
    kit: Any, lane: MemoryLane, work: Any, models: dict[str, LoadedModel]
) -> None:
    prefill = work("prefill", replace_options(max_bytes=100))
    work("decode")
    events = events_of(lane, request(models["prefill"], bodies(kit)[1], "r1"))
    assert isinstance(events[-1], EndEvent)
    assert events[-1].attempt == 1
    assert prefill.metrics.refused_requests == 1


def test_blocks_that_expired_are_computed(
    kit: Any, lane: MemoryLane, work: Any, models: dict[str, LoadedModel]
) -> None:
    prefill = work("prefill", replace_options(offer_seconds=0.001))
    decode = work("decode")
    events = events_of(lane, request(models["prefill"], bodies(kit)[1], "r1"))
    assert isinstance(events[-1], EndEvent)
    assert events[-1].attempt == 2
    wait_for(lambda: decode.metrics.broken_transfers == 1, "the fetch is counted")
    assert prefill.metrics.sent_bytes == 0


def replace_options(**changes: Any) -> KVTransferOptions:
    return KVTransferOptions.model_validate(changes)


def test_a_refused_request_and_an_answer_of_one_token_are_not_handed_over(
    kit: Any, lane: MemoryLane, work: Any, models: dict[str, LoadedModel]
) -> None:
    prefill = work("prefill")
    refused = events_of(lane, request(models["prefill"], kit.completion("x", max_tokens=301), "r1"))
    assert isinstance(refused[-1], ErrorEvent)
    sent = request(models["prefill"], bodies(kit)[1], "r2")
    later = events_of(lane, replace(sent, id="r3", body={**sent.body, "max_tokens": 1}))
    assert isinstance(later[-1], EndEvent)
    assert prefill.metrics.offered_requests == 0


def test_an_answer_that_is_sooner_complete_here_is_not_handed_over(
    kit: Any, lane: MemoryLane, work: Any, models: dict[str, LoadedModel], beats: MemoryHeartbeats
) -> None:
    steps = HistogramSample(counts=(100,), seconds=1.0)
    for name, role, blocks in (("w1", "prefill", 100), ("w2", "decode", 0)):
        side = HandoverMetrics(role=role, block_tokens=8, token_bytes=1_000, step_tokens=64)
        tiers = {Tier.STANDARD: TierMetrics(answered=10, usage=Usage(prompt=1_000, cached=0, completion=300))}
        metrics = WorkerMetrics(model="tiny", steps=steps, prompt=1_000, kv_blocks=blocks, handover=side, tiers=tiers)
        beats.send_heartbeat(WorkerState(name))
        beats.report_metrics(name, metrics)
    prefill = work("prefill")  # reads them at its start
    events = events_of(lane, request(models["prefill"], bodies(kit)[1], "r1"))
    assert isinstance(events[-1], EndEvent)
    assert events[-1].attempt == 1, "the decode worker has no room"
    assert prefill.metrics.stayed_requests == 1
