"""Mamba-2 (Dao & Gu 2024, arXiv 2405.21060, section 7): the weights of such a layer, and what surrounds its recurrence.

A head's values are x of the paper, its keys B and its queries C; heads of one group share B and C.
"""

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
class MambaSpec:
    """A decoder's Mamba-2 layers.

    Attributes:
        layers: per layer, whether it is one.
        module: its name within a layer of a checkpoint.
        bias: both products have one.  conv_bias: the convolution has one.
        time_steps: bounds of the step sizes.
    """

    layers: tuple[bool, ...]
    shape: RecurrenceShape
    module: str = "mamba"
    bias: bool = False
    conv_bias: bool = True
    time_steps: tuple[float, float] = (0.0, float("inf"))

    @property
    def output_size(self) -> int:
        """Features that the output product reads."""
        return self.shape.sizes[2]

    @property
    def product_size(self) -> int:
        """Features that the product makes but for the step sizes, which are its last ones."""
        return self.output_size + sum(self.shape.sizes)

    def state(self, dtype: torch.dtype) -> tuple[StateShape, ...]:
        """See `RecurrenceShape.state`."""
        return self.shape.state(dtype)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of a layer's part, the output product included."""
        heads, made = self.shape.num_value_heads, self.product_size + self.shape.num_value_heads
        products = hidden_size * (made + self.output_size) + (made + hidden_size) * self.bias
        convolution = sum(self.shape.sizes) * (self.shape.kernel_size + self.conv_bias)
        return products + convolution + 3 * heads + self.output_size


@dataclass(frozen=True, slots=True, eq=False)
class Mamba:
    """A layer's weights, but for the output product.

    Attributes:
        product: hidden -> the gate z of the output, then the convolution's features: values, keys and queries.
        gates: float32 hidden -> what `Gates` takes. A decay's error multiplies over all tokens, so this product is not
            rounded.
        recurrence: computes the heads' outputs, see `engine.models.state_layers.recurrence`.
        norm: a `GatedNorm`, of the gated outputs of the heads that share keys.
    """

    spec: MambaSpec
    product: Linear
    gates: Linear
    recurrence: StateOperator
    norm: OutputNorm

    def attended(self, layer: int, x: Tensor, attend: Attend, epsilon: float) -> Tensor:
        """[T, hidden], normed -> the heads' outputs [T, value_heads * value_dim], gated and normed."""
        z, features = self.product(x).tensor_split((self.spec.output_size,), dim=1)
        out = attend.scan(layer, self.recurrence, features, self.gates(x.float()))
        return self.norm(out.flatten(1), z, epsilon)
