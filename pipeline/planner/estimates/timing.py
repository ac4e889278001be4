"""How long an engine's steps take on a machine whose speed was measured.

What each step has to do is known from a rehearsal; what a machine takes for it is linear in a few quantities whose
prices `bench` measures: positions computed (whose price depends on how many there are, for weights are read once a
step), logits, keys that are read, and pairs of tokens that look at each other. Long answers read keys that nobody else
reads; rows that share a prefix read its keys once for all of them, and only the pairs are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

QUANTITIES: Final = 4
"""Of a step: tokens, logits, reads, pairs."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a machine was measured to take; seconds.

    Attributes:
        by_tokens: positions computed in a step -> what it takes for them, without what follows.
        logit: of a position whose logits are wanted.
        read: of a key (and its value) that rows which compute one token see, counted once in each step.
        pair: of a token that is computed and one that it looks at.
    """

    by_tokens: Mapping[int, float]
    logit: float = 0.0
    read: float = 0.0
    pair: float = 0.0

    def of(self, steps: Floats) -> Floats:
        """What steps take, float64 [steps]; `steps` as `QUANTITIES`, float64 [steps, 4]. Between two sizes that were
        measured the time lies on the line that joins them; beyond, on the last one's."""
        knots = sorted(self.by_tokens)
        sizes = _hats(steps[:, 0], knots) @ np.array([self.by_tokens[knot] for knot in knots])
        return np.asarray(sizes + steps[:, 1:] @ np.array([self.logit, self.read, self.pair]), dtype=np.float64)

    @classmethod
    def fit(cls, runs: Sequence[tuple[Floats, float]], sizes: Sequence[int]) -> StepTimes:
        """From runs whose steps are known, and how long each took in all.

        The prices are those with the least relative error over all runs; none is below 0.

        Args:
            runs: steps, float64 [steps, 4], and seconds.  sizes: the positions computed that steps of the runs had.
        """
        knots = sorted(set(sizes))
        rows = [np.concatenate([_hats(steps[:, 0], knots).sum(0), steps[:, 1:].sum(0)]) for steps, _ in runs]
        weighed = np.array(rows) / np.array([[seconds] for _, seconds in runs])
        scale = np.sqrt((weighed**2).sum(0))
        kept = np.flatnonzero(scale > 0)
        found = np.zeros(len(scale))
        while len(kept):
            price, *_ = np.linalg.lstsq(weighed[:, kept] / scale[kept], np.ones(len(runs)), rcond=None)
            if (price >= 0).all():
                found[kept] = price / scale[kept]
                break
            kept = np.delete(kept, int(np.argmin(price)))
        logit, read, pair = found[len(knots) :].tolist()
        return cls(dict(zip(knots, found[: len(knots)].tolist(), strict=True)), logit, read, pair)


def seconds_of(steps: Floats, waiting: NDArray[np.bool_], progress: Floats, times: StepTimes, whole: float) -> float:
    """How long one worker takes, from its first step to its last, where it was rehearsed with a part of its work.

    The rest of the work comes while others still wait: it is done at the rate that the rehearsal had so far, and the
    end of the run, when rows stand empty, comes once.

    Args:
        steps: float64 [steps, 4].  waiting: bool [steps], sequences had no row.
        progress: float64 [steps], tokens done.
        whole: times the part, all of the work.
    """
    if not len(steps):
        return 0.0
    took = times.of(steps)
    full = int(np.flatnonzero(waiting)[-1]) + 1 if waiting.any() else len(steps)
    rate = float(took[:full].sum()) / float(progress[full - 1])
    if whole < 1:  # it was rehearsed with more than its part
        return whole * float(took.sum())
    return float(took.sum()) + (whole - 1) * float(progress[-1]) * rate


def _hats(tokens: Floats, knots: Sequence[int]) -> Floats:
    """How much of each knot's time counts for steps of so many tokens, float64 [steps, knots]: weights on the line
    through the two knots beside it. Below the first knot its own time; above the last one what the last two say, or a
    single one in proportion."""
    if len(knots) == 1:
        return np.maximum(1.0, tokens / knots[0])[:, None]
    at = np.array(knots, dtype=np.float64)
    high = np.clip(np.searchsorted(at, tokens), 1, len(at) - 1)
    share = np.maximum(0.0, (tokens - at[high - 1]) / (at[high] - at[high - 1]))
    hats = np.zeros((len(tokens), len(at)))
    places = np.arange(len(tokens))
    hats[places, high - 1] = 1 - share
    hats[places, high] = share
    return hats
