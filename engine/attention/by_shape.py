"""Attention of a model whose cache groups differ in their KV heads or head_dim (Gemma 4): one backend for each shape.

A backend knows one shape of keys and values. So the groups of each shape have a backend of their own, which is given
its groups' part of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from engine.attention.base import (
    AttentionBackend,
    AttentionBatch,
    CapturableAttention,
    CompiledAttention,
    KVLayout,
    SharingAttention,
)
from engine.models.base import LayerCache
from engine.plan import BlockCopy


@dataclass(frozen=True, slots=True)
class _Part:
    """The backend of one shape, and which of the cache's groups are its own, in their order."""

    backend: AttentionBackend
    groups: tuple[int, ...]

    def batch(self, whole: AttentionBatch) -> AttentionBatch:
        """Its groups' part of a step."""
        tables = tuple(whole.block_tables[group] for group in self.groups)
        return replace(whole, block_tables=tables, slot_mapping=tuple(whole.slot_mapping[g] for g in self.groups))


class AttentionByShape:
    """An `AttentionBackend` that passes each layer on to the backend of its shape.

    Attributes:
        name: of the backends; where they differ, all of them.
    """

    def __init__(self, layout: KVLayout, parts: Sequence[_Part]) -> None:
        self.name = "+".join(dict.fromkeys(part.backend.name for part in parts))
        self.num_groups = len(layout.groups)
        self._parts = parts
        self._part_of_group = {group: index for index, part in enumerate(parts) for group in part.groups}
        self._part_of_layer = {
            layer: self._part_of_group[index] for index, group in enumerate(layout.groups) for layer in group.layers
        }

    def prepare(self, batch: AttentionBatch) -> tuple[Any, ...]:
        """See `AttentionBackend.prepare`."""
        return tuple(part.backend.prepare(part.batch(batch)) for part in self._parts)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, step: tuple[Any, ...],
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AttentionBackend.attend`."""
        part = self._part_of_layer[layer]
        return self._parts[part].backend.attend(layer, q, k, v, scale, step[part], sinks)

    def block_tensors(self, group: int) -> list[Tensor]:
        """See `AttentionBackend.block_tensors`."""
        part = self._parts[self._part_of_group[group]]
        return part.backend.block_tensors(part.groups.index(group))

    def layer_cache(self, layer: int, step: tuple[Any, ...]) -> LayerCache | None:
        """See `AttentionBackend.layer_cache`."""
        part = self._part_of_layer[layer]
        return self._parts[part].backend.layer_cache(layer, step[part])

    def zero(self, group: int, blocks: list[int]) -> None:
        """See `AttentionBackend.zero`."""
        part = self._parts[self._part_of_group[group]]
        part.backend.zero(part.groups.index(group), blocks)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        """See `AttentionBackend.copy`."""
        part = self._parts[self._part_of_group[group]]
        part.backend.copy(part.groups.index(group), copies)


class CapturableByShape(AttentionByShape):
    """One whose backends are all `CapturableAttention`."""

    def reserve(self, tokens: int, sequences: int, decodes: int, mixed: bool, table_width: int) -> tuple[Any, ...]:
        """See `CapturableAttention.reserve`."""
        sizes = tokens, sequences, decodes, mixed, table_width
        return tuple(_capturable(part.backend).reserve(*sizes) for part in self._parts)

    def refill(self, step: tuple[Any, ...], batch: AttentionBatch) -> None:
        """See `CapturableAttention.refill`."""
        for part, own in zip(self._parts, step, strict=True):
            _capturable(part.backend).refill(own, part.batch(batch))


class SharingByShape(CapturableByShape):
    """One whose backends are all `SharingAttention` and `CompiledAttention`."""

    @property
    def can_share(self) -> bool:
        """See `SharingAttention.can_share`."""
        return any(_sharing(part.backend).can_share for part in self._parts)

    def find_shared(self, batch: AttentionBatch) -> tuple[Any, ...] | None:
        """See `SharingAttention.find_shared`."""
        found = tuple(_sharing(part.backend).find_shared(part.batch(batch)) for part in self._parts)
        return None if all(own is None for own in found) else found

    def reserve_shared(
        self, tokens: int, sequences: int, decodes: int, mixed: bool, table_width: int
    ) -> tuple[Any, ...]:
        """See `SharingAttention.reserve_shared`."""
        sizes = tokens, sequences, decodes, mixed, table_width
        return tuple(_sharing(part.backend).reserve_shared(*sizes) for part in self._parts)

    def refill_shared(self, step: tuple[Any, ...], batch: AttentionBatch, shared: tuple[Any, ...]) -> None:
        """See `SharingAttention.refill_shared`."""
        for part, own, found in zip(self._parts, step, shared, strict=True):
            _sharing(part.backend).refill_shared(own, part.batch(batch), found)

    def warm_up_step(self) -> tuple[Any, ...]:
        """See `CompiledAttention.warm_up_step`."""
        return tuple(part.backend.warm_up_step() for part in self._parts if isinstance(part.backend, CompiledAttention))


def attention_by_shape(layout: KVLayout, make: Callable[[KVLayout], AttentionBackend]) -> AttentionByShape:
    """Create attention over groups of several shapes; `make`: of a layout of one shape."""
    parts = []
    for shape in dict.fromkeys(layout.shapes):
        groups = tuple(index for index, own in enumerate(layout.shapes) if own == shape)
        own = tuple(layout.groups[index] for index in groups)
        part = replace(layout, groups=own, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, shapes=())
        parts.append(_Part(make(part), groups))
    for kind, of in ((SharingAttention, SharingByShape), (CapturableAttention, CapturableByShape)):
        if all(isinstance(part.backend, kind) for part in parts):
            return of(layout, parts)
    return AttentionByShape(layout, parts)


def _sharing(backend: AttentionBackend) -> SharingAttention:
    assert isinstance(backend, SharingAttention)
    return backend


def _capturable(backend: AttentionBackend) -> CapturableAttention:
    assert isinstance(backend, CapturableAttention)
    return backend
