"""Compiles, when an engine starts, the kernels of attention, adapters and draws that its eager steps launch.

A kernel is compiled when it is first launched, in seconds; without this, in the middle of a job. The model itself
launches them, for tokens that are stored nowhere, so they are compiled for its own tensors.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from engine.adapters.tiles import LARGE, SMALL, TokenTiles
from engine.attention.base import WARM_UP_TOKENS, AttentionBackend, CompiledAttention
from engine.device_transfer import make_transfer
from engine.logs import get_logger
from engine.models.base import AdaptedModel, CausalModel, LayerCache, RoutedModel
from engine.runner.device_memory import AttendToNothing
from engine.sampling.sampler import Sampler

logger = get_logger(__name__)


class _AttendInEveryShape(AttendToNothing):
    """`Attend` of these tokens; adapters: tiles of none."""

    def __init__(self, model: CausalModel, attention: CompiledAttention, adapters: TokenTiles | None) -> None:
        super().__init__(model.spec, WARM_UP_TOKENS)
        self.adapters = adapters
        self._attention, self._step = attention, attention.warm_up_step()

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, sinks: Tensor | None = None, /
    ) -> Tensor:
        return self._attention.attend(layer, q, k, v, scale, self._step, sinks)

    def cache(self, layer: int) -> LayerCache | None:
        return self._attention.layer_cache(layer, self._step)


def compile_launches(model: CausalModel, attention: AttentionBackend, device: torch.device) -> None:
    """Launch every kernel that an eager step of this model may launch to attend, unless a library does, for adapters,
    and to draw; on other devices than CUDA's do nothing."""
    if device.type != "cuda":
        return
    begun = time.perf_counter()
    with torch.inference_mode():
        if model.spec.generates:
            row, vocab = np.zeros(1, dtype=np.int32), model.spec.vocab_size
            Sampler(1, vocab, (), device).draw(torch.zeros(1, vocab, device=device), row, row, row)
        if isinstance(attention, CompiledAttention):
            _attend(model, attention, device)
    logger.info("kernels are compiled", seconds=round(time.perf_counter() - begun, 2))


def _attend(model: CausalModel, attention: CompiledAttention, device: torch.device) -> None:
    zero = torch.zeros(WARM_UP_TOKENS, dtype=torch.int64, device=device)
    lengths = zero if model.spec.rope_original_max is not None else None
    tiles: list[TokenTiles | None] = [None]
    if isinstance(model, AdaptedModel) and model.num_places:
        nothing = torch.zeros(1, 3, dtype=torch.int32, device=device)
        tiles = [TokenTiles(nothing, nothing[0, :1], rows, make_transfer(device)) for rows in (SMALL, LARGE)]
    for adapters in tiles:
        model.forward(zero, zero, _AttendInEveryShape(model, attention, adapters), lengths)
    if isinstance(model, RoutedModel):
        model.reset_expert_load()
