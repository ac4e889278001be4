"""What surrounds a recurrence: the rates and decays of tokens, and the gated norm of its outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gates:
    """Makes rates and decays from a product with a token.

    The softplus of a part of the product is a head's step size, which sets its decay. In Mamba-2 it is the rate, too;
    the gated delta rule has a rate of its own, the sigmoid of another part.

    Attributes:
        decay_scale: float32 [value_heads], of a step of 1: the decay's logarithm.
        has_rates: rates are not the step sizes.
        steps: bounds of step sizes.
    """

    decay_scale: Tensor
    has_rates: bool
    steps: tuple[float, float] = (0.0, math.inf)

    def __call__(self, made: Tensor) -> Tensor:
        """float32 [T, value_heads], with `has_rates` rates and then steps [T, 2 * value_heads] -> rates and then decays
        as logarithms, float32 [T, 2 * value_heads]."""
        heads = len(self.decay_scale)
        steps = F.softplus(made[:, -heads:]).clamp_(*self.steps)
        rates = made[:, :heads].sigmoid() if self.has_rates else steps
        return torch.cat((rates, steps * self.decay_scale), dim=1)


class OutputNorm(Protocol):
    """A `GatedNorm`, whatever computes it."""

    def __call__(self, x: Tensor, z: Tensor, epsilon: float, /) -> Tensor:
        """float32 [T, features], which may be overwritten, and gates [T, features] before their silu -> [T, features]
        in z's dtype."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """RMSNorm (Zhang & Sennrich 2019, equation 4) of groups of neighbouring features, and a gate of each feature.

    Attributes:
        weight: float32 [features].
        group: features that are normed together.
        gates_first: what is normed is gated already; else the gate multiplies what is normed.
    """

    weight: Tensor
    group: int
    gates_first: bool

    def __call__(self, x: Tensor, z: Tensor, epsilon: float) -> Tensor:
        """See `OutputNorm`."""
        gate = F.silu(z.float())
        if self.gates_first:
            x = x.mul_(gate)
        normed = F.rms_norm(x.view(len(x), -1, self.group), (self.group,), eps=epsilon).flatten(1).mul_(self.weight)
        return (normed if self.gates_first else normed.mul_(gate)).to(z.dtype)
