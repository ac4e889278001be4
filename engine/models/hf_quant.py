"""Quantizes a model that transformers' code computes: replaces its linear layers one at a time.

The head is not quantized, because it decides between neighbouring tokens, nor are modules that share a weight.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoints.checkpoint import WeightSource
from engine.checkpoints.weight_format_stats import WeightFormatStats
from engine.errors import UnsupportedModel
from engine.models.decoder_builder import DecoderBuilder
from engine.quant.base import Linear

_LEAST_SHARE = 0.5
"""Of the weights between embeddings and head. Where most are not in linear layers (experts), little would change."""


class QuantizedModule(nn.Module):
    """Replaces a linear layer.

    Attributes:
        linear: computes its product.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def quantize_linears(model: Any, builder: DecoderBuilder) -> None:
    """Replace the linear layers of a transformers model by the parts that `builder` makes of their weights.

    Raises:
        UnsupportedModel: most of its weights are not in linear layers.
    """
    linears = _linears(model)
    reached = sum(module.weight.numel() for module in linears.values())
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    between = sum(p.numel() for p in model.base_model.parameters() if p.dim() > 1 and id(p) not in embeddings)
    if not linears or reached < _LEAST_SHARE * between:
        raise UnsupportedModel(
            f"{type(model).__name__} can't be quantized: {reached / max(between, 1):.0%} of its weights are in linear "
            "layers; load it without quantize"
        )
    with torch.inference_mode():
        for name in list(linears):
            module = linears.pop(name)
            weight = module.weight if type(module) is nn.Linear else module.weight.t()
            made = QuantizedModule(builder.linear(weight.detach().contiguous(), _detached(module.bias)))
            parent, _, own = name.rpartition(".")
            setattr(model.base_model.get_submodule(parent), own, made)


def restore_quantized(model: Any, builder: DecoderBuilder, weights: WeightSource) -> None:
    """Restore the quantized weights of a checkpoint in linear layers of a model that was loaded dense, where `builder`
    computes with them; logs which stay dense."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    linears = _linears(model)
    weight_counts = WeightFormatStats()
    for name in weights.names:
        if (weight := weights.quantized(name)) is None:
            continue
        own = name.removesuffix(".weight").removeprefix(prefix)
        module = linears.pop(own, None)
        shape = None if module is None else (module.out_features, module.in_features)
        if type(module) is nn.Linear and shape == (weight.n, weight.k) and builder.runs(weight, "linear"):
            dtype, device = module.weight.dtype, module.weight.device
            weight_counts.count_quantized(weight, dtype)
            with torch.inference_mode():
                made = QuantizedModule(builder.linear(weight.to(device), _detached(module.bias)))
            parent, _, last = own.rpartition(".")
            setattr(model.base_model.get_submodule(parent), last, made)
        else:
            weight_counts.dequantized(weight, next(model.parameters()).dtype)
    weight_counts.log()


def _linears(model: Any) -> dict[str, Any]:
    """Return, by name within the base model, linear layers whose weight is not shared, without the head."""
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - its modelling code takes seconds and 300 MB to import

    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.base_model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and module is not head and owners[id(module.weight)] == 1
    }


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()
