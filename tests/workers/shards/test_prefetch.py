"""One shard is prepared ahead while the worker has enough to do: it counts as held, and is released like the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from engine.models.base import ModelSpec
from engine.plan import CacheGroup, StepOutput, StepPlan
from engine.runner.null_runner import NullRunner
from pipeline.ports import StoreError
from pipeline.results.shard_history import ShardHistory
from pipeline.worker_client.ports import HEARTBEAT_SECONDS, ShardWork
from workers.model.loaded_model import LoadedModel
from workers.settings import WorkerSettings
from workers.shards.worker import ShardWorker
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import ModelLimits

SPEC = ModelSpec(
    architecture="none", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, vocab_size=400,
    max_position=256, windows=(None,), eos_token_ids=(2,), num_parameters=0, dtype=torch.float32,
)  # fmt: skip
ONE = WorkerSettings(max_open_shards=1)


class ObservedRunner(NullRunner):
    """The null runner, which calls `on_step` before each step."""

    on_step: Callable[[], None]

    def execute(self, plan: StepPlan) -> StepOutput:
        self.on_step()
        return super().execute(plan)


@pytest.fixture
def host(byte_level: Tokenizer) -> Callable[[Any, Callable[[], None]], LoadedModel]:
    """Makes a model whose steps cost nothing, on a clock of the test's."""

    def host(clock: Any, on_step: Callable[[], None]) -> LoadedModel:
        config = EngineConfig(cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=8))

        def make_runner(scheduler: Any) -> ObservedRunner:
            runner = ObservedRunner(scheduler.rows, SPEC.vocab_size)
            runner.on_step = on_step
            return runner

        engine = Engine(config, SPEC, (CacheGroup((0,), None, 400),), 256, make_runner, clock.monotonic)
        limits = ModelLimits(256, SPEC.vocab_size, SPEC.eos_token_ids)
        return LoadedModel("tiny", "tiny", engine, byte_level, limits, "float32", 8)

    return host


def long_shards(kit: Any, count: int) -> list[Any]:
    return [
        kit.make_work([kit.chat(max_tokens=60, ignore_eos=True)], shard=n, first_row=n) for n in range(1, count + 1)
    ]


@pytest.mark.slow
def test_given_enough_to_do_then_exactly_one_shard_is_prepared_and_held(host: Any, kit: Any) -> None:
    clock, seen = kit.FakeClock(), []
    source, sink = kit.ListSource(long_shards(kit, 4)), kit.MemorySink()

    def on_step() -> None:
        clock.sleep(0.5)
        seen.append((len(sink.parts), len(source.taken)))

    model = host(clock, on_step)
    ShardWorker(model, source, sink, clock, ONE, helper=kit.InlineExecutor()).run()
    assert sorted(sink.parts) == [1, 2, 3, 4]
    assert set(seen[2:]) == {(0, 2), (1, 3), (2, 4), (3, 4)}, "one is worked on, one waits"
    beats = [held for held in sink.held if held]
    assert [1, 2] in beats, "the waiting shard is reported as held, so that no other worker gets it"
    assert all(len(held) <= 2 for held in beats)


@pytest.mark.parametrize("how", ["stopped", "closed"])
def test_given_a_worker_that_must_stop_then_the_prepared_shard_is_released_too(host: Any, kit: Any, how: str) -> None:
    clock, stop, steps = kit.FakeClock(), threading.Event(), 0
    source, sink = kit.ListSource(long_shards(kit, 2)), kit.MemorySink()

    def on_step() -> None:
        nonlocal steps
        steps += 1
        clock.sleep(0.5)
        if steps == 12 and how == "stopped":
            stop.set()
        elif steps == 12:
            sink.closing = frozenset({source_job})

    model = host(clock, on_step)
    source_job = source.left[0].job.id
    ShardWorker(model, source, sink, clock, ONE, helper=kit.InlineExecutor()).run(stop)
    assert sink.parts == {}
    assert sorted(sink.released) == [1, 2]
    assert steps < 12 + HEARTBEAT_SECONDS / 0.5, "nothing was begun after the heartbeat that revoked it"
    assert not model.engine.has_work


def test_given_a_job_that_closes_then_another_jobs_prepared_shard_is_opened_in_order(host: Any, kit: Any) -> None:
    # Given a shard of another job that waits, whose attempts have died twice
    clock, steps = kit.FakeClock(), 0
    first, second = long_shards(kit, 2)
    other = second.job.model_copy(update={"id": "job-2"})
    second = replace(second, job=other, history=ShardHistory(silent=2))
    source, sink = kit.ListSource([first, second]), kit.MemorySink()

    def on_step() -> None:
        nonlocal steps
        steps += 1
        clock.sleep(0.5)
        if steps == 12:
            sink.closing = frozenset({first.job.id})

    model = host(clock, on_step)
    ShardWorker(model, source, sink, clock, ONE, helper=kit.InlineExecutor()).run()
    assert (sink.released, list(sink.parts)) == ([1], [2])
    assert sink.notes == [(2, [2]), (2, [])], "its rows are tried apart, and that is noted"


def test_given_a_part_that_cant_be_written_then_the_end_of_its_attempt_is_recorded(host: Any, kit: Any) -> None:
    class FullDiskSink(kit.MemorySink):  # type: ignore[misc]
        def commit(self, work: ShardWork, *args: Any) -> bool:
            raise StoreError("the disk is full")

        def checkpoint(self, *args: Any) -> None:
            raise StoreError("the disk is full")

    clock, sink = kit.FakeClock(), FullDiskSink()
    source = kit.ListSource([kit.make_work([kit.chat(max_tokens=3)])])
    with pytest.raises(StoreError, match="full"):
        ShardWorker(host(clock, lambda: None), source, sink, clock, ONE, helper=kit.InlineExecutor()).run()
    assert sink.released == [1]
