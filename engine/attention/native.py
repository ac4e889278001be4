"""Paged attention by the native kernels (native/csrc/attention.h), over a cache with their layout.

Mixed prompt chunks and decoding rows are one call, divided into tasks of about equal cost; a prefix that decoding
sequences share is read once for all of them. A row's result does not depend on the rest of its batch, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBatch, KVLayout
from engine.errors import EngineError
from engine.native.library import NativeLibrary, StepTasks
from engine.native.structs import KIND_OF, CacheShape, ElementKind, GroupInput, LayerStruct
from engine.native.workspace import MOST_PARTIALS, KernelWorkspace
from engine.plan import BlockCopy
from engine.zeros import zeros

CPU = torch.device("cpu")

MOST_INT8_DIM = 1024
"""As in csrc/cache.h."""

_PER_WORD = {ElementKind.F32: 1, ElementKind.BF16: 2, ElementKind.I8: 4}
"""Dimensions of a key that lie side by side."""

_LANES = 16
"""Columns of a block and dimensions of a value are padded to whole vectors of the widest instruction set."""


class NativeStorage:
    """The paged cache as csrc/api.h lays it out: K as words of dimensions by key, V as pairs of keys by dimension. So V
    is stored even where it is a part of K.

    Attributes:
        shape: for the kernels.
        keys, values: per layer [num_blocks, elements of a block].
        key_scales, value_scales: per layer float32 [num_blocks, kv_heads * columns]; int8 caches only.
        group_of: per layer, the index of its cache group.
        window_of: per layer, its sliding window in tokens, or None.
    """

    def __init__(self, layout: KVLayout, kind: ElementKind) -> None:
        self.layout = layout
        columns = -(-layout.block_size // _LANES) * _LANES
        value_stride = -(-layout.value_dim // _LANES) * _LANES
        self.shape = CacheShape(
            kind, layout.block_size, columns, layout.num_kv_heads, layout.head_dim, layout.value_dim, value_stride
        )
        num_layers = layout.num_layers
        self.group_of = [0] * num_layers
        self.window_of: list[int | None] = [None] * num_layers
        self.keys: list[Tensor] = [torch.empty(0)] * num_layers
        self.values: list[Tensor] = [torch.empty(0)] * num_layers
        self.key_scales: list[Tensor] = []
        self.value_scales: list[Tensor] = []
        dtype = {ElementKind.F32: torch.float32, ElementKind.BF16: torch.bfloat16, ElementKind.I8: torch.int8}[kind]
        heads, per_word = layout.num_kv_heads, _PER_WORD[kind]
        key_dim = -(-layout.head_dim // per_word) * per_word
        if kind == ElementKind.I8:
            self.key_scales = [torch.empty(0)] * num_layers
            self.value_scales = [torch.empty(0)] * num_layers
        for index, group in enumerate(layout.groups):
            for layer in group.layers:
                self.group_of[layer] = index
                self.window_of[layer] = group.window
                self.keys[layer] = zeros((group.num_blocks, heads * key_dim * columns), dtype, CPU)
                self.values[layer] = zeros((group.num_blocks, heads * columns * value_stride), dtype, CPU)
                if kind == ElementKind.I8:
                    self.key_scales[layer] = zeros((group.num_blocks, heads * columns), torch.float32, CPU)
                    self.value_scales[layer] = zeros((group.num_blocks, heads * columns), torch.float32, CPU)

    def block_tensors(self, group: int) -> list[Tensor]:
        """See `AttentionBackend.block_tensors`."""
        stores = tuple(filter(None, (self.keys, self.values, self.key_scales, self.value_scales)))
        return [stored[layer] for layer in self.layout.groups[group].layers for stored in stores]

    def zero(self, group: int, blocks: list[int]) -> None:
        """Zero these blocks in all layers of the group."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for layer in self.layout.groups[group].layers:
            for tensors in (self.keys, self.values, self.key_scales, self.value_scales):
                if tensors:
                    tensors[layer].index_fill_(0, index, 0)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        """Copy the first positions of blocks in all layers of the group; the targets' other positions become zeros."""
        shape, count, heads = self.shape, len(copies), self.shape.kv_heads
        layers = self.layout.groups[group].layers
        _, sources, targets, tokens = torch.tensor(copies, dtype=torch.int64).T.contiguous()
        rest = torch.arange(shape.columns) >= tokens[:, None]
        per_word, pair = _PER_WORD[shape.kind], 1 if shape.kind == ElementKind.F32 else 2
        words = self.keys[layers[0]].shape[1] // (shape.columns * per_word)  # of all heads
        of_keys = rest.view(count, 1, -1, 1).expand(-1, words, -1, per_word).reshape(count, -1)
        of_values = rest.view(count, 1, -1, 1, pair).expand(-1, heads, -1, shape.value_stride, -1).reshape(count, -1)
        of_scales = rest.repeat(1, heads)
        stores = (self.keys, self.values, self.key_scales, self.value_scales)
        for layer in layers:
            for stored, mask in zip(stores, (of_keys, of_values, of_scales, of_scales), strict=True):
                if stored:
                    stored[layer].index_copy_(0, targets, stored[layer].index_select(0, sources).masked_fill_(mask, 0))

    def layer_struct(self, layer: int) -> LayerStruct:
        """Return the struct of the layer's cache; the caller fills in its weights."""
        struct = LayerStruct()
        struct.keys, struct.values = self.keys[layer].data_ptr(), self.values[layer].data_ptr()
        if self.key_scales:
            struct.key_scales = self.key_scales[layer].data_ptr()
            struct.value_scales = self.value_scales[layer].data_ptr()
        struct.group = self.group_of[layer]
        return struct


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A step's tasks, and the arrays they point into."""

    tasks: StepTasks
    num_tokens: int
    num_decodes: int
    wanted: NDArray[np.int32] | None
    arrays: tuple[object, ...]


class NativeAttention:
    """The CPU's own backend."""

    name = "native"

    def __init__(
        self, layout: KVLayout, dtype: torch.dtype, library: NativeLibrary, kv_kind: ElementKind | None = None
    ) -> None:
        """`kv_kind`: of the cache; None: the dtype's.

        Raises:
            EngineError: the dtype is not one that the kernels compute in, or a head is too long for int8.
        """
        if kv_kind == ElementKind.I8 and layout.head_dim > MOST_INT8_DIM:
            raise EngineError(f"an int8 cache takes heads of {MOST_INT8_DIM} at most, not {layout.head_dim}")
        if dtype not in KIND_OF:
            raise EngineError(f"native attention computes in bfloat16 and float32, not {dtype}; use paged-sdpa")
        self.library = library
        self.activations = KIND_OF[dtype]
        self.storage = NativeStorage(layout, self.activations if kv_kind is None else kv_kind)
        self._layers = [self.storage.layer_struct(layer) for layer in range(len(self.storage.keys))]
        self._heads = layout.num_heads or layout.num_kv_heads
        self._space: KernelWorkspace | None = None

    def prepare(self, batch: AttentionBatch) -> NativeStep:
        groups = self.storage.layout.groups
        starts = np.ascontiguousarray(batch.starts, dtype=np.int32)
        counts = np.ascontiguousarray(batch.counts, dtype=np.int32)
        starts_at, counts_at = starts.ctypes.data, counts.ctypes.data
        keep: list[object] = [starts, counts]
        inputs = (GroupInput * len(groups))()
        for index, group in enumerate(groups):
            table = np.ascontiguousarray(batch.block_tables[index], dtype=np.int32)
            slots = np.ascontiguousarray(batch.slot_mapping[index], dtype=np.int64)
            keep += (table, slots)
            inputs[index] = GroupInput(
                starts_at, counts_at, table.ctypes.data, slots.ctypes.data,
                len(starts), batch.num_decodes, table.shape[1], group.window or 0,
            )  # fmt: skip
        tasks = self.library.plan(self.storage.shape, self._heads, MOST_PARTIALS, inputs)
        return NativeStep(tasks, len(batch.slot_mapping[0]), batch.num_decodes, batch.wanted, tuple(keep))

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, step: NativeStep,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self._check(q, k, v, step)
        struct = self._layers[layer]
        if sinks is not None and (sinks.shape != (self._heads,) or sinks.dtype != torch.float32):
            raise EngineError(f"sinks are {list(sinks.shape)} in {sinks.dtype}, not [{self._heads}] in torch.float32")
        struct.sinks = None if sinks is None else sinks.data_ptr()
        out = torch.empty(*q.shape[:2], self.storage.shape.value_dim, dtype=q.dtype)
        heads = self._heads
        if self._space is None or self._space.max_tokens < step.num_decodes:
            self._space = KernelWorkspace.for_attention(
                self.library, self.storage.shape, heads, max(64, 2 * step.num_decodes)
            )
        self.library.attend(
            self.storage.shape, self.activations, heads, scale, struct,
            step.tasks.group(self.storage.group_of[layer]), q.contiguous(), None if k is None else k.contiguous(),
            None if v is None else v.contiguous(), out, self._space.struct,
        )  # fmt: skip
        return out

    def _check(self, q: Tensor, k: Tensor | None, v: Tensor | None, step: NativeStep) -> None:
        """Check shapes: the kernels take the cache's shape and bare pointers, and would read out of bounds."""
        if (k is None) != (v is None):
            raise EngineError("keys and values are stored together, but the model gives one of them")
        shape = self.storage.shape
        parts = (
            ("q", q, self._heads, shape.head_dim),
            ("k", k, shape.kv_heads, shape.head_dim),
            ("v", v, shape.kv_heads, shape.value_dim),
        )
        for name, tensor, heads, dim in parts:
            if tensor is None:
                continue
            expected = (step.num_tokens, heads, dim)
            if tensor.shape != expected or KIND_OF.get(tensor.dtype) != self.activations:
                given = f"{list(tensor.shape)} in {tensor.dtype}"
                raise EngineError(
                    f"attention was made for {name} of {list(expected)} in {self.activations.name}, "
                    f"but the model gives {given}"
                )

    def block_tensors(self, group: int) -> list[Tensor]:
        return self.storage.block_tensors(group)

    def layer_cache(self, layer: int, step: object) -> None:
        """`attend` stores keys and values itself."""

    def zero(self, group: int, blocks: list[int]) -> None:
        self.storage.zero(group, blocks)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        self.storage.copy(group, copies)
