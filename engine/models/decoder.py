"""The fused decoder: one forward pass for all families that a `DecoderSpec` describes, dense ones and mixtures.

The families differ in data (`DecoderSpec`), not in code paths. Layers are plain tensors and
`Linear`s in a slotted dataclass: at a handful of tokens per step, dispatch costs as much as arithmetic, so q, k and v
are one product, gate and up another, and q and k are normed and rotated together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device_transfer import make_transfer
from engine.models.base import Attend, KVShape, ModelSpec, PackedAdapter
from engine.models.experts import ExpertRows, Experts, ExpertSpec, JoinedExperts, Mlp, WholeMixture, weighted_sum
from engine.models.latent import LatentAttention, LatentSpec
from engine.models.layer_inputs import LayerInput, LayerInputs, LayerInputSpec, look_up
from engine.models.layer_ops import Activation, HeadLayout, QkNorm, Residual, make_layer_ops
from engine.models.layer_ops.torch_ops import TorchLayerOps, gated
from engine.models.rope import RopeSpec, RotaryTable, Rotation
from engine.models.state_layers.delta import DeltaNet, DeltaSpec
from engine.models.state_layers.mamba import Mamba, MambaSpec
from engine.models.state_layers.short_conv import ShortConv, ShortConvSpec
from engine.quant.base import Linear, Rows, product
from engine.quant.weight import QWeight

if TYPE_CHECKING:
    from engine.adapters.adapter import Adapter
    from engine.adapters.linear import AdaptedLayers, TorchAdapter
    from engine.adapters.targets import Product

StateLayer = DeltaNet | Mamba | ShortConv
"""A layer's part that has a state instead of attention."""

StateLayers = DeltaSpec | MambaSpec | ShortConvSpec
"""Which layers have states, and their sizes."""

NormNames = tuple[str | None, str | None, str | None, str | None]
"""A layer's norms in checkpoints: of the input and the output of attention, and of the input and the output of the MLP.
None: there is none."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The fields of a `DecoderSpec` that one of its layers has otherwise."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    values_are_keys: bool = False
    reads: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderSpec:
    """The parameters of a family and size.

    Attributes:
        num_kv_heads, head_dim: of the cache; with latent attention 1 and `LatentSpec.key_dim`.
        layer_shapes: of all layers, where they differ; empty: none does. See `at`.
        latent: of latent attention; None: each KV head has keys and values of its own.
        intermediate_size: of the dense MLPs.
        experts: of the layers whose MLP is a mixture, or has one beside it; None: none is.
        state_layers: of the layers that have states instead of attention; None: all attend.
        without_mixer: layers that are an MLP only.  without_mlp: layers that have none.
        activation: of the gate, or of MLPs without one.
        qkv_bias, output_bias, mlp_bias: which products have a bias; of latent attention's, those with the input do.
        fused_qkv, fused_gate_up: checkpoints store these products stacked, as one tensor.
        has_sinks: each layer has sinks, see `Attend`.
        gated_attention: the product of q makes a gate for each head, too. What a head attended is multiplied by its
            gate's sigmoid (Qiu et al. 2025, arXiv 2505.06708, section 2.2).
        qk_norm: how q and k are normed; None: not at all.
        late_qk_norm: they are when they are rotated, not before.
        values_are_keys: no product makes values: they are the keys before these are normed and rotated.
        value_norm: values are normed, each head without a weight.
        reads: of `at` only: an earlier layer, whose keys and values this one attends to; None: it makes its own.
        layer_inputs: each layer has an input of its own for each token; None: none has.
        interleaved_rope: in checkpoints, the two rows of q and k that are rotated together are neighbours. The loader
            puts them half a head apart.
        norms: see `NormNames`. Layers without a part have none of that part.
        norm_offset: norm weights are stored as w and mean 1 + w.
        layer_norm: norms subtract the mean first (LayerNorm).  norm_bias: and add a bias, but for those of q and k.
        parallel: attention and MLP read the same normed input, and both join the residual.
        embedding_scale: factor of the embeddings, rounded to the weights' dtype.
        residual_scale: factor of what joins the residual.
        layer_scales: checkpoints hold a factor of each layer's output, the residual included.
        attention_scale: factor of q k^T.
        logits_scale: factor of the logits, above 0.
        final_softcap: logits become cap * tanh(logits / cap).
        tied: the head is the embedding.
        headless: the checkpoint has no head; the model returns hidden states only.
        ropes, layer_ropes: the kinds of rotation, and each layer's index among them.
        windows, eos_token_ids, max_position, context_limit: as in `ModelSpec`.
        weight_prefixes: prefixes of the decoder's tensors in checkpoints of this family ("model."), by preference.
        ignored_weights: prefixes of tensors that are not needed (an image encoder).
        stored_as: modules that checkpoints name otherwise, or store stacked, see `UnstackedWeights`.
        held: the layers that this process holds, of a model that several share by layers; embedding and head are with
            the first layer. None: all.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    attention_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[RopeSpec, ...]
    layer_ropes: tuple[int, ...]
    max_position: int
    eos_token_ids: tuple[int, ...]
    latent: LatentSpec | None = None
    experts: ExpertSpec | None = None
    state_layers: StateLayers | None = None
    without_mixer: frozenset[int] = frozenset()
    without_mlp: frozenset[int] = frozenset()
    activation: Activation = "silu"
    tied: bool = False
    headless: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    has_sinks: bool = False
    gated_attention: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qk_norm: QkNorm | None = None
    late_qk_norm: bool = False
    values_are_keys: bool = False
    value_norm: bool = False
    reads: int | None = None
    layer_inputs: LayerInputSpec | None = None
    interleaved_rope: bool = False
    norms: NormNames = ("input_layernorm", None, "post_attention_layernorm", None)
    norm_offset: bool = False
    layer_norm: bool = False
    norm_bias: bool = False
    parallel: bool = False
    embedding_scale: float | None = None
    residual_scale: float = 1.0
    layer_scales: bool = False
    layer_shapes: tuple[LayerShape, ...] = ()
    logits_scale: float = 1.0
    final_softcap: float | None = None
    weight_prefixes: tuple[str, ...] = ("model.",)
    ignored_weights: tuple[str, ...] = ()
    stored_as: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    context_limit: str | None = None
    held: range | None = None

    @property
    def held_layers(self) -> range:
        """The layers that this process holds."""
        return range(self.num_layers) if self.held is None else self.held

    @property
    def is_plain(self) -> bool:
        """Whether no layer has a shape or a part of its own: what the kernels compute as whole steps, and calibration
        knows product by product."""
        joined = self.experts is not None and self.experts.joins_mlp
        return not (self.layer_shapes or self.value_norm or self.layer_scales or self.layer_inputs or joined)

    def at(self, layer: int) -> DecoderSpec:
        """Return the parameters of a decoder whose layers are all like this one."""
        if not self.layer_shapes:
            return self
        shape = self.layer_shapes[layer]
        return replace(self, layer_shapes=(), **{part.name: getattr(shape, part.name) for part in fields(shape)})

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of the fused projection that are q's, k's and v's."""
        kv = self.num_kv_heads * self.head_dim if self.reads is None else 0
        return self.num_heads * self.head_dim, kv, 0 if self.values_are_keys else kv

    @property
    def heads(self) -> HeadLayout:
        """Of the fused projection."""
        keys = self.qkv_sizes[1] // self.head_dim
        return HeadLayout(
            self.num_heads, keys, self.head_dim, self.qk_norm, self.late_qk_norm, self.values_are_keys, self.value_norm
        )

    @property
    def attended_size(self) -> int:
        """Elements of all heads' outputs together."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def qkv_rows(self) -> dict[str, int]:
        """Modules that make q, k and v -> their rows, as checkpoints store them. Rows of gates stand behind those of
        their head's query."""
        q, k, v = self.qkv_sizes
        queries = q * (1 + self.gated_attention)
        rows = {"qkv_proj": q + k + v} if self.fused_qkv else {"q_proj": queries, "k_proj": k, "v_proj": v}
        return {module: count for module, count in rows.items() if count}

    @property
    def has_gates(self) -> bool:
        """Whether MLPs have a gate beside up."""
        return not self.activation.startswith("plain_")

    def gate_up_rows(self, inner: int) -> dict[str, int]:
        """Modules that make an MLP's gate and up, of `inner` rows each -> their rows, as checkpoints store them."""
        if not self.has_gates:
            return {"up_proj": inner}
        return {"gate_up_proj": 2 * inner} if self.fused_gate_up else {"gate_proj": inner, "up_proj": inner}

    def num_parameters(self, *, active: bool = False) -> int:
        """Weights. `active`: those that a token is computed with, without the experts that are not chosen, and the
        layers' own inputs of other tokens."""
        h, inputs = self.hidden_size, 0
        layers = sum(self.at(layer)._layer_parameters(layer, active=active) for layer in range(self.num_layers))
        if self.layer_inputs is not None:
            inputs = self.layer_inputs.num_parameters(h, self.num_layers, active=active)
        return layers + inputs + h * (1 + self.norm_bias) + self.vocab_size * h * (1 if self.tied else 2)

    def _layer_parameters(self, layer: int, *, active: bool) -> int:
        h, m = self.hidden_size, self.intermediate_size
        in_norm, out_norm, mlp_norm, down_norm = (name is not None for name in self.norms)
        mixer = mlp = norms = 0
        if layer not in self.without_mixer:
            mixer, norms = self._mixer_parameters(layer), in_norm + out_norm
        if layer not in self.without_mlp:
            norms += mlp_norm + down_norm
            experts = self.experts if self.experts is not None and self.experts.layers[layer] else None
            if experts is not None:
                chosen = experts.top_k if active else experts.num_experts
                mlp = experts.num_parameters(h, chosen, has_gates=self.has_gates)
            if experts is None or experts.joins_mlp:
                up = (1 + self.has_gates) * m
                mlp += (up + m) * h + (up + h) * self.mlp_bias
        return mixer + mlp + norms * h * (1 + self.norm_bias)

    def _mixer_parameters(self, layer: int) -> int:
        """Weights of a layer's attention, or of what has a state instead, the output product included."""
        h = self.hidden_size
        if (others := self.state_layers) is not None and others.layers[layer]:
            return others.num_parameters(h)
        q, k, _ = self.qkv_sizes
        attention = (self.attended_size + self.output_bias) * h + self.num_heads * self.has_sinks
        if self.latent is None:
            attention += (h + self.qkv_bias) * sum(self.qkv_rows.values())
        else:
            attention += self.latent.num_parameters(h, self.num_heads, bias=self.qkv_bias)
        if self.qk_norm not in (None, "unit"):
            attention += (1 + (k > 0)) * self.head_dim if self.qk_norm == "head" else q + k
        return attention

    def model_spec(self, dtype: torch.dtype) -> ModelSpec:
        """The model's shape for the rest of the engine."""
        dynamic = next((rope.dynamic for rope in self.ropes if rope.dynamic), None)
        return ModelSpec(
            architecture=self.architecture,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_position=self.max_position,
            context_limit=self.context_limit,
            windows=self.windows,
            eos_token_ids=self.eos_token_ids,
            num_parameters=self.num_parameters(),
            num_active_parameters=self.num_parameters(active=True) if self.experts or self.layer_inputs else None,
            dtype=dtype,
            rope_original_max=dynamic.original_max if dynamic else None,
            generates=not self.headless,
            has_sinks=self.has_sinks,
            states=()
            if (others := self.state_layers) is None
            else tuple(others.state(dtype) if has_state else () for has_state in others.layers),
            latent_dim=0 if self.latent is None else self.latent.rank,
            uncached_layers=tuple(sorted(self.without_mixer)),
            kv_shapes=tuple(KVShape(shape.num_kv_heads, shape.head_dim) for shape in self.layer_shapes),
            reads=tuple(shape.reads for shape in self.layer_shapes),
        )


@dataclass(frozen=True, slots=True, eq=False)
class HeadAttention:
    """The weights that make a layer's queries, and keys and values for each KV head.

    Attributes:
        qkv: hidden -> (heads + 2 kv_heads) * head_dim, and as much as of the queries for gates; or what of it
            `DecoderSpec.qkv_sizes` says.
        qk_norm: float32 [heads + kv_heads, head_dim], of what there is of both.
        sinks: float32 [heads], see `Attend`.
    """

    qkv: Linear
    qk_norm: Tensor | None = None
    sinks: Tensor | None = None


class WholeMlp(Protocol):
    """An MLP or a mixture that is computed in one call, whatever its form."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[T, hidden_size] -> a new [T, hidden_size]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer's weights. Norm weights are float32, with any offset already added.

    Attributes:
        attention, mlp: None: the layer has no such part.
        output: `DecoderSpec.attended_size`, or of a gated delta net's heads -> hidden.
        input_norm, mlp_norm, output_norm, down_norm: float32 [hidden_size], or [2, hidden_size] with
            `DecoderSpec.norm_bias`, weight and bias; None: there is none.
        joined: a mixture beside the MLP; None: there is none.
        input: of the layer's own input; None: it has none.
        scale: factor of the layer's output, the residual included.
    """

    input_norm: Tensor | None
    attention: HeadAttention | LatentAttention | StateLayer | None
    output: Linear | None
    mlp_norm: Tensor | None
    mlp: Mlp | Experts | WholeMlp | None
    output_norm: Tensor | None = None
    down_norm: Tensor | None = None
    joined: JoinedExperts | None = None
    input: LayerInput | None = None
    scale: float = 1.0

    @property
    def mixture(self) -> Experts | WholeMixture | None:
        """Its experts, if they are read as such."""
        if self.joined is not None:
            return self.joined.experts
        return self.mlp if isinstance(self.mlp, Experts) else None


@dataclass(frozen=True, slots=True, eq=False)
class _StepParts:
    """What layers read of a step besides hidden states.

    Attributes:
        rotations, growths: of each kind of rotation; growths [T, 1, 1], of queries.
        inputs: the layers' own, [T, layers, size].
    """

    attend: Attend
    rotations: list[Rotation]
    growths: list[Tensor | None]
    inputs: Tensor | None

    def take(self, at: Tensor, attend: Attend) -> _StepParts:
        """Of the tokens int64 [W] alone, which attend so."""
        return _StepParts(
            attend,
            [Rotation(*(part.index_select(0, at) for part in rotation)) for rotation in self.rotations],
            [None if growth is None else growth.index_select(0, at) for growth in self.growths],
            None if self.inputs is None else self.inputs.index_select(0, at),
        )


class FusedDecoder:
    """A `CausalModel` for every family that a `DecoderSpec` can describe."""

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        *,
        embedding: Tensor | QWeight | None,
        layers: tuple[Layer, ...],
        norm: Tensor,
        head: Linear | None,
        positions: int | None,
        inputs: LayerInputs | None = None,
    ) -> None:
        """Create the decoder from its weights, without copies.

        Args:
            embedding: [vocab_size, hidden_size]; rows of a quantized one are dequantized when they are looked up. None,
                and no head: another process has both (`DecoderSpec.held`).
            layers: those of `DecoderSpec.held_layers`.
            norm: float32 [hidden_size], as of `Layer`.
            positions: rotary positions to tabulate at once (None: on first use, or all where that is impossible).
            inputs: makes the layers' own inputs, with `DecoderSpec.layer_inputs`.
        """
        device = norm.device
        if positions is None and device.type != "cpu":
            positions = spec.max_position
        self._spec = spec.model_spec(dtype)
        self._decoder = spec
        self._specs = tuple(spec.at(layer) for layer in range(spec.num_layers))
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._inputs = inputs
        storing = [layer for layer, own in enumerate(self._specs) if own.reads is None]
        self._num_storing = storing[-1] + 1 if storing else 0
        self._transfer = make_transfer(device)
        self._ops = make_layer_ops(spec.hidden_size, spec.norm_eps, device, layer_norm=spec.layer_norm)
        self._torch_ops = TorchLayerOps(spec.norm_eps, layer_norm=spec.layer_norm)
        self._heads = tuple(own.heads for own in self._specs)
        self._ropes = tuple(RotaryTable(rope, dtype, device, positions) for rope in spec.ropes)
        scale = spec.embedding_scale
        self._embedding_scale = None if scale is None else float(torch.tensor(scale, dtype=dtype))
        self._adapted: AdaptedLayers | None = None

    @property
    def decoder_spec(self) -> DecoderSpec:
        """See `AdaptedModel.decoder_spec`."""
        return self._decoder

    @property
    def num_places(self) -> int:
        """See `AdaptedModel.num_places`."""
        return 0 if self._adapted is None else self._adapted.max_loras

    def add_places(self, max_loras: int, max_ranks: Mapping[Product, int]) -> None:
        """See `AdaptedModel.add_places`."""
        from engine.adapters.linear import AdaptedLayers  # noqa: PLC0415 - it imports the layers from here

        self._adapted = AdaptedLayers(self._layers, max_loras, max_ranks, self._spec.dtype, self._norm.device)
        self._layers = self._adapted.layers

    def pack_adapter(self, adapter: Adapter) -> TorchAdapter:
        """See `AdaptedModel.pack_adapter`."""
        assert self._adapted is not None, "`add_places` comes first"
        return self._adapted.pack(adapter)

    def place_adapter(self, place: int, adapter: PackedAdapter | None) -> None:
        """See `AdaptedModel.place_adapter`."""
        from engine.adapters.linear import TorchAdapter  # noqa: PLC0415 - it imports the layers from here

        assert self._adapted is not None, "`add_places` comes first"
        assert adapter is None or isinstance(adapter, TorchAdapter)
        self._adapted.place(place, adapter)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def recordable(self) -> bool:
        """Whether `forward` can be captured as a graph: it never reads a value on the host. (Frequencies that follow a
        sequence's length are read, and the rows of experts that are multiplied one by one. Segments of tokens are
        cut on the host, and without Triton runs with one adapter.)"""
        if self._spec.states or (self._adapted is not None and not self._adapted.step.recordable):
            return False
        mixtures = [mixture for layer in self._layers if isinstance(mixture := layer.mixture, Experts)]
        grouped = all(mlp.index is None and mlp.gate_up.recordable and mlp.down.recordable for mlp in mixtures)
        return grouped and self._spec.rope_original_max is None

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rope_lengths: Tensor | None) -> Tensor:
        """See `CausalModel.forward`."""
        return self._forward(input_ids, positions, attend, rope_lengths, None)

    def forward_with_states(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rope_lengths: Tensor | None, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """See `LayeredModel.forward_with_states`."""
        states = torch.empty(
            len(input_ids), len(layers), self._spec.hidden_size, dtype=self._spec.dtype, device=input_ids.device
        )
        inputs_of = {layer: states[:, i] for i, layer in enumerate(layers)}
        return self._forward(input_ids, positions, attend, rope_lengths, inputs_of), states.flatten(1)

    @property
    def embedding(self) -> Tensor:
        """See `LayeredModel.embedding`; dequantized, if it is quantized."""
        whole = self._embedding
        assert whole is not None
        return whole.dequantize(self._spec.dtype) if isinstance(whole, QWeight) else whole

    def _forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        rope_lengths: Tensor | None,
        states: Mapping[int, Tensor] | None,
    ) -> Tensor:
        """Run `forward`; states: layer -> output for its input [T, hidden_size]."""
        spec = self._decoder
        with torch.inference_mode():
            if self._adapted is not None:
                self._adapted.step.set(attend.adapters)
            hidden = self._embed_scaled(input_ids)
            inputs = None if self._inputs is None else self._inputs.of(input_ids, hidden, spec.norm_eps)
            step = self._step_parts(positions, attend, rope_lengths, inputs)
            first = spec.num_layers if states is not None else self._num_storing
            residual = Residual(self._ops, hidden, spec.residual_scale)
            self._through(range(first), residual, step, states or {})
            needed = attend.of_wanted() if first < spec.num_layers else None
            if needed is None:
                self._through(range(first, spec.num_layers), residual, step, {})
            elif len(needed[0]):  # layers that store nothing compute no token that nothing is read of
                (at,) = self._transfer.up(needed[0].astype(np.int64))
                picked = Residual(self._ops, residual.joined().index_select(0, at), spec.residual_scale)
                self._through(range(first, spec.num_layers), picked, step.take(at, needed[1]), {})
                hidden.index_copy_(0, at, picked.joined())
            if states is not None and spec.num_layers in states:
                states[spec.num_layers].copy_(residual.joined())
            return _tensor(residual.normed(self._norm))

    def _embed_scaled(self, input_ids: Tensor) -> Tensor:
        """Return what the first layer reads [T, hidden_size]; a new tensor."""
        hidden = self._embed(input_ids)
        if self._embedding_scale is not None:
            hidden *= self._embedding_scale
        return hidden

    def _step_parts(
        self, positions: Tensor, attend: Attend, rope_lengths: Tensor | None, inputs: Tensor | None
    ) -> _StepParts:
        return _StepParts(
            attend,
            [rope.lookup(positions, rope_lengths) for rope in self._ropes],
            [
                None if rope.growth is None else rope.growth.factors(positions)[:, None, None]
                for rope in self._decoder.ropes
            ],
            inputs,
        )

    def _through(self, layers: range, residual: Residual, step: _StepParts, states: Mapping[int, Tensor]) -> None:
        """Take the residual stream through layers; `states` as of `_forward`."""
        spec = self._decoder
        first = spec.held_layers.start
        for index in layers:
            layer = self._layers[index - first]
            if index in states:
                states[index].copy_(residual.joined())
            reader = None if spec.parallel or not isinstance(layer.attention, HeadAttention) else layer.attention.qkv
            normed = residual.normed(layer.input_norm, reader)
            if layer.attention is not None and layer.output is not None:
                rope = spec.layer_ropes[index]
                rotation, growth = step.rotations[rope], step.growths[rope]
                attended = self._attended(index, layer.attention, normed, rotation, growth, step.attend)
                residual.add(layer.output(attended.flatten(1)), layer.output_norm)
            if layer.mlp is not None:
                if not spec.parallel:
                    normed = residual.normed(layer.mlp_norm, layer.mlp.gate_up if isinstance(layer.mlp, Mlp) else None)
                update = self._mlp(layer.mlp, normed)
                if layer.joined is not None:
                    update = self._with_experts(layer.joined, update, residual.joined())
                residual.add(update, layer.down_norm)
            if step.inputs is not None and layer.input is not None:
                gate = layer.input.gate(residual.joined())
                update = layer.input.projection(gated(spec.activation, gate, step.inputs[:, index]))
                residual.add(update, layer.input.norm)
            if layer.scale != 1.0:
                residual.multiply(layer.scale)

    def _attended(
        self, index: int, part: HeadAttention | LatentAttention | StateLayer, x: Rows, rotation: Rotation,
        growth: Tensor | None, attend: Attend,
    ) -> Tensor:  # fmt: skip
        """[T, hidden_size], normed -> [T, heads, elements]; growth: of queries [T, 1, 1]."""
        spec = self._specs[index]
        if isinstance(part, StateLayer):
            return part.attended(index, _tensor(x), attend, spec.norm_eps)
        if isinstance(part, LatentAttention):
            assert spec.latent is not None
            scale = spec.attention_scale
            return part.attended(spec.latent, index, _tensor(x), rotation, growth, scale, attend)
        made = product(part.qkv, x)
        qkv, heads = made.view(len(made), -1, spec.head_dim), self._heads[index]
        q, k, v = self._ops.rotate(heads, qkv, part.qk_norm, rotation, growth, attend, index)
        attended = attend(index if spec.reads is None else spec.reads, q, k, v, spec.attention_scale, part.sinks)
        return attended * qkv[:, -spec.num_heads :].sigmoid() if spec.gated_attention else attended

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Return the tokens' rows [T, hidden_size], before any scaling; a new tensor."""
        assert self._embedding is not None
        return look_up(self._embedding, input_ids, self._spec.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalModel.logits`."""
        assert self._head is not None
        with torch.inference_mode():
            logits = self._head(hidden).float()
            if self._decoder.logits_scale != 1.0:
                logits *= self._decoder.logits_scale
            if (cap := self._decoder.final_softcap) is not None:
                logits.div_(cap).tanh_().mul_(cap)
            return logits

    def _mlp(self, mlp: Mlp | Experts | WholeMlp, rows: Rows) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        if isinstance(mlp, Mlp):
            made = product(mlp.gate_up, rows)
            return product(mlp.down, self._ops.activate(self._decoder.activation, made, mlp.down))
        x = _tensor(rows)
        return self._mixture(mlp, x, x) if isinstance(mlp, Experts) else mlp(x)

    def _mixture(self, mlp: Experts, x: Tensor, routed: Tensor) -> Tensor:
        """[T, hidden_size], and what the router reads -> [T, hidden_size]."""
        spec = self._decoder.experts
        assert spec is not None
        weights, chosen = mlp.route(spec, routed)
        if mlp.index is None:
            rows = ExpertRows.of(chosen, spec.num_experts)
        else:
            rows = ExpertRows.of_held(chosen, mlp.index, spec.num_held)
        inputs = rows.take(x, spec.top_k)
        if spec.scales_inputs:
            inputs *= weights.flatten().index_select(0, rows.order)[:, None].to(x.dtype)
            weights = torch.ones_like(weights)
        inner = _tensor(self._ops.activate(self._decoder.activation, mlp.gate_up(inputs, rows.ends)))
        total = weighted_sum(rows.restore(mlp.down(inner, rows.ends), len(x), spec.top_k), weights)
        if mlp.shared is not None:
            shared = self._mlp(mlp.shared, x)
            total += shared if mlp.shared_gate is None else shared * F.linear(x.float(), mlp.shared_gate).sigmoid()
        return total.to(x.dtype)

    def _with_experts(self, part: JoinedExperts, made: Tensor, hidden: Tensor) -> Tensor:
        """What the MLP made [T, hidden_size] of the residual, together with what the experts make of it."""
        ops, whole = self._torch_ops, part.experts
        unit = ops.norm32(hidden, hidden.shape[1])
        x = (unit * part.input_norm).to(hidden.dtype)
        mixed = self._mixture(whole, x, unit) if isinstance(whole, Experts) else whole(x, unit)
        return ops.normed(made, part.mlp_norm) + ops.normed(mixed, part.output_norm)


def _tensor(rows: Rows) -> Tensor:
    """Rows that were not made for one product."""
    assert isinstance(rows, Tensor)
    return rows
