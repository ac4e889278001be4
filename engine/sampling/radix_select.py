"""Radix selection for top_k, top_p and min_p: finds the last retained token without sorting or synchronising.

On a CPU a short list of the largest logits settles most draws, and otherwise the host sorts the line. On a device that
check costs more than its result: the host would wait until all earlier work is done. Here each line's last retained
logit is found by radix selection instead: in three rounds, 11 or 10 bits each, the amounts of all tokens are summed by
the next bits of their logits. The amounts are integers, so the sums are exact in any order, and the tokens are those of
the other methods, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampling.draw import UNITS, DrawWorkspace, relative
from engine.sampling.filters import Filters

_ROUNDS = ((21, 11), (10, 11), (0, 10))  # shift and bits of a round


def order_keys(logits: Tensor) -> Tensor:
    """int64 in [0, 2^32), ordered as the logits are (float32, any shape); equal where those are equal."""
    bits = (logits + 0.0).view(torch.int32)  # -0 + 0 is 0
    # Two's complement orders negative floats backwards: turn all bits but the sign around.
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)


def leading(keys: Tensor, amounts: Tensor, wanted: Tensor) -> Tensor:
    """Return bool [n, m]: of each line the shortest prefix, by key descending and then index ascending, whose amounts
    reach `wanted`, or all of it where they don't; at least one token with an amount.

    Args:
        keys: int64 [n, m], from `order_keys`.  amounts: int64 [n, m], 0 or more.  wanted: int64 [n, 1].
    """
    missing = torch.minimum(wanted, amounts.sum(-1, keepdim=True)).clamp_(min=1)
    threshold = torch.zeros_like(missing)
    for shift, bits in _ROUNDS:
        candidates = torch.where((keys >> (shift + bits)) == threshold, amounts, 0)
        bins = torch.zeros(len(keys), 1 << bits, dtype=torch.int64, device=keys.device)
        bins.scatter_add_(1, (keys >> shift) & ((1 << bits) - 1), candidates)
        bins = bins.flip(-1)
        sums = bins.cumsum(-1)
        at = torch.searchsorted(sums, missing).clamp_(max=bins.shape[1] - 1)
        missing = missing - (sums - bins).gather(1, at)
        threshold = (threshold << bits) + (bins.shape[1] - 1 - at)
    ties = torch.where(keys == threshold, amounts, 0)
    before = ties.cumsum(-1) - ties
    return (keys > threshold) | ((keys == threshold) & (before < missing))


def draw_from_selected(logits: Tensor, peak: Tensor, filters: Filters, u: Tensor, space: DrawWorkspace) -> Tensor:
    """Draw among the tokens that the filters retain, tokens int64 [n].

    Args:
        logits: float32 [n, vocab], n at most `space.lines`.  peak: float32 [n, 1].  u: float64 [n].
    """
    vocab = logits.shape[1]
    padded = space.weigh(logits, peak, filters.scale)
    weights = padded[:, :vocab]
    keys = order_keys(logits)
    ranks = torch.where(filters.top_k > 0, filters.top_k, vocab)
    weights *= leading(keys, torch.ones_like(weights), ranks)
    mass = weights.sum(-1, keepdim=True)
    wanted = (mass.double() * filters.top_p).ceil_().to(torch.int64)
    weights *= leading(keys, weights, wanted) | (filters.top_p >= 1)
    weights *= relative(logits, peak, filters.scale) >= filters.min_p.clamp(min=1 / UNITS)
    return space.pick(padded, u)
