"""Draws of tokens on a GPU, in Triton: a program reads one row of logits a few times and writes its token.

The tokens are those of `engine.sampling.batch`: the order of the vocabulary (probability descending, then token id
ascending), the integer units of 2^-40, the thresholds in float64 and the uniforms are the same. Integer sums don't
depend on their order, so a row's token depends on its own logits and parameters alone.

One operation differs between devices: exp2 on a GPU (`ex2.approx`, which torch uses there, too) and on a CPU round the
last bits of float32 differently. So with equal logits the devices' tokens are equal except where a uniform or a
filter's threshold is that close to the border between two tokens, in about one draw of a million. (Torch's and numpy's
exp2 on a CPU differ in a fifth of all weights, and 18 of 24 million draws.) With the same exp2 all tokens are equal.

Passes over a row's logits, 4 bytes each:

1. The maximum, its first token, and whether the logits are finite. A greedy row ends here.
2. With filters: the number of tokens in each of `BINS` intervals of the exponent, and the units of all. The interval of
   top_k's last token follows from the numbers; so do the few intervals that may hold top_p's last token, as an
   interval's ends bound the units of its tokens.
3. The logits of these intervals are listed, and the units of all higher ones are summed. The last token that a filter
   retains is found in the list by bisection of its keys. If top_k retains few tokens, all of them are listed, and top_p
   uses the same list; otherwise it repeats this pass with intervals of its own.
4. The units of the retained tokens are summed block by block. Then one block is read again for the token.

So a row is read once if it is greedy, twice without top_k and top_p, four times with one of them, and four or five
times with both. If an interval holds too many different logits for the list (most of the vocabulary in a narrow
cluster, far from an outlier), the bisection reads the row instead of the list, up to 32 times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sampling import draw

UNITS = tl.constexpr(draw.UNITS)
SEGMENT = tl.constexpr(draw.BLOCK)
"""Tokens of which one is drawn by a second uniform (`DrawWorkspace.pick_apart`)."""

OCTAVES = tl.constexpr(40.0)
"""A token is less than 2^-40 as probable as the most probable one beyond them, and weighs nothing."""

SLACK = tl.constexpr(2.0**-16)
"""Relative error of the bounds of a weight; those of exp2 and of the intervals' borders are far smaller."""

ERROR = tl.constexpr(2.0**-20)
"""The same of the logit at an interval's border."""

ALL = tl.constexpr(-0x7F800001)
"""The key of -inf: all tokens that weigh something have a greater one."""

BLOCK, WARPS, REGISTERS = 2048, 8, 128
"""Logits that a program holds at once, and its threads: two programs fit one of Hopper's multiprocessors."""

STAGES = tl.constexpr(4)
"""Blocks on their way from memory, and the one that is computed."""

BINS = 512
"""Intervals of the exponent; the last one is for tokens that weigh nothing."""

DEPTH = 8
"""Logits that are listed of each column of a block."""

_OF_A_STEP = ("scales", "top_ks", "top_ps", "min_ps", "uniforms", "inners")
"""Ranges of one copied buffer."""


@triton.jit
def _quarter(values):  # type: ignore[no-untyped-def]
    """Sums of four neighbours, which a thread has read with one instruction: they need fewer registers."""
    return tl.sum(tl.reshape(values, (values.shape[0] // 4, 4)), 1)


@triton.jit
def _order_keys(logits):  # type: ignore[no-untyped-def]
    """int32, ordered as the logits are; equal where those are equal."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    # Two's complement orders negative floats backwards: turn all bits but the sign around.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weigh(logits, peak, scale):  # type: ignore[no-untyped-def]
    """Probabilities relative to the most probable token, float32."""
    return tl.exp2((logits - peak) * scale)


@triton.jit
def _units(weights):  # type: ignore[no-untyped-def]
    """Relative probabilities as int64 multiples of 2^-40."""
    return (weights * UNITS).to(tl.int64)


@triton.jit
def _weigh_key(key, peak, scale):  # type: ignore[no-untyped-def]
    """The relative probability of tokens with this key."""
    return _weigh((key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), peak, scale)


@triton.jit
def _read(line, first, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = first + tl.arange(0, BLOCK)
    return tl.load(line + column, mask=column < V, other=float("-inf"))


@triton.jit
def _find_peak(line, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The maximum, the lowest finite logit, the first token of the maximum, and whether there is a token to choose."""
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    token = tl.arange(0, BLOCK)
    for first in tl.range(0, V, BLOCK, num_stages=STAGES):
        logits = _read(line, first, V, BLOCK)
        token = tl.where(logits > highest, first + tl.arange(0, BLOCK), token)
        highest = tl.maximum(highest, logits, propagate_nan=tl.PropagateNan.ALL)
        lowest = tl.minimum(lowest, tl.where(logits > float("-inf"), logits, float("inf")))
    peak = tl.max(highest, 0)
    finite = tl.min((highest < float("inf")).to(tl.int32), 0) > 0  # NaN is not below it either
    token = tl.min(tl.where(highest == peak, token, V - 1), 0)
    return peak, tl.min(lowest, 0), token, finite & (peak > float("-inf"))


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    line, peak, scale, density, V: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    """Number of tokens in each interval, int32 [BINS], and the units of all."""
    counts = tl.zeros((BINS,), tl.int32)
    total = tl.zeros((BLOCK // 4,), tl.int64)
    for first in tl.range(0, V, BLOCK, num_stages=STAGES):
        logits = _read(line, first, V, BLOCK)
        weights = _units(_weigh(logits, peak, scale))
        total += _quarter(weights)
        # Tokens that weigh nothing are in the last one.
        interval = tl.minimum((peak - logits) * scale * density, BINS - 2.0).to(tl.int32)
        counts += tl.histogram(tl.where(weights > 0, interval, BINS - 1), BINS)
    return counts, tl.sum(total, 0)


@triton.jit
def _bound(counts, total, wanted, density, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and last interval that may hold the token at which the units of the most probable ones reach `wanted`."""
    interval = tl.arange(0, BINS)
    number = tl.where(interval < BINS - 1, counts, 0).to(tl.int64)
    highest = tl.exp2(-interval.to(tl.float32) / density) * UNITS
    lowest = tl.exp2(-(interval + 1).to(tl.float32) / density) * UNITS
    most = number * ((highest * (1 + SLACK)).to(tl.int64) + 1)
    least = number * tl.maximum((lowest * (1 - SLACK)).to(tl.int64) - 1, 1)
    # Bounds of the units above an interval's lower border: those of the tokens above it, and all without those below.
    upper = tl.minimum(tl.cumsum(most, 0), total - tl.sum(least, 0) + tl.cumsum(least, 0))
    lower = tl.maximum(tl.cumsum(least, 0), total - tl.sum(most, 0) + tl.cumsum(most, 0))
    return tl.sum((upper < wanted).to(tl.int32), 0), tl.sum((lower < wanted).to(tl.int32), 0)


@triton.jit
def _border(interval, peak, scale, density):  # type: ignore[no-untyped-def]
    """The logit (float64) at an interval's upper border, and more than the error of float32 around it."""
    below = interval.to(tl.float64) / (density.to(tl.float64) * scale)
    return peak - below, (tl.abs(peak) + below) * ERROR


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    line, listed, peak, scale, density, begin, end, V: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr
):
    """Lists the logits of intervals begin..end and some neighbours.

    Each column of a block has a list of its own, so no column needs another's length; gaps are -inf.

    Returns the values that hold these logits (the list, or the whole row if a column has more than DEPTH), their
    number, the lowest and highest listed key, and number and units of the tokens above.
    """
    top, error = _border(begin, peak, scale, density)
    top = (top + error).to(tl.float32)
    bottom, error = _border(end + 1, peak, scale, density)
    bottom = (bottom - error).to(tl.float32)
    column = tl.arange(0, BLOCK)
    depth = tl.zeros((BLOCK,), tl.int32)
    rank = tl.zeros((BLOCK // 4,), tl.int32)
    above = tl.zeros((BLOCK // 4,), tl.int64)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in tl.range(0, V, BLOCK, num_stages=STAGES):
        logits = _read(line, first, V, BLOCK)
        rank += _quarter((logits > top).to(tl.int32))
        above += _quarter(tl.where(logits > top, _units(_weigh(logits, peak, scale)), 0))
        inside = (logits >= bottom) & (logits <= top)
        lowest = tl.minimum(lowest, tl.where(inside, logits, float("inf")))
        highest = tl.maximum(highest, tl.where(inside, logits, float("-inf")))
        tl.store(listed + depth * BLOCK + column, logits, mask=inside & (depth < DEPTH))
        depth += inside.to(tl.int32)
    deepest = tl.max(depth, 0)
    values = line
    count = tl.full((), V, tl.int32)
    if deepest <= DEPTH:
        values = listed
        count = deepest * BLOCK
        for level in range(deepest):
            tl.store(listed + level * BLOCK + column, float("-inf"), mask=level >= depth)
    tl.debug_barrier()  # the list is read by other threads than those that wrote it
    low, high = _order_keys(tl.min(lowest, 0)), _order_keys(tl.max(highest, 0))
    return values, count, low, high, tl.sum(rank, 0).to(tl.int64), tl.sum(above, 0)


@triton.jit
def _amount(  # type: ignore[no-untyped-def]
    values, count, low, high, peak, scale, WEIGHED: tl.constexpr, BLOCK: tl.constexpr
):
    """Of the tokens with keys low..high the number, or WEIGHED: the units."""
    amount = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logits = tl.load(values + at, mask=at < count, other=float("-inf"))
        keys = _order_keys(logits)
        inside = (at < count) & (keys >= low) & (keys <= high)
        if WEIGHED:
            amount += tl.where(inside, _units(_weigh(logits, peak, scale)), 0)
        else:
            amount += inside.to(tl.int64)
    return tl.sum(amount, 0)


@triton.jit
def _bisect(  # type: ignore[no-untyped-def]
    values, count, low, high, above, wanted, peak, scale, WEIGHED: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key at which `above` and the tokens with this key and more reach `wanted`, and the amount that those
    with more leave missing.

    Args:
        low, high: int32, keys of some tokens; at `low` the amount is reached.
        above: the amount of tokens with keys beyond `high`.
    """
    top = high
    over = above
    while low < high:
        middle = (high - (high.to(tl.int64) - low) // 2).to(tl.int32)
        reached = above + _amount(values, count, middle, top, peak, scale, WEIGHED, BLOCK)
        if reached >= wanted:
            low = middle
        else:
            high = middle - 1
            over = reached
    return low, wanted - over


@triton.jit
def _filter(  # type: ignore[no-untyped-def]
    line, listed, peak, lowest, scale, top_k, top_p,
    V: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Returns a key: all tokens with a greater one are retained; and how many with this one are, lowest ids first."""
    octaves = tl.minimum((peak - lowest) * scale, OCTAVES)
    density = (BINS - 1) / tl.maximum(octaves, 1e-30)
    counts, total = _count(line, peak, scale, density, V, BLOCK, BINS)
    interval = tl.arange(0, BINS)
    cut = tl.full((), ALL, tl.int32)
    high = cut
    ties = tl.zeros((), tl.int64)
    mass = total
    above = tl.zeros((), tl.int64)
    last = tl.full((), BINS - 2, tl.int32)
    begin = last
    count = tl.zeros((), tl.int32)
    values = listed
    end = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0)
    if (top_k > 0) & (end < BINS - 1):  # else it excludes only tokens that weigh nothing
        last = end
        begin = tl.where(tl.sum(tl.where(interval <= end, counts, 0), 0) <= BLOCK, 0, end)
        values, count, low, high, rank, above = _collect(
            line, listed, peak, scale, density, begin, end, V, BLOCK, DEPTH
        )
        cut, ties = _bisect(values, count, low, high, rank, top_k, peak, scale, False, BLOCK)
        mass = above + ties * _units(_weigh_key(cut, peak, scale))
        if cut < high:
            mass += _amount(values, count, cut + 1, high, peak, scale, True, BLOCK)
    if top_p < 1:
        wanted = tl.maximum(tl.minimum(tl.ceil(mass.to(tl.float64) * top_p).to(tl.int64), mass), 1)
        low = cut
        if begin > 0:  # the list lacks tokens above top_k's last one, or there is none
            begin, end = _bound(counts, total, wanted, density, BINS)
            values, count, low, high, _, above = _collect(
                line, listed, peak, scale, density, begin, tl.minimum(end, last), V, BLOCK, DEPTH
            )
            low = tl.maximum(low, cut)
        cut, missing = _bisect(values, count, low, high, above, wanted, peak, scale, True, BLOCK)
        ties = tl.cdiv(missing, _units(_weigh_key(cut, peak, scale)))
    if ties > 0 and _amount(values, count, cut, cut, peak, scale, False, BLOCK) == ties:
        cut -= 1  # usual, and spares counting them
        ties = tl.zeros((), tl.int64)
    return cut, ties


@triton.jit
def _target(total, uniform):  # type: ignore[no-untyped-def]
    # float64 may round uniform * total up to the total itself, which no running sum exceeds.
    return tl.minimum((total.to(tl.float64) * uniform).to(tl.int64), total - 1)


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    line, peak, scale, min_p, cut, ties, uniform, inner, apart,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The first retained token at which the running sum exceeds uniform times the total.

    apart: the uniform draws a segment, and `inner` the token inside it.  BLOCKS: of a row, up to a power of two.
    """
    block = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.int64)
    ranks = tl.zeros((BLOCKS,), tl.int64)
    rank = tl.zeros((), tl.int64)
    weight = _weigh_key(cut, peak, scale)
    tied_units = tl.where(weight >= min_p, _units(weight), 0)
    for first in tl.range(0, V, BLOCK, num_stages=STAGES):
        logits = _read(line, first, V, BLOCK)
        weights = _weigh(logits, peak, scale)
        keys = _order_keys(logits)
        amount = tl.sum(tl.where((weights >= min_p) & (keys > cut), _units(weights), 0), 0)
        if ties > 0:
            tied = tl.sum((keys == cut).to(tl.int32), 0)
            ranks = tl.where(block == first // BLOCK, rank, ranks)
            amount += tied_units * tl.maximum(tl.minimum(ties - rank, tied), 0)
            rank += tied
        sums = tl.where(block == first // BLOCK, amount, sums)
    target = _target(tl.sum(sums, 0), uniform)
    at = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    target -= tl.sum(tl.where(block < at, sums, 0), 0)
    rank = tl.sum(tl.where(block == at, ranks, 0), 0)

    logits = _read(line, at * BLOCK, V, BLOCK)
    weights = _weigh(logits, peak, scale)
    keys = _order_keys(logits)
    tied = (keys == cut).to(tl.int32)
    retained = (keys > cut) | ((tied > 0) & (rank + tl.cumsum(tied, 0) <= ties))
    weights = tl.where((weights >= min_p) & retained, _units(weights), 0)
    weights = tl.reshape(weights, (BLOCK // SEGMENT, SEGMENT))
    segment = tl.arange(0, BLOCK // SEGMENT)
    sums = tl.sum(weights, 1)
    part = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    target -= tl.sum(tl.where(segment < part, sums, 0), 0)
    if apart:
        target = _target(tl.sum(tl.where(segment == part, sums, 0), 0), inner)
    weights = tl.sum(tl.where(segment[:, None] == part, weights, 0), 0)
    within = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    return at * BLOCK + part * SEGMENT + within


@triton.jit(do_not_specialize=_OF_A_STEP)
def _draw_rows(  # type: ignore[no-untyped-def]
    logits, scales, top_ks, top_ps, min_ps, uniforms, inners, tokens, alive, lists, stride,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A program draws the token of a row; see `draw_rows`."""
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    scale = tl.load(scales + row)
    peak, lowest, token, sound = _find_peak(line, V, BLOCK)
    if sound & (scale > 0):
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        filtered = (top_k > 0) | (top_p < 1)
        cut = tl.full((), ALL, tl.int32)
        ties = tl.zeros((), tl.int64)
        if filtered:
            listed = lists + row.to(tl.int64) * (DEPTH * BLOCK)
            cut, ties = _filter(line, listed, peak, lowest, scale, top_k, top_p, V, BLOCK, BINS, DEPTH)
        token = _pick(
            line, peak, scale, tl.load(min_ps + row), cut, ties, tl.load(uniforms + row), tl.load(inners + row),
            filtered == 0, V, BLOCK, BLOCKS,
        )  # fmt: skip
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(alive + row, sound)


def draw_rows(
    logits: Tensor, scale: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row, in one launch.

    Args:
        logits: float32 [S, vocab], contiguous rows.
        scale: float32 [S], log2(e) / temperature; 0: the row is greedy.
        top_k: int64 [S], 0 is off.  top_p: float64 [S], 1 is off.  min_p: float32 [S], 0 is off.
        uniform, inner: float64 [S] in [0, 1); `inner` is for rows without top_k and top_p.

    Returns:
        Tokens, int64 [S], and bool [S], rows with a token to choose: all logits finite or -inf, and one finite.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    alive = torch.empty(rows, dtype=torch.bool, device=logits.device)
    block = min(BLOCK, max(draw.BLOCK, triton.next_power_of_2(vocab)))
    lists = torch.empty(rows, DEPTH * block, dtype=torch.float32, device=logits.device)
    _draw_rows[(rows,)](
        logits, scale, top_k, top_p, min_p, uniform, inner, tokens, alive, lists, logits.stride(0),
        V=vocab, BLOCK=block, BLOCKS=triton.next_power_of_2(triton.cdiv(vocab, block)), BINS=BINS, DEPTH=DEPTH,
        num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return tokens, alive
