"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464): the weights of such a layer, and what surrounds its
recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.base import Attend
from engine.models.state_layers.gates import OutputNorm
from engine.models.state_layers.recurrence import RecurrenceShape
from engine.quant.base import Linear
from engine.states import StateOperator, StateShape


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A decoder's gated delta nets.

    Attributes:
        layers: per layer, whether it is one; the others attend.
        interleaved: checkpoints store the products as `in_proj_qkvz` and `in_proj_ba`, whose rows are sorted by key
            heads; else as `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`.
    """

    layers: tuple[bool, ...]
    shape: RecurrenceShape
    interleaved: bool = False

    @property
    def output_size(self) -> int:
        """Features that the output product reads."""
        return self.shape.sizes[2]

    def state(self, dtype: torch.dtype) -> tuple[StateShape, ...]:
        """See `RecurrenceShape.state`."""
        return self.shape.state(dtype)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of a layer's part, the output product included."""
        shape = self.shape
        q, k, v = shape.sizes
        products = hidden_size * (q + k + 3 * v + 2 * shape.num_value_heads)
        return products + (q + k + v) * shape.kernel_size + 2 * shape.num_value_heads + shape.value_dim

    def qkvz_order(self) -> Tensor:
        """Where the rows of q, k, v and z, stacked, lie in `in_proj_qkvz`: int64 [rows]."""
        shape = self.shape
        values = shape.num_value_heads // shape.num_key_heads * shape.value_dim
        return _by_parts(shape.num_key_heads, (shape.key_dim, shape.key_dim, values, values))

    def ba_order(self) -> Tensor:
        """Likewise the rows of b and a in `in_proj_ba`."""
        return _by_parts(self.shape.num_key_heads, (self.shape.num_value_heads // self.shape.num_key_heads,) * 2)


def _by_parts(heads: int, sizes: tuple[int, ...]) -> Tensor:
    """Rows that are sorted by heads, each of which has parts of these sizes, sorted by parts."""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, list(sizes), dim=1)])


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNet:
    """A layer's weights, but for the output product.

    Attributes:
        qkvz: hidden -> q, k, v, and the gate z of the output.
        gates: float32 hidden -> what `Gates` takes. A decay's error multiplies over all tokens, so this product is not
            rounded.
        recurrence: computes the heads' outputs, see `engine.models.state_layers.recurrence`.
        norm: a `GatedNorm`, of each head's output.
    """

    shape: RecurrenceShape
    qkvz: Linear
    gates: Linear
    recurrence: StateOperator
    norm: OutputNorm

    def attended(self, layer: int, x: Tensor, attend: Attend, epsilon: float) -> Tensor:
        """[T, hidden], normed -> the heads' outputs [T, value_heads * value_dim], normed and gated."""
        qkv, z = self.qkvz(x).tensor_split((sum(self.shape.sizes),), dim=1)
        out = attend.scan(layer, self.recurrence, qkv, self.gates(x.float()))
        return self.norm(out.flatten(1), z, epsilon)
