"""Gated short convolutions (Liquid AI, LFM2 technical report, 2025, section 2): layers that remember a few tokens.

A layer's product gives B, C and x for each token; the output is C times a causal convolution, feature by feature, of
B x.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.models.base import Attend
from engine.quant.base import Linear
from engine.states import NO_SLOT, Segments, StateOperator, StateShape


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A decoder's short convolutions.

    Attributes:
        layers: per layer, whether it is one; the others attend.
        hidden_size: features that are convolved.
        kernel_size: tokens that a convolution sees, 2 at least.
        bias: the convolution and both products have one.
    """

    layers: tuple[bool, ...]
    hidden_size: int
    kernel_size: int
    bias: bool = False

    @property
    def output_size(self) -> int:
        """Features that the output product reads."""
        return self.hidden_size

    def state(self, dtype: torch.dtype) -> tuple[StateShape, ...]:
        """A layer's state: the convolution's last inputs."""
        return (StateShape((self.kernel_size - 1, self.hidden_size), dtype),)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of a layer's part, the output product included."""
        return hidden_size * (4 * hidden_size + self.kernel_size) + 5 * hidden_size * self.bias


class Convolution:
    """The `StateOperator` of a layer: its input is [T, features] in the model's dtype."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """From float32 [features, kernel_size] and [features]."""
        self._weight = weight.t().contiguous()
        self._bias = bias

    def __call__(self, states: tuple[Tensor, ...], segments: Segments, *inputs: Tensor) -> Tensor:
        """See `StateOperator`; returns float32 [T, features]."""
        (remembered,), (x,) = states, inputs
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        single, before = segments.num_single, remembered.shape[1]
        if single:
            at, read, write = (
                torch.from_numpy(part[:single].copy()).to(x.device)
                for part in (segments.first, segments.read, segments.write)
            )
            seen = torch.cat((remembered.index_select(0, read), x.index_select(0, at)[:, None]), dim=1)
            out.index_copy_(0, at, self._convolved(seen.transpose(0, 1))[0])
            stored = torch.from_numpy(np.flatnonzero(segments.write[:single] != NO_SLOT)).to(x.device)
            remembered.index_copy_(0, write[stored], seen[stored, 1:])
        parts = (segments.first, segments.count, segments.read, segments.write)
        for first, count, read, write in zip(*(part[single:].tolist() for part in parts), strict=True):
            seen = torch.cat((remembered[read], x[first : first + count]))
            out[first : first + count] = self._convolved(seen)
            if write != NO_SLOT:
                remembered[write] = seen[-before:]
        return out

    def _convolved(self, seen: Tensor) -> Tensor:
        """[kernel_size - 1 + n, ..., features] -> float32 [n, ..., features]."""
        count = len(seen) + 1 - len(self._weight)
        out = seen[:count] * self._weight[0]
        for tap in range(1, len(self._weight)):
            out.addcmul_(seen[tap : tap + count].float(), self._weight[tap])
        return out if self._bias is None else out.add_(self._bias)


@dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    """A layer's weights, but for the output product.

    Attributes:
        product: hidden -> B, C and x.
        convolution: a `Convolution`.
    """

    product: Linear
    convolution: StateOperator

    def attended(self, layer: int, x: Tensor, attend: Attend, epsilon: float) -> Tensor:
        """[T, hidden], normed -> [T, hidden]. `epsilon` is of norms, which such a layer has none of."""
        b, c, value = self.product(x).chunk(3, dim=1)
        return (attend.scan(layer, self.convolution, b * value) * c).to(x.dtype)
