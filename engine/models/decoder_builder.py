"""Builds a fused decoder from a weight source: every tensor is read once, into its final memory.

Products are packed layer by layer, so loading never holds more than the model, one layer and one tensor. A tensor that
is missing, has another shape, or is not read by the model is an error that names it: unread tensors mean that the
config does not describe the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.checkpoints.checkpoint import DERIVED, PartSource, WeightSource
from engine.checkpoints.weight_format_stats import WeightFormatStats
from engine.config import Quantize
from engine.errors import CorruptWeights
from engine.logs import get_logger
from engine.models.base import CausalModel
from engine.models.decoder import DecoderSpec, FusedDecoder, HeadAttention, Layer, StateLayer
from engine.models.experts import ExpertLinear, Experts, ExpertSpec, GroupedLinear, JoinedExperts, LinearPerExpert, Mlp
from engine.models.head_order import head_order, latent_order, qkv_order
from engine.models.latent import BatchedProduct, LatentAttention, LatentSpec
from engine.models.layer_inputs import LayerInput, LayerInputs, LayerInputSpec
from engine.models.state_layers.reading import read_state_layer
from engine.quant.base import DenseLinear, Linear, dense, packs
from engine.quant.int8_linear import Int8Linear
from engine.quant.linear import fast_kernel, int8_weight_only, quantized_linear
from engine.quant.rtn import AT_LOAD, at_load, round_to_nearest
from engine.quant.weight import QWeight, stack

logger = get_logger(__name__)

_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")
_CORRECTIONS = (
    "gate.e_score_correction_bias", "e_score_correction_bias", "moe_statics.e_score_correction_bias", "expert_bias",
)  # fmt: skip
_QK_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))


class _MlpNames(NamedTuple):
    """An MLP's modules in checkpoints. gate_up: None: as `DecoderSpec.gate_up_rows` says."""

    block: str
    gate_up: tuple[str, str] | None = None
    down: str = "down_proj"


class _MixtureNames(NamedTuple):
    """A mixture's modules in checkpoints: gate, up and down are parts of each expert."""

    block: str
    router: str
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_MIXTURES = (
    _MixtureNames("mlp", "mlp.gate"),
    _MixtureNames("mlp", "mlp.router"),
    _MixtureNames("mlp", "mlp.router.gate"),
    _MixtureNames("mlp", "mlp.gate.wg"),
    _MixtureNames("block_sparse_moe", "block_sparse_moe.gate", ("w1", "w3", "w2")),
    _MixtureNames("block_sparse_moe", "block_sparse_moe.router.layer"),
    _MixtureNames("block_sparse_moe", "block_sparse_moe.router"),
    _MixtureNames("feed_forward", "feed_forward.router"),
    _MixtureNames("", "router.proj"),
    _MixtureNames("feed_forward", "feed_forward.gate", ("w1", "w3", "w2")),
    _MixtureNames("mixer", "mixer.gate"),
)
_MLPS = (
    _MlpNames("mlp"), _MlpNames("feed_forward"), _MlpNames("feed_forward", ("w1", "w3"), "w2"), _MlpNames("mixer"),
)  # fmt: skip
_ATTENTIONS = ("self_attn", "mixer")
_OUTPUTS = ("o_proj", "out_proj")
_EMBEDDINGS = ("embed_tokens", "embeddings")
_LAST_NORMS = ("norm", "embedding_norm", "final_layernorm", "norm_f")

_PACKED_HEAD_BYTES = 128 << 20
"""A tied head is packed as a second copy only up to this size: small models gain 10 to 60 % on their largest product,
large ones would take gigabytes for little."""


_LONGEST_BIAS = 1 << 24

Use = Literal["linear", "gated", "head", "embedding", "tied"]
"""The use of a weight. "embedding": its rows are looked up; "tied": it is the head, too."""


class DecoderBuilder(Protocol):
    """Makes the parts of a decoder from its weights, and the decoder from its parts."""

    @property
    def quantize(self) -> Quantize:
        """The quantization of weights at load."""
        ...

    def runs(self, weight: QWeight, use: Use) -> bool:
        """Whether its parts compute with this weight as stored, fast. Other weights are dequantized for it."""
        ...

    def linear(self, weight: Tensor | QWeight, bias: Tensor | None) -> Linear: ...

    def gated(self, weight: Tensor | QWeight, bias: Tensor | None) -> Linear:
        """The product of gate and up, stacked in this order [2 * intermediate, hidden]."""
        ...

    def experts(
        self, weights: Sequence[Tensor | QWeight], biases: Sequence[Tensor | None], *, gated: bool
    ) -> ExpertLinear:
        """The products of a mixture's experts, with a weight and a bias for each. `gated`: as of
        `DecoderBuilder.gated`."""
        ...

    def head(self, weight: Tensor | QWeight) -> Linear: ...

    def tied_head(self, embedding: Tensor | QWeight) -> Linear:
        """A head that is the embedding."""
        ...

    def decoder(self, spec: DecoderSpec, dtype: torch.dtype, **parts: Any) -> CausalModel:
        """From embedding (a tensor or `QWeight`), layers, norm, head, positions and, where there are any, inputs, as
        `FusedDecoder` takes them."""
        ...


@dataclass(frozen=True, slots=True)
class TorchBuilder:
    """A decoder of torch's operators.

    Attributes:
        quantize: weights at load, all but the head's, which decides between neighbouring tokens.
        dtype: of the inputs; None: unknown, and kernels for one dtype are not used.
    """

    quantize: Quantize = "none"
    dtype: torch.dtype | None = None

    def runs(self, weight: QWeight, use: Use) -> bool:
        return use == "embedding" or fast_kernel(weight, self.dtype) is not None

    def linear(self, weight: Tensor | QWeight, bias: Tensor | None) -> Linear:
        if self.quantize in AT_LOAD and isinstance(weight, Tensor):
            weight = round_to_nearest(weight, at_load(self.quantize, weight.device))
        if isinstance(weight, QWeight):
            return quantized_linear(weight, bias, self.dtype)
        if self.quantize == "int8":
            return Int8Linear(weight, bias)
        if self.quantize == "int8-weight-only":
            return int8_weight_only(weight, bias)
        return dense(weight, bias)

    def gated(self, weight: Tensor | QWeight, bias: Tensor | None) -> Linear:
        return self.linear(weight, bias)

    def experts(
        self, weights: Sequence[Tensor | QWeight], biases: Sequence[Tensor | None], *, gated: bool
    ) -> ExpertLinear:
        dense = [weight for weight in weights if isinstance(weight, Tensor)]
        if (
            self.quantize in ("none", "dense")
            and len(dense) == len(weights)
            and GroupedLinear.runs(dense[0], len(dense))
        ):
            offsets = [bias for bias in biases if bias is not None]
            return GroupedLinear(torch.stack(dense), torch.stack(offsets) if offsets else None)
        return LinearPerExpert([self.linear(*parts) for parts in zip(weights, biases, strict=True)])

    def head(self, weight: Tensor | QWeight) -> Linear:
        return quantized_linear(weight, dtype=self.dtype) if isinstance(weight, QWeight) else dense(weight)

    def tied_head(self, embedding: Tensor | QWeight) -> Linear:
        if isinstance(embedding, QWeight):
            return quantized_linear(embedding)
        small = embedding.numel() * embedding.element_size() <= _PACKED_HEAD_BYTES
        return dense(embedding) if small and packs(embedding.dtype, embedding.device) else DenseLinear(embedding)

    def decoder(self, spec: DecoderSpec, dtype: torch.dtype, **parts: Any) -> CausalModel:
        return FusedDecoder(spec, dtype, **parts)


class WeightReader:
    """Reads tensors from a source, each once, and checks at the end that none is left."""

    def __init__(self, source: WeightSource, builder: DecoderBuilder, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._builder = builder
        self._left = set(source.names)
        self._weight_counts = WeightFormatStats()
        self.dtype = dtype
        self.device = device

    def has(self, name: str) -> bool:
        return name in self._left

    def expect(self, name: str, *wanted: int) -> None:
        """Check, before allocation, that the tensor exists and has the config's shape."""
        if name not in self._left:
            raise CorruptWeights(f"tensor {name} is missing from the checkpoint")
        if (shape := self._source.shape(name)) != wanted:
            raise CorruptWeights(f"tensor {name} has shape {list(shape)}, but the config asks for {list(wanted)}")

    def forget(self, name: str) -> None:
        """Count a tensor as read that was read elsewhere, or by another process."""
        self._left.remove(name)

    def fill(self, name: str, into: Tensor) -> None:
        self.expect(name, *into.shape)
        self._source.read(name, into)
        self._left.remove(name)

    def dense(self, name: str, rows: int, columns: int) -> Tensor:
        """A matrix in the model's dtype, dequantized if it is stored quantized."""
        weight = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        self.expect(name, rows, columns)
        if (stored := self._source.quantized(name)) is not None:
            stored.dequantize(into=weight)
            self._left.remove(name)
        else:
            self.fill(name, weight)
        return weight

    def matrix(self, name: str, rows: int, columns: int, use: Use) -> Tensor | QWeight:
        self.expect(name, rows, columns)
        return self._matrices([name], [rows], columns, use)

    def fused(
        self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool, use: Use = "linear",
        order: Tensor | None = None,
    ) -> tuple[Tensor | QWeight, Tensor | None]:  # fmt: skip
        """Weight and bias of the products `names`, stacked; `order`: int64 [rows], which row comes where, or some."""
        for name, count in zip(names, rows, strict=True):
            self.expect(f"{name}.weight", count, columns)
        weight = self._matrices([f"{name}.weight" for name in names], rows, columns, use, order)
        offset = torch.empty(sum(rows), dtype=self.dtype, device=self.device) if bias else None
        if offset is not None:
            for index, part in enumerate(torch.split(offset, list(rows))):
                self.fill(f"{names[index]}.bias", part)
            offset = offset if order is None else offset[order.to(self.device)]
        return weight, offset

    def _matrices(
        self, names: Sequence[str], rows: Sequence[int], columns: int, use: Use, order: Tensor | None = None
    ) -> Tensor | QWeight:
        """Stacked: quantized if all are, can be stacked so and the builder computes with that; else dense."""
        parts: list[QWeight | None] = [None] * len(names)
        if self._builder.quantize == "none":
            parts = [self._source.quantized(name) for name in names]
            stored = [part for part in parts if part is not None]
            whole = stack(stored) if len(stored) == len(parts) else None
            whole = whole if whole is None or order is None else whole.take(order)
            if whole is not None and self._builder.runs(whole := whole.to(self.device), use):
                assert (whole.n, whole.k) == (sum(rows) if order is None else len(order), columns), names
                self._left.difference_update(names)
                self._weight_counts.count_quantized(whole, self.dtype)
                return whole
            for part in stored:
                self._weight_counts.dequantized(part, self.dtype)
        weight = torch.empty(sum(rows), columns, dtype=self.dtype, device=self.device)
        for index, into in enumerate(torch.split(weight, list(rows))):
            if (quantized := parts[index]) is None:
                self.fill(names[index], into)
            else:
                quantized.dequantize(into=into)
                self._left.remove(names[index])
                parts[index] = None
        return weight if order is None else weight[order.to(self.device)]

    def norm(self, name: str, shape: tuple[int, ...], offset: bool, bias: bool = False) -> Tensor:
        """A norm's weight; with `bias`, weight and bias [2, *shape]."""
        weight = self.exact(f"{name}.weight", *shape)
        weight = weight.add_(1) if offset else weight
        return torch.stack((weight, self.exact(f"{name}.bias", *shape))) if bias else weight

    def exact(self, name: str, *shape: int) -> Tensor:
        """A small tensor in float32."""
        weight = torch.empty(shape, dtype=torch.float32, device=self.device)
        self.fill(name, weight)
        return weight

    def rows_behind(self, first: int, name: str, *shape: int) -> Tensor:
        """The rows from `first` on of a tensor in float32, dequantized if it is stored quantized. It is read once more
        for the others."""
        self.expect(name, *shape)
        rows = torch.empty(shape[0] - first, *shape[1:], dtype=torch.float32, device=self.device)
        if (stored := self._source.quantized(name)) is not None:
            stored.rows(first, shape[0]).dequantize(into=rows)
        elif isinstance(self._source, PartSource):
            self._source.read_part(name, 0, first, shape[0], rows)
        else:
            whole = torch.empty(shape)
            self._source.read(name, whole)
            rows.copy_(whole[first:])
        return rows

    def finish(self, ignored: tuple[str, ...]) -> None:
        known = (n for n in self._left if not n.endswith(DERIVED) and not n.startswith(ignored or ("\0",)))
        rest = sorted(n for n in known if not self._adds_nothing(n))
        if rest:
            more = f" (and {len(rest) - 1} more)" if len(rest) > 1 else ""
            raise CorruptWeights(f"the checkpoint holds tensor {rest[0]}{more}, which this architecture has no use for")
        self._weight_counts.log()

    def _adds_nothing(self, name: str) -> bool:
        """Whether this is a bias of zeros, as quantizers give to every product that they pack."""
        shape = self._source.shape(name)
        if not name.endswith(".bias") or len(shape) != 1 or shape[0] > _LONGEST_BIAS:
            return False
        bias = torch.empty(shape)
        self._source.read(name, bias)
        return not bool(bias.any())


def build_decoder(
    spec: DecoderSpec,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    positions: int | None = None,
    builder: DecoderBuilder | None = None,
) -> CausalModel:
    """Read the weights of `spec` into a decoder.

    Args:
        builder: of the decoder's parts; None: torch's operators.

    Raises:
        CorruptWeights: a tensor is missing, has another shape, can't be read, or is unexpected.
    """
    builder = builder or TorchBuilder()
    reader = WeightReader(source, builder, dtype, device)
    names = [(prefix, name) for prefix in spec.weight_prefixes for name in _EMBEDDINGS]
    prefix, name = next((found for found in names if reader.has("{}{}.weight".format(*found))), names[0])
    use: Use = "tied" if spec.tied else "embedding"
    embedding, head = None, None
    if spec.held_layers.start == 0:
        embedding = reader.matrix(f"{prefix}{name}.weight", spec.vocab_size, spec.hidden_size, use)
    else:
        for other in filter(reader.has, (f"{prefix}{name}.weight", *_HEADS)):
            reader.forget(other)
    inputs = None
    if spec.layer_inputs is not None:
        inputs = _layer_inputs(spec.layer_inputs, spec, reader, builder, prefix)
    layers = tuple(_layer(spec, reader, builder, prefix, index) for index in spec.held_layers)
    last = next((found for found in _LAST_NORMS if reader.has(f"{prefix}{found}.weight")), _LAST_NORMS[0])
    norm = reader.norm(f"{prefix}{last}", (spec.hidden_size,), spec.norm_offset, spec.norm_bias)
    if embedding is not None:
        head = _head(spec, reader, builder, embedding)
    reader.finish(spec.ignored_weights)
    _report_slow_experts(layers, device)
    parts = {"embedding": embedding, "layers": layers, "norm": norm, "head": head, "positions": positions}
    return builder.decoder(spec, dtype, **parts, **({} if inputs is None else {"inputs": inputs}))


def _report_slow_experts(layers: Sequence[Layer], device: torch.device) -> None:
    mixtures = [mixture for layer in layers if isinstance(mixture := layer.mixture, Experts)]
    if device.type != "cpu" and not all(mlp.gate_up.recordable and mlp.down.recordable for mlp in mixtures):
        logger.warning(
            "experts are multiplied one by one, and each step waits for their rows to be counted; with vLLM or with "
            "bfloat16 weights on a GPU of compute capability 9 or 10 they are not",
            mixtures=len(mixtures),
        )


def _layer(whole: DecoderSpec, reader: WeightReader, builder: DecoderBuilder, prefix: str, index: int) -> Layer:
    spec = whole.at(index)
    name = f"{prefix}layers.{index}"

    def norms(parts: Sequence[str | None]) -> list[Tensor | None]:
        shape = (spec.hidden_size,)
        return [
            None if part is None else reader.norm(f"{name}.{part}", shape, spec.norm_offset, spec.norm_bias)
            for part in parts
        ]

    attention = output = None
    mlp: Mlp | Experts | None = None
    input_norm = output_norm = mlp_norm = down_norm = joined = None
    if index not in spec.without_mixer:
        input_norm, output_norm = norms(spec.norms[:2])
        attention, output = _mixer(spec, reader, builder, name, index)
    if index not in spec.without_mlp:
        mlp_norm, down_norm = norms(spec.norms[2:])
        experts = spec.experts if spec.experts is not None and spec.experts.layers[index] else None
        if experts is not None and experts.joins_mlp:
            joined = _joined_experts(spec, experts, reader, builder, name, index)
        if experts is not None and not experts.joins_mlp:
            mlp = _experts(spec, experts, reader, builder, name, index)
        else:
            names = next(
                (found for found in _MLPS if reader.has(f"{name}.{found.block}.{found.down}.weight")), _MLPS[0]
            )
            mlp = _mlp(spec, f"{name}.{names.block}", spec.intermediate_size, reader, builder, names)
    return Layer(
        input_norm=input_norm,
        attention=attention,
        output=output,
        mlp_norm=mlp_norm,
        mlp=mlp,
        output_norm=output_norm,
        down_norm=down_norm,
        joined=joined,
        input=None
        if spec.layer_inputs is None
        else _layer_input(spec.layer_inputs, reader, builder, name, spec.hidden_size),
        scale=float(reader.exact(f"{name}.layer_scalar", 1)) if spec.layer_scales else 1.0,
    )


def _layer_inputs(
    spec: LayerInputSpec, decoder: DecoderSpec, reader: WeightReader, builder: DecoderBuilder, prefix: str
) -> LayerInputs:
    width = decoder.num_layers * spec.size
    table = reader.matrix(f"{prefix}embed_tokens_per_layer.weight", spec.vocab_size, width, "embedding")
    product = reader.fused([f"{prefix}per_layer_model_projection"], [width], decoder.hidden_size, False)
    norm = reader.exact(f"{prefix}per_layer_projection_norm.weight", spec.size)
    return LayerInputs(table, builder.linear(*product), norm)


def _layer_input(
    spec: LayerInputSpec, reader: WeightReader, builder: DecoderBuilder, name: str, hidden: int
) -> LayerInput:
    return LayerInput(
        gate=builder.linear(*reader.fused([f"{name}.per_layer_input_gate"], [spec.size], hidden, False)),
        projection=builder.linear(*reader.fused([f"{name}.per_layer_projection"], [hidden], spec.size, False)),
        norm=reader.exact(f"{name}.post_per_layer_input_norm.weight", hidden),
    )


def _mixer(
    spec: DecoderSpec, reader: WeightReader, builder: DecoderBuilder, name: str, index: int
) -> tuple[HeadAttention | LatentAttention | StateLayer, Linear]:
    """Read a layer's attention or state, and its output product."""
    if spec.state_layers is not None and spec.state_layers.layers[index]:
        state, product = read_state_layer(spec.state_layers, reader, builder, name, spec.hidden_size)
        return state, builder.linear(*product)
    names = [(f"{name}.{block}", output) for block in _ATTENTIONS for output in _OUTPUTS]
    part, output = next((found for found in names if reader.has("{}.{}.weight".format(*found))), names[0])
    attention: HeadAttention | LatentAttention
    if spec.latent is None:
        attention = _head_attention(spec, reader, builder, part, index)
    else:
        attention = _latent_attention(spec, spec.latent, reader, builder, part)
    product = reader.fused([f"{part}.{output}"], [spec.hidden_size], spec.attended_size, spec.output_bias)
    return attention, builder.linear(*product)


def _head_attention(
    spec: DecoderSpec, reader: WeightReader, builder: DecoderBuilder, name: str, index: int
) -> HeadAttention:
    qkv = [f"{name}.{part}" for part in spec.qkv_rows], list(spec.qkv_rows.values())
    return HeadAttention(
        qkv=builder.linear(*reader.fused(*qkv, spec.hidden_size, spec.qkv_bias, order=qkv_order(spec, index))),
        qk_norm=_qk_norm(spec, reader, name, index),
        sinks=reader.exact(f"{name}.sinks", spec.num_heads) if spec.has_sinks else None,
    )


def _latent_attention(
    spec: DecoderSpec, latent: LatentSpec, reader: WeightReader, builder: DecoderBuilder, name: str
) -> LatentAttention:
    """W_UK and W_UV multiply as what they are stored in, so `kv_b_proj` is dequantized and never quantized at load."""
    heads, rank, hidden = spec.num_heads, latent.rank, spec.hidden_size
    interleaved = spec.interleaved_rope
    made = (heads, latent.query_dim, latent.rotated_dim)
    line = (1, latent.key_dim, latent.rotated_dim)
    if latent.query_rank is None:
        down = [f"{name}.q_proj", f"{name}.kv_a_proj_with_mqa"], [heads * latent.query_dim, latent.key_dim]
        order = latent_order([made, line], interleaved=interleaved)
    else:
        down = [f"{name}.q_a_proj", f"{name}.kv_a_proj_with_mqa"], [latent.query_rank, latent.key_dim]
        order = latent_order([(1, latent.query_rank, 0), line], interleaved=interleaved)
    both = reader.dense(f"{name}.kv_b_proj.weight", heads * (latent.plain_dim + latent.value_dim), rank)
    keys, values = both.view(heads, -1, rank).tensor_split((latent.plain_dim,), dim=1)
    query_norm = queries = None
    if latent.query_rank is not None:
        query_norm = reader.exact(f"{name}.q_a_layernorm.weight", latent.query_rank)
        rows = [f"{name}.q_b_proj"], [heads * latent.query_dim], latent.query_rank
        queries = builder.linear(*reader.fused(*rows, False, order=latent_order([made], interleaved=interleaved)))
    return LatentAttention(
        down=builder.linear(*reader.fused(*down, hidden, spec.qkv_bias, order=order)),
        norm=reader.exact(f"{name}.kv_a_layernorm.weight", rank),
        keys=BatchedProduct(keys.contiguous()),
        values=BatchedProduct(values.transpose(1, 2).contiguous()),
        query_norm=query_norm,
        queries=queries,
    )


def _qk_norm(spec: DecoderSpec, reader: WeightReader, name: str, layer: int) -> Tensor | None:
    """Read the norms of q and k of a layer, for each head [heads + kv_heads, head_dim]."""
    if spec.qk_norm is None:
        return None
    if spec.qk_norm == "unit":
        positions = len(spec.ropes[spec.layer_ropes[layer]].inverse_frequencies) > 0
        heads = spec.num_heads + spec.num_kv_heads
        return torch.ones(heads, spec.head_dim, device=reader.device) if positions else None
    parts = []
    names = next((found for found in _QK_NORMS if reader.has(f"{name}.{found[0]}.weight")), _QK_NORMS[0])
    for part, heads in zip(names, (spec.num_heads, 0 if spec.reads is not None else spec.num_kv_heads), strict=True):
        if not heads:
            continue
        shapes = {
            "head": (spec.head_dim,), "heads": (heads, spec.head_dim), "projection": (heads * spec.head_dim,)
        }  # fmt: skip
        weight = reader.norm(f"{name}.{part}", shapes[spec.qk_norm], spec.norm_offset)
        parts.append(weight.view(-1, spec.head_dim).expand(heads, -1))
    whole, order = torch.cat(parts), head_order(spec, layer)
    return whole if order is None else whole[:, order.to(whole.device)].contiguous()


def _mlp(
    spec: DecoderSpec, name: str, inner: int, reader: WeightReader, builder: DecoderBuilder, names: _MlpNames = _MLPS[0]
) -> Mlp:
    hidden, bias = spec.hidden_size, spec.mlp_bias
    rows = spec.gate_up_rows(inner) if names.gate_up is None else dict.fromkeys(names.gate_up, inner)
    use: Use = "gated" if spec.has_gates else "linear"
    gate_up = reader.fused([f"{name}.{part}" for part in rows], list(rows.values()), hidden, bias, use)
    make = builder.gated if spec.has_gates else builder.linear
    return Mlp(make(*gate_up), builder.linear(*reader.fused([f"{name}.{names.down}"], [hidden], inner, bias)))


def _experts(
    decoder: DecoderSpec, spec: ExpertSpec, reader: WeightReader, builder: DecoderBuilder, name: str, layer: int
) -> Experts:
    hidden, inner = decoder.hidden_size, spec.intermediate_size
    names = next((found for found in _MIXTURES if reader.has(f"{name}.{found.router}.weight")), _MIXTURES[0])
    block, (gate, up, down) = f"{name}.{names.block}".rstrip("."), names.parts
    held = range(spec.num_experts) if spec.held is None else spec.held[layer]
    each = [f"{block}.experts.{expert}" for expert in held]
    router = reader.exact(f"{name}.{names.router}.weight", spec.num_experts, hidden)
    bias = spec.has_bias
    use: Use = "gated" if decoder.has_gates else "linear"
    modules = (gate, up) if decoder.has_gates else (up,)
    gates = [
        reader.fused([f"{e}.{module}" for module in modules], [inner] * len(modules), hidden, bias, use) for e in each
    ]
    gate_up = builder.experts(*zip(*gates, strict=True), gated=decoder.has_gates)
    del gates
    downs = [reader.fused([f"{e}.{down}"], [hidden], inner, bias) for e in each]
    shared = next((part for part in _SHARED if reader.has(f"{block}.{part}.down_proj.weight")), _SHARED[0])
    correction = None
    if spec.has_correction:
        name = next((part for part in _CORRECTIONS if reader.has(f"{block}.{part}")), _CORRECTIONS[0])
        shape = (1, spec.num_experts) if "statics" in name else (spec.num_experts,)
        correction = reader.exact(f"{block}.{name}", *shape).view(-1)
    index = rows = None
    if spec.held is not None:
        rows = torch.zeros(spec.num_experts, dtype=torch.int64, device=reader.device)
        index = torch.full((spec.num_experts,), len(held), device=reader.device)
        index[list(held)] = torch.arange(len(held), device=reader.device)
    return Experts(
        router=router,
        gate_up=gate_up,
        down=builder.experts(*zip(*downs, strict=True), gated=False),
        router_bias=reader.exact(f"{name}.{names.router}.bias", spec.num_experts) if bias else None,
        correction=correction,
        shared=_mlp(decoder, f"{block}.{shared}", spec.shared_size, reader, builder) if spec.shared_size else None,
        shared_gate=reader.exact(f"{block}.shared_expert_gate.weight", 1, hidden) if spec.has_shared_gate else None,
        index=index,
        rows=rows,
    )


def _joined_experts(
    decoder: DecoderSpec, spec: ExpertSpec, reader: WeightReader, builder: DecoderBuilder, name: str, layer: int
) -> JoinedExperts:
    """The router's norm and its factors of the norm are a part of its weight."""
    hidden = decoder.hidden_size
    experts = _experts(decoder, spec, reader, builder, name, layer)
    scale = reader.exact(f"{name}.router.scale", hidden) * hidden**-0.5
    return JoinedExperts(
        experts=replace(
            experts,
            router=experts.router * scale,
            expert_scale=reader.exact(f"{name}.router.per_expert_scale", spec.num_experts),
        ),
        input_norm=reader.norm(f"{name}.pre_feedforward_layernorm_2", (hidden,), decoder.norm_offset),
        output_norm=reader.norm(f"{name}.post_feedforward_layernorm_2", (hidden,), decoder.norm_offset),
        mlp_norm=reader.norm(f"{name}.post_feedforward_layernorm_1", (hidden,), decoder.norm_offset),
    )


def _head(spec: DecoderSpec, reader: WeightReader, builder: DecoderBuilder, embedding: Tensor | QWeight) -> Linear:
    """Read the language-model head. A stored head that differs from the tied embedding takes precedence."""
    name = next((head for head in _HEADS if reader.has(head)), _HEADS[0])
    if not spec.tied or reader.has(name):
        head = reader.matrix(name, spec.vocab_size, spec.hidden_size, "head")
        if not (spec.tied and _same(head, embedding)):
            return builder.head(head)
    return builder.tied_head(embedding)


def _same(head: Tensor | QWeight, embedding: Tensor | QWeight) -> bool:
    if isinstance(head, QWeight) and isinstance(embedding, QWeight):
        return head.equals(embedding)
    return isinstance(head, Tensor) and isinstance(embedding, Tensor) and torch.equal(head, embedding)
