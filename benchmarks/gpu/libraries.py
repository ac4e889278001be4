"""Attention by others' libraries on the shapes that ours is timed on, as far as they are installed.

Each gets its keys as it likes them best: paged ones where it takes our pages, else a sequence's keys in one piece,
which costs it nothing extra while it is timed. None writes the new keys, as ours does in the same call: that favours
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.cases import Made
from benchmarks.gpu.context import Context, Skipped

MakeCall = Callable[[Made, Context], Callable[[], Tensor]]


def _offsets(counts: list[int], device: torch.device) -> Tensor:
    """int32 [B + 1]: where each sequence begins, and the end."""
    return torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)).to(device)


def _lengths(made: Made) -> list[int]:
    return [start + count for start, count in zip(made.case.starts, made.case.counts, strict=True)]


def _wants(package: str) -> None:
    if find_spec(package.partition(".")[0]) is None:
        raise Skipped(f"{package} is not installed")


def sdpa(made: Made, context: Context) -> Callable[[], Tensor]:
    """torch's scaled_dot_product_attention on dense keys; only where all sequences are alike."""
    starts, counts = set(made.case.starts), set(made.case.counts)
    if len(starts) > 1 or len(counts) > 1 or (counts != {1} and starts != {0}):
        raise Skipped("dense attention is for sequences that are alike")
    batch, count = len(made.case.starts), counts.pop()
    q = made.q.view(batch, count, *made.q.shape[1:]).transpose(1, 2)
    k, v = (each.view(batch, -1, *each.shape[1:]).transpose(1, 2).contiguous() for each in (made.k, made.v))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=count > 1, enable_gqa=True).transpose(1, 2)


def varlen(made: Made, context: Context) -> Callable[[], Tensor]:
    """torch's own variable-length attention, which has FlashAttention 2 inside; keys are repeated for query heads."""
    from torch.nn.attention.varlen import varlen_attn

    if made.q.device.type != "cuda":
        raise Skipped("torch's variable-length attention is for GPUs")
    sharing = made.case.heads // made.case.kv_heads
    k, v = (each.repeat_interleave(sharing, 1) for each in (made.k, made.v))
    lengths, device = _lengths(made), made.q.device
    places = _offsets(made.case.counts, device), _offsets(lengths, device), max(made.case.counts), max(lengths)
    # The queries are the last of each sequence, so one window on the left of all keys and none on the right is causal.
    return lambda: varlen_attn(made.q, k, v, *places, window_size=(-1, 0))


def flash2(made: Made, context: Context) -> Callable[[], Tensor]:
    """FlashAttention 2 over keys in one piece (its pages must be multiples of 256 tokens)."""
    _wants("flash_attn")
    from flash_attn import flash_attn_varlen_func

    lengths, device = _lengths(made), made.q.device
    places = _offsets(made.case.counts, device), _offsets(lengths, device), max(made.case.counts), max(lengths)
    return lambda: flash_attn_varlen_func(made.q, made.k, made.v, *places, causal=True)


def flash3(made: Made, context: Context) -> Callable[[], Tensor]:
    """FlashAttention 3 over our pages."""
    _wants("flash_attn_interface")
    from flash_attn_interface import flash_attn_with_kvcache

    device = made.q.device
    keys, values = made.paged()
    table, offsets = _table(made), _offsets(made.case.counts, device)
    used = torch.tensor(_lengths(made), dtype=torch.int32, device=device)
    return lambda: flash_attn_with_kvcache(
        made.q, keys, values, cache_seqlens=used, page_table=table, cu_seqlens_q=offsets,
        max_seqlen_q=max(made.case.counts), causal=True,
    )  # fmt: skip


def vllm_flash3(made: Made, context: Context) -> Callable[[], Tensor]:
    """FlashAttention 3 as vLLM's wheel brings it, over our pages."""
    if context.vllm is not None and str(context.vllm) not in sys.path:
        sys.path.append(str(context.vllm))
    _wants("vllm")
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    device, lengths = made.q.device, _lengths(made)
    keys, values = made.paged()
    table, offsets = _table(made), _offsets(made.case.counts, device)
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    return lambda: flash_attn_varlen_func(
        made.q, keys, values, max_seqlen_q=max(made.case.counts), cu_seqlens_q=offsets, max_seqlen_k=max(lengths),
        seqused_k=used, block_table=table, causal=True, fa_version=3,
    )  # fmt: skip


def _table(made: Made) -> Tensor:
    return torch.from_numpy(made.batch.block_tables[0]).to(made.q.device)


LIBRARIES: Mapping[str, MakeCall] = {
    "torch, dense": sdpa,
    "torch, variable length": varlen,
    "FlashAttention 2": flash2,
    "FlashAttention 3": flash3,
    "FlashAttention 3 of vLLM": vllm_flash3,
}
"""By name; each gives the call to time, or says what it lacks."""
