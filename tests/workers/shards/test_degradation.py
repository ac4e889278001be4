"""Bulk work is paused and resumes by itself: no row is lost, none changes, and none is computed again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from engine.plan import CacheGroup
from schemas.jobs.job import Tier
from schemas.settings.overload import StepName
from tests.cluster.null_worker import PromptRunner
from tests.workers.shards.test_urgent_shards import SPEC, TieredSource, shard
from workers.model.loaded_model import LoadedModel
from workers.settings import WorkerSettings
from workers.shards.worker import ShardWorker
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import ModelLimits

PAUSED: frozenset[StepName] = frozenset({"pause_bulk"})


@pytest.fixture
def model(byte_level: Tokenizer, kit: Any) -> LoadedModel:
    """Its tokens depend on the whole prompt, the position and the last token."""
    config = EngineConfig(cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=4))
    engine = Engine(
        config, SPEC, (CacheGroup((0,), None, 400),), 256, lambda made: PromptRunner(made.rows, SPEC.vocab_size),
        kit.FakeClock().monotonic,
    )  # fmt: skip
    limits = ModelLimits(256, SPEC.vocab_size, SPEC.eos_token_ids)
    return LoadedModel("tiny", "tiny", engine, byte_level, limits, "float32", 4)


class Script:
    """The active steps by the number of the loop's iteration: paused from `begin` to `end`; notes what was sampled
    meanwhile."""

    def __init__(self, engine: Any, begin: int, end: int) -> None:
        self.engine, self.begin, self.end = engine, begin, end
        self.iterations = 0
        self.sampled: list[int] = []
        self.running: list[int] = []

    def __call__(self) -> Collection[StepName]:
        self.iterations += 1
        if not self.begin <= self.iterations < self.end:
            return ()
        self.sampled.append(self.engine.stats().generated)
        self.running.append(self.engine.num_running + self.engine.num_waiting)
        return PAUSED


class LastingSource(TieredSource):
    """A source that may have more shards, as far as the worker knows, until the pause of its script has ended."""

    script: Script | None = None

    def finished(self) -> bool:
        is_paused = self.script is not None and self.script.iterations < self.script.end
        return not is_paused and super().finished()


def run(kit: Any, model: Any, source: TieredSource, degradation: Any) -> Any:
    if isinstance(source, LastingSource) and isinstance(degradation, Script):
        source.script = degradation
    sink = kit.MemorySink()
    settings = WorkerSettings(poll_interval_seconds=0.0)
    ShardWorker(
        model, source, sink, kit.FakeClock(), settings, None, kit.InlineExecutor(), degradation=degradation
    ).run()  # fmt: skip
    return sink


def texts(sink: Any) -> dict[Any, Any]:
    return {key: (row.text, row.completion_tokens) for key, row in sink.rows.items()}


def test_paused_bulk_rows_keep_their_place_and_resume_with_their_tokens(model: LoadedModel, kit: Any) -> None:
    # Given bulk shards, and what they answer without a pause,
    def source() -> LastingSource:
        return LastingSource([shard(kit, number, Tier.BULK, rows=6, tokens=40) for number in (1, 2, 3)], {})

    expected = texts(run(kit, model, source(), lambda: ()))
    before = model.engine.stats().generated
    # when bulk work is paused in the middle,
    script = Script(model.engine, 25, 400)
    sink = run(kit, model, source(), script)
    # then nothing is in the engine, nothing more is sampled until the end of the pause,
    assert script.running[0] > 0
    assert set(script.running[3:]) == {0}
    assert len(set(script.sampled[3:])) == 1
    assert 0 < script.sampled[-1] - before < sum(tokens for _, tokens in expected.values())
    # and all rows are as without it, and no token was sampled twice.
    assert texts(sink) == expected
    assert model.engine.stats().generated - before == sum(tokens for _, tokens in expected.values())


def test_standard_shards_are_computed_while_bulk_work_is_paused(model: LoadedModel, kit: Any) -> None:
    # Given more bulk shards than may be open, paused from the start, when a standard one comes,
    bulk = [shard(kit, number, Tier.BULK, rows=6, tokens=10) for number in range(1, 8)]
    source = LastingSource(bulk, {60: shard(kit, 9, Tier.STANDARD, rows=3, tokens=5)})
    script = Script(model.engine, 10, 1_000)
    sink = run(kit, model, source, script)
    # then it is done first, in the pause.
    assert next(iter(sink.parts)) == 9
    assert script.sampled[-1] > script.sampled[5]
    assert sorted(sink.parts) == [1, 2, 3, 4, 5, 6, 7, 9]


def test_no_bulk_shard_is_taken_in_a_pause(model: LoadedModel, kit: Any) -> None:
    source = LastingSource([shard(kit, number, Tier.BULK, rows=2, tokens=3) for number in (1, 2)], {})
    taken: list[int] = []

    class Paused(Script):
        def __call__(self) -> Collection[StepName]:
            active = super().__call__()
            if active:
                taken.append(len(source.taken))
            return active

    run(kit, model, source, Paused(model.engine, 1, 50))
    assert set(taken) == {0}
    assert source.taken == [1, 2]


def test_paused_shards_are_released_with_their_tokens_when_the_source_is_finished(model: LoadedModel, kit: Any) -> None:
    # Given two open bulk shards, whose source ends (another model's turn has come) while bulk work stays paused,
    source = TieredSource([shard(kit, number, Tier.BULK, rows=6, tokens=40) for number in (1, 2)], {})
    # when the worker runs,
    sink = run(kit, model, source, Script(model.engine, 25, 2_000))
    # then it ends: both shards are released with a last checkpoint, and none is committed.
    assert sorted(sink.released) == [1, 2]
    assert sink.parts == {}
    last = [checkpoints[-1].head for checkpoints in sink.checkpoints.values()]
    assert all(head.final for head in last)
    assert sum(head.generated for head in last) > 0
