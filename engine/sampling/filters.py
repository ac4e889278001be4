"""The filters top_k, top_p and min_p: the number of most probable tokens that remain, and a draw among them.

All three retain a prefix of one order of the vocabulary: probability descending, then token id ascending. So the chain
is a minimum of three lengths:

- top_k keeps the first k.
- top_p keeps the shortest prefix whose probability reaches p, of the distribution renormalised after top_k (as in
  transformers and vLLM); at least one token (Holtzman et al. 2020, "The curious case of neural text degeneration").
- min_p keeps tokens with at least min_p times the probability of the most probable one (Nguyen et al. 2024, "Turning up
  the heat"). It comes last, so top_p does not renormalise after it; a ratio of two probabilities is the same before
  and after renormalising.

Usually a short list of the largest logits settles the prefix; where it does not, the line is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.draw import UNITS, DrawWorkspace, descending, largest, pick, relative, units


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


def prefix_length(ordered: Tensor, peak: Tensor, filters: Filters, total: Tensor | None) -> Tensor:
    """Return how many of the most probable tokens remain, int64 [n, 1]; m: m or more, unless the list is the whole
    line.

    Args:
        ordered: float32 [n, m], the m largest logits, descending.  peak: float32 [n, 1], the largest.
        total: int64 [n, 1], weight of the whole line, for lines without top_k; None where the list is the whole line,
            or every line has a top_k of at most m.
    """
    m = ordered.shape[1]
    weights = relative(ordered, peak, filters.scale)
    sums = units(weights).cumsum(-1)
    length = torch.where(filters.top_k > 0, filters.top_k, m)
    mass = sums.gather(1, length - 1) if total is None else total
    wanted = (mass.double() * filters.top_p).ceil_().to(torch.int64)
    reached = torch.searchsorted(sums, wanted) + 1
    length = torch.where(filters.top_p < 1, torch.minimum(length, reached), length)
    # Tokens of weight zero can't be drawn, so they are excluded too.
    above = torch.searchsorted(-weights, -filters.min_p.clamp(min=1 / UNITS), right=True)
    return torch.minimum(length, above).clamp_(min=1)


def draw_from_largest(
    logits: Tensor, peak: Tensor, filters: Filters, total: Tensor | None, u: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Draw where the `width` largest logits settle the prefix: tokens int64 [n], and bool [n] where they did.

    Args:
        logits: float32 [n, vocab].  peak: float32 [n, 1].  total: as for `prefix_length`.  u: float64 [n].
    """
    vocab = logits.shape[1]
    values, ids = largest(logits, width)
    ordered = descending(values)
    width = ordered.shape[1]
    length = prefix_length(ordered, peak, filters, total)
    last = ordered.gather(1, length - 1)
    # Where the prefix, or a tie at its end, reaches the list's end, more of it may lie outside the list.
    settled = (last > ordered[:, -1:]) | (width == vocab)
    above = values > last
    ties = values == last
    retained = above | (ties & (ties.cumsum(-1) <= length - above.sum(-1, keepdim=True)))
    weights = units(relative(values, peak, filters.scale)).mul_(retained)
    return ids.gather(1, pick(weights, u)[:, None])[:, 0], settled[:, 0]


def draw_from_sorted(logits: Tensor, peak: Tensor, filters: Filters, u: Tensor, space: DrawWorkspace) -> Tensor:
    """Draw with the whole line sorted, tokens int64 [n]; arguments as above, n at most `space.lines`."""
    ordered = descending(logits)
    length = prefix_length(ordered, peak, filters, None)
    last = ordered.gather(1, length - 1)
    weights = space.weigh(logits, peak, filters.scale, min_logit=last)
    # All tokens equal to the last one are included; those with the highest ids may have to be removed.
    following = ordered.gather(1, length.clamp(max=logits.shape[1] - 1))
    excess = (following == last) & (length < logits.shape[1])
    for line in excess[:, 0].nonzero()[:, 0].tolist():
        ties = (logits[line] == last[line]).nonzero()[:, 0]
        room = int(length[line] - (logits[line] > last[line]).sum())
        weights[line, ties[room:]] = 0
    return space.pick(weights, u)
