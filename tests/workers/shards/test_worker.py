"""The worker's loop: full batches across shards, one result for each row, and isolated faults.

The engine is the real one; for faults and for speed its runner has no model.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from engine.models.base import ModelSpec
from engine.plan import CacheGroup, RowState, StepOutput, StepPlan
from engine.runner.null_runner import NullRunner
from pipeline.adapters.system_clock import SystemClock
from pipeline.ports import StoreError
from pipeline.results.shard_history import ShardHistory
from pipeline.runtime.inline_executor import InlineExecutor
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.job import Tier
from schemas.jobs.results import RowStatus
from schemas.models import ModelPin
from schemas.requests.errors import RowErrorCode
from tests.waiting import HANG_SECONDS
from workers.errors import BrokenEngineError, ModelMismatchError
from workers.model.loaded_model import LoadedModel
from workers.observability.progress import WorkerProgress
from workers.settings import WorkerSettings
from workers.shards.shard_reader import ShardReader
from workers.shards.worker import ShardWorker
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import ModelLimits

SPEC = ModelSpec(
    architecture="none", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, vocab_size=400,
    max_position=256, windows=(None,), eos_token_ids=(2,), num_parameters=0, dtype=torch.float32,
)  # fmt: skip
POISON = 399
ALWAYS = -1


class FaultyRunner:
    """The null runner, whose steps fail when a prompt holds `poison` (or always)."""

    def __init__(self, rows: RowState, poison: int | None, on_step: Callable[[], None] | None) -> None:
        self._null = NullRunner(rows, POISON)
        self._rows = rows
        self._poison = poison
        self._on_step = on_step
        self.batches: list[int] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        if self._on_step is not None:
            self._on_step()
        self.batches.append(len(plan.rows))
        for row in plan.rows.tolist():
            prompt = self._rows.token_ids[row, : self._rows.prompt_len[row]]
            if self._poison == ALWAYS or (self._poison is not None and self._poison in prompt):
                raise RuntimeError("the device said no")
        return self._null.execute(plan)


@pytest.fixture
def host(byte_level: Tokenizer, kit: Any) -> Any:
    """Makes a loaded model: (model, runner)."""

    def host(
        *,
        poison: int | None = None,
        clock: Any = None,
        max_num_seqs: int = 8,
        on_step: Callable[[], None] | None = None,
        blocks: int = 400,
    ) -> tuple[LoadedModel, FaultyRunner]:
        clock = clock or kit.FakeClock()
        config = EngineConfig(cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=max_num_seqs))
        made: list[FaultyRunner] = []

        def make_runner(scheduler: Any) -> FaultyRunner:
            made.append(FaultyRunner(scheduler.rows, poison, on_step))
            return made[0]

        groups = (CacheGroup((0,), None, blocks),)
        engine = Engine(config, SPEC, groups, 256, make_runner, clock.monotonic)
        limits = ModelLimits(256, SPEC.vocab_size, SPEC.eos_token_ids)
        model = LoadedModel(
            "tiny", "tiny", engine, byte_level, limits, "float32", max_num_seqs, aliases=frozenset({"demo"})
        )
        return model, made[0]

    return host


@pytest.fixture
def run_worker(kit: Any) -> Any:
    """Runs a worker to its end, without threads: (progress, sink)."""

    def run_worker(model: LoadedModel, shards: list[ShardWork], **more: Any) -> tuple[WorkerProgress, Any]:
        sink = more.pop("sink", None) or kit.MemorySink()
        clock = more.pop("clock", None) or kit.FakeClock()
        stop = more.pop("stop", None)
        more.setdefault("helper", kit.InlineExecutor())
        source = more.pop("source", None) or kit.ListSource(shards)
        return ShardWorker(model, source, sink, clock, **more).run(stop), sink

    return run_worker


def test_each_row_of_each_shard_has_one_result(host: Any, run_worker: Any, kit: Any) -> None:
    # Given three shards with good rows, rows that can't be, and copies
    model, _ = host()
    bodies = [kit.chat("a", max_tokens=5), 0, kit.chat("b", max_tokens=900), kit.chat("c", model="gpt-9"), 3]
    shards = [
        kit.make_work(
            [body if not isinstance(body, int) else body + 10 * at for body in bodies], shard=at + 1, first_row=10 * at
        )
        for at in range(3)
    ]
    # When a worker is done with them
    progress, sink = run_worker(model, shards)
    # Then each row has its result, in its shard's part
    assert {shard: [row.row for row in part] for shard, part in sink.parts.items()} == {
        1: [0, 1, 2, 3, 4], 2: [10, 11, 12, 13, 14], 3: [20, 21, 22, 23, 24],
    }  # fmt: skip
    for at in (0, 10, 20):
        first, copy, too_long, unknown, unknown_copy = (sink.rows[at + offset] for offset in range(5))
        assert first.status == copy.status == RowStatus.SUCCEEDED
        assert first.text == copy.text
        assert (first.custom_id, copy.custom_id) == (f"id-{at}", f"id-{at + 1}")
        assert first.completion_tokens == 5
        assert too_long.error_code == RowErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert unknown.error_code == unknown_copy.error_code == RowErrorCode.MODEL_NOT_FOUND
        assert "'gpt-9' is not loaded; this run serves demo, tiny" in unknown.error_message
    counts = progress.counts
    assert (progress.rows, counts.succeeded, counts.failed, counts.committed) == (15, 6, 9, 15)
    assert (counts.shards_committed, progress.shards_open, progress.stopped) == (3, 0, False)
    # and usage counts a copy once
    usage = sink.usages[1]
    assert (usage.prompt, usage.completion) == (sink.rows[0].prompt_tokens, 5)
    assert sum(usage.completion for usage in sink.usages.values()) == counts.completion_tokens == 15


def test_a_shard_of_only_bad_rows_is_committed(host: Any, run_worker: Any, kit: Any) -> None:
    model, _ = host()
    progress, sink = run_worker(model, [kit.make_work([kit.chat(model="no")])])
    assert sink.rows[0].error_code == RowErrorCode.MODEL_NOT_FOUND
    assert sink.reports[1].engine_started_at is None
    assert progress.counts.failed == 1


def test_without_shards_the_worker_ends(host: Any, run_worker: Any) -> None:
    model, runner = host()
    progress, sink = run_worker(model, [])
    assert (progress.rows, sink.parts, runner.batches) == (0, {}, [])


def test_names_that_the_model_answers_to(host: Any, run_worker: Any, kit: Any) -> None:
    model, _ = host()
    _, sink = run_worker(model, [kit.make_work([kit.chat(model="demo", max_tokens=1)])])
    assert sink.rows[0].status == RowStatus.SUCCEEDED
    assert sink.rows[0].model == json.loads(sink.rows[0].response)["model"] == "demo"


def test_the_batch_stays_full_between_shards(host: Any, run_worker: Any, kit: Any) -> None:
    # Given shards whose answers differ in length, so that each thins out towards its end
    model, runner = host(max_num_seqs=8)
    shards = [
        kit.make_work([kit.chat(max_tokens=2 + 6 * row) for row in range(8)], shard=number, first_row=8 * number)
        for number in range(1, 7)
    ]
    run_worker(model, shards)
    # When the next one begins before the last one ends, then only the very end is thin
    full = [size for size in runner.batches if size == 8]
    assert len(full) / len(runner.batches) > 0.7
    longest = 2 + 6 * 7
    thin = len(runner.batches) - len(full)
    assert thin <= longest


def test_the_longest_answer_starts_early_though_the_last_shard_is_not_known(
    host: Any, run_worker: Any, kit: Any
) -> None:
    # Given a source that can't exclude that a shard comes back, until all are committed
    sink = kit.MemorySink()

    class Source(kit.ListSource):  # type: ignore[misc,name-defined]
        def finished(self) -> bool:
            return len(sink.parts) == 2

    model, runner = host(max_num_seqs=4)
    lengths = [6] * 80
    lengths[-1] = 60  # in the planner's order it is the last to begin
    work = [
        kit.make_work([kit.chat(max_tokens=n) for n in lengths[first : first + 40]], shard=number, first_row=first)
        for number, first in ((1, 0), (2, 40))
    ]
    for number, first in enumerate((0, 40)):
        table = work[number].table
        at = table.schema.get_field_index("expected_tokens")
        column = pa.array(lengths[first : first + 40], type=table.schema.field(at).type)
        work[number] = replace(work[number], table=table.set_column(at, table.schema.field(at), column))
    # when all are answered,
    run_worker(model, work, sink=sink, source=Source(work))
    # then it did not begin last and end alone.
    assert [row.completion_tokens for row in sink.rows.values()] == lengths
    assert len(runner.batches) < sum(lengths) / 4 + 20


def test_memory_is_bounded_by_the_open_shards(host: Any, run_worker: Any, kit: Any) -> None:
    # Given many shards, each with one long answer that keeps it open
    model, _ = host(max_num_seqs=16)
    shards = [
        kit.make_work([kit.chat(max_tokens=200), kit.chat(max_tokens=1)], shard=number, first_row=2 * number)
        for number in range(1, 20)
    ]
    seen: list[int] = []

    class ProgressObserver:
        def progress(self, progress: WorkerProgress) -> None:
            seen.append(progress.shards_open)

    settings = WorkerSettings(max_open_shards=3, report_interval_seconds=0.0)
    progress, _ = run_worker(model, shards, settings=settings, observer=ProgressObserver())
    assert max(seen) == 3
    assert progress.rows == 38


def test_a_poison_row_fails_alone(host: Any, run_worker: Any, kit: Any) -> None:
    # Given a row that makes every step fail that it is part of
    model, _ = host(poison=POISON)
    clean, _ = host()
    bodies = [kit.completion(f"row {row}", max_tokens=4, temperature=0) for row in range(11)]
    bodies[5] = kit.completion([POISON, 50], max_tokens=4)
    progress, sink = run_worker(model, [kit.make_work(bodies)])
    # Then it fails with the reason, and all others have the answers that they would have had
    assert sink.rows[5].error_code == RowErrorCode.ENGINE_ERROR
    assert "the device said no" in sink.rows[5].error_message
    assert (progress.counts.succeeded, progress.counts.failed) == (10, 1)
    bodies[5] = kit.completion("fine", max_tokens=4)
    _, expected = run_worker(clean, [kit.make_work(bodies)])
    for row in set(range(11)) - {5}:
        assert sink.rows[row].text == expected.rows[row].text
        assert sink.rows[row].completion_tokens == 4


def test_after_a_failed_step_rows_resume_from_their_tokens(host: Any, run_worker: Any, kit: Any) -> None:
    # Given a step that fails once, late, and a log of each step
    bodies = [kit.completion(f"row {row}", max_tokens=20 + row, n=1 + row % 2, temperature=0.9) for row in range(6)]
    bodies[4] = kit.completion("row 4", max_tokens=30, n=2, stop=["q", "e"], temperature=1.0)
    steps = 0

    def fails_once() -> None:
        nonlocal steps
        steps += 1
        if steps == 15:
            raise RuntimeError("the device said no")

    for settings in (WorkerSettings(checkpoint_seconds=0), WorkerSettings(checkpoint_seconds=1e9)):
        steps = 0
        model, _ = host(on_step=fails_once)
        clean, _ = host()
        _, sink = run_worker(model, [kit.make_work(bodies)], settings=settings)
        _, expected = run_worker(clean, [kit.make_work(bodies)], settings=settings)
        # Then no token is sampled twice, all answers are as they would have been, and logs never start again
        assert {row: r.text for row, r in sink.rows.items()} == {row: r.text for row, r in expected.rows.items()}
        assert sink.reports[1].generated == sink.usages[1].completion == expected.usages[1].completion
        assert model.engine.stats().generated == expected.usages[1].completion
        reached: dict[tuple[int, int], int] = {}
        for point in sink.checkpoints.get(1, []):
            for choice in point.running:
                key = choice.row, choice.choice
                assert choice.start == reached.get(key, 0)
                reached[key] = choice.start + len(choice.token_ids)


def test_rows_that_fail_alone_are_held_back_until_the_engine_has_shown_that_it_works(host: Any, kit: Any) -> None:
    # Given an engine that fails with everything, slowly, and a log of each step, then no row is logged as failed
    clock = kit.FakeClock()
    model, _ = host(poison=ALWAYS, clock=clock, on_step=lambda: clock.sleep(1.0))
    sink = kit.MemorySink()
    source = kit.ListSource([kit.make_work([kit.chat(max_tokens=4) for _ in range(8)])])
    worker = ShardWorker(model, source, sink, clock, WorkerSettings(checkpoint_seconds=0), helper=kit.InlineExecutor())
    with pytest.raises(BrokenEngineError):
        worker.run()
    assert not [row for point in sink.checkpoints.get(1, []) for row in point.finished["row"].to_pylist()]
    assert sink.released == [1], "the end of the attempt is recorded"


def test_a_single_row_that_fails_is_a_failed_row(host: Any, run_worker: Any, kit: Any) -> None:
    # Given no other row that could show whether it is the engine
    model, _ = host(poison=POISON)
    progress, sink = run_worker(model, [kit.make_work([kit.completion([POISON, 50], max_tokens=4)])])
    assert progress.counts.failed == 1
    assert sink.rows[0].error_code == RowErrorCode.ENGINE_ERROR


def test_given_an_engine_that_prefills_but_cant_decode_when_rows_fail_then_no_row_is_blamed(
    host: Any, kit: Any
) -> None:
    # Given first steps that work, and a log of each step
    model, runner = host()
    execute = runner.execute

    def no_decodes(plan: StepPlan) -> StepOutput:
        if plan.num_decodes:
            raise RuntimeError("the device said no")
        output: StepOutput = execute(plan)
        return output

    runner.execute = no_decodes
    sink = kit.MemorySink()
    source = kit.ListSource([kit.make_work([kit.chat(max_tokens=4) for _ in range(8)])])
    worker = ShardWorker(
        model, source, sink, kit.FakeClock(), WorkerSettings(checkpoint_seconds=0), helper=kit.InlineExecutor()
    )
    with pytest.raises(BrokenEngineError):
        worker.run()
    assert not [row for point in sink.checkpoints[1] for row in point.finished["row"].to_pylist()]


def test_given_many_poison_rows_when_each_fails_alone_then_the_engine_does_not_count_as_broken(
    host: Any, run_worker: Any, kit: Any
) -> None:
    model, _ = host(poison=POISON)
    bodies = [kit.completion([POISON, row], max_tokens=4) for row in range(50, 58)]
    progress, _ = run_worker(model, [kit.make_work([*bodies, kit.chat(max_tokens=3)])])
    assert (progress.counts.failed, progress.counts.succeeded) == (8, 1)


@pytest.mark.parametrize("polls", [16, 17, 18])
def test_given_a_stop_just_after_a_failed_step_when_shards_are_released_then_all_tokens_are_logged(
    polls: int, host: Any, run_worker: Any, kit: Any
) -> None:
    steps = 0

    def fails_once() -> None:
        nonlocal steps
        steps += 1
        if steps == 15:
            raise RuntimeError("the device said no")

    class StopAfter:
        left = polls

        def is_set(self) -> bool:
            self.left -= 1
            return self.left < 0

    model, _ = host(on_step=fails_once)
    shard = kit.make_work([kit.completion(f"row {row}", max_tokens=50) for row in range(6)])
    _, sink = run_worker(model, [shard], settings=WorkerSettings(checkpoint_seconds=1e9), stop=StopAfter())
    logged = sum(len(choice.token_ids) for point in sink.checkpoints[1] for choice in point.running)
    assert logged == model.engine.stats().generated >= 6 * 13
    assert sink.checkpoints[1][-1].head.generated == logged


@pytest.mark.parametrize("rows", [1, 2])
def test_given_a_broken_engine_and_hardly_a_row_when_they_fail_then_they_are_not_blamed(
    rows: int, host: Any, kit: Any
) -> None:
    model, _ = host(poison=ALWAYS)
    sink = kit.MemorySink()
    source = kit.ListSource([kit.make_work([kit.chat(max_tokens=4) for _ in range(rows)])])
    with pytest.raises(BrokenEngineError, match=r"every request.*the device said no"):
        ShardWorker(model, source, sink, kit.FakeClock(), helper=kit.InlineExecutor()).run()
    assert (sink.parts, sink.released) == ({}, [1])


def test_two_poison_rows_fail_and_the_others_succeed(host: Any, run_worker: Any, kit: Any) -> None:
    model, _ = host(poison=POISON)
    bodies = [kit.completion(f"row {row}", max_tokens=4) for row in range(20)]
    bodies[3] = bodies[17] = kit.completion([POISON], max_tokens=4, n=2)
    progress, sink = run_worker(model, [kit.make_work(bodies)])
    assert [row for row, result in sink.rows.items() if result.status == RowStatus.FAILED] == [3, 17]
    assert progress.counts.succeeded == 18


def test_a_broken_engine_stops_the_run_and_fails_no_row(host: Any, kit: Any) -> None:
    # Given an engine that fails with whatever it gets, then the run ends, and no row is marked as its own fault
    model, runner = host(poison=ALWAYS)
    sink = kit.MemorySink()
    source = kit.ListSource([kit.make_work([kit.chat(max_tokens=4) for _ in range(30)])])
    with pytest.raises(BrokenEngineError, match=r"every request.*the device said no"):
        ShardWorker(model, source, sink, kit.FakeClock(), helper=kit.InlineExecutor()).run()
    assert sink.parts == {}
    assert len(runner.batches) < 15


def test_a_request_that_takes_too_long_times_out(host: Any, run_worker: Any, kit: Any) -> None:
    # Given steps of one second, and a limit of five
    clock = kit.FakeClock()
    model, _ = host(clock=clock, on_step=lambda: clock.sleep(1.0))
    shard = kit.make_work([kit.chat(max_tokens=3), kit.chat(max_tokens=100)])
    _, sink = run_worker(model, [shard], settings=WorkerSettings(request_timeout_seconds=5.0), clock=clock)
    assert sink.rows[0].status == RowStatus.SUCCEEDED
    assert (sink.rows[1].error_code, sink.rows[1].status_code) == (RowErrorCode.REQUEST_TIMEOUT, 408)
    # The tokens that it cost are in the usage
    assert sink.usages[1].completion > 3


@pytest.mark.slow
def test_waiting_for_others_does_not_count_as_time_taken(host: Any, run_worker: Any, kit: Any) -> None:
    # Given far more rows than run at once, each well under the limit
    clock = kit.FakeClock()
    model, _ = host(clock=clock, on_step=lambda: clock.sleep(1.0), max_num_seqs=8)
    shard = kit.make_work([kit.chat(max_tokens=3) for _ in range(100)])
    progress, _ = run_worker(model, [shard], settings=WorkerSettings(request_timeout_seconds=7.0), clock=clock)
    assert progress.counts.succeeded == 100


def test_a_row_that_the_engine_refuses_fails(host: Any, run_worker: Any, kit: Any) -> None:
    # Given a cache too small for the longest answer that the context would allow
    model, _ = host(blocks=4)
    _, sink = run_worker(model, [kit.make_work([kit.chat(max_tokens=200), kit.chat(max_tokens=4)])])
    assert sink.rows[0].error_code == RowErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert sink.rows[1].status == RowStatus.SUCCEEDED


def test_a_stop_releases_unfinished_shards(host: Any, run_worker: Any, kit: Any) -> None:
    # Given a worker that is stopped while one shard is done and others are not
    stop = threading.Event()
    steps = 0

    def on_step() -> None:
        nonlocal steps
        steps += 1
        if steps == 20:
            stop.set()

    model, _ = host(on_step=on_step)
    shards = [kit.make_work([kit.chat(max_tokens=10)], shard=1)]
    shards += [kit.make_work([kit.chat(max_tokens=100)], shard=n, first_row=n) for n in (2, 3)]
    progress, sink = run_worker(model, shards, stop=stop)
    # Then what was done is committed, and the others are released, not failed
    assert progress.stopped
    assert list(sink.parts) == [1]
    assert sink.released == [2, 3]
    assert not model.engine.has_work
    # and the engine can be used again
    again, sink = run_worker(model, [kit.make_work([kit.chat(max_tokens=2)])])
    assert again.counts.succeeded == 1


def test_a_shard_that_another_attempt_committed_first(host: Any, run_worker: Any, kit: Any) -> None:
    model, _ = host()
    shards = [kit.make_work([kit.chat(max_tokens=2)], shard=n, first_row=n) for n in (1, 2)]
    progress, sink = run_worker(model, shards, sink=kit.MemorySink(lost=[1]))
    assert list(sink.parts) == [2]
    assert (progress.counts.shards_lost, progress.counts.shards_committed, progress.counts.committed) == (1, 1, 1)


@pytest.mark.parametrize(
    "pin",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float32", "digest": "sha256:other"},
        {"dtype": "float32", "quantization": "int8"},
        {"dtype": "float32", "kv_dtype": "int8"},
    ],
)
def test_a_job_pinned_to_another_model_is_refused_whole(host: Any, run_worker: Any, kit: Any, pin: Any) -> None:
    model, _ = host()
    model = LoadedModel(
        model.name, model.source, model.engine, model.tokenizer, model.limits, "float32", 8, digest="sha256:mine"
    )
    job = kit.make_job().model_copy(update={"models": (ModelPin(name="tiny", source="tiny", **pin),)})
    sink = kit.MemorySink()
    with pytest.raises(ModelMismatchError, match="job-1 was begun with"):
        run_worker(model, [kit.make_work([kit.chat(max_tokens=2)], job=job)], sink=sink)
    assert sink.parts == {}


def test_a_failing_sink_ends_the_run(host: Any, run_worker: Any, kit: Any) -> None:
    class FullDisk(kit.MemorySink):  # type: ignore[misc]
        def commit(self, *args: Any) -> bool:
            raise StoreError("disk full")

    model, _ = host()
    with pytest.raises(StoreError, match="disk full"):
        run_worker(model, [kit.make_work([kit.chat(max_tokens=2)])], sink=FullDisk())


class UnexpectedFailure(Exception):
    """An unexpected exception, of a class that no code catches by name."""


def test_given_a_shard_whose_part_cant_be_made_then_it_is_given_up_and_the_others_are_committed(
    host: Any, run_worker: Any, kit: Any
) -> None:
    class FailingSink(kit.MemorySink):  # type: ignore[misc]
        def commit(self, work: Any, *args: Any) -> bool:
            if work.shard == 1:
                raise UnexpectedFailure("planted")
            return bool(super().commit(work, *args))

    model, _ = host()
    shards = [kit.make_work([kit.chat(max_tokens=2)], shard=n, first_row=n) for n in (1, 2)]
    _, sink = run_worker(model, shards, sink=FailingSink())
    assert (list(sink.parts), list(sink.given_up)) == ([2], [1])


def test_given_a_shard_that_cant_be_prepared_then_it_is_given_up_and_the_others_are_committed(
    host: Any, run_worker: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ShardReader.prepare

    def broken(reader: ShardReader, work: Any) -> Any:
        if work.shard == 1:
            raise UnexpectedFailure("planted")
        return real(reader, work)

    monkeypatch.setattr(ShardReader, "prepare", broken)
    model, _ = host()
    shards = [kit.make_work([kit.chat(max_tokens=2)], shard=n, first_row=n) for n in (1, 2)]
    _, sink = run_worker(model, shards)
    assert (list(sink.parts), list(sink.given_up)) == ([2], [1])


@pytest.mark.parametrize("write", ["begin", "checkpoint", "note"])
def test_given_a_shard_whose_record_cant_be_written_then_it_is_given_up_and_the_others_are_committed(
    write: str, host: Any, run_worker: Any, kit: Any
) -> None:
    class FailingSink(kit.MemorySink):  # type: ignore[misc]
        def _fail(self, kind: str, work: Any) -> None:
            if (kind, work.shard) == (write, 1):
                raise UnexpectedFailure("planted")

        def begin(self, work: Any) -> None:
            self._fail("begin", work)
            super().begin(work)

        def checkpoint(self, work: Any, new: Any) -> None:
            self._fail("checkpoint", work)
            super().checkpoint(work, new)

        def record(self, work: Any, rows: Any) -> None:
            self._fail("note", work)
            super().record(work, rows)

    model, _ = host()
    died = ShardHistory(silent=2) if write == "note" else ShardHistory()
    shards = [
        replace(kit.make_work([kit.chat(max_tokens=9)] * 3, shard=n, first_row=10 * n), history=died) for n in (1, 2)
    ]
    settings = WorkerSettings(checkpoint_seconds=0.0)
    _, sink = run_worker(model, shards, sink=FailingSink(), settings=settings)
    assert list(sink.parts) == [2]
    assert (list(sink.given_up), sink.released) == ([1], [])
    assert isinstance(sink.given_up[1], UnexpectedFailure)
    assert not model.engine.has_work


def test_a_worker_sends_heartbeats(host: Any, run_worker: Any, kit: Any) -> None:
    # Given steps of half a second, then a heartbeat comes every three seconds, with the held shards
    clock = kit.FakeClock()
    model, _ = host(clock=clock, on_step=lambda: clock.sleep(0.5))
    _, sink = run_worker(model, [kit.make_work([kit.chat(max_tokens=60)], shard=4)], clock=clock)
    assert len([held for held in sink.held if held == [4]]) >= 9


@pytest.mark.parametrize("blocked", ["checkpoint", "commit", "release", "give_up"])
@pytest.mark.slow
def test_given_a_slow_write_to_the_store_then_heartbeats_are_still_sent(blocked: str, host: Any, kit: Any) -> None:
    # Given a write that is not through before three heartbeats were sent after it began
    clock, beats = kit.FakeClock(), threading.Condition()
    stop, written = threading.Event(), threading.Event()

    class SlowSink(kit.MemorySink):  # type: ignore[misc,name-defined]
        def send_heartbeat(self, *args: Any) -> None:
            super().send_heartbeat(*args)
            with beats:
                beats.notify_all()

        def wait(self, what: str) -> None:
            if what != blocked:
                return
            then = len(self.held)
            for _ in range(3000):  # a guard against hanging
                clock.sleep(1.0)
                with beats:
                    if len(self.held) >= then + 3:
                        written.set()
                        return
                    beats.wait(0.02)
            raise AssertionError("heartbeats wait for the write")

        def checkpoint(self, *args: Any) -> None:
            super().checkpoint(*args)
            self.wait("checkpoint")

        def commit(self, work: Any, *args: Any) -> bool:
            if blocked == "give_up" and work.shard == 1:
                raise UnexpectedFailure("planted")
            won: bool = super().commit(work, *args)
            self.wait("commit")
            return won

        def release(self, *args: Any) -> None:
            super().release(*args)
            self.wait("release")

        def give_up(self, *args: Any) -> None:
            super().give_up(*args)
            self.wait("give_up")

    def on_step() -> None:
        clock.sleep(0.5)
        if blocked == "release" and len(sink.held) > 3:
            stop.set()

    sink = SlowSink()
    model, _ = host(clock=clock, on_step=on_step)
    shards = [kit.make_work([kit.chat(max_tokens=100)], shard=n, first_row=n) for n in (1, 2)]
    shards[0] = kit.make_work([kit.chat(max_tokens=2)], shard=1) if blocked in ("commit", "give_up") else shards[0]
    ShardWorker(model, kit.ListSource(shards), sink, clock).run(stop)
    assert written.is_set(), f"no {blocked} was slow"
    assert stop.is_set() or sorted([*sink.parts, *sink.given_up]) == [1, 2]


def test_given_a_part_that_cant_be_made_when_the_worker_is_stopped_then_its_shard_is_given_up(
    host: Any, kit: Any
) -> None:
    stop = threading.Event()

    class FailingSink(kit.MemorySink):  # type: ignore[misc]
        def commit(self, *args: Any) -> bool:
            stop.set()
            raise UnexpectedFailure("planted")

    model, _ = host()
    sink = FailingSink()
    work = kit.make_work([kit.chat(max_tokens=2)])
    ShardWorker(model, kit.ListSource([work]), sink, kit.FakeClock(), helper=InlineExecutor()).run(stop)
    assert (list(sink.given_up), sink.released) == ([1], [])


def test_given_a_shard_that_another_worker_committed_then_it_is_released_without_a_checkpoint(
    host: Any, kit: Any, run_worker: Any
) -> None:
    clock, sink = kit.FakeClock(), kit.MemorySink()
    steps = 0

    def on_step() -> None:
        nonlocal steps
        clock.sleep(0.5)
        steps += 1
        if steps == 8:
            sink.committed_elsewhere.add(("job-1", 1))

    model, _ = host(clock=clock, on_step=on_step)
    shards = [kit.make_work([kit.chat(max_tokens=100)], shard=n, first_row=n) for n in (1, 2)]
    settings = WorkerSettings(checkpoint_seconds=1e9)
    progress, _ = run_worker(model, shards, sink=sink, clock=clock, settings=settings)
    assert (sink.released, list(sink.parts)) == ([1], [2])
    assert not [point for point in sink.checkpoints[1] if point.head.final], "what stands needs no log"
    assert progress.counts.completion_tokens == 100


def test_result_times_are_utc(host: Any, run_worker: Any, kit: Any) -> None:
    clock = kit.FakeClock()
    model, _ = host(clock=clock, on_step=lambda: clock.sleep(1.0))
    _, sink = run_worker(model, [kit.make_work([kit.chat(max_tokens=10)])], clock=clock)
    row = sink.rows[0]
    assert row.created_at == kit.NOON
    assert 8 <= (row.finished_at - row.started_at).total_seconds() <= 11
    assert 0 <= (row.started_at - kit.NOON).total_seconds() <= 2
    assert sink.reports[1].engine_started_at == row.started_at
    assert sink.reports[1].engine_finished_at == row.finished_at


def test_answers_are_the_same_with_and_without_threads(host: Any, run_worker: Any, kit: Any) -> None:
    # Given the same shards, with the helper on a thread of its own and without
    def run(**more: Any) -> dict[int, Any]:
        model, _ = host(max_num_seqs=4)
        shards = [
            kit.make_work([kit.chat(f"{n} {row}", max_tokens=7) for row in range(20)], shard=n, first_row=20 * n)
            for n in range(1, 6)
        ]
        _, sink = run_worker(model, shards, **more)
        return {row: (result.text, result.completion_tokens) for row, result in sink.rows.items()}

    assert run(helper=None) == run()


@pytest.mark.slow
def test_a_slow_preparation_delays_no_checkpoint(host: Any, kit: Any) -> None:
    # Given a second shard that can't be had before something of the first is logged, and a heartbeat was sent
    logged = threading.Event()

    class Sink(kit.MemorySink):  # type: ignore[misc]
        def checkpoint(self, *args: Any) -> None:
            super().checkpoint(*args)
            logged.set()

    class SlowSource(kit.ListSource):  # type: ignore[misc]
        def take(self, timeout: float, tiers: Sequence[Tier] = ()) -> ShardWork | None:
            if self.taken:
                assert logged.wait(HANG_SECONDS), "the log waits for the shard"
            work: ShardWork | None = super().take(timeout, tiers)
            return work

    model, _ = host(clock=SystemClock(), on_step=lambda: time.sleep(0.001))
    shards = [kit.make_work([kit.chat(max_tokens=200)], shard=n, first_row=n) for n in (1, 2)]
    sink = Sink()
    ShardWorker(model, SlowSource(shards), sink, SystemClock(), WorkerSettings(checkpoint_seconds=0.02)).run()
    assert sorted(sink.parts) == [1, 2]


def test_stop_strings_reach_into_the_engine(host: Any, run_worker: Any, kit: Any) -> None:
    # Given an answer with a known piece, when that is a stop string, then the answer ends before it
    model, _ = host()
    _, sink = run_worker(model, [kit.make_work([kit.completion("x", max_tokens=12)])])
    text = sink.rows[0].text
    piece = text[5:8]
    _, sink = run_worker(model, [kit.make_work([kit.completion("x", max_tokens=12, stop=[piece])])])
    assert sink.rows[0].text == text[: text.index(piece)]
    assert sink.rows[0].finish_reason == "stop"
    assert np.int32(sink.rows[0].completion_tokens) < 12
