"""A worker with content policies: its rows, and its requests on a lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.client import CallSettings, answer
from pipeline.lane.memory import MemoryLane
from pipeline.worker_client.ports import BY_URGENCY
from schemas.jobs.job import Tier
from schemas.workers.lane import EndEvent, LaneEvent, LaneRequest, TokensEvent
from tests.waiting import HANG_SECONDS
from workers.lane.requests import LaneRules
from workers.lane.routes import FindModel, no_models
from workers.lane.server import LaneServer, LaneServing
from workers.model.loaded_model import LoadedModel
from workers.policies.policy import Policies
from workers.settings import WorkerSettings
from workers.shards.worker import ShardWorker

CONFIG = EngineConfig(
    dtype="float32",
    threads=1,
    max_model_len=2048,
    cache=CacheConfig(block_size=16, num_blocks=600),
    schedule=ScheduleConfig(max_num_seqs=8),
)
CLOCK = SystemClock()
CALL = CallSettings(silence_timeout_seconds=5.0, poll_interval_seconds=0.02)


def forced_chat(kit: Any, *texts: str, prompt: str = "Tell me.", **more: Any) -> dict[str, Any]:
    """A chat whose answer is one of these texts."""
    body = {"structured_outputs": {"choice": list(texts)}, "temperature": 0, "max_tokens": 800, **more}
    made: dict[str, Any] = kit.chat(prompt, **body)
    return made


def rows_of(kit: Any, model: LoadedModel, bodies: Sequence[Any], policies: Policies, **settings: Any) -> Any:
    """The sink of a shard of these bodies."""
    sink = kit.MemorySink()
    how = WorkerSettings(policies=policies, **settings)
    source = kit.ListSource([kit.make_work(bodies)])
    ShardWorker(model, source, sink, SystemClock(), how, helper=kit.InlineExecutor()).run()
    return sink


class EndlessSource:
    """A source without shards that never finishes."""

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> None:
        return None

    def finished(self) -> bool:
        return False


SendRequest = Callable[..., list[LaneEvent]]


@contextmanager
def serving_worker(
    kit: Any,
    model: LoadedModel,
    policies: Policies,
    lane: MemoryLane | None = None,
    find_model: FindModel = no_models,
) -> Iterator[SendRequest]:
    """A worker on a lane, by default of its own: gives the events of a body's answer."""
    lane, stop = lane or MemoryLane(CLOCK), threading.Event()
    serving = LaneServing(emit_interval_seconds=0.0, emit_interval_seconds_each=0.0)
    rules = LaneRules(policies=policies)
    server = LaneServer(model, lane.worker(model.name), CLOCK, rules, serving, find_model=find_model)

    def run() -> None:
        with server.running(stop) as side_work:
            ShardWorker(model, EndlessSource(), kit.MemorySink(), CLOCK, beside=side_work).run(stop)

    def send(body: dict[str, Any], **more: Any) -> list[LaneEvent]:
        url = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        request = LaneRequest(f"r{time.monotonic_ns()}", model.pin().key, body, url=url, **more)
        return list(answer(lane, request, CLOCK, CALL))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield send
    finally:
        stop.set()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    assert not model.engine.has_work


def text_of(events: Sequence[LaneEvent], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TokensEvent) and event.choice == choice)


def end_of(events: Sequence[LaneEvent]) -> EndEvent:
    assert isinstance(events[-1], EndEvent), events[-1]
    return events[-1]
