"""The decoder families in native code: one call computes a whole step, attention and cache included.

The same `DecoderSpec` that the fused decoder reads is handed to the kernels as data. Hidden states stay in float32
between the layers; products take them in the model's dtype, or quantized row by row.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.adapters.adapter import Adapter
from engine.adapters.targets import Product
from engine.adapters.tiles import TokenTiles
from engine.attention.base import AttentionStep
from engine.attention.native import NativeAttention
from engine.config import Quantize
from engine.errors import EngineError
from engine.expert_load import ExpertLoad
from engine.models.base import Attend, CausalModel, ModelSpec, PackedAdapter
from engine.models.decoder import DecoderSpec, FusedDecoder, HeadAttention, Layer
from engine.models.decoder_builder import Use
from engine.models.experts import ExpertLinear, Experts, LinearPerExpert, Mlp
from engine.models.native_experts import NativeExperts
from engine.models.native_parts import with_native_heads, with_native_mlps
from engine.models.rope import RotaryTable
from engine.models.state_layers.native_recurrence import with_native_recurrences
from engine.native.adapters import NativeAdapter, NativeAdapters
from engine.native.library import NativeLibrary
from engine.native.linear import NativeLinear
from engine.native.packing import pack_quantized, runs_small
from engine.native.shapes import ShapeTable
from engine.native.structs import KIND_OF, PARTS, DecoderShape, ElementKind, Gate, LayerStruct, StepStruct
from engine.native.workspace import KernelWorkspace
from engine.quant.base import Linear
from engine.quant.rtn import AT_LOAD, round_to_nearest
from engine.quant.weight import QWeight

_NORMS = ("input_norm", "mlp_norm", "qk_norm", "output_norm", "down_norm")
"""Norms of a layer, in the order of `_norms`."""


class NativeDecoder:
    """A `CausalModel` whose steps run in the kernels; its attention must be `NativeAttention`."""

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        library: NativeLibrary,
        *,
        embedding: Tensor | NativeLinear,
        layers: tuple[Layer, ...],
        norm: Tensor,
        head: Linear,
        positions: int | None,
    ) -> None:
        """As `FusedDecoder`; the layers' and the head's products are `NativeLinear`s, and so is an embedding in a small
        form, whose rows are unpacked when they are looked up."""
        self.library = library
        self._spec = spec.model_spec(dtype)
        self._decoder = spec
        self._kind = KIND_OF[dtype]
        self._embedding = embedding if isinstance(embedding, Tensor) else None
        self._table = None if isinstance(embedding, Tensor) else embedding
        self._layers = layers
        self._norm = norm
        self._head = _native(head)
        self._experts = tuple(self._mixture(layer) for layer in layers)
        self._ropes = tuple(RotaryTable(rope, torch.float32, torch.device("cpu"), positions) for rope in spec.ropes)
        self._bound: _Bound | None = None
        self._adapters: NativeAdapters | None = None

    @property
    def decoder_spec(self) -> DecoderSpec:
        """See `AdaptedModel.decoder_spec`."""
        return self._decoder

    @property
    def num_places(self) -> int:
        """See `AdaptedModel.num_places`."""
        return 0 if self._adapters is None else self._adapters.max_loras

    def add_places(self, max_loras: int, max_ranks: Mapping[Product, int]) -> None:
        """See `AdaptedModel.add_places`."""
        self._adapters = NativeAdapters(
            self.library, self._decoder.num_layers, max_loras, max(max_ranks.values()), self._spec.dtype,
            has_gates=self._decoder.has_gates,
        )  # fmt: skip
        self._bound = None

    def pack_adapter(self, adapter: Adapter) -> NativeAdapter:
        """See `AdaptedModel.pack_adapter`."""
        assert self._adapters is not None, "`add_places` comes first"
        return self._adapters.pack(adapter)

    def place_adapter(self, place: int, adapter: PackedAdapter | None) -> None:
        """See `AdaptedModel.place_adapter`."""
        assert self._adapters is not None, "`add_places` comes first"
        assert adapter is None or isinstance(adapter, NativeAdapter)
        self._adapters.place(place, adapter)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rope_lengths: Tensor | None) -> Tensor:
        """See `CausalModel.forward`."""
        return self._forward(input_ids, positions, attend, rope_lengths)

    def forward_with_states(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rope_lengths: Tensor | None, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """See `LayeredModel.forward_with_states`."""
        states = torch.empty(len(input_ids), len(layers), self._decoder.hidden_size, dtype=self._spec.dtype)
        hidden = self._forward(input_ids, positions, attend, rope_lengths, layers, states)
        return hidden, states.flatten(1)

    @property
    def embedding(self) -> Tensor | None:
        """See `LayeredModel.embedding`."""
        return self._embedding

    def _forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rope_lengths: Tensor | None,
        layers: tuple[int, ...] = (), states: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run `forward`; states: the output for those before `layers`, [T, len(layers), hidden_size]."""
        if not (isinstance(attend, AttentionStep) and isinstance(attend.backend, NativeAttention)):
            raise EngineError("a native decoder computes with native attention only; load the model for another one")
        tokens = input_ids.shape[0]
        bound = self._bind(attend.backend, tokens)
        by_position = self._spec.rope_original_max is None  # else the rows of longer sequences are in no table
        if by_position:
            end = int(positions.numpy().max()) + 1
            rotations = [rope.table(end) for rope in self._ropes]
        else:
            rotations = [rope.rows(positions, rope_lengths) for rope in self._ropes]
        growths = [None if rope.growth is None else rope.growth.factors(positions) for rope in self._decoder.ropes]
        hidden = torch.empty(tokens, self._decoder.hidden_size, dtype=self._spec.dtype)
        state_layers = (ctypes.c_int32 * len(layers))(*layers)
        ids, at = input_ids.contiguous(), positions.contiguous()
        wanted, adapters = attend.prepared.wanted, attend.adapters
        assert not isinstance(adapters, TokenTiles), "nothing is recorded on a CPU"
        step = StepStruct(
            tokens, len(attend.backend.storage.layout.groups), ids.data_ptr(), attend.prepared.tasks.groups,
            at.data_ptr() if by_position else None, _pointers(rotations), _pointers(growths), hidden.data_ptr(),
            None if wanted is None else wanted.ctypes.data,
            -1 if wanted is None else len(wanted), len(layers), ctypes.addressof(state_layers),
            None if states is None else states.data_ptr(), None if adapters is None else adapters.ctypes.data,
        )  # fmt: skip
        self.library.forward(bound.shape, bound.layers, self._embedding, self._norm, step, bound.space.struct)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalModel.logits`."""
        with torch.inference_mode():
            logits = self._head.product(hidden, self._room(len(hidden)))
            if self._decoder.logits_scale != 1.0:
                logits *= self._decoder.logits_scale
            if (cap := self._decoder.final_softcap) is not None:
                logits.div_(cap).tanh_().mul_(cap)
            return logits

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `GreedyModel.greedy`. A soft cap and a scale preserve the order, so they are not applied."""
        return self._head.argmax(hidden, self._room(hidden.shape[0]))

    def spent(self) -> dict[str, float]:
        """Seconds in each part of the kernels since the first step, by the first thread's clock."""
        if self._bound is None:
            return {}
        return dict(zip(PARTS, (self._bound.space.spent / 1e9).tolist(), strict=True))

    def expert_load(self) -> ExpertLoad | None:
        """See `RoutedModel.expert_load`."""
        if (experts := self._decoder.experts) is None:
            return None
        none = torch.zeros(experts.num_experts, dtype=torch.int64)
        rows = torch.stack([none if mixture is None else mixture.rows for mixture in self._experts])
        return ExpertLoad(rows.numpy())

    def reset_expert_load(self) -> None:
        """See `RoutedModel.reset_expert_load`."""
        for mixture in self._experts:
            if mixture is not None:
                mixture.rows.zero_()

    def weight_bytes(self) -> dict[str, int]:
        """Return the bytes of the weights, by the form of their elements ("int4", "bfloat16", …), factors and biases
        included. Shared weights are counted once. Norms are float32."""
        found: Counter[str] = Counter()
        for linear in self._linears():
            found[linear.form] += linear.num_bytes
        if self._embedding is not None:
            found[str(self._embedding.dtype).removeprefix("torch.")] += self._embedding.nbytes
        norms = [self._norm, *(norm for layer in self._layers for norm in _norms(layer) if norm is not None)]
        sinks = [sinks for layer in self._layers if (sinks := _heads(layer).sinks) is not None]
        found["float32"] += sum(small.nbytes for small in (*norms, *sinks))
        return dict(found)

    def _linears(self) -> list[NativeLinear]:
        found = [_native(part) for layer in self._layers for part in _products(layer)]
        found.extend(linear for mixture in self._experts if mixture is not None for linear in mixture.linears)
        found.append(self._head)
        if self._table is not None and self._table is not self._head:
            found.append(self._table)
        return found

    def _room(self, rows: int) -> KernelWorkspace:
        if self._bound is not None and rows <= self._bound.space.max_tokens:
            return self._bound.space
        return KernelWorkspace.for_linear(self.library, self._decoder.hidden_size, rows, reorders=self._head.reorders)

    def _bind(self, attention: NativeAttention, tokens: int) -> _Bound:
        """Structs that point to the weights and to this attention's cache, and room for so many tokens."""
        bound = self._bound
        if bound is None or bound.attention is not attention or bound.space.max_tokens < tokens:
            self._bound = bound = self._make(attention, max(tokens, 64))
        return bound

    def _make(self, attention: NativeAttention, tokens: int) -> _Bound:
        spec, cache = self._decoder, attention.storage.shape
        shape = DecoderShape(
            self._kind, spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.num_heads,
            Gate[spec.activation.upper()], spec.layer_norm + spec.norm_bias, int(spec.parallel),
            int(spec.qk_norm == "projection"), int(spec.late_qk_norm),
            spec.norm_eps, spec.attention_scale, self._embedding_scale(), spec.residual_scale, cache,
            None if self._table is None else ctypes.addressof(self._table.struct),
        )  # fmt: skip
        layers = (LayerStruct * spec.num_layers)()
        for index, layer in enumerate(self._layers):
            struct = attention.storage.layer_struct(index)
            struct.qkv, struct.output = _native(_heads(layer).qkv).struct, _native(layer.output).struct
            if (mixture := self._experts[index]) is not None:
                struct.experts = ctypes.pointer(mixture.struct)
            elif not isinstance(layer.mlp, Experts):
                mlp = _mlp(layer)
                struct.gate_up, struct.down = _native(mlp.gate_up).struct, _native(mlp.down).struct
            struct.sinks = None if (sinks := _heads(layer).sinks) is None else sinks.data_ptr()
            for name, weight in zip(_NORMS, _norms(layer), strict=True):
                setattr(struct, name, None if weight is None else weight.data_ptr())
            if spec.parallel:
                struct.mlp_norm = struct.input_norm
            struct.rope = spec.layer_ropes[index]
            struct.adapters = None if self._adapters is None else self._adapters.layer(index)
            layers[index] = struct
        space = KernelWorkspace.for_decoder(
            self.library, cache, spec.num_heads, spec.hidden_size,
            spec.intermediate_size if None in self._experts else 0, self._kind, tokens,
            reorders=any(linear.reorders for linear in self._linears()),
            experts=next((mixture.sizes for mixture in self._experts if mixture is not None), None),
            max_rank=0 if self._adapters is None else self._adapters.max_rank,
        )  # fmt: skip
        return _Bound(attention, shape, layers, space)

    def _mixture(self, layer: Layer) -> NativeExperts | None:
        if not isinstance(layer.mlp, Experts):
            return None
        assert self._decoder.experts is not None
        return NativeExperts(self.library, self._decoder.experts, layer.mlp)

    def _embedding_scale(self) -> float:
        scale = self._decoder.embedding_scale
        return 1.0 if scale is None else float(torch.tensor(scale, dtype=self._spec.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    attention: NativeAttention
    shape: DecoderShape
    layers: Any
    space: KernelWorkspace


@dataclass(frozen=True, slots=True)
class NativeBuilder:
    """Makes a decoder's parts for the kernels.

    Attributes:
        quantize: weights at load. int8 is used where the table measured it as faster; the head has the model's dtype,
            because it decides between neighbouring tokens.
    """

    library: NativeLibrary
    quantize: Quantize = "none"
    table: ShapeTable | None = None

    def runs(self, weight: QWeight, use: Use) -> bool:
        """Whether the kernels compute with a small weight; unsupported groups are better dequantized once."""
        return runs_small(weight)

    def linear(self, weight: Tensor | QWeight, bias: Tensor | None) -> Linear:
        weight = self._rounded(weight)
        if isinstance(weight, QWeight):
            return NativeLinear(self.library, pack_quantized(self.library, weight, bias))
        return NativeLinear.dense(self.library, self._kind(weight), weight, bias)

    def gated(self, weight: Tensor | QWeight, bias: Tensor | None) -> Linear:
        """Gate and up, stacked, are interleaved by vectors, so that both halves of a result lie in one panel."""
        mixed_bias = None if bias is None else self._mix(bias)
        weight = self._rounded(weight)
        if isinstance(weight, QWeight):
            return NativeLinear(self.library, pack_quantized(self.library, weight, mixed_bias, gated=True))
        return NativeLinear.dense(self.library, self._kind(weight), self._mix(weight), mixed_bias)

    def experts(
        self, weights: Sequence[Tensor | QWeight], biases: Sequence[Tensor | None], *, gated: bool
    ) -> ExpertLinear:
        make = self.gated if gated else self.linear
        return LinearPerExpert([make(*parts) for parts in zip(weights, biases, strict=True)])

    def head(self, weight: Tensor | QWeight) -> Linear:
        if isinstance(weight, QWeight):
            return self.linear(weight, None)
        return NativeLinear.dense(self.library, KIND_OF[weight.dtype], weight)

    def tied_head(self, embedding: Tensor | QWeight) -> Linear:
        return self._table(embedding) if isinstance(embedding, QWeight) else self.head(embedding)

    def decoder(self, spec: DecoderSpec, dtype: torch.dtype, **parts: Any) -> CausalModel:
        """A tied head in a small form is the embedding's only copy, but for a `FusedDecoder`. Where some of the layers
        have states or one part only, or attend to latent vectors, or are not plain, the kernels compute products, MLPs,
        attention and recurrences call by call, and torch's operators the rest."""
        whole = spec.is_plain and not spec.without_mixer and not spec.without_mlp
        if spec.state_layers is not None or spec.latent is not None or not whole:
            layers = with_native_mlps(self.library, spec, parts.pop("layers"))
            layers = with_native_heads(self.library, layers)
            return FusedDecoder(spec, dtype, layers=with_native_recurrences(self.library, layers), **parts)
        if isinstance(embedding := parts.pop("embedding"), QWeight):
            head = _native(parts["head"])
            embedding = head if head.looked_up else self._table(embedding)
        return NativeDecoder(spec, dtype, self.library, embedding=embedding, **parts)

    def _table(self, embedding: QWeight) -> NativeLinear:
        return NativeLinear(self.library, pack_quantized(self.library, embedding, looked_up=True))

    def _rounded(self, weight: Tensor | QWeight) -> Tensor | QWeight:
        if isinstance(weight, Tensor) and self.quantize in AT_LOAD:
            return round_to_nearest(weight, AT_LOAD[self.quantize])
        return weight

    def _mix(self, stacked: Tensor) -> Tensor:
        lanes = self.library.panel // 2
        rows = stacked.shape[0] // 2
        padding = [0, 0] * (stacked.dim() - 1) + [0, -rows % lanes]
        gate, up = (F.pad(half, padding) for half in stacked.chunk(2))
        shape = (-1, lanes, *stacked.shape[1:])
        return torch.stack((gate.reshape(shape), up.reshape(shape)), dim=1).reshape(-1, *stacked.shape[1:])

    def _kind(self, weight: Tensor) -> ElementKind:
        if self.quantize == "int8-weight-only":
            return ElementKind.W8
        if self.quantize == "int8":
            table = self.table or ShapeTable(self.library, weight.dtype)
            if table.int8_is_faster(*weight.shape):
                return ElementKind.I8
        return KIND_OF[weight.dtype]


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def _mlp(layer: Layer) -> Mlp:
    assert isinstance(layer.mlp, Mlp)
    return layer.mlp


def _products(layer: Layer) -> tuple[Linear | None, ...]:
    """A layer's, but for those of experts."""
    mlp = () if isinstance(layer.mlp, Experts) else (_mlp(layer).gate_up, _mlp(layer).down)
    return _heads(layer).qkv, layer.output, *mlp


def _norms(layer: Layer) -> tuple[Tensor | None, ...]:
    return layer.input_norm, layer.mlp_norm, _heads(layer).qk_norm, layer.output_norm, layer.down_norm


def _heads(layer: Layer) -> HeadAttention:
    assert isinstance(layer.attention, HeadAttention), "`NativeBuilder.decoder` makes no other one for the kernels"
    return layer.attention


def _native(linear: Linear | None) -> NativeLinear:
    assert isinstance(linear, NativeLinear)
    return linear
