"""The model interface of the engine, for all families: shapes, and two functions over flat token batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import UnsupportedModel
from engine.expert_load import ExpertLoad
from engine.states import StateOperator, StateShape

if TYPE_CHECKING:
    from engine.adapters.adapter import Adapter
    from engine.adapters.targets import Product
    from engine.adapters.tiles import TokenTiles
    from engine.models.decoder import DecoderSpec


class LayerCache(NamedTuple):
    """A layer's part of the paged cache, contiguous rows of tokens, and a step's rows in it.

    Attributes:
        keys, values: [slots, kv_heads, head_dim] of any shape, in the model's dtype or float8_e4m3fn.
        key_scales, value_scales: float32 [slots, kv_heads], likewise, of float8; else None.
        slots: int32 or int64 [T]; -1: the token is stored nowhere.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    slots: Tensor


class Attend(Protocol):
    """Attention of a step, as models call it."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, sinks: Tensor | None = None, /
    ) -> Tensor:
        """Store k and v in the paged cache and attend causally within each sequence.

        Args:
            q, k, v: [T, heads, head_dim], [T, kv_heads, head_dim] and likewise; q and k arrive rotated. With
                `ModelSpec.latent_dim` v is the first so many elements of k. None: nothing is stored, and q attends to
                what the layer has stored in this step and before.
            sinks: float32 [heads], a score that joins each head's softmax without a value, so that a head may attend to
                nothing (Xiao et al. 2024, StreamingLLM, section 3.2; OpenAI 2025, gpt-oss, section 2.2). Only with
                `ModelSpec.has_sinks`.

        Returns:
            [T, heads, head_dim]; with `latent_dim` [T, heads, latent_dim].
        """
        ...

    def cache(self, layer: int) -> LayerCache | None:
        """Return where the step's keys and values of a layer belong, for a caller that stores them itself and then
        passes None; None: only a call stores them."""
        ...

    def of_wanted(self) -> tuple[NDArray[np.int32], Attend] | None:
        """Return the tokens whose hidden states after the last layer are needed, ascending int32 [W], and how these
        alone attend, to what is stored; None: all are needed."""
        ...

    @property
    def adapters(self) -> NDArray[np.int32] | TokenTiles | None:
        """int32 [T], the place of each token's adapter; -1: it has none; None: no token has one. Of a step that is
        recorded, tiles that each replay has other contents of. Only read by models that have places
        (`AdaptedModel`)."""
        ...

    def scan(self, layer: int, operator: StateOperator, *inputs: Tensor) -> Tensor:
        """Compute a layer that has states instead of keys and values.

        Args:
            operator: computes it from stored states.  inputs: [T, ...] each.

        Returns:
            [T, ...] of the operator.
        """
        ...


class KVShape(NamedTuple):
    """A layer's keys, and its values likewise, of one token: [num_kv_heads, head_dim]."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's shape.

    Attributes:
        architecture: the family's name as its config gives it.
        max_position: context length of the model, tokens.
        context_limit: the setting of the model that limits `max_position`, because longer contexts would be computed
            otherwise than here; None: nothing does.
        windows: per layer, the sliding window in tokens (a query sees itself and window - 1 before it), or None.
        eos_token_ids: the tokens that end an answer (config and generation_config together).
        num_active_parameters: that a token is computed with; None: all of them, or it is not known.
        generates: it has a language-model head.
        has_sinks: its layers attend with sinks, see `Attend`.
        states: per layer, the tensors of its state (`engine.states`), none where it has no state; empty: no layer has.
        uncached_layers: layers with neither keys and values nor a state.
        latent_dim: of latent attention, with one KV head: a token's values are the first so many elements of its key,
            and are not stored apart (`engine.models.latent`). 0: values are stored, of head_dim elements.
        kv_shapes: per layer, where layers differ from `num_kv_heads` and `head_dim`, one for each window; empty: none
            does.
        reads: per layer, the earlier one whose keys and values it attends to, or None, where it stores its own; empty:
            all do.
        rope_original_max: length from which rotary frequencies depend on a sequence's length (dynamic scaling only).
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    dtype: torch.dtype
    num_active_parameters: int | None = None
    rope_original_max: int | None = None
    generates: bool = True
    has_sinks: bool = False
    context_limit: str | None = None
    states: tuple[tuple[StateShape, ...], ...] = ()
    latent_dim: int = 0
    uncached_layers: tuple[int, ...] = ()
    kv_shapes: tuple[KVShape, ...] = ()
    reads: tuple[int | None, ...] = ()

    def kv_shape(self, layer: int) -> KVShape:
        """Of a layer that attends."""
        return self.kv_shapes[layer] if self.kv_shapes else KVShape(self.num_kv_heads, self.head_dim)

    @property
    def kv_elements(self) -> int:
        """Elements of a token's keys and values in all layers."""
        layers = (layer for layers in self.window_layers.values() for layer in layers)
        return sum(heads * dim * (1 if self.latent_dim else 2) for heads, dim in map(self.kv_shape, layers))

    @property
    def value_dim(self) -> int:
        """Elements of a head's value."""
        return self.latent_dim or self.head_dim

    def context(self, max_model_len: int | None) -> int:
        """The longest sequence, in tokens, where the configured one is `max_model_len`.

        Raises:
            UnsupportedModel: the model's is shorter.
        """
        if max_model_len is not None and max_model_len > self.max_position:
            limit = "" if self.context_limit is None else f" ({self.context_limit}: more is not supported)"
            raise UnsupportedModel(
                f"max_model_len {max_model_len} is beyond the model's context of {self.max_position}{limit}"
            )
        return self.max_position if max_model_len is None else max_model_len

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers with states."""
        return tuple(layer for layer, shapes in enumerate(self.states) if shapes)

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """Layers that attend."""
        others = {*self.state_layers, *self.uncached_layers}
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    @property
    def window_layers(self) -> dict[int | None, tuple[int, ...]]:
        """Windows -> the layers whose keys and values are attended to with them; full attention first, then by size."""
        storing = [layer for layer in self.attending_layers if not self.reads or self.reads[layer] is None]
        windows = {self.windows[layer] for layer in storing}
        return {
            window: tuple(layer for layer in storing if self.windows[layer] == window)
            for window in sorted(windows, key=lambda window: (window is not None, window or 0))
        }


class CausalModel(Protocol):
    """A decoder over a flat batch: concatenated tokens of many sequences, without padding."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rope_lengths: Tensor | None) -> Tensor:
        """Compute hidden states after the last norm, [T, hidden_size] in the model's dtype.

        Args:
            input_ids, positions: int64 [T].
            rope_lengths: int64 [T], for each token max(its sequence's prompt length, position + 1); given only when
                `spec.rope_original_max` is set.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [S, vocab_size] for hidden [S, hidden_size]."""
        ...


@runtime_checkable
class WeighedModel(Protocol):
    """A model that reports the memory of its weights."""

    def weight_bytes(self) -> dict[str, int]:
        """Return bytes by the form of the weights' elements ("int4", "bfloat16", …), factors and biases included."""
        ...


@runtime_checkable
class RoutedModel(Protocol):
    """A model that may count the rows of its experts."""

    def expert_load(self) -> ExpertLoad | None:
        """Return the rows that each expert has computed so far; None: it has none, or does not count."""
        ...

    def reset_expert_load(self) -> None:
        """Count from zero again."""
        ...


class PackedAdapter(Protocol):
    """An adapter in the form that a model's places take."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory of all its matrices."""
        ...


@runtime_checkable
class AdaptedModel(Protocol):
    """A model that can add the low-rank products of adapters to its own, for some tokens or all."""

    @property
    def decoder_spec(self) -> DecoderSpec:
        """What adapters are checked against."""
        ...

    @property
    def num_places(self) -> int:
        """Places that it has."""
        ...

    def add_places(self, max_loras: int, max_ranks: Mapping[Product, int]) -> None:
        """Make places for adapters; called once. `max_ranks`: the largest of all adapters' `Adapter.max_rank` by
        product; 0: none changes it."""
        ...

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter:
        """Read an adapter. Raises `CorruptWeights` if its file can't be read any more."""
        ...

    def place_adapter(self, place: int, adapter: PackedAdapter | None) -> None:
        """Put an adapter into a place, as `pack_adapter` returned it; None: empty it."""
        ...


@runtime_checkable
class LayeredModel(Protocol):
    """A `CausalModel` that returns hidden states between its layers."""

    def forward_with_states(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rope_lengths: Tensor | None, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Run `CausalModel.forward`, and return each token's concatenated states before these layers.

        Args:
            layers: ascending; `spec.num_layers` means behind the last one, before the last norm. That needs a step
                in which all tokens are needed (`AttentionBatch.wanted`).

        Returns:
            hidden states as of `forward`, and [T, len(layers) * hidden_size] in the model's dtype.
        """
        ...

    @property
    def embedding(self) -> Tensor | None:
        """[vocab_size, hidden_size], before any scaling; None: it is stored in a form that only the model reads."""
        ...


class GreedyModel(CausalModel, Protocol):
    """A model that finds the most probable token without writing all logits."""

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for hidden [S, hidden_size], the argmax of `logits` (int64 [S], the lowest of equals), and whether
        the row is
        sound: no logit NaN or +inf, and one finite at least (bool [S])."""
        ...
