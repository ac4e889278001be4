"""Buffers of the kernels between products: allocated once for the largest step, so that steps allocate nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.native.library import NativeLibrary
from engine.native.structs import PARTS, CacheShape, ElementKind, WorkspaceStruct

ROW_BLOCK = 128
TILE_KEYS = 256
ATTENTION_ROWS = 60
QUANT_GROUP = 192
STREAMED_ROWS = 128
UNPACKED_ROWS = 240
"""As in csrc/api.h."""

_APART = 32
"""Elements between the rows of an operand: rows of 4,096 bytes would share the same few lines of the first cache."""

MOST_PARTIALS = 8192
"""Results of single attention tiles that can be stored: spreads about 8,192 / heads tiles of one step over threads."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """What the experts of a layer need room for.

    Attributes:
        num_experts, top_k: of a layer, and chosen for a token.
        intermediate: of a chosen one.  shared: of the shared one; 0: there is none.
    """

    num_experts: int
    top_k: int
    intermediate: int
    shared: int = 0

    @property
    def widest(self) -> int:
        return max(self.intermediate, self.shared)


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
        words = _padded(in_features if reorders else -(-in_features // 4), 16) + _APART
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
        stride = cache.value_stride + 2
        buffers = {
            "state": torch.empty(max_decodes * heads * stride),
            "partial": torch.empty(MOST_PARTIALS * stride),
        }
        thread_bytes = max(_attention_bytes(cache, heads), 8 * (cache.kv_heads * cache.head_dim + 16), extra)
        return cls._of(library, buffers, thread_bytes, max_decodes)

    @classmethod
    def for_decoder(
        cls, library: NativeLibrary, cache: CacheShape, heads: int, hidden: int, intermediate: int,
        activations: ElementKind, max_tokens: int, *, reorders: bool = False, experts: ExpertSizes | None = None,
        max_rank: int = 0,
    ) -> KernelWorkspace:  # fmt: skip
        """For whole steps of up to `max_tokens` tokens; `reorders` as in `for_linear`. `intermediate`: of the layers
        without experts. `max_rank`: of adapters; 0: there are none."""
        panel, dim = library.panel, cache.head_dim
        widest = max(hidden, heads * dim, intermediate, experts.widest if experts else 0)
        strides = {
            "hidden_stride": _padded(hidden, panel),
            "qkv_stride": _padded((heads + 2 * cache.kv_heads) * dim, panel),
            "attended_stride": _padded(heads * dim, 4) + _APART,
            "gated_stride": _padded(intermediate, panel) + _APART,
            "scale_stride": -(-widest // QUANT_GROUP),
        }
        element = 1 if activations == ElementKind.F32 else 2  # elements of activations in a word
        input_words = _input_words(activations, hidden, widest, reorders=reorders)
        stride = cache.value_stride + 2
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
        strides["input_words"] = input_words
        if max_rank:
            strides["low_rank_stride"] = _padded(max_rank, panel)
            strides["plain_words"] = _padded(-(-hidden // element), 16) + _APART
            strides["delta_stride"] = max(
                strides["hidden_stride"], strides["qkv_stride"], 2 * _padded(intermediate, panel)
            )
            buffers["delta"] = torch.zeros(min(max_tokens, STREAMED_ROWS) * strides["delta_stride"])
            buffers["low_rank"] = torch.zeros(max_tokens * strides["low_rank_stride"])
            buffers["plain"] = torch.zeros(max_tokens * strides["plain_words"] + 16, dtype=torch.int32)
        if experts is not None:
            buffers |= _expert_buffers(library, experts, activations, max_tokens, strides)
            thread_bytes = max(thread_bytes, _expert_bytes(library, experts, widest))
        return cls._of(library, buffers, thread_bytes, max_tokens, **strides)

    @classmethod
    def for_experts(
        cls, library: NativeLibrary, experts: ExpertSizes, hidden: int, activations: ElementKind, max_tokens: int,
        *, reorders: bool = False,
    ) -> KernelWorkspace:  # fmt: skip
        """For experts alone."""
        widest = max(hidden, experts.widest)
        strides = {
            "hidden_stride": _padded(hidden, library.panel),
            "scale_stride": -(-widest // QUANT_GROUP),
            "input_words": _input_words(activations, hidden, widest, reorders=reorders),
        }
        buffers = {"update": torch.empty(max_tokens * strides["hidden_stride"])}
        buffers |= _expert_buffers(library, experts, activations, max_tokens, strides)
        return cls._of(library, buffers, _expert_bytes(library, experts, widest), max_tokens, **strides)

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


def _input_words(activations: ElementKind, hidden: int, widest: int, *, reorders: bool) -> int:
    """Of a row of an operand: `hidden` elements as they are, or any quantized or in another order."""
    element = 1 if activations == ElementKind.F32 else 2
    return _padded(max(-(-(widest if reorders else hidden) // element), -(-widest // 4)), 16) + _APART


def _expert_bytes(library: NativeLibrary, experts: ExpertSizes, widest: int) -> int:
    """Of a product, or the scores of one token."""
    return max(_product_bytes(library, widest), 16 * experts.num_experts)


def _expert_buffers(
    library: NativeLibrary, experts: ExpertSizes, activations: ElementKind, max_tokens: int, strides: dict[str, int]
) -> dict[str, Tensor]:
    """Of every token's chosen experts and the shared one. Their pages are taken when steps first need them."""
    panel = library.panel
    rows = max_tokens * (experts.top_k + (experts.shared > 0))
    strides["logits_stride"] = _padded(experts.num_experts + 1, panel)
    gated = max_tokens * (experts.top_k * _padded(experts.intermediate, panel) + _padded(experts.shared, panel))
    element = 1 if activations == ElementKind.F32 else 2
    max_runs = experts.num_experts + 1 + rows // UNPACKED_ROWS + 1
    return {
        "logits": torch.empty(max_tokens * strides["logits_stride"]),
        "factors": torch.empty(rows),
        "expert_scale": torch.empty(rows * strides["scale_stride"]),
        "expert_output": torch.empty(rows * strides["hidden_stride"]),
        "expert_input": torch.empty(rows * strides["input_words"] + 16, dtype=torch.int32),
        "expert_gated": torch.empty(gated // element + 16, dtype=torch.int32),
        "chosen": torch.empty(rows, dtype=torch.int32),
        "sorted": torch.empty(rows, dtype=torch.int32),
        "expert_starts": torch.empty(experts.num_experts + 2, dtype=torch.int32),
        "runs": torch.empty(2 + 3 * max_runs, dtype=torch.int32),
    }


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
    per_row = 8 * columns + 8 * cache.value_stride + 4 * (cache.head_dim + 1) + 28
    return int(rows * per_row + 8 * columns + 8 * (cache.head_dim + 16) + 20 * 128)
