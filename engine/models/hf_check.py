"""Checks, on a few tokens, that an architecture over a flat batch gives the same results as transformers alone.

Architectures differ in ways that no list of config keys covers: logits scaled after the head, positions counted from
the mask, biases on scores. So a model is compared with its own eager forward once, when it is loaded, and refused if
the two disagree. The check covers the first positions only: it can't find differences far behind them (scores
scaled from position 8192 on, say), and a forward over so many tokens would take minutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.paged_sdpa import with_sinks
from engine.errors import UnsupportedModel
from engine.models.base import CausalModel, ModelSpec
from engine.states import NO_SLOT, Segments, StateOperator, empty_states

_LENGTHS = (7, 4)
_CHUNKS = ((0, 5, 0, 3), (5, 7, 3, 4))
"""Two calls: (first sequence from, to, second sequence from, to)."""
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.05


class DenseAttend:
    """`Attend` over whole tensors: stores keys and values per layer and sequence, and attends with a dense mask.

    Set `ranges` to the positions [start, stop) of each sequence before every forward.
    """

    adapters = None

    def __init__(self, spec: ModelSpec) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.layers: list[int] = []
        self._spec = spec
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._states: dict[int, tuple[Tensor, ...]] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, sinks: Tensor | None = None, /
    ) -> Tensor:
        self.layers.append(layer)
        outputs, at = [], 0
        for sequence, (start, stop) in enumerate(self.ranges):
            rows = slice(at, at + stop - start)
            at = rows.stop
            if k is not None and v is not None:
                new = k[rows], v[rows]
                before = self._cache[layer, sequence] if start else (k[:0], v[:0])
                self._cache[layer, sequence] = torch.cat((before[0], new[0])), torch.cat((before[1], new[1]))
            keys, values = self._cache[layer, sequence]
            query, key = torch.arange(start, stop)[:, None], torch.arange(stop)
            mask = key <= query
            if (window := self._spec.windows[layer]) is not None:
                mask &= key > query - window
            query_heads, key_heads, value_heads = (x.transpose(0, 1) for x in (q[rows], keys, values))
            mask = mask.to(q.device)
            if sinks is not None:
                scores = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
                key_heads, value_heads, mask = with_sinks(key_heads, value_heads, scores, sinks[:, None, None])
            out = F.scaled_dot_product_attention(
                query_heads, key_heads, value_heads, attn_mask=mask, scale=scale, enable_gqa=True
            )
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)

    def cache(self, layer: int) -> None:
        """There is none."""

    def of_wanted(self) -> None:
        """All tokens are needed."""

    def scan(self, layer: int, operator: StateOperator, *inputs: Tensor) -> Tensor:
        """Each sequence has a slot of its own."""
        self.layers.append(layer)
        starts, stops = np.array(self.ranges, dtype=np.int64).T
        slots = np.arange(1, len(starts) + 1)
        if layer not in self._states:
            self._states[layer] = empty_states(self._spec.states[layer], 1 + len(slots), inputs[0].device)
        counts = stops - starts
        segments = Segments(np.cumsum(counts) - counts, counts, np.where(starts > 0, slots, NO_SLOT), slots, 0)
        return operator(self._states[layer], segments, *inputs)


def check_quantized(model: CausalModel, reference: Any) -> None:
    """Check a model whose layers were replaced, as `check_against_eager`: some modules read their weights themselves.

    Raises:
        UnsupportedModel: its modules don't work with replaced layers.
    """
    try:
        check_against_eager(model, reference, _HALF_TOLERANCE)  # a sum's last bit may round to another whole number
    except AttributeError as error:
        raise UnsupportedModel(f"{model.spec.architecture} can't be quantized: {error}") from error


def check_against_eager(model: CausalModel, reference: Any, tolerance: float | None = None) -> None:
    """Compare `model`, in chunks over a flat batch, with `reference(input_ids [1, T]).logits`, one sequence at a time.

    Args:
        tolerance: of the logits, relative; None: the dtype's.

    Raises:
        UnsupportedModel: they disagree, or layers do not attend once each.
    """
    spec = model.spec
    device = next(reference.parameters()).device
    sequences = [(torch.arange(n, device=device) * 7919 + 11 * n) % spec.vocab_size for n in _LENGTHS]
    attend = DenseAttend(spec)
    ours: list[list[Tensor]] = [[], []]
    for first, last, second, end in _CHUNKS:
        attend.ranges, attend.layers = [(first, last), (second, end)], []
        parts = [torch.arange(*r, device=device) for r in attend.ranges]
        ids = torch.cat([sequences[i][p] for i, p in enumerate(parts)])
        logits = model.logits(model.forward(ids, torch.cat(parts), attend, None))
        for i, part in enumerate(torch.split(logits, [len(p) for p in parts])):
            ours[i].append(part)
        if attend.layers != list(range(spec.num_layers)):
            raise UnsupportedModel(f"{spec.architecture} does not attend once in each of its {spec.num_layers} layers")
    if tolerance is None:
        tolerance = _TOLERANCE.get(spec.dtype, _HALF_TOLERANCE)
    with torch.inference_mode():
        for ids, got in zip(sequences, ours, strict=True):
            wanted = reference(input_ids=ids[None], use_cache=False).logits[0].float()
            error = float((torch.cat(got) - wanted).norm() / wanted.norm())
            if not error < tolerance:
                raise UnsupportedModel(
                    f"{spec.architecture} can't be run over flat batches: its logits are off by {error:.1%}"
                )
