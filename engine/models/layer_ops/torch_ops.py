"""A layer's operations by torch's operators: what a CPU computes, and the reference of the fused kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.base import Attend
from engine.models.layer_ops.base import Activation, HeadLayout, Update
from engine.models.rope import Rotation
from engine.quant.base import Linear

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""The kernels compute with the same constants (csrc/linear.h)."""


class TorchLayerOps:
    """`LayerOps` of a decoder whose norms have this epsilon, and subtract the mean first (`layer_norm`) or not."""

    def __init__(self, epsilon: float, *, layer_norm: bool) -> None:
        self.epsilon = epsilon
        self.layer_norm = layer_norm

    def add_norm(
        self, hidden: Tensor, update: Update | None, norm: Tensor | None, reader: Linear | None = None
    ) -> Tensor:
        """See `LayerOps.add_norm`. (Torch's sum with a factor rounds otherwise at the end of a tensor.)"""
        if update is not None:
            made = self.normed(update.made, update.norm)
            hidden.add_(made if update.scale == 1.0 else made * update.scale)
            if update.factor != 1.0:
                hidden *= update.factor
        return self.normed(hidden, norm)

    def rotate(
        self, heads: HeadLayout, qkv: Tensor, qk_norm: Tensor | None, rotation: Rotation, growth: Tensor | None,
        attend: Attend, layer: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """See `LayerOps.rotate`; nothing is stored."""
        qk = qkv[:, : heads.num_heads + heads.num_kv_heads]
        v = qkv[:, heads.first_value : heads.first_value + heads.num_kv_heads]
        if heads.value_norm:
            v = self.norm32(v, heads.head_dim).to(v.dtype)
        if qk_norm is not None and not heads.late_qk_norm:
            qk = self._qk_normed(heads, qk, qk_norm)
        qk = rotation.apply(qk)
        if qk_norm is not None and heads.late_qk_norm:
            qk = self._qk_normed(heads, qk, qk_norm)
        q, k = qk.tensor_split((heads.num_heads,), dim=1)
        q = q if growth is None else (q * growth).to(q.dtype)
        return (q, k, v) if heads.num_kv_heads else (q, None, None)

    def activate(self, activation: Activation, made: Tensor, reader: Linear | None = None) -> Tensor:
        """See `LayerOps.activate`."""
        return inner_values(activation, made)

    def normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """In float32, rounded once to x's dtype; x itself where there is no norm."""
        return x if weight is None else self.norm32(x, weight.shape[-1], weight).to(x.dtype)

    def norm32(self, x: Tensor, size: int, weight: Tensor | None = None) -> Tensor:
        """Zhang & Sennrich 2019 (RMSNorm), equation 4, or Ba et al. 2016 (LayerNorm), of the last `size` elements, in
        float32."""
        if not self.layer_norm:
            return F.rms_norm(x.float(), (size,), weight=weight, eps=self.epsilon)
        weight, bias = (weight, None) if weight is None or weight.dim() == 1 else weight
        return F.layer_norm(x.float(), (size,), weight, bias, self.epsilon)

    def _qk_normed(self, heads: HeadLayout, x: Tensor, weight: Tensor) -> Tensor:
        """Norm q and k [T, heads + kv_heads, head_dim]; weight: float32 [heads + kv_heads, head_dim]."""
        if heads.qk_norm != "projection":
            return self.norm32(x, x.shape[-1]).mul_(weight).to(x.dtype)
        parts = (part.flatten(1) for part in x.tensor_split((heads.num_heads,), dim=1))
        whole = torch.cat([self.norm32(part, part.shape[1]) for part in parts], dim=1)
        return whole.view(x.shape).mul_(weight).to(x.dtype)


def inner_values(activation: Activation, made: Tensor) -> Tensor:
    """An MLP's values between its products, of gate and up side by side, or of up where there is no gate."""
    match activation:
        case "plain_silu":
            return F.silu(made)
        case "plain_gelu_tanh":
            return F.gelu(made, approximate="tanh")
        case "plain_relu2":
            return F.relu(made).square_()
        case _:
            return gated(activation, *made.chunk(2, dim=-1))


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """The activation of `gate`, multiplied with `up`; a new tensor."""
    match activation:
        case "silu":
            return F.silu(gate).mul_(up)
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh").mul_(up)
        case "clamped_swiglu":
            return clamped_swiglu(gate, up)
        case _:
            raise AssertionError(f"{activation} has no gate")


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's gate (OpenAI 2025, section 2.3): clamped, steeper than SiLU, and with a residual connection."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate * SWIGLU_ALPHA).sigmoid_().mul_(gate).mul_(up.add_(1))
