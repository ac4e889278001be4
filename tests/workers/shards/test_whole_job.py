"""A whole job through planner, worker and scheduler, on a runner that answers at once and charges each step what a
model would take: how close is the order to the best one possible?"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from shared_prefix import best_hits

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from engine.models.base import ModelSpec
from engine.plan import CacheGroup, StepOutput, StepPlan
from engine.runner.null_runner import NullRunner
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.stats import SchedulerStats
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.planner import SourceFile, StoredShard, open_source, plan
from pipeline.ports import World
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.inputs import InputFormat
from schemas.jobs.plan import PlanSegment
from schemas.requests.limits import Limits
from workers.model.loaded_model import LoadedModel
from workers.shards.worker import ShardWorker
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import ModelLimits

ROWS, BLOCK, VOCABULARY = 128, 32, 400
SPEC = ModelSpec(
    architecture="none", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, vocab_size=VOCABULARY,
    max_position=8192, windows=(None,), eos_token_ids=(2,), num_parameters=0, dtype=torch.float32,
)  # fmt: skip
STEP_SECONDS, TOKEN_SECONDS, CONTEXT_SECONDS = 0.02, 1.7e-4, 1e-6  # about those of 135 M parameters on two cores

RequestSize = tuple[list[int], int]
"""Prompt, and tokens that the answer will have."""


class CostModelRunner(NullRunner):
    """Records for each step its running rows, its tokens, and the seconds that it would take."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler.rows, VOCABULARY, first_token=10)
        self._scheduler = scheduler
        self.steps: list[tuple[int, int, float]] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        context = int((plan.starts + plan.counts).sum())
        seconds = STEP_SECONDS + TOKEN_SECONDS * plan.num_tokens + CONTEXT_SECONDS * context
        self.steps.append((self._scheduler.num_running, plan.num_tokens, seconds))
        return super().execute(plan)


class MemoryPlanSink:
    """A `PlanSink` that stores the shards."""

    def __init__(self) -> None:
        self.tables: dict[int, pa.Table] = {}

    def existing_segment(self, index: int) -> PlanSegment | None:
        return None

    def write_shard(self, number: int, table: pa.Table) -> StoredShard:
        self.tables[number] = table
        return StoredShard(f"shards/{number}", "0" * 64, 1)

    def reused_keys(self, segment: PlanSegment) -> list[bytes]:
        return []

    def write_results(self, table: pa.Table) -> None:
        raise AssertionError(table.to_pylist())

    def store_results(self, number: int) -> StoredShard:
        return StoredShard(f"rejects/{number}", "0" * 64, 0)

    def commit_segment(self, segment: PlanSegment) -> PlanSegment:
        return segment


@dataclass
class JobRun:
    """The measurements of a job. `cached`: prompt tokens that were not computed."""

    steps: list[tuple[int, int, float]]
    cached: int
    stats: SchedulerStats

    @property
    def mean_rows(self) -> float:
        rows, _, seconds = np.array(self.steps).T
        return float((rows * seconds).sum() / seconds.sum())

    @property
    def tail_share(self) -> float:
        """Share of the time with under a quarter of the slots busy."""
        rows, _, seconds = np.array(self.steps).T
        return float(seconds[rows < ROWS / 4].sum() / seconds.sum())


@pytest.fixture
def run(byte_level: Tokenizer, kit: Any, tmp_path: Path) -> Callable[..., JobRun]:
    def run(requests: list[RequestSize], blocks: int = 16_000, rows: int = ROWS) -> JobRun:
        job = kit.make_job()
        lines = []
        for number, (prompt, length) in enumerate(requests):
            body = kit.completion(prompt, max_tokens=length, temperature=0, ignore_eos=True)
            lines.append(
                json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
            )
        data, sink = "\n".join(lines).encode(), MemoryPlanSink()
        source = open_source([SourceFile("in.jsonl", lambda: io.BytesIO(data))], InputFormat.JSONL, Limits())
        world = World(FolderStore(tmp_path / "store"), SystemClock(), SystemRandomness(), tmp_path)
        plan(source, job, sink, world, attempt="planner")

        runners: list[CostModelRunner] = []

        def make_runner(scheduler: Scheduler) -> CostModelRunner:
            runners.append(CostModelRunner(scheduler))
            return runners[0]

        config = EngineConfig(cache=CacheConfig(block_size=BLOCK), schedule=ScheduleConfig(rows, 2048))
        groups = (CacheGroup((0,), None, blocks + 1),)
        clock = kit.FakeClock()
        engine = Engine(config, SPEC, groups, 8192, make_runner, clock.monotonic)
        limits = ModelLimits(8192, VOCABULARY, SPEC.eos_token_ids)
        model = LoadedModel("tiny", "tiny", engine, byte_level, limits, "float32", rows)
        works = [
            ShardWork(job, number, 1, f"attempt-{number}", table, kit.NOON) for number, table in sink.tables.items()
        ]
        results = kit.MemorySink()
        ShardWorker(model, kit.ListSource(works), results, clock, helper=kit.InlineExecutor()).run()
        assert sorted(results.rows) == list(range(len(requests)))
        assert {row.status for row in results.rows.values()} == {"succeeded"}
        cached = sum(row.cached_tokens or 0 for row in results.rows.values())
        return JobRun(runners[0].steps, cached, engine.scheduler.stats)

    return run


def mixed_job(seed: int, groups: int = 6, loners: float = 0.25, most: int = 1000) -> list[RequestSize]:
    """500 requests: prompts of 20 to 3,000 tokens, most of them in groups with a system prompt and, inside, shared
    examples; answers of 1 to `most` tokens; shuffled."""
    draw = np.random.default_rng(seed)

    def text(low: int, high: int) -> list[int]:
        count = int(np.exp(draw.uniform(np.log(low), np.log(high))))
        return draw.integers(10, VOCABULARY, count).tolist()  # type: ignore[no-any-return]

    shared = [(text(80, 700), [text(200, 1600) for _ in range(int(draw.integers(0, 4)))]) for _ in range(groups)]
    requests = []
    for _ in range(500):
        system, examples = shared[int(draw.integers(groups))]
        prompt = text(20, 3000)
        if draw.random() >= loners:
            example = examples[int(draw.integers(len(examples)))] if examples and draw.random() < 0.7 else []
            prompt = [*system, *example, *text(20, 700)]
        requests.append((prompt[:3000], int(draw.integers(1, most + 1))))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("loners", [0.25, pytest.param(0.0, marks=pytest.mark.exhaustive)])
def test_each_shared_block_is_computed_once_and_the_tail_is_short(run: Callable[..., JobRun], loners: float) -> None:
    requests = mixed_job(1, loners=loners)
    done = run(requests)
    prompts = [prompt for prompt, _ in requests]
    assert best_hits(prompts, BLOCK) <= done.cached <= best_hits(prompts, 1)  # parts of blocks are copied
    assert done.tail_share < 0.03  # 0.08 is required
    assert done.mean_rows > 0.95 * ROWS


@pytest.mark.exhaustive
def test_in_a_pool_for_half_of_them_little_is_lost(run: Callable[..., JobRun]) -> None:
    requests = mixed_job(2, groups=20, loners=0.0)
    done = run(requests, blocks=2500)
    assert done.cached >= 0.999 * best_hits([prompt for prompt, _ in requests], BLOCK)
    assert done.stats.recomputed_tokens < 0.01 * done.stats.computed_tokens
    assert done.mean_rows > 90  # 71 when each was counted with all blocks that it would ever have
    assert done.tail_share < 0.03


@pytest.mark.slow
def test_the_longest_answer_is_the_last_to_end_only_by_its_own_length(run: Callable[..., JobRun]) -> None:
    """Given a job with less work than its longest answer takes alone, in several shards, then all that is long starts
    at once, wherever it stands, and the job ends with it."""
    draw = np.random.default_rng(3)
    requests = [(prompt, int(min(1000, 1 + draw.exponential(60)))) for prompt, _ in mixed_job(3, groups=3, loners=0.0)]
    longest = {tuple(prompt[:20]): number for number, (prompt, _) in enumerate(requests)}
    for number in longest.values():
        requests[number] = (requests[number][0], 1000)
    assert sum(length for _, length in requests) < 1000 * 40
    done = run(requests, rows=48)
    assert len(done.steps) <= 1000 + 20


@pytest.mark.exhaustive
def test_the_order_is_a_function_of_the_plan(run: Callable[..., JobRun]) -> None:
    requests = mixed_job(4)
    assert run(requests, blocks=3000).steps == run(requests, blocks=3000).steps
