"""Benchmarks of this machine: prefill and decode of a model, and the scheduler and pipeline without a model.

Prompts are random token ids from a fixed seed, so that no two share a prefix, and answers ignore end tokens, so that
every run computes the same positions. Decode is measured after all prompts are in the cache, in windows of steps of one
batch. A thing is measured again only within `STAGE_SECONDS`: steps of equal work differ little.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.dry_run import DryRun
from engine.engine import Engine, resolve_device
from engine.errors import EngineError
from engine.models.base import ModelSpec
from engine.models.load import describe_model
from engine.plan import CacheGroup
from engine.request import Request, SamplingParams, as_token_ids
from engine.step_engine import StepEngine
from pipeline.inputs.pinning import pin_input
from pipeline.planner.estimates.timing import StepTimes
from schemas.jobs.job import JobSettings, Tier
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.job_options import ChosenModel
from tokenmill.local.run_job import run_job
from tokenmill.local.run_plan import RunPlan, tokens_per_sequence
from tokenmill.local.tracker import RunTracker
from workers.model.loaded_model import LoadedModel, model_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEED = 0
PREFILL_TOKENS = 256
PREFILL_ROWS = 8
"""Prompts that fill one step of 2,048 positions."""
SHORT_TOKENS = 128
LONGEST_TOKENS = 1984
"""A prompt whose tokens attend to many others, within a step of 2,048 positions."""
DECODE_PROMPT_TOKENS = 32
DECODE_TOKENS = 64
WARM_STEPS = 4
"""Steps of decode before the first window. They also compute the rest of the prompts."""
WINDOW_STEPS = 16
LONG_TOKENS = 512
LONG_ROWS = 8
"""In total more keys and values than a processor's caches hold, as in a real batch."""
STAGE_SECONDS = 5.0
"""No measurement is repeated after so long."""
SCHEDULER_ROWS = 256
WORDS = ("river", "stone", "lantern", "copper", "autumn", "window", "garden", "bridge", "letter", "harbour", "winter")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement.

    Attributes:
        name: what was measured.  rows: sequences in the batch.
        tokens_per_second: the median over repeats.  slowest, fastest: of the repeats, in tokens per second.
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


@dataclass(frozen=True, slots=True)
class Case:
    """A workload of requests without shared prefixes.

    Attributes:
        rows: number of requests.  prompt, answer: tokens of each.
        decoding: measure only the steps after all prompts are computed; else answers have one token.
    """

    rows: int
    prompt: int
    answer: int
    decoding: bool

    @property
    def behind_long(self) -> bool:
        """Whether decode is measured after long prompts."""
        return self.decoding and self.prompt != DECODE_PROMPT_TOKENS

    @property
    def windows(self) -> int:
        """Of decode, that the answers have room for."""
        return (self.answer - 1 - WARM_STEPS) // WINDOW_STEPS

    def seconds(self, repeats: int, position: float) -> float:
        """Roughly, of measuring it, where computing a position takes `position` seconds. A step of decode takes longer
        for each position than one of prompts, and has a minimum."""
        fill = self.rows * self.prompt * position
        if not self.decoding:
            return fill * min(repeats, math.ceil(STAGE_SECONDS / fill))
        window = WINDOW_STEPS * (8 + 1.5 * self.rows) * position
        return fill + window * (WARM_STEPS / WINDOW_STEPS + min(self.windows, math.ceil(STAGE_SECONDS / window)))

    @property
    def name(self) -> str:
        if not self.decoding:
            return f"prefill, {'prompts' if self.rows > 1 else 'a prompt'} of {self.prompt} tokens"
        behind = f", behind {self.prompt} tokens" if self.behind_long else ""
        return f"decode, batch {self.rows}{behind}"


@dataclass(frozen=True, slots=True)
class TimedWork:
    """The work of an engine's steps, and their duration.

    Attributes:
        case, measurement: for people.  steps: float64 [steps, 4] (`StepTimes.fit`).  seconds: of all steps, the median
            over repeats.
    """

    case: Case
    measurement: Measurement
    steps: NDArray[np.float64]
    seconds: float


def rate(engine: StepEngine, vocab_size: int, case: Case, repeats: int) -> Measurement:
    """Measure a case of any engine."""
    return _measured(case.name, case.rows, _runs(engine, vocab_size, case, repeats, is_warm=False))


def rate_cases(batches: Sequence[int], repeats: int) -> list[Case]:
    """The cases of prefill, and of decode in these batches."""
    answer = _answer_tokens(repeats)
    return [
        Case(PREFILL_ROWS, PREFILL_TOKENS, 1, decoding=False),
        *(Case(size, DECODE_PROMPT_TOKENS, answer, decoding=True) for size in batches),
    ]


def _runs(engine: StepEngine, vocab_size: int, case: Case, repeats: int, *, is_warm: bool) -> list[_Run]:
    """Measure a case up to `repeats` times, within `STAGE_SECONDS`. `is_warm`: prefill needs no warm-up."""
    runs: list[_Run] = []
    if case.decoding:
        _fill(engine, _prompts(vocab_size, case.rows, case.prompt, 0), case.answer)
        _until_all_decode(engine, case.rows * case.prompt)
        _steps_of(engine, WARM_STEPS)
        while len(runs) < case.windows and _has_time(runs):
            runs.append(_steps_of(engine, WINDOW_STEPS))
        _cancel(engine, case.rows)
        return runs
    for repeat in range(0 if is_warm else -1, repeats):
        _fill(engine, _prompts(vocab_size, case.rows, case.prompt, repeat + 1), case.answer)
        run = _steps_of(engine)
        if repeat >= 0:
            runs.append(run)
        if not _has_time(runs):
            break
    return runs


def _has_time(runs: Sequence[_Run]) -> bool:
    return sum(run.seconds for run in runs) < STAGE_SECONDS


def timed_cases(engine: Engine, wanted: Iterable[Case], repeats: int) -> list[TimedWork]:
    """Measure cases of this project's engine, and what their steps computed. On a CPU a warm-up of the first one, whose
    step is the largest, is enough: all steps have the same kernels. A GPU's are chosen by the steps' shapes."""
    is_cpu = resolve_device(engine.config.device).type == "cpu"
    works: list[TimedWork] = []
    for case in wanted:
        works.append(_timed(engine, case, repeats, is_warm=is_cpu and bool(works)))
    return works


def _timed(engine: Engine, case: Case, repeats: int, *, is_warm: bool) -> TimedWork:
    runs = _runs(engine, engine.spec.vocab_size, case, repeats, is_warm=is_warm)
    steps = _steps(engine, case)
    seconds = statistics.median(run.seconds for run in runs)
    if case.decoding:
        steps = steps[WARM_STEPS : WARM_STEPS + len(runs) * WINDOW_STEPS]
        seconds *= len(runs)  # the windows follow each other
    else:
        assert len(steps) == len(runs[0].steps), "the same requests take the same steps"
    return TimedWork(case, _measured(case.name, case.rows, runs), steps, seconds)


def seconds_left(done: Sequence[tuple[Case, float]], rest: Sequence[Case], repeats: int) -> float | None:
    """Seconds that the rest of the cases takes, roughly, from those that are done, and the seconds of each; None: none
    is done."""
    if not done:
        return None
    (first, took), *others = done
    position = took / (first.rows * first.prompt * 3)  # it takes a warm-up, and two or three runs
    left = sum(case.seconds(repeats, position) for case in rest)
    if others:
        left *= sum(took for _, took in others) / sum(case.seconds(repeats, position) for case, _ in others)
    return left


def step_times(works: Sequence[TimedWork]) -> StepTimes:
    """Fit the durations of a step's parts. Cases that measure reading keys or long prompts compute about as many
    positions as other cases, so they add no step size."""
    sizes = {
        work.case.rows if work.case.decoding else int(work.steps[:, 0].max())
        for work in works
        if not (work.case.behind_long or work.case.prompt > PREFILL_TOKENS)
    }
    return StepTimes.fit([(work.steps, work.seconds) for work in works], sorted(sizes))


def cases(spec: ModelSpec, max_num_seqs: int, batches: Sequence[int], repeats: int) -> list[Case]:
    """The cases that separate the parts of a step's time: prompts and answers, steps of few and of many positions,
    tokens that attend to few others and to many; as far as the engine's memory allows, which is sized for
    `max_num_seqs` rows."""
    positions = spec.max_position
    if positions < DECODE_PROMPT_TOKENS + DECODE_TOKENS:
        needed = DECODE_PROMPT_TOKENS + DECODE_TOKENS
        raise EngineError(f"the model's context holds {positions} tokens, but measuring it takes {needed}")
    prompt, answer = min(PREFILL_TOKENS, positions - 1), min(_answer_tokens(repeats), positions - DECODE_PROMPT_TOKENS)
    found = [
        replace(case, answer=answer) if case.decoding else replace(case, prompt=prompt)
        for case in rate_cases(batches, repeats)
    ]
    found += [Case(rows, min(SHORT_TOKENS, prompt // 2), 1, decoding=False) for rows in (1, 4)]
    long = min(LONGEST_TOKENS, positions - 1)
    if long >= 2 * PREFILL_TOKENS:
        found.append(Case(1, long, 1, decoding=False))
    behind = min(LONG_TOKENS, positions - answer - 1)
    if behind >= PREFILL_TOKENS:
        room = max_num_seqs * (PREFILL_TOKENS + DECODE_TOKENS) // (behind + answer)
        found.append(Case(min(LONG_ROWS, room), behind, answer, decoding=True))
    return found


def _answer_tokens(repeats: int) -> int:
    """Tokens of an answer with room for as many windows of decode, as far as the cache has it, and that doesn't end in
    the last one."""
    wanted = 1 + WARM_STEPS + repeats * WINDOW_STEPS + WARM_STEPS
    return min(wanted, PREFILL_TOKENS + DECODE_TOKENS - DECODE_PROMPT_TOKENS)


def _steps(engine: Engine, case: Case) -> NDArray[np.float64]:
    """The work of a case's steps, by a dry run."""
    blocks = case.rows * (-(-(case.prompt + case.answer) // engine.config.cache.block_tokens) + 1) + 1
    groups = tuple(CacheGroup(layers, window, blocks) for window, layers in engine.spec.window_layers.items())
    dry_run = DryRun(engine.config, engine.spec, groups)
    _fill(dry_run, _prompts(engine.spec.vocab_size, case.rows, case.prompt, 0), case.answer)
    steps, computing = [], list[bool]()
    while True:
        computing.append(dry_run.scheduler.stats.computed_tokens < case.rows * case.prompt)
        if (done := dry_run.step()) is None:
            break
        steps.append(done[0][:4])
    return np.array([s for s, prompts in zip(steps, computing, strict=False) if prompts != case.decoding], dtype=float)


def scheduler(steps: int = 200) -> Measurement:
    """Measure the engine's overhead per step: the same loop with a model that answers at once."""
    block_size = CacheConfig().block_tokens
    config = EngineConfig(schedule=ScheduleConfig(max_num_seqs=SCHEDULER_ROWS, max_num_batched_tokens=8192))
    length = DECODE_PROMPT_TOKENS + steps + 1
    blocks = SCHEDULER_ROWS * (-(-length // block_size) + 1) + 1
    engine = Engine.without_model(_null_spec(max_position=max(length, 1024)), config, blocks)
    _fill(engine, _prompts(engine.spec.vocab_size, SCHEDULER_ROWS, DECODE_PROMPT_TOKENS, 0), max_tokens=steps)
    _until_all_decode(engine, SCHEDULER_ROWS * DECODE_PROMPT_TOKENS)
    return _measured(f"scheduler alone, batch {SCHEDULER_ROWS}", SCHEDULER_ROWS, [_steps_of(engine)])


def pipeline(model: ChosenModel, rows: int) -> float:
    """Measure rows per second without the model: reading, planning, tokenizing, scheduling, results, commits."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as name:
        folder = Path(name)
        requests = folder / "requests.jsonl"
        context = describe_model(model_path(model.source.path)).spec.max_position
        with requests.open("w", encoding="utf-8") as file:
            file.writelines(_request_line(model.name, row, context) for row in range(rows))
        plan = RunPlan(
            inputs=pin_input(requests),
            models=(model,),
            output=folder / "out",
            tier=Tier.STANDARD,
            settings=JobSettings(),
            engine=EngineOptions(dtype="float32", max_num_seqs=SCHEDULER_ROWS, max_num_batched_tokens=8192),
        )
        started = time.perf_counter()
        done = run_job(plan, RunTracker(), threading.Event(), _without_model)
        seconds = time.perf_counter() - started
    if done.counts.succeeded != rows:
        raise EngineError(f"{done.counts.failed} of {rows} rows failed without a model; this is a defect of tokenmill")
    return rows / seconds


def _request_line(model: str, row: int, context: int) -> str:
    """A request of 24 words and 32 tokens, or of fewer that fit a small context with any tokenizer."""
    words = " ".join(WORDS[(row * 7 + i * i) % len(WORDS)] for i in range(min(24, context // 10)))
    answer = min(32, context // 8)
    body = {"model": model, "prompt": f"{row}: {words}", "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": str(row), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def _without_model(plan: RunPlan, pin: ModelPin, segments: list[PlanSegment]) -> LoadedModel:
    """A loaded model that answers at once, behind the real tokenizer."""
    config = plan.engine.config()
    length = (tokens_per_sequence(segments) or 1) * 2
    blocks = config.schedule.rows * length // config.cache.block_tokens
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


def _prompts(vocab_size: int, rows: int, tokens: int, repeat: int) -> Iterator[NDArray[np.int32]]:
    random = np.random.default_rng((SEED, rows, tokens, repeat))
    for _ in range(rows):
        yield as_token_ids(random.integers(0, vocab_size, tokens, dtype=np.int32))


def _fill(engine: StepEngine | DryRun, prompts: Iterator[NDArray[np.int32]], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(Request(f"bench-{index}", prompt, params, expected_tokens=max_tokens))


def _until_all_decode(engine: StepEngine, prompt_tokens: int) -> None:
    """Step until all prompts are computed; later steps compute one token a row."""
    before = engine.stats().computed
    while engine.stats().computed - before < prompt_tokens:
        if engine.step():
            raise EngineError("a row ended while others waited; give the cache more memory or take a smaller batch")


def _cancel(engine: StepEngine, rows: int) -> None:
    """End a case's requests, so that the engine is idle."""
    for index in range(rows):
        engine.cancel(f"bench-{index}")
    while engine.has_work:
        engine.step()


def _steps_of(engine: StepEngine, most: int | None = None) -> _Run:
    """Run so many steps, or until the engine is idle, and measure them."""
    before, steps = engine.stats().computed, list[float]()
    started = time.perf_counter()
    while engine.has_work and (most is None or len(steps) < most):
        step_started = time.perf_counter()
        for completion in engine.step():
            if completion.error is not None:
                raise EngineError(f"a row failed: {completion.error}")
        steps.append(time.perf_counter() - step_started)
    return _Run(engine.stats().computed - before, time.perf_counter() - started, tuple(steps))


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
