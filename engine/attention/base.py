"""The interface of attention backends: mixed prompt chunks and decode tokens over a paged cache, causal, in one call.

`prepare` converts a step's ranges into a backend's own form, once; `attend` then runs for every layer. Keys and values
are stored before they are read, so tokens of the same step (a chunk, or another sequence that shares the block) are
visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.models.base import Attend, KVShape, LayerCache, ModelSpec
from engine.plan import BlockCopy, CacheGroup
from engine.states import StateOperator, StateStep

if TYPE_CHECKING:
    from engine.adapters.tiles import TokenTiles


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The attention input of a step (B sequences, T tokens; single-token sequences come first).

    Attributes:
        starts, counts: int32 [B]; a sequence's queries are at positions start ... start + count - 1, and its keys
            reach from 0 (or the window's edge) to start + count - 1.
        num_decodes: sequences with count 1 at the front.
        block_tables: per cache group int32 [B, max_blocks].
        slot_mapping: per cache group int64 [T], block * block_size + offset of each token's key.
        wanted: int32 [W], ascending, the last ones of each sequence: the tokens whose hidden states after the last
            layer are needed; a model may leave the others undefined. None: all.
    """

    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    num_decodes: int
    block_tables: tuple[NDArray[np.int32], ...]
    slot_mapping: tuple[NDArray[np.int64], ...]
    wanted: NDArray[np.int32] | None = None

    def of(self, wanted: NDArray[np.int32]) -> AttentionBatch:
        """Return the batch of the wanted tokens alone, for layers that store nothing."""
        of_sequence = np.searchsorted(np.cumsum(self.counts), wanted, side="right")
        counts = np.bincount(of_sequence, minlength=len(self.counts)).astype(np.int32)
        left = np.flatnonzero(counts)
        return AttentionBatch(
            starts=(self.starts + self.counts - counts)[left],
            counts=counts[left],
            num_decodes=int(np.count_nonzero(left < self.num_decodes)),
            block_tables=tuple(table[left] for table in self.block_tables),
            slot_mapping=tuple(slots[wanted] for slots in self.slot_mapping),
        )

    def rows(self, first: int, end: int) -> AttentionBatch:
        """Return the batch of the sequences first ... end - 1 alone."""
        tokens = slice(int(self.counts[:first].sum()), int(self.counts[:end].sum()))
        wanted = self.wanted
        if wanted is not None:
            wanted = wanted[(wanted >= tokens.start) & (wanted < tokens.stop)] - np.int32(tokens.start)
        return AttentionBatch(
            starts=self.starts[first:end],
            counts=self.counts[first:end],
            num_decodes=min(max(self.num_decodes - first, 0), end - first),
            block_tables=tuple(table[first:end] for table in self.block_tables),
            slot_mapping=tuple(slots[tokens] for slots in self.slot_mapping),
            wanted=wanted,
        )


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of the paged cache: for each layer, num_blocks blocks of block_size tokens, each with K and V of
    [kv_heads, head_dim]. The backend chooses the memory layout of a block.

    Attributes:
        groups: of the layers that attend.
        shapes: of each group, where groups differ (`engine.attention.by_shape`); empty: all have `num_kv_heads` heads
            of `head_dim`.
        num_heads: query heads; 0: as many as KV heads.
        has_sinks: `attend` is given sinks.
        latent_dim: V is the first so many elements of K, with one KV head, and need not be stored; 0: it is apart.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    num_kv_heads: int
    head_dim: int
    num_heads: int = 0
    has_sinks: bool = False
    latent_dim: int = 0
    shapes: tuple[KVShape, ...] = ()

    @classmethod
    def of(cls, spec: ModelSpec, groups: tuple[CacheGroup, ...], block_size: int) -> KVLayout:
        """Of a model's cache. A group without layers, of which another process has all, has the shape of a layer that
        this one has."""
        some = next(group.layers[0] for group in groups if group.layers)
        shapes = tuple(spec.kv_shape(group.layers[0] if group.layers else some) for group in groups)
        return cls(
            groups, block_size, *shapes[0], spec.num_heads, spec.has_sinks, spec.latent_dim,
            shapes if len(set(shapes)) > 1 else (),
        )  # fmt: skip

    @property
    def value_dim(self) -> int:
        """Elements of a head's value."""
        return self.latent_dim or self.head_dim

    @property
    def num_layers(self) -> int:
        """Length of a list with an entry for each layer that attends, by its index in the model."""
        return 1 + max(layer for group in self.groups for layer in group.layers)


class AttentionBackend(Protocol):
    """An attention backend. One object per engine; it owns the cache's tensors."""

    name: str

    def prepare(self, batch: AttentionBatch) -> Any:
        """Prepare the step for `attend`, once for all layers."""
        ...

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, step: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Store k and v [T, kv_heads, head_dim], then attend with q [T, heads, head_dim]; returns q's shape. With
        `KVLayout.latent_dim` v and the result have so many elements instead of head_dim. Without k and v nothing is
        stored.

        Args:
            sinks: float32 [heads], contiguous; see `engine.models.base.Attend`.
        """
        ...

    def block_tensors(self, group: int) -> list[Tensor]:
        """Return the tensors of the group's layers, [num_blocks, …] each, in an order that a layout has for ever: line
        b of all of them is the content of block b."""
        ...

    def layer_cache(self, layer: int, step: Any) -> LayerCache | None:
        """See `engine.models.base.Attend.cache`."""
        ...

    def zero(self, group: int, blocks: list[int]) -> None:
        """Zero these blocks in all layers of the group."""
        ...

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        """Copy the first positions of blocks in all layers of the group."""
        ...


@runtime_checkable
class CapturableAttention(Protocol):
    """A backend whose prepared steps can have persistent buffers, so that a captured forward pass can read them."""

    @property
    def num_groups(self) -> int:
        """Of the cache."""
        ...

    def reserve(self, tokens: int, sequences: int, decodes: int, mixed: bool, table_width: int) -> Any:
        """Allocate a prepared step with persistent buffers, which `refill` fills and `attend` reads repeatedly.

        The largest one is reserved first; all of them are filled and read one after the other.

        Args:
            tokens, sequences: of the step, padding included. In a mixed step the last sequence is always padding.
            decodes: maximum of sequences with a single token; in a step that is not mixed all of them.
            mixed: sequences may have more than one token.
            table_width: entries of a whole block table.
        """
        ...

    def refill(self, step: Any, batch: AttentionBatch) -> None:
        """Fill a reserved step with this batch, which was padded to its sequences and tokens: sequences without tokens
        (count 0) attend to nothing, and tokens with slot -1 are not stored. Block tables may be narrower than
        reserved."""
        ...


@runtime_checkable
class SharingAttention(CapturableAttention, Protocol):
    """A backend that can read once what decoding sequences begin with together.

    `prepare` does so where it pays. A reserved step does so if it was reserved for it: others launch less.
    """

    @property
    def can_share(self) -> bool:
        """Whether any step may share: there are layers that see all keys."""
        ...

    def find_shared(self, batch: AttentionBatch) -> Any | None:
        """Return which sequences share what; None: to read it together does not pay."""
        ...

    def reserve_shared(self, tokens: int, sequences: int, decodes: int, mixed: bool, table_width: int) -> Any:
        """As `reserve`, for `refill_shared`."""
        ...

    def refill_shared(self, step: Any, batch: AttentionBatch, shared: Any | None) -> None:
        """As `refill`, with what `find_shared` returned for this batch."""
        ...


WARM_UP_TOKENS = 2
"""Of a step that only compiles kernels. Not one: strides of a single token are not those of any number."""


@runtime_checkable
class CompiledAttention(AttentionBackend, Protocol):
    """A backend whose kernels are compiled when they are first launched."""

    def warm_up_step(self) -> Any:
        """Prepare a step of `WARM_UP_TOKENS`, which are stored nowhere and attend to nothing, whose `attend` launches
        every kernel that a prepared step may launch."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """A backend with a prepared step: the `Attend` that models call, layer by layer.

    A model that computes whole steps itself unpacks it instead.

    Attributes:
        states: of the layers that have states instead; None: there are none.
        batch: that was prepared; None: all of its tokens are needed.
        adapters: see `engine.models.base.Attend.adapters`.
    """

    backend: AttentionBackend
    prepared: Any
    states: StateStep | None = None
    batch: AttentionBatch | None = None
    adapters: NDArray[np.int32] | TokenTiles | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, sinks: Tensor | None = None, /
    ) -> Tensor:
        return self.backend.attend(layer, q, k, v, scale, self.prepared, sinks)

    def cache(self, layer: int) -> LayerCache | None:
        """See `engine.models.base.Attend.cache`."""
        return self.backend.layer_cache(layer, self.prepared)

    def of_wanted(self) -> tuple[NDArray[np.int32], Attend] | None:
        """See `engine.models.base.Attend.of_wanted`."""
        if self.batch is None or (wanted := self.batch.wanted) is None:
            return None
        prepared = self.backend.prepare(self.batch.of(wanted)) if len(wanted) else None
        return wanted, AttentionStep(self.backend, prepared)

    def scan(self, layer: int, operator: StateOperator, *inputs: Tensor) -> Tensor:
        """See `engine.models.base.Attend.scan`."""
        assert self.states is not None, "the model's description says which layers have states"
        return self.states.scan(layer, operator, *inputs)
