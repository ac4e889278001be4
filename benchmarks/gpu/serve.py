"""Stage `serve`: output tokens a second in a steady state, beside the bound that the measured rates allow.

A cell holds a full batch of requests of one length, and each that ends is replaced at once. Left to itself such a batch
begins in lockstep, and mixes only after several lives of its requests. Here the first requests are of all ages: one of
age a has ISL + a prompt tokens and OSL - a still to come, which is the state it would be in, for the price of a
prompt. So the state is steady when the last of these prompts has been computed, and the window begins. Whether it was
is told by the two halves of the window, and by the mean context beside the one expected.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.engine_settings import with_overrides
from benchmarks.gpu import profiling
from benchmarks.gpu.context import Context, OutOfTime, Part, Skipped, free_memory, synchronize, tried
from benchmarks.gpu.models import CONFIGS, LLAMA, QWEN, load_engine, write_config
from benchmarks.gpu.roofline import Form, Shape, bound
from engine import CacheConfig, Engine, EngineConfig, EngineStats, Request, SamplingParams, ScheduleConfig

_LOAD_SECONDS = 30.0
_FILL_SECONDS = 25.0
"""Of 512 rows."""

_FULL = 0.95
"""Of the cache that a batch may need in the mean: its rows are not all of mean length at every moment."""

_MAX_FILL_SECONDS = 70.0
_GAP_STEPS = 20


@dataclass(frozen=True, slots=True)
class Cell:
    """Prompt and answer tokens of every request, how its tokens are drawn (1: greedy), and the rows of the batch (None:
    the context's)."""

    isl: int
    osl: int
    top_p: float = 1.0
    rows: int | None = None

    @property
    def name(self) -> str:
        drawn = f", top_p {self.top_p}" if self.top_p < 1 else ""
        rows = f", {self.rows} rows" if self.rows is not None else ""
        return f"{self.isl}/{self.osl}{drawn}{rows}"

    @property
    def mean_tokens(self) -> float:
        """Of a row's cache, over its life."""
        return self.isl + self.osl / 2

    def batch(self, context: Context) -> int:
        """Rows of the batch."""
        return context.batch if self.rows is None else self.rows

    def params(self, answer: int) -> SamplingParams:
        """Of a request with so many tokens still to come."""
        temperature = 1.0 if self.top_p < 1 else 0.0
        return SamplingParams(max_tokens=answer, temperature=temperature, top_p=self.top_p, seed=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Variant:
    """A form of weights and cache: settings of the engine, and what the bound makes of them."""

    name: str
    settings: dict[str, Any]
    form: Form


def variants(context: Context) -> list[Variant]:
    """bf16 first."""
    if context.dry:
        return [
            Variant("float32", {"dtype": "float32", "attention": "paged-sdpa", "async_scheduling": True}, Form(4, 4)),
            Variant("fp8", {"dtype": "float32", "attention": "paged-sdpa", "quantize": "fp8"}, Form(1, 4)),
        ]
    return [
        Variant("bf16", {"dtype": "bfloat16"}, Form(2, 2)),
        Variant("fp8", {"dtype": "bfloat16", "quantize": "fp8"}, Form(1, 2)),
        Variant("fp8, fp8 cache", {"dtype": "bfloat16", "quantize": "fp8", "kv_dtype": "fp8"}, Form(1, 1)),
    ]


def plan(context: Context) -> list[tuple[str, Variant, list[Cell]]]:
    """Models, forms and cells, each line on an engine of its own; the most wanted first, for time may run out."""
    first, second = context.sized((LLAMA, QWEN), ("tiny-llama", "tiny-qwen3"))
    forms = variants(context)
    if context.dry:
        every = [Cell(8, 8), Cell(8, 8, top_p=0.9), Cell(24, 4, rows=2)]
        return [(model, form, every) for model in (first, second) for form in forms]
    bf16, fp8, fp8_cache = forms
    usual, drawn, double, fourfold = (
        Cell(1000, 1000), Cell(1000, 1000, top_p=0.9), Cell(1000, 1000, rows=512), Cell(1000, 1000, rows=1024)
    )  # fmt: skip
    rest = [Cell(128, 128), Cell(128, 128, rows=1024), Cell(128, 2048), Cell(2048, 128)]
    return [
        (first, bf16, [usual, drawn, double]),
        (first, fp8_cache, [usual, double, fourfold]),
        (first, fp8, [usual, drawn, double]),
        (first, bf16, rest),
        *((second, form, [usual, *rest]) for form in forms),
    ]


def engine_for(context: Context, model: str, variant: Variant, wanted: Iterable[Cell]) -> Engine:
    """An engine on a model's shape, with room for a full batch of any of these cells."""
    wanted = list(wanted)
    longest = max(cell.isl + cell.osl for cell in wanted)
    rows = max(cell.batch(context) for cell in wanted)
    config = EngineConfig(
        device="cpu" if context.dry else "cuda",
        max_model_len=longest + 1,
        cache=CacheConfig(
            gpu_memory_utilization=0.9,
            prefix_caching=False,
            sequences=rows,
            tokens_per_sequence=longest,
        ),
        schedule=ScheduleConfig(rows, context.sized(8192, 64)),
    )
    config = with_overrides(config, {**variant.settings, **context.settings})
    return load_engine(write_config(context.folder, model), config)


def rows_that_fit(engine: Engine, cell: Cell) -> int:
    """Rows of the cell that the cache of the layers without a window holds at once, in the mean of their lives and with
    half of their last blocks empty."""
    size = engine.config.cache.block_tokens
    each = min(cell.mean_tokens / size + 0.5, -(-(cell.isl + cell.osl) // size))
    blocks = min(group.num_blocks for group in engine.scheduler.groups if group.window is None)
    return int(_FULL * (blocks - 1) / each)  # block 0 is no sequence's


class Flow:
    """A batch that is kept full: requests of all ages at first, then a new one for each that ends."""

    def __init__(self, engine: Engine, cell: Cell, context: Context) -> None:
        self.engine = engine
        self.cell = cell
        self._context = context
        self._rng = np.random.default_rng(11)
        self._made = 0
        self._open: set[str] = set()

    def fill(self) -> float:
        """Add the first batch and compute all its prompts; seconds that it took.

        Raises:
            OutOfTime: it took too long; the cache may be too small for the batch.
        """
        begun = time.perf_counter()
        limit = begun + self._context.sized(_MAX_FILL_SECONDS, 10.0)
        computed = self.engine.stats().prompt
        batch, cell = self.cell.batch(self._context), self.cell
        ages = self._rng.permutation((np.arange(batch) * cell.osl) // batch)
        self.engine.settle(more_to_come=True)
        for age in ages.tolist():
            self._add(cell.isl + age, cell.osl - age)
        wanted = batch * cell.isl + int(ages.sum())
        replaced = 0
        # What was just added waits for the next step in any case.
        while self.engine.stats().prompt - computed < wanted or self.engine.num_waiting > replaced:
            replaced = self.step()
            if self._context.left() < self._context.window or time.perf_counter() > limit:
                raise OutOfTime(f"{cell.name}: the batch was not full in time")
        return time.perf_counter() - begun

    def step(self) -> int:
        """One step; what ends with it is replaced. How many requests were.

        Raises:
            RuntimeError: a request ended otherwise than by its length.
        """
        ended = self.engine.step()
        for completion in ended:
            if completion.error is not None:
                raise RuntimeError(f"request {completion.request_id} failed: {completion.error}")
            self._open.remove(completion.request_id)
            self._add(self.cell.isl, self.cell.osl)
        return len(ended)

    def stop(self) -> None:
        """Leave the engine empty."""
        for name in self._open:
            self.engine.cancel(name)
        while self.engine.has_work:
            self.engine.step()
        self._open.clear()

    def _add(self, prompt: int, answer: int) -> None:
        self._made += 1
        name = f"{self.cell.name}-{self._made}"
        ids = self._rng.integers(3, self.engine.spec.vocab_size, prompt).astype(np.int32)
        self._open.add(name)
        self.engine.add(Request(name, ids, self.cell.params(answer)))


def window(flow: Flow, context: Context) -> dict[str, Any]:
    """The steady state for `context.window` seconds."""
    engine = flow.engine
    before = engine.stats()
    synchronize(context.device)
    begun = time.perf_counter()
    marks = [(0.0, before.generated)]
    slowest = 0.0
    while (elapsed := time.perf_counter() - begun) < context.window:
        flow.step()
        slowest = max(slowest, time.perf_counter() - begun - elapsed)
        marks.append((time.perf_counter() - begun, engine.stats().generated))
    after = engine.stats()
    seconds, total = marks[-1][0], after.generated - before.generated
    middle = next((mark for mark in marks if mark[0] >= seconds / 2), marks[-1])
    first = (middle[1] - before.generated) / max(middle[0], 1e-9)
    second = (after.generated - middle[1]) / max(seconds - middle[0], 1e-9)
    steps = after.steps - before.steps
    return {
        "seconds": seconds,
        "output_tokens": total,
        "output_tokens_per_second": total / seconds,
        "prompt_tokens_per_second": (after.prompt - before.prompt) / seconds,
        "second_half_over_first": second / first if first else 0.0,
        "steps": steps,
        "mean_step_seconds": seconds / max(1, steps),
        "slowest_step_seconds": slowest,
        "mean_rows": (after.step_rows - before.step_rows) / max(1, steps),
        "preemptions": after.preemptions - before.preemptions,
        **loop_counts(before, after),
        "free_blocks": after.free_blocks,
        "total_blocks": after.total_blocks,
    }


def loop_counts(before: EngineStats, after: EngineStats) -> dict[str, int]:
    """Steps between the two that were planned ahead, had to wait for results, took a graph, and found no memory."""
    names = ("steps_ahead", "steps_not_ahead", "steps_recorded", "steps_out_of_memory")
    return {name: getattr(after, name) - getattr(before, name) for name in names}


def measure(engine: Engine, cell: Cell, model: str, variant: Variant, context: Context, gaps: bool) -> dict[str, Any]:
    """A cell: filled, measured, set against its bounds, and its steps looked at if `gaps`.

    Raises:
        Skipped: the batch does not fit the cache, so it would never be full.
    """
    batch = cell.batch(context)
    if (fitting := rows_that_fit(engine, cell)) < batch:
        raise Skipped(f"the cache holds {fitting} of {batch} rows")
    context.need(context.window + context.sized(_FILL_SECONDS * batch / 512, 0.5))
    flow = Flow(engine, cell, context)
    try:
        found: dict[str, Any] = {"fill_seconds": flow.fill(), **window(flow, context)}
        if gaps:
            found["gaps"] = tried(lambda: profiling.steps(flow.step, context.device, context.sized(_GAP_STEPS, 2)))
    finally:
        flow.stop()
    return found | against_bound(found["output_tokens_per_second"], cell, model, variant, context)


def against_bound(rate: float, cell: Cell, model: str, variant: Variant, context: Context) -> dict[str, Any]:
    """The bounds of this batch and of any batch, and what share of them `rate` (output tokens a second) is."""
    if context.rates is None:
        return {"bound": {"error": "the stage machine has not measured this machine"}}
    shape = Shape.of(CONFIGS[model])
    found: dict[str, Any] = {}
    if variant.form.weights == 1 and context.rates.fp8 is None:
        return {"bound": {"error": "no fp8 rate was measured here"}}
    for name, batch in (("this batch", cell.batch(context)), ("any batch", None)):
        requests = [(cell.isl, cell.osl)] * cell.batch(context)
        least = bound(shape, variant.form, context.rates, requests, batch=batch)
        each = least.tokens_per_second
        found[name] = {"output_tokens_per_second": each, "share": rate / each, **asdict(least)}
    return {"bound": found}


def run(context: Context) -> Iterator[Part]:
    """All of the plan."""
    for model, variant, wanted in plan(context):
        yield from of_model(context, model, variant, wanted)
        free_memory(context.device)


def of_model(context: Context, model: str, variant: Variant, wanted: list[Cell]) -> Iterator[Part]:
    """One model in one form, on one engine; when this ends, nothing holds it any more."""
    label = f"{model} {variant.name}"
    engines: list[Engine] = []

    def load() -> dict[str, Any]:
        context.need(context.sized(_LOAD_SECONDS, 0.5) + context.window)
        begun = time.perf_counter()
        engines.append(engine_for(context, model, variant, wanted))
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "attention": engines[0].attention_name}

    yield f"{label} load", tried(load)
    for engine in engines:
        for cell in wanted:
            one = partial(measure, engine, cell, model, variant, context, cell is wanted[0])
            yield f"{label} {cell.name}", tried(one)
