"""Pooled hidden states: one vector for all positions of a prompt, in float32.

The modes are those of sentence-transformers. A paged engine processes a prompt in chunks and accumulates; an encoder
processes it whole, in a padded batch. A mean excludes the first `Request.pooling_skip` positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import RowState, StepPlan
from engine.request import Pooling, Request


def pool_padded(hidden: Tensor, lengths: Sequence[int], mode: Pooling, skips: Sequence[int]) -> Tensor:
    """Pool each row of a batch that is padded on the right.

    Args:
        hidden: [rows, positions, hidden], any float dtype.  lengths: positions of each row that count.
        skips: of them, the number of first ones that a mean excludes.

    Returns:
        float32 [rows, hidden].
    """
    device = hidden.device
    count = torch.tensor(lengths, device=device)
    if mode == "cls":
        return hidden[:, 0].float()
    if mode == "last":
        return hidden[torch.arange(len(lengths), device=device), count - 1].float()
    positions = torch.arange(hidden.shape[1], device=device)
    inside = positions < count[:, None]
    if mode == "max":
        return hidden.float().masked_fill(~inside[..., None], -torch.inf).amax(dim=1)
    first = torch.tensor(skips, device=device)
    weights = (inside & (positions >= first[:, None])).float()
    if mode == "weightedmean":
        weights *= positions + 1
    total = torch.einsum("rp,rph->rh", weights, hidden.float())
    return total / _divisor(mode, weights.sum(dim=1))[:, None]


def _divisor(mode: Pooling, weight: Tensor) -> Tensor:
    """Return the divisor of a sum; `weight`: total of its positions."""
    weight = weight.clamp(min=1e-9)
    return weight.sqrt() if mode == "mean_sqrt_len" else weight


@dataclass(slots=True)
class _Row:
    """The pooled state of one row so far: float32 [hidden]."""

    mode: Pooling
    skip: int
    state: Tensor | None = None

    def add(self, hidden: Tensor, start: int) -> None:
        """Add the hidden states [positions, hidden] of the positions from `start` on."""
        if self.mode == "last":
            self.state = hidden[-1].float()
        elif self.mode == "cls":
            self.state = hidden[0].float() if self.state is None else self.state
        elif self.mode == "max":
            part = hidden.float().amax(dim=0)
            self.state = part if self.state is None else torch.maximum(self.state, part)
        else:
            first = max(0, self.skip - start)
            part = hidden[first:].float()
            if self.mode == "weightedmean":
                positions = torch.arange(start + first + 1, start + len(hidden) + 1, device=part.device)
                part = part * positions[:, None]
            self.state = part.sum(dim=0) if self.state is None else self.state + part.sum(dim=0)

    def vector(self, length: int) -> Tensor:
        """Return the result after all `length` positions were added."""
        assert self.state is not None
        if self.mode in ("last", "cls", "max"):
            return self.state
        positions = torch.arange(self.skip + 1, length + 1).float()
        weight = positions.sum() if self.mode == "weightedmean" else torch.tensor(float(len(positions)))
        return self.state / _divisor(self.mode, weight)


class Pooler:
    """Accumulates the pooled states of rows that request pooling."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def concerns(self, rows: NDArray[np.int32]) -> bool:
        """Whether any of these rows requests pooling. (The state of a row whose owner left early remains until the
        row's next owner.)"""
        return bool(self._rows) and not self._rows.keys().isdisjoint(rows.tolist())

    def assign(self, row: int, request: Request) -> None:
        """Reset a row for its new owner."""
        self._rows.pop(row, None)
        if request.pooling is not None:
            self._rows[row] = _Row(request.pooling, request.pooling_skip)

    def take(
        self, plan: StepPlan, hidden: Tensor, ends: NDArray[Any], rows: RowState, failed: NDArray[np.bool_]
    ) -> dict[int, NDArray[np.float32]]:
        """Add this step's hidden states [T, hidden]; returns the vectors of the rows whose prompt is complete."""
        done: dict[int, NDArray[np.float32]] = {}
        for i, row in enumerate(plan.rows.tolist()):
            pooled = self._rows.get(row)
            if pooled is None:
                continue
            start, end, count = int(plan.starts[i]), int(ends[i]), int(plan.counts[i])
            pooled.add(hidden[end - count : end], start)
            length = int(rows.prompt_len[row])
            if start + count == length:
                del self._rows[row]
                done[row] = pooled.vector(length).cpu().numpy()
                failed[i] |= not bool(np.isfinite(done[row]).all())
        return done
