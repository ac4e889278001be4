"""Buffers of the kernels between products: allocated once for the largest step, so that steps allocate nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.native.library import NativeLibrary
from engine.native.structs import PARTS, CacheShape, ElementKind, WorkspaceStruct

ROW_BLOCK = 120
TILE_KEYS = 256
ATTENTION_ROWS = 60
QUANT_GROUP = 192
"""As in csrc/api.h."""

MOST_PARTIALS = 8192
"""Results of single attention tiles that can be stored: spreads about 8,192 / heads tiles of one step over threads."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelWorkspace:
    """A `WorkspaceStruct` and the tensors it points to.

    Attributes:
        max_tokens: capacity in rows.
        spent: int64 [len(PARTS)], nanoseconds of each part so far.
    """

    struct: WorkspaceStruct
    max_tokens: int
    spent: Tensor
    _keep: tuple[Tensor, ...]

    @classmethod
    def for_linear(
        cls, library: NativeLibrary, in_features: int, max_tokens: int, *, reorders: bool = False
    ) -> KernelWorkspace:
        """For products only. `reorders`: also with weights whose columns are in an order of their own."""
        words = _padded(in_features if reorders else -(-in_features // 4), 16)
        thread_bytes = _product_bytes(library, in_features)
        buffers = {
            "row_scale": torch.empty(max_tokens * -(-in_features // QUANT_GROUP)),
            "input": torch.zeros(max_tokens * words + 16, dtype=torch.int32),
            "partial": torch.empty(library.threads * max_tokens * 3),
        }
        return cls._of(
            library, buffers, thread_bytes, max_tokens, input_words=words, scale_stride=-(-in_features // QUANT_GROUP)
        )

    @classmethod
    def for_attention(
        cls, library: NativeLibrary, cache: CacheShape, heads: int, max_decodes: int, *, extra: int = 0
    ) -> KernelWorkspace:
        """For attention alone, with room for the states of `max_decodes` decoding sequences."""
        stride = cache.value_dim + 2
        buffers = {
            "state": torch.empty(max_decodes * heads * stride),
            "partial": torch.empty(MOST_PARTIALS * stride),
        }
        thread_bytes = max(_attention_bytes(cache, heads), 8 * (cache.kv_heads * cache.head_dim + 16), extra)
        return cls._of(library, buffers, thread_bytes, max_decodes)

    @classmethod
    def for_decoder(
        cls, library: NativeLibrary, cache: CacheShape, heads: int, hidden: int, intermediate: int,
        activations: ElementKind, max_tokens: int, *, reorders: bool = False,
    ) -> KernelWorkspace:  # fmt: skip
        """For whole steps of up to `max_tokens` tokens; `reorders` as in `for_linear`."""
        panel, dim = library.panel, cache.head_dim
        strides = {
            "hidden_stride": _padded(hidden, panel),
            "qkv_stride": _padded((heads + 2 * cache.kv_heads) * dim, panel),
            "attended_stride": _padded(heads * dim, 4),
            "gated_stride": _padded(intermediate, panel),
            "scale_stride": -(-max(hidden, heads * dim, intermediate) // QUANT_GROUP),
        }
        element = 1 if activations == ElementKind.F32 else 2  # elements of activations in a word
        widest = max(hidden, heads * dim, intermediate)
        input_words = _padded(max(-(-(widest if reorders else hidden) // element), -(-widest // 4)), 16)
        stride = cache.value_dim + 2
        buffers = {
            "residual": torch.zeros(max_tokens * strides["hidden_stride"]),
            "update": torch.zeros(max_tokens * strides["hidden_stride"]),
            "qkv": torch.zeros(max_tokens * strides["qkv_stride"]),
            "row_scale": torch.zeros(max_tokens * -(-widest // QUANT_GROUP)),
            "state": torch.zeros(max_tokens * heads * stride),
            "partial": torch.zeros(max(MOST_PARTIALS * stride, library.threads * max_tokens * 3)),
            "input": torch.zeros(max_tokens * input_words + 16, dtype=torch.int32),
            "attended": torch.zeros(max_tokens * strides["attended_stride"] // element + 16, dtype=torch.int32),
            "gated": torch.zeros(max_tokens * strides["gated_stride"] // element + 16, dtype=torch.int32),
            "query": torch.zeros(max_tokens * heads * dim // element + 16, dtype=torch.int32),
        }
        thread_bytes = max(_product_bytes(library, widest), _attention_bytes(cache, heads))
        return cls._of(library, buffers, thread_bytes, max_tokens, input_words=input_words, **strides)

    @classmethod
    def _of(
        cls, library: NativeLibrary, buffers: dict[str, Tensor], thread_bytes: int, max_tokens: int, **sizes: int
    ) -> KernelWorkspace:
        thread_bytes = _padded(thread_bytes, 4096) + 128  # not a multiple of a page: two threads' rooms don't alias
        space = torch.zeros(library.threads * thread_bytes + 64, dtype=torch.uint8)
        spent = torch.zeros(len(PARTS), dtype=torch.int64)
        struct = WorkspaceStruct(**sizes, **{name: tensor.data_ptr() for name, tensor in buffers.items()})
        struct.thread_space = -(-space.data_ptr() // 64) * 64
        struct.thread_bytes = thread_bytes
        struct.spent = spent.data_ptr()
        return cls(struct, max_tokens, spent, (space, *buffers.values()))


def _padded(n: int, to: int) -> int:
    return -(-n // to) * to


def _product_bytes(library: NativeLibrary, widest: int) -> int:
    """A block's results, a panel of unpacked weights, or a row of the widest operand in float32."""
    panel = library.panel
    return max(ROW_BLOCK * panel * 4 + max(widest + 2, ROW_BLOCK) * panel * 4, 8 * (widest + 16))


def _attention_bytes(cache: CacheShape, heads: int) -> int:
    """As csrc/attention.h lays out AttentionSpace."""
    per_head = heads // cache.kv_heads
    rows = max(ATTENTION_ROWS, per_head)
    columns = max(1, TILE_KEYS // cache.block_size) * cache.columns
    per_row = 8 * columns + 8 * cache.value_dim + 4 * (cache.head_dim + 1) + 28
    return int(rows * per_row + 8 * columns + 8 * (cache.head_dim + 16) + 20 * 128)
