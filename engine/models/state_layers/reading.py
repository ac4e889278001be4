"""Reads the weights of layers that have states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import CorruptWeights
from engine.models.state_layers.delta import DeltaNet, DeltaSpec
from engine.models.state_layers.gates import GatedNorm, Gates
from engine.models.state_layers.mamba import Mamba, MambaSpec
from engine.models.state_layers.recurrence import Recurrence
from engine.models.state_layers.short_conv import Convolution, ShortConv, ShortConvSpec
from engine.quant.base import DenseLinear
from engine.quant.weight import QWeight

if TYPE_CHECKING:
    from engine.models.decoder import StateLayer, StateLayers
    from engine.models.decoder_builder import DecoderBuilder, WeightReader


def read_state_layer(
    spec: StateLayers, reader: WeightReader, builder: DecoderBuilder, layer: str, hidden: int
) -> tuple[StateLayer, tuple[Tensor | QWeight, Tensor | None]]:
    """Read the part of the layer named `layer` that has a state, and the weight and bias of its output product."""
    part: StateLayer
    match spec:
        case DeltaSpec():
            name, bias = f"{layer}.linear_attn", False
            part = _delta_net(spec, reader, builder, name, hidden)
        case MambaSpec():
            name, bias = f"{layer}.{spec.module}", spec.bias
            part = _mamba(spec, reader, builder, name, hidden)
        case ShortConvSpec():
            name, bias = f"{layer}.conv", spec.bias
            part = _short_conv(spec, reader, builder, name, hidden)
    return part, reader.fused([f"{name}.out_proj"], [hidden], spec.output_size, bias)


def _delta_net(spec: DeltaSpec, reader: WeightReader, builder: DecoderBuilder, name: str, hidden: int) -> DeltaNet:
    shape = spec.shape
    (q, k, v), heads = shape.sizes, shape.num_value_heads
    if spec.interleaved:
        reader.expect(f"{name}.in_proj_qkvz.weight", q + k + 2 * v, hidden)  # before an order of so many rows is made
        qkvz = reader.fused([f"{name}.in_proj_qkvz"], [q + k + 2 * v], hidden, False, order=spec.qkvz_order())
        ba = reader.exact(f"{name}.in_proj_ba.weight", 2 * heads, hidden)[spec.ba_order().to(reader.device)]
    else:
        qkvz = reader.fused([f"{name}.in_proj_qkv", f"{name}.in_proj_z"], [q + k + v, v], hidden, False)
        ba = torch.cat([reader.exact(f"{name}.in_proj_{part}.weight", heads, hidden) for part in "ba"])
    step_bias = reader.exact(f"{name}.dt_bias", heads)
    return DeltaNet(
        shape=shape,
        qkvz=builder.linear(*qkvz),
        gates=DenseLinear(ba, torch.cat((torch.zeros_like(step_bias), step_bias))),
        recurrence=Recurrence(
            shape,
            Gates(_decay_scale(reader, name, heads), has_rates=True),
            reader.exact(f"{name}.conv1d.weight", q + k + v, 1, shape.kernel_size)[:, 0],
        ),
        norm=GatedNorm(
            reader.exact(f"{name}.norm.weight", shape.value_dim).repeat(heads), shape.value_dim, gates_first=False
        ),
    )


def _mamba(spec: MambaSpec, reader: WeightReader, builder: DecoderBuilder, name: str, hidden: int) -> Mamba:
    """The rows of `in_proj` that make the step sizes are not quantized at load."""
    shape, made, features = spec.shape, spec.product_size, sum(spec.shape.sizes)
    heads, rows, product = shape.num_value_heads, made + shape.num_value_heads, f"{name}.in_proj"
    steps = reader.rows_behind(made, f"{product}.weight", rows, hidden)
    step_bias = reader.exact(f"{name}.dt_bias", heads)
    if spec.bias:
        step_bias += reader.rows_behind(made, f"{product}.bias", rows)
    convolution = reader.exact(f"{name}.conv1d.weight", features, 1, shape.kernel_size)[:, 0]
    bias = reader.exact(f"{name}.conv1d.bias", features) if spec.conv_bias else None
    gates = Gates(_decay_scale(reader, name, heads), has_rates=False, steps=spec.time_steps)
    return Mamba(
        spec=spec,
        product=builder.linear(*reader.fused([product], [rows], hidden, spec.bias, order=torch.arange(made))),
        gates=DenseLinear(steps, step_bias),
        recurrence=Recurrence(shape, gates, convolution, bias, reader.exact(f"{name}.D", heads)),
        norm=GatedNorm(
            reader.exact(f"{name}.norm.weight", spec.output_size),
            spec.output_size // shape.num_key_heads,
            gates_first=True,
        ),
    )


def _short_conv(
    spec: ShortConvSpec, reader: WeightReader, builder: DecoderBuilder, name: str, hidden: int
) -> ShortConv:
    weight = reader.exact(f"{name}.conv.weight", hidden, 1, spec.kernel_size)[:, 0]
    return ShortConv(
        builder.linear(*reader.fused([f"{name}.in_proj"], [3 * hidden], hidden, spec.bias)),
        Convolution(weight, reader.exact(f"{name}.conv.bias", hidden) if spec.bias else None),
    )


def _decay_scale(reader: WeightReader, name: str, heads: int) -> Tensor:
    scale = -reader.exact(f"{name}.A_log", heads).exp()
    if not bool(scale.isfinite().all()):
        raise CorruptWeights(f"the tensor {name}.A_log holds values whose exponential is not finite")
    return scale
