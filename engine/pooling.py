"""Pooled hidden states of prompts: the last token's, or the mean over all, summed in float32 across chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import RowState, StepPlan
from engine.request import Request


class Pooler:
    """Keeps what is pooled so far of the rows that ask for it."""

    def __init__(self) -> None:
        self._kind: dict[int, str] = {}
        self._sum: dict[int, Tensor] = {}

    @property
    def active(self) -> bool:
        """Whether any row asks for pooling."""
        return bool(self._kind)

    def assign(self, row: int, request: Request) -> None:
        """The row has a new owner."""
        self._kind.pop(row, None)
        self._sum.pop(row, None)
        if request.pooling is not None:
            self._kind[row] = request.pooling

    def take(
        self, plan: StepPlan, hidden: Tensor, ends: NDArray[Any], rows: RowState, failed: NDArray[np.bool_]
    ) -> dict[int, NDArray[np.float32]]:
        """Add this step's hidden states [T, hidden]; give the vectors of the rows whose prompt is complete."""
        done: dict[int, NDArray[np.float32]] = {}
        for i, row in enumerate(plan.rows.tolist()):
            kind = self._kind.get(row)
            if kind is None:
                continue
            end, count = int(ends[i]), int(plan.counts[i])
            complete = int(plan.starts[i]) + count == int(rows.prompt_len[row])
            if kind == "mean":
                part = hidden[end - count : end].float().sum(dim=0)
                self._sum[row] = self._sum[row] + part if row in self._sum else part
            if not complete:
                continue
            vector = hidden[end - 1].float() if kind == "last" else self._sum[row] / int(rows.prompt_len[row])
            del self._kind[row]
            self._sum.pop(row, None)
            done[row] = vector.cpu().numpy()
            failed[i] |= not bool(np.isfinite(done[row]).all())
        return done
