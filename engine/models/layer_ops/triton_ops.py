"""A layer's operations by fused Triton kernels, one launch each."""

from __future__ import annotations

from torch import Tensor

from engine.models.base import Attend
from engine.models.layer_ops.base import Activation, HeadLayout, Update
from engine.models.layer_ops.torch_ops import TorchLayerOps
from engine.models.rope import Rotation
from engine.quant.base import Linear, Rows, fp8_input
from engine.triton_kernels.layers import MAX_FP8_COLUMNS, activate, add_norm, rotate_and_store


class TritonLayerOps:
    """`LayerOps` on a CUDA device.

    Args:
        reference: torch's form, which computes what no kernel does: the rotation where attention stores keys and values
            itself (`Attend.cache`).
        interpreted: by Triton's interpreter, which rounds to float8 wrongly.
    """

    def __init__(self, reference: TorchLayerOps, *, interpreted: bool = False) -> None:
        self._reference = reference
        self._interpreted = interpreted

    def add_norm(
        self, hidden: Tensor, update: Update | None, norm: Tensor | None, reader: Linear | None = None
    ) -> Rows:
        """See `LayerOps.add_norm`."""
        if update is None and norm is None:
            return hidden
        ops = self._reference
        return add_norm(
            hidden, update, norm, ops.epsilon, fp8_input(reader), layer_norm=ops.layer_norm,
            interpreted=self._interpreted,
        )  # fmt: skip

    def rotate(
        self, heads: HeadLayout, qkv: Tensor, qk_norm: Tensor | None, rotation: Rotation, growth: Tensor | None,
        attend: Attend, layer: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """See `LayerOps.rotate`; keys and values are stored."""
        ops, cache = self._reference, attend.cache(layer) if heads.num_kv_heads else None
        if heads.num_kv_heads and cache is None:
            return ops.rotate(heads, qkv, qk_norm, rotation, growth, attend, layer)
        q = rotate_and_store(
            heads, qkv, qk_norm, rotation, growth, cache, ops.epsilon, layer_norm=ops.layer_norm,
            interpreted=self._interpreted,
        )  # fmt: skip
        return q, None, None

    def activate(self, activation: Activation, made: Tensor, reader: Linear | None = None) -> Rows:
        """See `LayerOps.activate`. Rows too long for a program's registers are quantized by their product."""
        form = fp8_input(reader) if made.shape[1] <= 2 * MAX_FP8_COLUMNS else None
        return activate(activation, made, form, interpreted=self._interpreted)
