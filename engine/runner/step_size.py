"""The size of a step where the settings don't give it: its rows, its tokens, and the tokens of its largest mixed graph.

On a CPU the size is constant (`ScheduleConfig`). On a CUDA device it follows from the device's memory and from what a
token of the model costs, and is halved while it does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from engine.config import EngineConfig, KVDType
from engine.errors import OutOfMemory
from engine.logs import get_logger
from engine.models.base import ModelSpec
from engine.runner.memory import sequence_bytes

logger = get_logger(__name__)

Planned = TypeVar("Planned")

LARGE_DEVICE_BYTES = 70 << 30
"""Memory from which a device of compute capability 9 or more counts as fast: an H100, and larger ones."""

FAST_FLOPS = 6.4e14
"""Operations per second of a fast device: two thirds of an H100's 990 TFLOP/s of dense products in 16 bits."""

STEP_SECONDS = 0.25
"""Computing time of a step where no latency is an objective: longer steps would hardly save anything."""

LAUNCH_SECONDS = 600e-6
"""Time in which the host launches a layer: on an H200's, steps of 500 tokens of an 8B model (32 layers, 17 ms of
computing) took 1.6 ms longer without a graph (docs/gpu.md)."""

SHORT_TOKENS = 512
"""Assumed length of a sequence when the work is unknown: short, because rows that find no memory only wait."""

ACTIVATION_ELEMENTS = 20
"""A token's activations at their peak, in multiples of the hidden size: the MLP's of 3.5 times that, and a few more."""

LOGIT_BYTES = 12
"""Of a logit: in the model's dtype, as float32, and a copy for penalties or masks."""

ROWS, TOKENS, GRAPH_TOKENS = (128, 4096), (2048, 16384), (512, 4096)
"""Bounds of the choice; the lower ones are the size on a CPU."""

MIN_ROWS, MIN_TOKENS = 8, 128
"""Bounds of halving."""


class StepSize(NamedTuple):
    """The size of a step.

    Attributes:
        rows: `ScheduleConfig.max_num_seqs`.  tokens: `ScheduleConfig.max_num_batched_tokens`.
        graph_tokens: `EngineConfig.max_graph_tokens`.
    """

    rows: int
    tokens: int
    graph_tokens: int


def choose_step_size(
    spec: ModelSpec,
    total_bytes: int,
    free_bytes: int,
    cache_bytes: int | None = None,
    *,
    capability: tuple[int, int] = (9, 0),
    step_seconds: float = STEP_SECONDS,
    kv_dtype: KVDType = "auto",
    sequence_tokens: int | None = None,
    ranks: int = 1,
) -> StepSize:
    """Choose the size of a step on a CUDA device. All sizes are powers of two.

    Tokens: as many as the device computes in `step_seconds`; their activations take at most a sixteenth of
    `free_bytes`. Speed is estimated: from a T4 (16 GB, 65 TFLOP/s) to an H100 it grows with the square of the memory,
    and an A100 (312 TFLOP/s), whatever its memory, has a third of an H100's.

    Rows: all sequences that fit the cache at once; at most half of the tokens, so that prompts are computed beside
    them, and as many as decode in half of `STEP_SECONDS`; their logits take at most a thirty-second of `free_bytes`.

    Mixed graphs: up to the number of tokens that takes as long to compute as to launch.

    Args:
        spec: of the model, or of a rank's share of it.
        total_bytes: the device's memory.  free_bytes: what may be used of it beside the weights, and beside a cache of
            `cache_bytes`.  cache_bytes: of a given cache; None: it shares `free_bytes`.
        capability: compute capability of the device.  step_seconds: computing time of a step.
        sequence_tokens: mean length of the planned sequences; None: unknown.
        ranks: devices that share the model.
    """
    speed = min(1.0 if capability >= (9, 0) else 1 / 3, (total_bytes / LARGE_DEVICE_BYTES) ** 2)
    token_seconds = 2 * max(1, spec.num_active_parameters or spec.num_parameters) / ranks / (FAST_FLOPS * speed)
    activations = ACTIVATION_ELEMENTS * spec.hidden_size * spec.dtype.itemsize
    tokens = _within(min(step_seconds / token_seconds, free_bytes / 16 / activations), TOKENS)
    room = free_bytes if cache_bytes is None else cache_bytes
    fitting = room / max(1, sequence_bytes(spec, sequence_tokens or SHORT_TOKENS, kv_dtype))
    # The power of two above it: no less than what fits.
    rows = min(
        2 * fitting, tokens / 2, STEP_SECONDS / 2 / token_seconds, free_bytes / 32 / LOGIT_BYTES / spec.vocab_size
    )
    graph_tokens = _within(2 * LAUNCH_SECONDS * spec.num_layers / token_seconds, GRAPH_TOKENS)  # above it, likewise
    return StepSize(_within(rows, ROWS), tokens, graph_tokens)


def _within(value: float, bounds: tuple[int, int]) -> int:
    """Return the largest power of two up to `value`, within these bounds, which are powers of two."""
    lower, upper = bounds
    return max(lower, min(1 << max(1, int(value)).bit_length() - 1, upper))


def with_step_size(config: EngineConfig, size: StepSize) -> EngineConfig:
    """Return the settings with this size where they give none."""
    schedule = config.schedule
    tokens = size.tokens if schedule.max_num_batched_tokens is None else schedule.max_num_batched_tokens
    rows = min(size.rows, tokens) if schedule.max_num_seqs is None else schedule.max_num_seqs
    graph_tokens = size.graph_tokens if config.max_graph_tokens is None else config.max_graph_tokens
    schedule = replace(schedule, max_num_seqs=rows, max_num_batched_tokens=tokens)
    return replace(config, schedule=schedule, max_graph_tokens=graph_tokens)


def fit_step_size(
    config: EngineConfig, size: StepSize, plan: Callable[[EngineConfig], Planned]
) -> tuple[EngineConfig, Planned]:
    """Plan with this size where the settings give none, and with half of it again while that does not fit.

    Args:
        plan: runs the largest step, and plans the cache.

    Returns:
        The settings with the size that fits, and what was planned with them.

    Raises:
        OutOfMemory: of `plan`, when the settings give rows and tokens, or the cache's size, or too little is left to
            halve.
    """
    while True:
        sized = with_step_size(config, size)
        try:
            planned = plan(sized)
        except OutOfMemory as error:
            smaller = StepSize(size.rows // 2, size.tokens // 2, size.graph_tokens)
            if not _may_halve(config) or smaller.rows < MIN_ROWS or smaller.tokens < MIN_TOKENS:
                raise
            schedule, size = sized.schedule, smaller
            logger.warning(
                "the step does not fit the device, and is halved", rows=schedule.rows, tokens=schedule.tokens,
                reason=str(error),
            )  # fmt: skip
        else:
            log_step_size(sized)
            return sized, planned


def _may_halve(config: EngineConfig) -> bool:
    """Return whether a part of the size was chosen, and the cache gets what the step leaves."""
    schedule, cache = config.schedule, config.cache
    is_given = schedule.max_num_seqs is not None and schedule.max_num_batched_tokens is not None
    return not is_given and cache.memory_bytes is None and cache.num_blocks is None


def log_step_size(config: EngineConfig) -> None:
    """Log the size of a step of an engine on a device."""
    schedule = config.schedule
    logger.info(
        "the size of a step is set", rows=schedule.rows, tokens=schedule.tokens, graph_tokens=config.graph_tokens
    )
