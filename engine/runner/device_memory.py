"""The KV cache's memory on a CUDA device: the remainder after weights and the largest step.

The largest step is run once after the weights are loaded, with the maximum tokens of a step, and logits and draws for
the maximum rows; its attention is left out, because it needs little memory. The peak of that run, and the memory of
other processes on the device, are subtracted from the settings' share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.adapters.tiles import TokenTiles
from engine.config import EngineConfig, KVDType, ScheduleConfig
from engine.errors import OutOfMemory
from engine.logs import get_logger
from engine.models.base import CausalModel, LayerCache, ModelSpec, RoutedModel
from engine.request import Request, SamplingParams
from engine.runner.memory import available_bytes
from engine.runner.step_size import STEP_SECONDS, StepSize, choose_step_size
from engine.sampling.sampler import Sampler
from engine.states import NO_SLOT, Segments, StateOperator, empty_states

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory use of a device, in bytes.

    Attributes:
        total: the device's memory.
        outside: held by other processes, and by libraries that allocate memory themselves.
        peak: held by this process's tensors in the largest step, weights included.
    """

    total: int
    outside: int
    peak: int


def cache_budget(use: MemoryUse, utilization: float) -> int:
    """Return the bytes of the cache with which this process and all others use `utilization` of the device.

    Raises:
        OutOfMemory: weights and the largest step leave nothing.
        ValueError: `utilization` is not a share.
    """
    if not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {utilization}, but must be above 0 and at most 1")
    budget = int(use.total * utilization) - use.outside - use.peak
    if budget <= 0:
        raise OutOfMemory(
            f"weights and the largest step take {_gib(use.peak)} GiB and others hold {_gib(use.outside)} GiB, which "
            f"leaves nothing of {utilization:.0%} of the device's {_gib(use.total)} GiB for the KV cache; lower "
            "max_num_batched_tokens or max_num_seqs, quantize the weights, or raise gpu_memory_utilization"
        )
    return budget


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def choose_for_device(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    free_bytes: int | None = None,
    *,
    kv_dtype: KVDType = "auto",
    ranks: int = 1,
    num_stages: int = 1,
) -> StepSize:
    """Choose the size of a step on this CUDA device (`choose_step_size`): where tokens of streams have an objective, it
    takes no longer than that, so that the first steps with a stream are in time, too.

    Args:
        spec: of the model, or of a rank's share of it.
        free_bytes: of the device beside the weights; None: what is free now. On several ranks: of the one with the
            least.
        ranks: devices that share the model.  num_stages: that they are divided into. Stages compute one prompt's chunk
            one after the other, so they make its step no shorter.
    """
    cache, slo = config.cache, config.schedule.slo
    free, total = torch.cuda.mem_get_info(device)
    free = free if free_bytes is None else free_bytes
    given = None if cache.memory_bytes is None else cache.memory_bytes // ranks
    usable = int(free - (1 - cache.gpu_memory_utilization) * total)
    return choose_step_size(
        spec, total, usable - (given or 0), given, capability=torch.cuda.get_device_capability(device),
        step_seconds=STEP_SECONDS if slo is None else slo.itl_seconds, kv_dtype=kv_dtype,
        sequence_tokens=cache.tokens_per_sequence, ranks=ranks // num_stages,
    )  # fmt: skip


def make_memory_release(device: torch.device) -> Callable[[], None]:
    """Return a function that releases the allocator's cached memory to the device, which removes fragmentation."""
    return torch.cuda.empty_cache if device.type == "cuda" else lambda: None


class AttendToNothing:
    """`Attend` of a step of one sequence, without a cache and adapters."""

    adapters: TokenTiles | None = None

    def __init__(self, spec: ModelSpec, tokens: int) -> None:
        self._spec = spec
        zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
        self._segments = Segments(zero, one * tokens, zero + NO_SLOT, one, 0)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, sinks: Tensor | None = None, /
    ) -> Tensor:
        return q.new_zeros(*q.shape[:2], (q if v is None else v).shape[2])

    def cache(self, layer: int) -> LayerCache | None:
        """There is none."""

    def of_wanted(self) -> None:
        """All tokens are needed."""

    def scan(self, layer: int, operator: StateOperator, *inputs: Tensor) -> Tensor:
        return operator(empty_states(self._spec.states[layer], 2, inputs[0].device), self._segments, *inputs)


def largest_step(model: CausalModel, schedule: ScheduleConfig, device: torch.device) -> None:
    """Compute a step of the maximum size of this schedule and discard the result."""
    tokens = schedule.tokens
    rows = np.arange(min(schedule.rows, tokens), dtype=np.int32)
    sampler = Sampler(len(rows), model.spec.vocab_size, model.spec.eos_token_ids, device)
    request = Request("largest step", np.zeros(1, dtype=np.int32), SamplingParams(top_k=50, top_p=0.9))
    for row in rows.tolist():
        sampler.assign(row, request, 0, request.prompt_token_ids, 1)
    with torch.inference_mode():
        positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        lengths = positions if model.spec.rope_original_max is not None else None
        hidden = model.forward(positions, positions, AttendToNothing(model.spec, tokens), lengths)
        if model.spec.generates:
            sampler.draw(model.logits(hidden[: len(rows)].clone()), rows, np.ones_like(rows), np.zeros_like(rows))
    if isinstance(model, RoutedModel):  # its tokens are all the same one, and nobody's
        model.reset_expert_load()


def measure(model: CausalModel, schedule: ScheduleConfig, device: torch.device) -> MemoryUse:
    """Run the largest step on a CUDA device, and measure its memory. (On a CPU: run it, and measure the remainder.)

    Raises:
        OutOfMemory: it does not fit.
    """
    if device.type != "cuda":
        largest_step(model, schedule, device)
        return MemoryUse(available_bytes(device), 0, 0)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        largest_step(model, schedule, device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"a step of {schedule.tokens} tokens and {schedule.rows} rows does not fit the "
            f"memory of {device} beside the weights; lower max_num_batched_tokens or max_num_seqs: {error}"
        ) from error
    torch.cuda.synchronize(device)
    use = MemoryUse(total, outside, torch.cuda.max_memory_allocated(device))
    torch.cuda.empty_cache()
    # Libraries have loaded their kernels by now, which takes memory outside the allocator.
    free, _ = torch.cuda.mem_get_info(device)
    outside = max(outside, total - free - torch.cuda.memory_reserved(device))
    logger.info("the largest step was run", tokens=schedule.tokens, rows=schedule.rows, peak_gib=_gib(use.peak))
    return MemoryUse(total, outside, use.peak)
