"""A dry run predicts what an engine with a model then does: the same steps, hits and preemptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.dry_run import DryRun
from engine.plan import StepOutput, StepPlan
from engine.scheduler.step_cost import cache_windows, count_group_work
from tests.engine.oracle import make_prompts

TinyModel = Callable[[str], Path]


def requests(count: int = 24, **params: Any) -> list[Request]:
    """Prompts of which some begin alike, and answers of different lengths."""
    found = []
    for i, prompt in enumerate(make_prompts(seed=5, count=count, vocab_size=257, shared=45, longest=90)):
        wanted = SamplingParams(max_tokens=3 + i * 7 % 23, temperature=0, **params)
        found.append(Request(str(i), as_token_ids(prompt), wanted, expected_tokens=wanted.max_tokens))
    return found


def config(blocks: int | None = None, rows: int = 6, budget: int = 48) -> EngineConfig:
    cache = CacheConfig(block_size=8, num_blocks=blocks, sequences=24, tokens_per_sequence=128)
    return EngineConfig(dtype="float32", max_model_len=128, cache=cache, schedule=ScheduleConfig(rows, budget))


def computed_steps(engine: Engine, given: Iterable[Request]) -> list[tuple[float, ...]]:
    """The work of each step of the engine, recorded at its runner."""
    found: list[tuple[float, ...]] = []
    state, windows = engine.scheduler.rows, cache_windows(engine.spec.windows)
    inner = engine._runner
    layers = [engine.spec.windows.count(window) / engine.spec.num_layers for window in windows]

    class RecordingRunner:
        def execute(self, plan: StepPlan) -> StepOutput:
            one = plan.counts == 1
            parts = {n: getattr(plan, n)[one] for n in ("rows", "starts", "counts", "num_logits", "samples")}
            seen, reads, pairs = np.zeros(4096, dtype=np.bool_), 0.0, 0.0
            for window, share, table in zip(windows, layers, state.block_tables, strict=True):
                pairs += share * count_group_work(plan, table, window, state.block_size, seen).pairs
                if one.any():
                    work = count_group_work(replace(plan, **parts), table, window, state.block_size, seen)
                    reads += share * work.read_tokens
            found.append((plan.num_tokens, int(plan.num_logits.sum()), reads, pairs))
            return inner.execute(plan)

    engine._runner = RecordingRunner()
    for request in given:
        engine.add(request)
    while engine.has_work:
        assert all(completion.error is None for completion in engine.step())
    return found


def run_dry(engine: Engine, settings: EngineConfig, given: Iterable[Request]) -> tuple[DryRun, list[Any]]:
    dry_run = DryRun(settings, engine.spec, engine.scheduler._cache.groups)
    for request in given:
        dry_run.add(request)
    steps = []
    while (done := dry_run.step()) is not None:
        steps.append(done[0][:4])
    return dry_run, steps


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("blocks", [None, 40])
@pytest.mark.slow
def test_given_requests_then_each_step_of_a_dry_run_equals_the_engines(
    family: str, blocks: int | None, tiny_model: TinyModel
) -> None:
    settings = config(blocks)
    engine = Engine.load(tiny_model(family), settings)

    dry_run, steps = run_dry(engine, settings, requests(ignore_eos=True))
    measured = computed_steps(engine, requests(ignore_eos=True))

    assert len(steps) == len(measured)
    np.testing.assert_allclose(steps, measured)
    real, predicted = engine.stats(), dry_run.scheduler.stats
    assert predicted.prefix_hit_tokens == real.cached > 0
    assert predicted.computed_tokens == real.computed
    assert predicted.preemptions == real.preemptions
    assert dry_run.generated_tokens == real.generated == sum(r.params.max_tokens for r in requests())
    assert dry_run.prompt_tokens == sum(len(r.prompt_token_ids) for r in requests())
    assert dry_run.cached_tokens <= predicted.prefix_hit_tokens


@pytest.mark.slow
def test_given_a_small_pool_then_a_dry_run_preempts_as_the_engine_does(tiny_model: TinyModel) -> None:
    settings = config(20, rows=8)
    # Answers that are longer than expected: more are admitted than the pool has room for
    given = [replace(request, expected_tokens=1) for request in requests(ignore_eos=True)]
    engine = Engine.load(tiny_model("llama"), settings)

    dry_run, steps = run_dry(engine, settings, given)
    measured = computed_steps(engine, given)

    assert dry_run.scheduler.stats.preemptions == engine.stats().preemptions > 0
    np.testing.assert_allclose(steps, measured)


def test_given_answers_that_may_end_then_a_dry_run_ends_them_as_expected(tiny_model: TinyModel) -> None:
    settings = config()
    engine = Engine.load(tiny_model("llama"), settings)
    given = [replace(request, expected_tokens=2) for request in requests()]
    choices = [replace(r, params=replace(r.params, n=2, temperature=1.0), request_id=f"n{r.request_id}") for r in given]

    dry_run, _ = run_dry(engine, settings, [*given, *choices])

    assert dry_run.generated_tokens == 2 * len(given) + 2 * 2 * len(choices)
    assert not dry_run.scheduler.has_work
    dry_run.scheduler.check_integrity()
