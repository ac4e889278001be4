"""What this machine does with a model: prefill and decode apart, and everything around it with nothing to compute.

Prompts are random token ids from a fixed seed, so that no two share a prefix, and answers ignore end tokens, so that
every run computes exactly the same positions. Decode is measured after every prompt is in the cache.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.models.base import ModelSpec
from engine.request import Request, SamplingParams, as_token_ids
from pipeline.pinning import pin_input
from schemas.job import JobSettings, ModelPin, PlanSegment, Tier
from tokenmill.engine_options import EngineOptions
from tokenmill.job_options import ChosenModel
from tokenmill.run_plan import RunPlan, tokens_per_sequence
from tokenmill.tracker import RunTracker
from tokenmill.wiring import run_job
from workers.model_host import LoadedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEED = 0
DECODE_PROMPT_TOKENS = 32
SCHEDULER_ROWS = 256
WORDS = ("river", "stone", "lantern", "copper", "autumn", "window", "garden", "bridge", "letter", "harbour", "winter")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One thing that was measured.

    Attributes:
        name: what.  rows: sequences in the batch.
        tokens_per_second: the median over repeats.  slowest, fastest: of the repeats, likewise tokens per second.
        step_ms: median time of a step, in milliseconds.
    """

    name: str
    rows: int
    tokens_per_second: float
    slowest: float
    fastest: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class _Run:
    tokens: int
    seconds: float
    steps: tuple[float, ...]


def prefill(engine: Engine, prompt_tokens: int, rows: int, repeats: int) -> Measurement:
    """Prompts only: one token is sampled for each."""
    runs = []
    for repeat in range(repeats + 1):  # the first one warms up: kernels are chosen, memory is touched
        _fill(engine, _prompts(engine, rows, prompt_tokens, repeat), max_tokens=1)
        run = _drain(engine)
        runs.append(_Run(rows * prompt_tokens, run.seconds, run.steps))
    return _measured(f"prefill, prompts of {prompt_tokens} tokens", rows, runs[1:])


def decode(engine: Engine, rows: int, answer_tokens: int, repeats: int) -> Measurement:
    """Answers only: the clock starts when the last row has its first token."""
    runs = []
    for repeat in range(repeats + 1):
        _fill(engine, _prompts(engine, rows, DECODE_PROMPT_TOKENS, repeat), max_tokens=answer_tokens)
        _until_all_decode(engine, rows * DECODE_PROMPT_TOKENS)
        runs.append(_drain(engine))
    return _measured(f"decode, batch {rows}", rows, runs[1:])


def long_prompts(
    engine: Engine, prompt_tokens: int, rows: int, answer_tokens: int, repeats: int
) -> tuple[Measurement, Measurement]:
    """Prompts, and then answers behind them: what it costs that tokens look at many others."""
    before, after = [], []
    for repeat in range(repeats + 1):
        _fill(engine, _prompts(engine, rows, prompt_tokens, repeat), max_tokens=answer_tokens)
        begun = time.perf_counter()
        _until_all_decode(engine, rows * prompt_tokens)
        before.append(_Run(rows * prompt_tokens, time.perf_counter() - begun, (0.0,)))
        after.append(_drain(engine))
    return (
        _measured(f"prefill, prompts of {prompt_tokens} tokens", rows, before[1:]),
        _measured(f"decode, batch {rows}, behind {prompt_tokens} tokens", rows, after[1:]),
    )


def scheduler(steps: int = 200) -> Measurement:
    """The engine's own work per step: the same loop with a model that answers at once."""
    block_size = CacheConfig().block_size
    config = EngineConfig(schedule=ScheduleConfig(max_num_seqs=SCHEDULER_ROWS, max_num_batched_tokens=8192))
    length = DECODE_PROMPT_TOKENS + steps + 1
    blocks = SCHEDULER_ROWS * (-(-length // block_size) + 1) + 1
    engine = Engine.without_model(_null_spec(max_position=max(length, 1024)), config, blocks)
    _fill(engine, _prompts(engine, SCHEDULER_ROWS, DECODE_PROMPT_TOKENS, 0), max_tokens=steps)
    _until_all_decode(engine, SCHEDULER_ROWS * DECODE_PROMPT_TOKENS)
    return _measured(f"scheduler alone, batch {SCHEDULER_ROWS}", SCHEDULER_ROWS, [_drain(engine)])


def pipeline(model: ChosenModel, rows: int) -> float:
    """Rows per second of everything but the model: reading, planning, tokenizing, scheduling, results, commits."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as name:
        folder = Path(name)
        requests = folder / "requests.jsonl"
        with requests.open("w", encoding="utf-8") as file:
            file.writelines(_request_line(model.name, row) for row in range(rows))
        plan = RunPlan(
            inputs=pin_input(requests),
            model=model,
            output=folder / "out",
            tier=Tier.STANDARD,
            settings=JobSettings(),
            engine=EngineOptions(dtype="float32", max_num_seqs=SCHEDULER_ROWS, max_num_batched_tokens=8192),
        )
        begun = time.perf_counter()
        done = run_job(plan, RunTracker(), threading.Event(), _without_model)
        seconds = time.perf_counter() - begun
    if done.counts.succeeded != rows:
        raise EngineError(f"{done.counts.failed} of {rows} rows failed without a model; this is a defect of tokenmill")
    return rows / seconds


def _request_line(model: str, row: int) -> str:
    words = " ".join(WORDS[(row * 7 + i * i) % len(WORDS)] for i in range(24))
    body = {"model": model, "prompt": f"{row}: {words}", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": str(row), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def _without_model(plan: RunPlan, pin: ModelPin, segments: list[PlanSegment]) -> LoadedModel:
    """A loaded model that answers at once, behind the real tokenizer."""
    config = plan.engine.config()
    length = (tokens_per_sequence(segments) or 1) * 2
    blocks = config.schedule.max_num_seqs * length // config.cache.block_size
    return LoadedModel.without_weights(
        Path(pin.source), name=pin.name, config=config, num_blocks=blocks, digest=pin.digest
    )


def _null_spec(max_position: int) -> ModelSpec:
    return ModelSpec(
        architecture="null",
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        vocab_size=32_000,
        max_position=max_position,
        windows=(None,),
        eos_token_ids=(),
        num_parameters=0,
        dtype=torch.float32,
    )


def _prompts(engine: Engine, rows: int, tokens: int, repeat: int) -> Iterator[NDArray[np.int32]]:
    random = np.random.default_rng((SEED, rows, tokens, repeat))
    for _ in range(rows):
        yield as_token_ids(random.integers(0, engine.spec.vocab_size, tokens, dtype=np.int32))


def _fill(engine: Engine, prompts: Iterator[NDArray[np.int32]], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(Request(f"bench-{index}", prompt, params, expected_tokens=max_tokens))


def _until_all_decode(engine: Engine, prompt_tokens: int) -> None:
    """Step until all prompts are computed: the steps after that compute one token a row."""
    before = engine.stats().computed
    while engine.stats().computed - before < prompt_tokens:
        if engine.step():
            raise EngineError("a row ended while others waited; give the cache more memory or take a smaller batch")


def _drain(engine: Engine) -> _Run:
    """Run until nothing is left, with the clock on."""
    before, steps = engine.stats().computed, []
    begun = time.perf_counter()
    while engine.has_work:
        step_begun = time.perf_counter()
        for completion in engine.step():
            if completion.error is not None:
                raise EngineError(f"a row failed: {completion.error}")
        steps.append(time.perf_counter() - step_begun)
    return _Run(engine.stats().computed - before, time.perf_counter() - begun, tuple(steps))


def _measured(name: str, rows: int, runs: list[_Run]) -> Measurement:
    rates = [run.tokens / run.seconds for run in runs]
    return Measurement(
        name=name,
        rows=rows,
        tokens_per_second=statistics.median(rates),
        slowest=min(rates),
        fastest=max(rates),
        step_ms=1000 * statistics.median(step for run in runs for step in run.steps),
    )
