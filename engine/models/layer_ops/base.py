"""The interface of the operations between a layer's products, and the residual stream that layers read and add to.

On a GPU each launch of a small kernel costs as much as its arithmetic, so the operations are cut where fused kernels
are: a sum and the norm that reads it, everything between the product of q, k and v and attention, and an MLP's
activation. vLLM cuts its custom ops likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from engine.models.base import Attend
from engine.models.rope import Rotation
from engine.quant.base import Linear, Rows

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "plain_silu", "plain_gelu_tanh", "plain_relu2"]
"""Of the gate, which is multiplied with up; for "clamped_swiglu" see `clamped_swiglu`. The plain ones are of up itself,
in MLPs without a gate; relu2 is the square of ReLU (So et al. 2021, Primer, section 4.1)."""

QkNorm = Literal["head", "heads", "projection", "unit"]
"""Norms of q and k: of each head, with one weight for all heads of q and one for those of k, or
with a weight for each head; or of all heads together; or of each head without a weight, in layers with positions."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A layer's heads in the product of q, k and v, which stand in this order, gates behind them.

    Attributes:
        num_kv_heads: that the layer makes keys and values of; 0: it attends to those of another layer.
        qk_norm, late_qk_norm, values_are_keys, value_norm: as of `DecoderSpec`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: QkNorm | None = None
    late_qk_norm: bool = False
    values_are_keys: bool = False
    value_norm: bool = False

    @property
    def first_value(self) -> int:
        """Of the heads."""
        return self.num_heads + (0 if self.values_are_keys else self.num_kv_heads)


class Update(NamedTuple):
    """What joins the residual: hidden = (hidden + scale * norm(made)) * factor.

    Attributes:
        made: [T, hidden_size].
        norm: float32 [hidden_size] or [2, hidden_size], as of `Layer`; None: there is none.
    """

    made: Tensor
    norm: Tensor | None = None
    scale: float = 1.0
    factor: float = 1.0


class LayerOps(Protocol):
    """The operations. Each result is rounded to the model's dtype."""

    def add_norm(
        self, hidden: Tensor, update: Update | None, norm: Tensor | None, reader: Linear | None = None
    ) -> Rows:
        """Add the update to hidden states [T, hidden_size] in place, then norm them.

        Args:
            norm: as of `Update`; None: the result is `hidden` itself.
            reader: the one product that reads the result; None: others do, and it is a tensor.

        Returns:
            [T, hidden_size], a new tensor, or its fp8 codes if `reader` takes them.
        """
        ...

    def rotate(
        self, heads: HeadLayout, qkv: Tensor, qk_norm: Tensor | None, rotation: Rotation, growth: Tensor | None,
        attend: Attend, layer: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Norm and rotate queries and keys.

        Args:
            qkv: [T, heads, head_dim], see `HeadLayout`.
            qk_norm: float32 [num_heads + num_kv_heads, head_dim].
            growth: float32 [T, 1, 1], factors of queries.
            attend, layer: of the step; keys and values may be stored where `attend.cache` says.

        Returns:
            q, k and v as `attend` takes them; k and v None: they are stored, or there are none.
        """
        ...

    def activate(self, activation: Activation, made: Tensor, reader: Linear | None = None) -> Rows:
        """An MLP's values between its products, of gate and up side by side, or of up where there is no gate.

        Args:
            made: [T, 2 * intermediate], or [T, intermediate] without a gate.
            reader: as of `add_norm`.

        Returns:
            [T, intermediate], a new tensor, or its fp8 codes if `reader` takes them.
        """
        ...


class Residual:
    """The residual stream of a step: hidden states [T, hidden_size], which are changed in place.

    What a layer's part made joins them when they are read next: so a sum and the norm of it are one operation.

    Args:
        scale: of what joins.
    """

    __slots__ = ("_hidden", "_ops", "_scale", "_update")

    def __init__(self, ops: LayerOps, hidden: Tensor, scale: float = 1.0) -> None:
        self._ops = ops
        self._hidden = hidden
        self._scale = scale
        self._update: Update | None = None

    def add(self, made: Tensor, norm: Tensor | None = None) -> None:
        """Add [T, hidden_size], behind its norm; the caller does not change it any more."""
        self.joined()
        self._update = Update(made, norm, self._scale)

    def multiply(self, factor: float) -> None:
        """Multiply the stream by this, what was added last included."""
        if self._update is None:
            self._hidden *= factor
        else:
            self._update = self._update._replace(factor=self._update.factor * factor)

    def joined(self) -> Tensor:
        """The hidden states themselves, with all that was added."""
        if self._update is not None:
            self._ops.add_norm(self._hidden, self._update, None)
            self._update = None
        return self._hidden

    def normed(self, norm: Tensor | None, reader: Linear | None = None) -> Rows:
        """The normed hidden states, see `LayerOps.add_norm`."""
        update, self._update = self._update, None
        return self._ops.add_norm(self._hidden, update, norm, reader)
