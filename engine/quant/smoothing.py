"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438, section 4): moves outliers of inputs into weights, exactly.

Where a norm feeds linear layers, its weight is divided by a factor a channel and their columns are multiplied by it:
s = max|x|^a / max|w|^(1-a). The products stay what they were, but inputs become easier to quantize. The model runs
over calibration text with the fused decoder, whose linear layers note the largest input of each channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.models.base import CausalModel
from engine.models.decoder import DecoderSpec
from engine.models.decoder_builder import TorchBuilder
from engine.models.hf_check import DenseAttend
from engine.quant.base import DenseLinear, Linear
from engine.quant.weight import QWeight

_LEAST = 1e-5


class _Noting:
    """A linear layer that records its inputs.

    Attributes:
        inputs, weights: float32 [in_features], the largest of each channel.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._linear = DenseLinear(weight, bias)
        self.in_features, self.out_features = self._linear.in_features, self._linear.out_features
        self.inputs = torch.zeros(self.in_features)
        self.weights = weight.abs().amax(0).float()

    def __call__(self, x: Tensor) -> Tensor:
        torch.maximum(self.inputs, x.abs().amax(0).float(), out=self.inputs)
        return self._linear(x)


@dataclass(frozen=True, slots=True)
class NotingBuilder(TorchBuilder):
    """Builds a dense decoder whose layers' products note their inputs.

    Attributes:
        noted: four products a layer: of q, k and v, output, gate and up, down.
    """

    quantize: Any = "dense"
    noted: list[_Noting] = field(default_factory=list)

    def linear(self, weight: Tensor | QWeight, bias: Tensor | None) -> Linear:
        assert isinstance(weight, Tensor)
        self.noted.append(_Noting(weight, bias))
        return self.noted[-1]


def run_over(model: CausalModel, sequences: Sequence[Sequence[int]]) -> None:
    """Compute each sequence separately, only for its layers' records of inputs."""
    for ids in sequences:
        run_in_one_step(model, [ids])


def run_in_one_step(model: CausalModel, sequences: Sequence[Sequence[int]]) -> None:
    """Compute the sequences in one step, so that each product sees all its inputs at once."""
    attend = DenseAttend(model.spec)
    attend.ranges = [(0, len(ids)) for ids in sequences]
    flat = torch.tensor([token for ids in sequences for token in ids])
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    lengths = None
    if model.spec.rope_original_max is not None:
        lengths = torch.cat([torch.full((len(ids),), len(ids)) for ids in sequences])
    model.forward(flat, positions, attend, lengths)


def factors(spec: DecoderSpec, noted: Sequence[_Noting], prefix: str, strength: float = 0.5) -> dict[str, Tensor]:
    """Return each tensor's factor, [channels]: columns of q, k, v, gate and up, and the norms before them.

    Args:
        prefix: of the layers' names ("model.").  strength: the paper's alpha.
    """
    found: dict[str, Tensor] = {}
    attention = [f"self_attn.{part}" for part in spec.qkv_rows]
    mlp = [f"mlp.{part}" for part in spec.gate_up_rows(spec.intermediate_size)]
    for layer in range(spec.num_layers):
        name = f"{prefix}layers.{layer}."
        qkv, _, gate_up, _ = noted[4 * layer : 4 * layer + 4]
        fed = [(spec.norms[0], [qkv], attention), (spec.norms[2], [gate_up], mlp)]
        if spec.parallel:
            fed = [(spec.norms[0], [qkv, gate_up], attention + mlp)]
        for norm, linears, modules in fed:
            if norm is None:  # nothing that could be divided comes before these
                continue
            factor = _factor(linears, strength)
            found[f"{name}{norm}.weight"] = 1 / factor
            if spec.norm_bias:
                found[f"{name}{norm}.bias"] = 1 / factor
            found |= {f"{name}{module}.weight": factor for module in modules}
    return found


def smoothed(name: str, tensor: Tensor, by: Mapping[str, Tensor], norm_offset: bool) -> Tensor:
    """A float32 tensor with its factor; `norm_offset`: norms are stored less one."""
    if (factor := by.get(name)) is None:
        return tensor
    if tensor.dim() == 1 and norm_offset and name.endswith(".weight"):
        return (tensor + 1) * factor - 1
    return tensor * factor


def _factor(linears: Sequence[_Noting], strength: float) -> Tensor:
    """Of products that have the same input."""
    inputs = torch.stack([linear.inputs for linear in linears]).amax(0)
    weights = torch.stack([linear.weights for linear in linears]).amax(0)
    factor = inputs.clamp(min=_LEAST) ** strength / weights.clamp(min=_LEAST) ** (1 - strength)
    return torch.where(inputs == 0, 1.0, factor.clamp(min=_LEAST))  # a channel that nothing came through
