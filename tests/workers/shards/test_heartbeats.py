"""Heartbeats while the worker's loop is in a long step: they are repeated, until the worker counts as stuck."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from pipeline.ports import PipelineError
from pipeline.worker_client.ports import HEARTBEAT_SECONDS, WorkerLoad
from tests.waiting import HANG_SECONDS
from workers.model.loaded_model import LoadedModel
from workers.shards.heartbeats import HeartbeatSender
from workers.shards.worker import ShardWorker

STUCK_SECONDS = 60.0
LOAD = WorkerLoad(tokens_per_second=7.0)


@pytest.fixture
def clock(kit: Any) -> Any:
    return kit.FakeClock()


@pytest.fixture
def sink(kit: Any) -> Any:
    return kit.MemorySink()


@pytest.fixture
def sender(kit: Any, clock: Any, sink: Any) -> HeartbeatSender:
    return HeartbeatSender(sink, clock, kit.InlineExecutor(), STUCK_SECONDS)


def test_given_a_long_step_then_the_last_load_is_repeated_until_the_worker_counts_as_stuck(
    kit: Any, clock: Any, sink: Any, sender: HeartbeatSender
) -> None:
    # Given a loop that sent a heartbeat, and makes no turn since
    sender.record_progress()
    sender.send([kit.make_work([kit.chat()], shard=4)], LOAD)
    for _ in range(3 * int(STUCK_SECONDS)):
        clock.sleep(1.0)
        sender.repeat()
    # Then each repeat has the last load, and names no shard: some may have been released since
    repeats = sink.held[1:]
    assert sink.held[0] == [4]
    assert repeats == [[]] * int(STUCK_SECONDS / HEARTBEAT_SECONDS)
    assert sink.loads == [LOAD] * (1 + len(repeats))
    # When the loop makes a turn after all, then heartbeats are repeated again
    sender.record_progress()
    sender.repeat()
    assert len(sink.held) == 2 + len(repeats)


def test_given_a_loop_that_sends_its_own_then_none_is_repeated(clock: Any, sink: Any, sender: HeartbeatSender) -> None:
    sender.repeat()
    assert sink.held == [], "there is none to repeat"
    for _ in range(60):
        sender.record_progress()
        if sender.is_due:
            sender.send([], LOAD)
        sender.repeat()
        clock.sleep(0.5)
    assert len(sink.held) == 30 / HEARTBEAT_SECONDS


def test_given_a_repeat_that_fails_then_the_loop_raises_it(kit: Any, clock: Any, sender: HeartbeatSender) -> None:
    sender.send([], LOAD)
    assert not sender.is_due

    def fail(*_: Any) -> None:
        raise PipelineError("planted")

    sender._sink.send_heartbeat = fail  # type: ignore[method-assign]
    clock.sleep(HEARTBEAT_SECONDS)
    sender.repeat()
    sender.repeat()
    with pytest.raises(PipelineError, match="planted"):
        _ = sender.is_due


@pytest.mark.slow
def test_given_a_step_that_outlasts_heartbeats_then_the_worker_sends_them_meanwhile(
    model_folder: Any, kit: Any
) -> None:
    # Given a step that doesn't end before three more heartbeats were sent
    config = EngineConfig(
        dtype="float32", max_model_len=128, cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=4)
    )
    model = LoadedModel.load(model_folder, name="tiny", config=config)
    clock, sent, rows = kit.FakeClock(), threading.Semaphore(0), set[int | None]()

    class Sink(kit.MemorySink):  # type: ignore[misc,name-defined]
        def send_heartbeat(self, held: Any, load: WorkerLoad) -> None:
            super().send_heartbeat(held, load)
            rows.add(load.max_num_seqs)
            clock.sleep(HEARTBEAT_SECONDS)  # the next one is due
            sent.release()

    step = model.engine.step
    steps = 0

    def long_step() -> Any:
        nonlocal steps
        steps += 1
        if steps == 1:
            while sent.acquire(blocking=False):
                pass
            for _ in range(3):
                assert sent.acquire(timeout=HANG_SECONDS), "no heartbeat is sent while the engine is in a step"
        return step()

    model.engine.step = long_step  # type: ignore[method-assign]
    sink = Sink()
    ShardWorker(model, kit.ListSource([kit.make_work([kit.chat(max_tokens=2)])]), sink, clock).run()
    assert list(sink.parts) == [1]
    assert rows == {4}
