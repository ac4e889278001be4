"""The duration of an engine's steps on a machine whose speed was measured.

The work of each step is known from a dry run. Its duration is linear in a few quantities whose unit costs `bench`
measures: computed positions (whose cost depends on their number, because weights are read once a step), logits, keys
that are read, and pairs of tokens that attend to each other. Long answers read keys of their own; rows that share a
prefix read its keys once for all of them, and only the pairs are counted for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

QUANTITIES: Final = 4
"""Number of quantities of a step: tokens, logits, reads, pairs."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A machine's measured times; seconds.

    Attributes:
        by_tokens: computed positions of a step -> time for them, without the following.
        logit: time for a position whose logits are needed.
        read: time for a key (and its value) that rows which compute one token see, counted once in each step.
        pair: time for a computed token and one that it attends to.
    """

    by_tokens: Mapping[int, float]
    logit: float = 0.0
    read: float = 0.0
    pair: float = 0.0

    def of(self, steps: Floats) -> Floats:
        """Seconds of steps, float64 [steps]; `steps` as `QUANTITIES`, float64 [steps, 4]. Between two measured sizes
        the time is interpolated linearly; beyond the last one it is extrapolated."""
        knots = sorted(self.by_tokens)
        sizes = _hats(steps[:, 0], knots) @ np.array([self.by_tokens[knot] for knot in knots])
        return np.asarray(sizes + steps[:, 1:] @ np.array([self.logit, self.read, self.pair]), dtype=np.float64)

    @classmethod
    def fit(cls, runs: Sequence[tuple[Floats, float]], sizes: Sequence[int]) -> StepTimes:
        """Fit the times to runs whose steps and total seconds are known.

        The unit costs minimize the relative error over all runs; none is below 0.

        Args:
            runs: steps, float64 [steps, 4], and seconds.  sizes: the numbers of computed positions of the runs' steps.
        """
        knots = sorted(set(sizes))
        rows = [np.concatenate([_hats(steps[:, 0], knots).sum(0), steps[:, 1:].sum(0)]) for steps, _ in runs]
        weighed = np.array(rows) / np.array([[seconds] for _, seconds in runs])
        scale = np.sqrt((weighed**2).sum(0))
        active = np.flatnonzero(scale > 0)
        found = np.zeros(len(scale))
        while len(active):
            costs, *_ = np.linalg.lstsq(weighed[:, active] / scale[active], np.ones(len(runs)), rcond=None)
            if (costs >= 0).all():
                found[active] = costs / scale[active]
                break
            active = np.delete(active, int(np.argmin(costs)))
        logit, read, pair = found[len(knots) :].tolist()
        return cls(dict(zip(knots, found[: len(knots)].tolist(), strict=True)), logit, read, pair)


def estimate_worker_seconds(
    steps: Floats, waiting: NDArray[np.bool_], progress: Floats, times: StepTimes, whole: float
) -> float:
    """Seconds that one worker takes from its first step to its last, from a dry run with a part of its work.

    The rest of the work arrives while sequences still wait: it proceeds at the dry run's rate, and the end of the run,
    when rows are empty, occurs once.

    Args:
        steps: float64 [steps, 4].  waiting: bool [steps], whether sequences waited for a row.
        progress: float64 [steps], tokens done.
        whole: all of the work as a multiple of the part.
    """
    if not len(steps):
        return 0.0
    took = times.of(steps)
    full = int(np.flatnonzero(waiting)[-1]) + 1 if waiting.any() else len(steps)
    rate = float(took[:full].sum()) / float(progress[full - 1])
    if whole < 1:  # the dry run had more than its part
        return whole * float(took.sum())
    return float(took.sum()) + (whole - 1) * float(progress[-1]) * rate


def _hats(tokens: Floats, knots: Sequence[int]) -> Floats:
    """Interpolation weights of each knot's time for steps of so many tokens, float64 [steps, knots]: linear between the
    two nearest knots. Below the first knot its own time; above the last one extrapolated from the last two, or in
    proportion to a single one."""
    if len(knots) == 1:
        return np.maximum(1.0, tokens / knots[0])[:, None]
    at = np.array(knots, dtype=np.float64)
    high = np.clip(np.searchsorted(at, tokens), 1, len(at) - 1)
    share = np.maximum(0.0, (tokens - at[high - 1]) / (at[high] - at[high - 1]))
    hats = np.zeros((len(tokens), len(at)))
    indices = np.arange(len(tokens))
    hats[indices, high - 1] = 1 - share
    hats[indices, high] = share
    return hats
