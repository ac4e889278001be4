"""Attention over a paged cache on a GPU, in Triton: prompt chunks and decoding tokens by one kernel.

A program takes some queries of one sequence and all query heads that share a KV head, as rows of one product, and walks
the keys that they see (Dao et al. 2022, FlashAttention, algorithm 1, with exponentials of base 2). Few sequences with
long contexts would leave most of a GPU idle, so their keys can be split among programs, whose results are joined by a
second kernel (Flash-Decoding).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_tokens(  # type: ignore[no-untyped-def]
    k, v, keys, values, slots, k_stride, v_stride,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """A program puts one token's keys and values into its slot; slot -1: nowhere (a row that only fills a graph).

    LARGEST: of the cache's dtype, beyond which values are cut off; 0: it holds all that comes.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, COLUMNS)
        inside = column < WIDTH
        key = tl.load(k + token.to(tl.int64) * k_stride + column, mask=inside)
        value = tl.load(v + token.to(tl.int64) * v_stride + column, mask=inside)
        if LARGEST > 0:
            key = tl.clamp(key.to(tl.float32), -LARGEST, LARGEST)
            value = tl.clamp(value.to(tl.float32), -LARGEST, LARGEST)
        tl.store(keys + slot * WIDTH + column, key.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + slot * WIDTH + column, value.to(values.dtype.element_ty), mask=inside)


@triton.jit
def attend_tiles(  # type: ignore[no-untyped-def]
    q, keys, values, out, log_sums, tables, starts, counts, begins, tile_sequences, tile_firsts,
    scale, q_token_stride, q_head_stride, table_stride, split_stride,
    KV_HEADS: tl.constexpr, SHARING: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A program attends with QUERIES tokens of a sequence and the SHARING query heads of one KV head.

    Args:
        q: [T, heads, head_dim].  keys, values: [blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM].
        out: [T, heads, head_dim], or float32 [SPLITS, T, heads, head_dim] with log_sums float32 [SPLITS, T, heads].
        tables: int32 [B, table_stride], the blocks of each sequence.
        starts, counts, begins: int32 [B]: position of a sequence's first query, how many, and the first one's row in q.
        tile_sequences, tile_firsts: int32 [tiles]: whose queries a program takes, from which on.
        scale: of q k^T, times log2(e).
        HEADS, DIMS: SHARING and HEAD_DIM up to a power of two.  WINDOW: 0: none.
        UPCAST: multiply in float32 whatever the dtype is, as the interpreter must.
    """
    sequence = tl.load(tile_sequences + tl.program_id(0))
    first = tl.load(tile_firsts + tl.program_id(0))
    kv_head = tl.program_id(1)
    start = tl.load(starts + sequence)
    count = tl.load(counts + sequence)
    begin = tl.load(begins + sequence)

    row = tl.arange(0, QUERIES * HEADS)
    query = first + row // HEADS
    head = row % HEADS
    used = (query < count) & (head < SHARING)
    position = start + query
    head = kv_head * SHARING + head
    token = (begin + query).to(tl.int64)
    dim = tl.arange(0, DIMS)
    in_head = dim < HEAD_DIM
    queries = tl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
        mask=used[:, None] & in_head[None, :],
        other=0,
    )
    if UPCAST:
        queries = queries.to(tl.float32)

    end = start + tl.minimum(first + QUERIES, count)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(start + first - WINDOW + 1, 0) // COLUMNS * COLUMNS
    if SPLITS > 1:
        each = tl.cdiv(tl.cdiv(end - lowest, COLUMNS), SPLITS) * COLUMNS
        lowest = lowest + tl.program_id(2) * each
        end = tl.minimum(end, lowest + each)

    most = tl.full((QUERIES * HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES * HEADS,), tl.float32)
    sums = tl.zeros((QUERIES * HEADS, DIMS), tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    for at in range(lowest, end, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        there = column < end
        block = tl.load(table + column // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        place = ((block * BLOCK_SIZE + column % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        key = tl.load(keys + place[None, :] + dim[:, None], mask=there[None, :] & in_head[:, None], other=0.0)
        value = tl.load(values + place[:, None] + dim[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(queries, key.to(queries.dtype), input_precision="ieee") * scale
        seen = there[None, :] & (column[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (column[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        value = value.to(queries.dtype)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(queries.dtype), value, sums, input_precision="ieee")
        most = higher

    divisor = tl.where(total == 0, 1.0, total)
    sums = sums / divisor[:, None]
    row_of_out = token * (KV_HEADS * SHARING) + head
    if SPLITS > 1:
        split = tl.program_id(2).to(tl.int64) * split_stride
        row_of_out = split + row_of_out
        tl.store(log_sums + row_of_out, tl.where(total == 0, float("-inf"), most + tl.log2(divisor)), mask=used)
    places = out + row_of_out[:, None] * HEAD_DIM + dim[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=used[:, None] & in_head[None, :])


@triton.jit
def join_splits(  # type: ignore[no-untyped-def]
    parts, log_sums, out, split_stride, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr
):
    """A program joins one query head's results over parts of its keys, each weighed by its share of the sum."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIMS)
    inside = dim < HEAD_DIM
    split = tl.arange(0, SPLITS)
    at = split.to(tl.int64) * split_stride + row
    sums = tl.load(log_sums + at)
    most = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(most == float("-inf"), 0.0, most))
    part = tl.load(parts + at[:, None] * HEAD_DIM + dim[None, :], mask=inside[None, :], other=0)
    part = tl.where(weights[:, None] > 0, part, 0.0)
    joined = tl.sum(part * weights[:, None], 0) / tl.maximum(tl.sum(weights, 0), 1e-30)
    tl.store(out + row * HEAD_DIM + dim, joined.to(out.dtype.element_ty), mask=inside)
