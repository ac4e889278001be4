"""Stage `published`: shapes of models whose output tokens a second on a GPU are published, with and without tuning.

The numbers are FinePhrase's (Hugging Face 2026, "The Synthetic Data Playbook"; datatrove's
examples/inference/benchmark): vLLM 0.15 on an H100 of 80 GB, greedy, with its default settings and with the best of
801; the best ones of SmolLM2 are with drafts copied from the prompt. Ours is a steady state on random weights, with the
size of a step that the engine chooses by itself and without drafts, which random weights never accept.

Their prompts are documents of FineWeb-Edu's sample of 10 billion tokens behind an instruction, their answers have 4,096
tokens at most. Lengths are not published: assumed are the sample's mean of 1,034 tokens (9.67 million documents) and 66
of the instruction, and the 359 tokens that FinePhrase's answers have in the mean (of SmolLM2-1.7B, to four
instructions).
Theirs is a whole job with lengths of all sizes, its start and its tail included. So the ratio says how near ours
comes, and not more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.engine_settings import with_overrides
from benchmarks.gpu.context import Context, Part, free_memory, tried
from benchmarks.gpu.models import GEMMA, QWEN, SMOLLM_1_7B, SMOLLM_135M, load_engine, write_config
from benchmarks.gpu.serve import Cell, Flow, against_bound, rows_that_fit, variants, window
from engine import CacheConfig, Engine, EngineConfig

CONTEXT_TOKENS = 8192
"""Of a sequence at most, as theirs."""

_SECONDS = 35.0
"""Of a model, at least."""


@dataclass(frozen=True, slots=True)
class Published:
    """Output tokens a second on an H100: with vLLM's default settings, and with the best that were tried."""

    default: float
    best: float


PUBLISHED = {
    SMOLLM_135M: Published(28_391, 45_540),
    SMOLLM_1_7B: Published(5_255, 9_220),
    GEMMA: Published(22_996, 23_585),
    QWEN: Published(6_338, 6_443),
}
"""By shape."""


def run(context: Context) -> Iterator[Part]:
    """Each model."""
    tiny = {"tiny-smollm2": PUBLISHED[SMOLLM_135M], "tiny-gemma3": PUBLISHED[GEMMA]}
    for model, published in context.sized(PUBLISHED, tiny).items():
        yield model, tried(partial(of_model, context, model, published))
        free_memory(context.device)


def of_model(context: Context, model: str, published: Published) -> dict[str, Any]:
    """Load, fill and measure; all rows that the engine chose, or as many as its cache holds at once."""
    context.need(context.sized(_SECONDS, 0.5) + context.window)
    begun = time.perf_counter()
    engine = engine_for(context, model)
    loaded = time.perf_counter() - begun
    lengths = context.sized(Cell(1100, 359), Cell(24, 8))
    schedule = engine.config.schedule
    cell = Cell(lengths.isl, lengths.osl, rows=min(schedule.rows, rows_that_fit(engine, lengths)))
    flow = Flow(engine, cell, context)
    try:
        found = {"fill_seconds": flow.fill(), **window(flow, context)}
    finally:
        flow.stop()
    rate = found["output_tokens_per_second"]
    return {
        "load_seconds": loaded,
        "isl": cell.isl,
        "osl": cell.osl,
        "rows": cell.rows,
        "step_rows": schedule.rows,
        "step_tokens": schedule.tokens,
        "graph_tokens": engine.config.graph_tokens,
        **found,
        "published_default": published.default,
        "published_best": published.best,
        "ours_over_default": rate / published.default,
        "ours_over_best": rate / published.best,
        **against_bound(rate, cell, model, variants(context)[0], context),
    }


def engine_for(context: Context, model: str) -> Engine:
    """An engine that chooses rows and tokens of a step by itself."""
    config = EngineConfig(
        device="cpu" if context.dry else "cuda",
        max_model_len=context.sized(CONTEXT_TOKENS, 64),
        cache=CacheConfig(gpu_memory_utilization=0.9, memory_bytes=context.sized(None, 1 << 18), prefix_caching=False),
    )
    config = with_overrides(config, {**variants(context)[0].settings, **context.settings})
    return load_engine(write_config(context.folder, model), config)
