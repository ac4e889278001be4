"""top_k, top_p and min_p: how many of the likeliest tokens stay in play, and a draw among them.

All three keep a prefix of one order of the vocabulary: probability descending, then token id ascending. So the chain
is a minimum of three lengths:

- top_k keeps the first k.
- top_p keeps the shortest prefix whose probability reaches p, of the distribution renormalised after top_k (as in
  transformers and vLLM); at least one token (Holtzman et al. 2020, "The curious case of neural text degeneration").
- min_p keeps tokens with at least min_p times the probability of the likeliest one (Nguyen et al. 2024, "Turning up
  the heat"). It comes last, so top_p does not renormalise after it; a ratio of two probabilities is the same before
  and after renormalising.

Usually a short list of the largest logits settles the prefix; where it does not, the line is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling.draw import Workspace, largest, pick, relative, units


@dataclass(frozen=True, slots=True)
class Filters:
    """Of n lines, each [n, 1]: `scale` float32 (log2(e) / temperature), `top_k` int64 (0 is off), `top_p` float64
    (1 is off), `min_p` float32 (0 is off)."""

    scale: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def take(self, part: Tensor | slice) -> Filters:
        """The filters of some of the lines."""
        return Filters(self.scale[part], self.top_k[part], self.top_p[part], self.min_p[part])


def prefix_length(ordered: Tensor, peak: Tensor, filters: Filters, total: Tensor | None, vocab: int) -> Tensor:
    """How many of the likeliest tokens stay, int64 [n, 1]; above m: more than `ordered` can tell.

    Args:
        ordered: float32 [n, m], the m largest logits, descending.  peak: float32 [n, 1], the largest.
        total: int64 [n, 1], weight of the whole line; not needed where every line has a top_k of at most m.
        vocab: tokens in a line.
    """
    m = ordered.shape[1]
    weights = relative(ordered, peak, filters.scale)
    fixed = units(weights)
    sums = fixed.cumsum(-1)
    by_k = filters.top_k > 0
    length = torch.where(by_k, filters.top_k, vocab)
    mass = sums.gather(1, length.clamp(max=m) - 1)
    if total is not None:
        mass = torch.where(by_k, mass, total)
    reached = (sums.double() < mass.double() * filters.top_p).sum(-1, keepdim=True) + 1
    length = torch.where(filters.top_p < 1, torch.minimum(length, reached), length)
    # A count of m says only "m or more" unless the list is the whole line.
    above = (weights >= filters.min_p).sum(-1, keepdim=True)
    positive = (fixed > 0).sum(-1, keepdim=True)  # what weighs nothing can't be drawn, so it need not be kept
    for count in (above, positive):
        length = torch.minimum(length, torch.where(count < m, count, vocab))
    return length.clamp_(min=1)


def kept_tokens(logits: Tensor, ordered: Tensor, length: Tensor) -> Tensor:
    """Which tokens are in the prefix, bool [n, m].

    Args:
        logits: float32 [n, m], in ascending order of token id.
        ordered: float32, the same logits in descending order (at least the first `length`).
        length: int64 [n, 1].
    """
    last = ordered.gather(1, length - 1)
    above = logits > last
    ties = logits == last
    return above | (ties & (ties.cumsum(-1) <= length - above.sum(-1, keepdim=True)))


def draw_from_largest(
    logits: Tensor, peak: Tensor, filters: Filters, total: Tensor | None, u: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Draw where the `width` largest logits settle the prefix: tokens int64 [n], and bool [n] where they did.

    Args:
        logits: float32 [n, vocab].  peak: float32 [n, 1].  total: as for `prefix_length`.  u: float64 [n].
    """
    vocab = logits.shape[1]
    ordered, ids = largest(logits, width)
    width = ordered.shape[1]
    length = prefix_length(ordered, peak, filters, total, vocab)
    # Where the prefix ends in a tie that reaches the list's end, tokens with lower ids may stand outside the list.
    last = ordered.gather(1, length.clamp(max=width) - 1)
    settled = (
        (length <= width) & (last > ordered[:, -1:]) if width < vocab else torch.ones_like(length, dtype=torch.bool)
    )
    ids, order = ids.sort(-1)
    values = ordered.gather(1, order)
    kept = kept_tokens(values, ordered, length.clamp(max=width))
    weights = units(relative(values, peak, filters.scale)).masked_fill_(~kept, 0)
    return ids.gather(1, pick(weights, u)[:, None])[:, 0], settled[:, 0]


def draw_from_sorted(logits: Tensor, peak: Tensor, filters: Filters, u: Tensor, space: Workspace) -> Tensor:
    """Draw with the whole line sorted, tokens int64 [n]; arguments as above, n at most `space.lines`."""
    ordered = sorted_descending(logits)
    total = units(relative(ordered, peak, filters.scale)).sum(-1, keepdim=True)
    length = prefix_length(ordered, peak, filters, total, logits.shape[1])
    kept = kept_tokens(logits, ordered, length)
    return space.pick(space.weigh(logits, peak, filters.scale, kept=kept), u)


def sorted_descending(logits: Tensor) -> Tensor:
    """Each line's values in descending order."""
    if logits.device.type == "cpu":
        # numpy sorts float32 with SIMD and without indices, over ten times faster than torch on a CPU.
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))
    return logits.sort(-1, descending=True).values
