"""Attention over a paged cache on a GPU, in Triton: prompt chunks and decoding tokens by one kernel.

A program takes some queries of one sequence and all query heads that share a KV head, as rows of one product, and walks
the keys that they see (Dao et al. 2022, FlashAttention, algorithm 1, with exponentials of base 2). Few sequences with
long contexts would leave most of a GPU idle, so their keys can be split among programs, whose results are joined by a
second kernel (Flash-Decoding).

Decoding sequences whose first blocks are the same memory can share reading it (Juravsky et al. 2024, "Hydragen";
FlashInfer's cascade inference): `attend_shared` takes many sequences as rows of one product over these blocks,
`attend_tiles` begins behind them, and both are parts of the keys for `join_splits`.

With latent attention (engine/models/latent.py) a head is long and has one key for all query heads, whose first elements
are its value: a program takes some of the heads, and reads each key once, as two parts.

A launch's size depends on nothing that lies on the device, so it can be captured in a graph: tiles of sequences that
have no queries read no table and write nothing.

Triton specialises a kernel for each pattern of arguments that are 1 or multiples of 16, addresses included. Arguments
that change with every step are excluded from that: a serving engine would compile, a second at a time, for hours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.triton_kernels.rounding import to_e4m3

_OF_A_STEP = (
    "tables", "starts", "counts", "begins", "shared", "tile_sequences", "tile_firsts", "tile_rows", "tile_keys",
    "table_stride", "first_token", "split_stride", "first_split", "splits", "shared_splits",
)  # fmt: skip
"""Ranges that lie anywhere in one copied buffer, and sizes of the step."""


@triton.jit(do_not_specialize=("slots",))
def store_tokens(  # type: ignore[no-untyped-def]
    k, v, keys, values, slots, k_stride, v_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, LATENT: tl.constexpr
):
    """A program puts one token's keys and values into its slot; slot -1: nowhere (a row that only fills a graph).

    LATENT: values are a part of the keys, and not stored.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, COLUMNS)
        inside = column < WIDTH
        key = tl.load(k + token.to(tl.int64) * k_stride + column, mask=inside)
        tl.store(keys + slot * WIDTH + column, key.to(keys.dtype.element_ty), mask=inside)
        if not LATENT:
            value = tl.load(v + token.to(tl.int64) * v_stride + column, mask=inside)
            tl.store(values + slot * WIDTH + column, value.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _store_scaled(  # type: ignore[no-untyped-def]
    x, codes, scales, slot,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Puts one token's keys or values, x [KV_HEADS, HEAD_DIM], into its slot with a scale for each head."""
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    inside = (head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    place = head[:, None] * HEAD_DIM + dim[None, :]
    each = tl.load(x + place, mask=inside, other=0).to(tl.float32)
    size = tl.abs(each)
    broken = tl.max(tl.where(size < float("inf"), 0, 1), 1) > 0  # NaN is not below it either
    most = tl.max(tl.where(size < float("inf"), size, 0.0), 1)
    scale = most * (1 / 448)
    scale = tl.where(scale > 0, scale, 1.0)  # zeros, and what is too small for a scale
    code = each / scale[:, None]
    code = tl.where(broken[:, None], 0.0, tl.minimum(tl.maximum(code, -448.0), 448.0))
    tl.store(codes + slot * (KV_HEADS * HEAD_DIM) + place, to_e4m3(code, BY_HAND), mask=inside)
    tl.store(scales + slot * KV_HEADS + head, tl.where(broken, float("nan"), scale), mask=head < KV_HEADS)


@triton.jit(do_not_specialize=("slots",))
def store_tokens_scaled(  # type: ignore[no-untyped-def]
    k, v, keys, values, key_scales, value_scales, slots, k_stride, v_stride,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BY_HAND: tl.constexpr,
    LATENT: tl.constexpr,
):  # fmt: skip
    """As `store_tokens`, into float8_e4m3fn with a float32 scale for each token and head.

    What is not finite makes the scale NaN, and with it all that is computed from it.
    HEADS, DIMS: KV_HEADS and HEAD_DIM up to a power of two.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        row = token.to(tl.int64)
        _store_scaled(k + row * k_stride, keys, key_scales, slot, KV_HEADS, HEADS, HEAD_DIM, DIMS, BY_HAND)
        if not LATENT:
            _store_scaled(v + row * v_stride, values, value_scales, slot, KV_HEADS, HEADS, HEAD_DIM, DIMS, BY_HAND)


@triton.jit
def _load_queries(  # type: ignore[no-untyped-def]
    q, token, head, used, scale, q_token_stride, q_head_stride,
    VALUE_DIM: tl.constexpr, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr, RESTS: tl.constexpr, NARROW: tl.constexpr,
    UPCAST: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """Queries [rows, DIMS] of these tokens and heads [rows], LATENT their rests [rows, RESTS], and the scale of their
    products with keys, one for all or [rows, 1]."""
    dim = tl.arange(0, DIMS)
    query_at = q + token[:, None] * q_token_stride + head[:, None] * q_head_stride
    queries = tl.load(query_at + dim[None, :], mask=used[:, None] & (dim < VALUE_DIM)[None, :], other=0)
    query_rests = queries
    if LATENT:
        rest = VALUE_DIM + tl.arange(0, RESTS)
        query_rests = tl.load(query_at + rest[None, :], mask=used[:, None] & (rest < HEAD_DIM)[None, :], other=0)
    row_scale = scale
    if NARROW and queries.dtype == tl.bfloat16:  # float16 holds them as exactly, but for their range
        size = tl.max(tl.abs(queries.to(tl.float32)), 1)
        if LATENT:
            size = tl.maximum(size, tl.max(tl.abs(query_rests.to(tl.float32)), 1))
            query_rests = (query_rests.to(tl.float32) / tl.where(size > 0, size, 1.0)[:, None]).to(tl.float16)
        row_scale = (tl.where(size > 0, size, 1.0) * scale)[:, None]
        queries = (queries.to(tl.float32) / tl.where(size > 0, size, 1.0)[:, None]).to(tl.float16)
    if UPCAST:
        queries = queries.to(tl.float32)
    if LATENT:
        query_rests = query_rests.to(queries.dtype)
    return queries, query_rests, row_scale


@triton.jit
def _walk_keys(  # type: ignore[no-untyped-def]
    queries, query_rests, keys, values, key_scales, value_scales, table, position, lowest, least, end, kv_head,
    row_scale,
    KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr, RESTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr, NARROW: tl.constexpr,
    LATENT: tl.constexpr, HALVED: tl.constexpr,
):  # fmt: skip
    """Attends with rows of queries at `position` [rows] to the keys from `least` to `end` of a block table, in turns of
    COLUMNS from `lowest` on. Returns each row's largest score, the sum of its weights relative to it, and their sums of
    values [rows, DIMS]."""
    dim = tl.arange(0, DIMS)
    in_head = dim < VALUE_DIM
    if LATENT:
        rest = VALUE_DIM + tl.arange(0, RESTS)
        in_rest = rest < HEAD_DIM
    most = tl.full((queries.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((queries.shape[0],), tl.float32)
    sums = tl.zeros((queries.shape[0], DIMS // 2 if HALVED else DIMS), tl.float32)
    odd_sums = sums
    of_sums = 0.0  # the largest scale of values so far, by which weights are divided, and `sums` would be multiplied
    for at in range(lowest, end, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        there = (column < end) & (column >= least)
        block = tl.load(table + column // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + column % BLOCK_SIZE) * KV_HEADS + kv_head
        place = slot * HEAD_DIM
        key = tl.load(keys + place[None, :] + dim[:, None], mask=there[None, :] & in_head[:, None], other=0.0)
        if LATENT:
            key_rest = tl.load(keys + place[None, :] + rest[:, None], mask=there[None, :] & in_rest[:, None], other=0.0)
            scores = tl.dot(query_rests, key_rest.to(queries.dtype), input_precision="ieee")
            scores = tl.dot(queries, key.to(queries.dtype), scores, input_precision="ieee") * row_scale
            value = tl.trans(key)
        else:
            value = tl.load(values + place[:, None] + dim[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
            scores = tl.dot(queries, key.to(queries.dtype), input_precision="ieee") * row_scale
        if SCALED:
            scores *= tl.load(key_scales + slot, mask=there, other=0.0)[None, :]
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
        if SCALED:
            of_values = tl.load(value_scales + slot, mask=there, other=0.0)
            if NARROW:
                largest = tl.maximum(of_sums, tl.max(of_values, 0))
                divisor = tl.where(largest > 0, largest, 1.0)
                shrink *= of_sums / divisor
                weights *= (of_values / divisor)[None, :]
                of_sums = largest
            else:
                weights *= of_values[None, :]
        weights = weights.to(queries.dtype)
        sums = sums * shrink[:, None]
        if HALVED:
            odd_sums = odd_sums * shrink[:, None]
            value, odd = tl.split(tl.reshape(value, (COLUMNS, DIMS // 2, 2)))
            odd_sums = tl.dot(weights, odd, odd_sums, input_precision="ieee")
        sums = tl.dot(weights, value, sums, input_precision="ieee")
        most = higher
    if HALVED:
        sums = tl.reshape(tl.join(sums, odd_sums), (queries.shape[0], DIMS))
    if NARROW:
        sums *= of_sums
    return most, total, sums


@triton.jit(do_not_specialize=_OF_A_STEP)
def attend_tiles(  # type: ignore[no-untyped-def]
    q, keys, values, key_scales, value_scales, sinks, out, log_sums,
    tables, starts, counts, begins, shared, tile_sequences, tile_firsts,
    scale, q_token_stride, q_head_stride, table_stride, first_token, split_stride,
    KV_HEADS: tl.constexpr, SHARING: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIMS: tl.constexpr, QUERIES: tl.constexpr, SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, RESTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr,
    SCALED: tl.constexpr, NARROW: tl.constexpr, UPCAST: tl.constexpr, SINKS: tl.constexpr, LATENT: tl.constexpr,
    SHARED: tl.constexpr, HALVED: tl.constexpr,
):  # fmt: skip
    """A program attends with QUERIES tokens of a sequence and HEADS of the SHARING query heads of one KV head.

    Args:
        q: [T, heads, HEAD_DIM].  keys, values: [blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]; LATENT: values are the first
            VALUE_DIM elements of keys, and `values` is not read. Otherwise VALUE_DIM is HEAD_DIM.
        key_scales, value_scales: SCALED: float32 [blocks, BLOCK_SIZE, KV_HEADS], else not read.
        sinks: SINKS: float32 [heads], scores without a value, else not read.
        out: [T, heads, VALUE_DIM]; SPLIT: float32 [splits, t, heads, VALUE_DIM] and log_sums float32 [splits, t,
            heads], for t tokens from `first_token` on, and as many splits as the grid's last axis has programs. (One
            kernel for any number of them: each further one would be compiled in the middle of a job.)
        tables: int32 [B, table_stride], the blocks of each sequence.
        starts, counts, begins: int32 [B]: position of a sequence's first query, how many, and the first one's row in q.
        shared: SHARED: int32 [B], first keys of a sequence that `attend_shared` takes, else not read.
        tile_sequences, tile_firsts: int32 [tiles]: whose queries a program takes, from which on.
        scale: of q k^T, times log2(e).
        HEADS: a power of two; PARTS programs take all of SHARING.
        DIMS, RESTS: VALUE_DIM, and HEAD_DIM - VALUE_DIM, up to a power of two.  WINDOW: 0: none.
        NARROW: products with float8_e4m3fn are made in float16, to which a GPU converts it in one instruction; float16
            lacks the range for weights times scales, and for what bfloat16 holds.
        UPCAST: multiply in float32 whatever the dtype is, as the interpreter must.
        HALVED: codes of values are multiplied as even and odd elements: two are read from shared memory at once, not
            one. Triton 3.6 compiles that for a Hopper to reads beyond shared memory with some tiles (64 rows, heads of
            32): only for tiles that were checked on one.
    """
    sequence = tl.load(tile_sequences + tl.program_id(0))
    first = tl.load(tile_firsts + tl.program_id(0))
    kv_head = tl.program_id(1) // PARTS
    start = tl.load(starts + sequence)
    count = tl.load(counts + sequence)
    begin = tl.load(begins + sequence)

    row = tl.arange(0, QUERIES * HEADS)
    query = first + row // HEADS
    head = tl.program_id(1) % PARTS * HEADS + row % HEADS
    used = (query < count) & (head < SHARING)
    position = start + query
    head = kv_head * SHARING + head
    token = (begin + query).to(tl.int64)
    queries, query_rests, row_scale = _load_queries(
        q, token, head, used, scale, q_token_stride, q_head_stride, VALUE_DIM, DIMS, HEAD_DIM, RESTS, NARROW, UPCAST,
        LATENT,
    )  # fmt: skip

    # Keys that the tile sees: from the first one in any query's window to its last query's own; none without queries.
    least = 0
    if WINDOW > 0:
        least = tl.maximum(start + first - WINDOW + 1, 0)
    if SHARED:
        least = tl.load(shared + sequence)
    end = tl.where(first < count, start + tl.minimum(first + QUERIES, count), 0)
    lowest = least // COLUMNS * COLUMNS
    if SPLIT:
        each = tl.cdiv(tl.cdiv(tl.maximum(end - lowest, 0), COLUMNS), tl.num_programs(2)) * COLUMNS
        lowest = lowest + tl.program_id(2) * each
        end = tl.minimum(end, lowest + each)

    most, total, sums = _walk_keys(
        queries, query_rests, keys, values, key_scales, value_scales, tables + sequence.to(tl.int64) * table_stride,
        position, lowest, least, end, kv_head, row_scale, KV_HEADS, VALUE_DIM, DIMS, HEAD_DIM, RESTS, BLOCK_SIZE,
        WINDOW, COLUMNS, SCALED, NARROW, LATENT, HALVED,
    )  # fmt: skip

    if SINKS:  # joins the first part of the keys, which may be empty
        sink = tl.load(sinks + head, mask=used, other=0.0) * 1.4426950408889634
        sink = tl.where(tl.program_id(2) == 0, sink, float("-inf"))
        higher = tl.maximum(most, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.exp2(sink - base)
        sums = sums * shrink[:, None]
        most = higher

    divisor = tl.where(total == 0, 1.0, total)
    sums = sums / divisor[:, None]
    row_of_out = token * (KV_HEADS * SHARING) + head
    if SPLIT:
        row_of_out += tl.program_id(2).to(tl.int64) * split_stride - first_token * (KV_HEADS * SHARING)
        tl.store(log_sums + row_of_out, tl.where(total == 0, float("-inf"), most + tl.log2(divisor)), mask=used)
    dim = tl.arange(0, DIMS)
    places = out + row_of_out[:, None] * VALUE_DIM + dim[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=used[:, None] & (dim < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=_OF_A_STEP)
def attend_shared(  # type: ignore[no-untyped-def]
    q, keys, values, key_scales, value_scales, out, log_sums, tables, tile_rows, tile_keys,
    scale, q_token_stride, q_head_stride, table_stride, first_split, split_stride,
    KV_HEADS: tl.constexpr, SHARING: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIMS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, RESTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SCALED: tl.constexpr, NARROW: tl.constexpr, UPCAST: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """A program attends with QUERIES decoding sequences to a part of the keys that all of them begin with.

    Args:
        tile_rows: int32 [tiles, QUERIES], the sequences, of which each is a token of the same index; -1: none.
        tile_keys: int32 [tiles], how many keys they share; 0: an unused tile.
        first_split: number of the first part in `out` and `log_sums`, which are as of `attend_tiles` with SPLIT.
        The others are as of `attend_tiles`.
    """
    tile = tl.program_id(0)
    end = tl.load(tile_keys + tile)
    kv_head = tl.program_id(1) // PARTS
    row = tl.arange(0, QUERIES * HEADS)
    token = tl.load(tile_rows + tile * QUERIES + row // HEADS).to(tl.int64)
    head = tl.program_id(1) % PARTS * HEADS + row % HEADS
    used = (token >= 0) & (head < SHARING)
    head = kv_head * SHARING + head
    queries, query_rests, row_scale = _load_queries(
        q, token, head, used, scale, q_token_stride, q_head_stride, VALUE_DIM, DIMS, HEAD_DIM, RESTS, NARROW, UPCAST,
        LATENT,
    )  # fmt: skip
    each = tl.cdiv(tl.cdiv(end, COLUMNS), tl.num_programs(2)) * COLUMNS
    lowest = tl.program_id(2) * each
    end = tl.minimum(end, lowest + each)
    sequence = tl.load(tile_rows + tile * QUERIES).to(tl.int64)
    behind = tl.full((QUERIES * HEADS,), 1 << 30, tl.int32)
    most, total, sums = _walk_keys(
        queries, query_rests, keys, values, key_scales, value_scales, tables + sequence * table_stride, behind, lowest,
        lowest, end, kv_head, row_scale, KV_HEADS, VALUE_DIM, DIMS, HEAD_DIM, RESTS, BLOCK_SIZE, 0, COLUMNS, SCALED,
        NARROW, LATENT, False,
    )  # fmt: skip
    divisor = tl.where(total == 0, 1.0, total)
    row_of_out = token * (KV_HEADS * SHARING) + head + (first_split + tl.program_id(2)).to(tl.int64) * split_stride
    tl.store(log_sums + row_of_out, tl.where(total == 0, float("-inf"), most + tl.log2(divisor)), mask=used)
    dim = tl.arange(0, DIMS)
    places = out + row_of_out[:, None] * VALUE_DIM + dim[None, :]
    tl.store(places, sums / divisor[:, None], mask=used[:, None] & (dim < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=_OF_A_STEP)
def join_splits(  # type: ignore[no-untyped-def]
    parts, log_sums, out, counts, begins, shared, tile_sequences, tile_firsts, first_token, split_stride, splits,
    shared_splits,
    KV_HEADS: tl.constexpr, SHARING: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIMS: tl.constexpr, QUERIES: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """A program joins a tile's results over parts of its keys, each weighed by its share of the sum.

    Args: as of `attend_tiles`, whose `out` and `log_sums` are `parts` and `log_sums` here.
        splits, shared_splits: parts of all sequences, and further ones of sequences that share keys.
    """
    sequence = tl.load(tile_sequences + tl.program_id(0))
    first = tl.load(tile_firsts + tl.program_id(0))
    count = tl.load(counts + sequence)
    begin = tl.load(begins + sequence)
    row = tl.arange(0, QUERIES * HEADS)
    query = first + row // HEADS
    head = tl.program_id(1) % PARTS * HEADS + row % HEADS
    used = (query < count) & (head < SHARING)
    row_of_out = (begin + query).to(tl.int64) * (KV_HEADS * SHARING) + tl.program_id(1) // PARTS * SHARING + head
    row_of_part = row_of_out - first_token * (KV_HEADS * SHARING)
    dim = tl.arange(0, DIMS)
    wanted = used[:, None] & (dim < VALUE_DIM)[None, :]
    if SHARED:
        splits += tl.where(tl.load(shared + sequence) > 0, shared_splits, 0)
    most = tl.full((QUERIES * HEADS,), float("-inf"), tl.float32)
    for split in range(splits):
        most = tl.maximum(most, tl.load(log_sums + split * split_stride + row_of_part, mask=used, other=float("-inf")))
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.zeros((QUERIES * HEADS,), tl.float32)
    sums = tl.zeros((QUERIES * HEADS, DIMS), tl.float32)
    for split in range(splits):
        at = split * split_stride + row_of_part
        weight = tl.exp2(tl.load(log_sums + at, mask=used, other=float("-inf")) - base)
        part = tl.load(parts + at[:, None] * VALUE_DIM + dim[None, :], mask=wanted, other=0.0)
        # A part without keys is zeros, and its weight is zero.
        sums += part * weight[:, None]
        total += weight
    joined = sums / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + row_of_out[:, None] * VALUE_DIM + dim[None, :], joined.to(out.dtype.element_ty), mask=wanted)
