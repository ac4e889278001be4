"""The number of drafts of a row: fixed, or adapted to their measured gain.

The price of a draft is the time that one more position adds to a step; it is measured, by rows in the step. Divided by
the time per token of the batch without it, the price is a number of tokens, and the j-th draft of a row pays when its
acceptance probability is higher. (The goodput rule of Liu et al. 2024, TurboSpec, section 4, taken one draft at a
time.) A small batch is bound by memory bandwidth, so its price is near 0; a full one is bound by compute, and its price
is near 1. Then no row drafts, and proposers are not even called.
"""

from __future__ import annotations

from math import log, log2
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config import SpeculationConfig
from engine.speculative.base import TRUSTS

Ints = NDArray[np.int32]


class DraftLengths(Protocol):
    """Decides on the lengths of drafts, and records their outcome."""

    def is_worthwhile(self, rows: Ints, counts: Ints) -> bool:
        """Whether a step of these rows with these numbers of positions should have drafts; int32 [B] each."""
        ...

    @property
    def max_drafts(self) -> int:
        """Maximum drafts of a row."""
        ...

    def trim(self, row: int, epoch: int, trust: int, drafted: int) -> int:
        """Return how many of the `drafted` tokens are worth verifying; `trust`: see `Draft`; `epoch`: of the row's
        owner."""
        ...

    def record(self, row: int, epoch: int, trust: int, drafted: int, accepted: int) -> None:
        """Record the outcome of a row's drafts."""
        ...

    def record_step(self, rows: int, positions: int, drafted: int, seconds: float) -> None:
        """Record a finished step: its rows, computed positions, drafts among them, and time."""
        ...


class FixedLengths:
    """A fixed number of drafts.

    Args:
        length: drafts a row gets.
    """

    def __init__(self, length: int) -> None:
        self.max_drafts = length

    def is_worthwhile(self, rows: Ints, counts: Ints) -> bool:
        return True

    def trim(self, row: int, epoch: int, trust: int, drafted: int) -> int:
        return drafted

    def record(self, row: int, epoch: int, trust: int, drafted: int, accepted: int) -> None:
        pass

    def record_step(self, rows: int, positions: int, drafted: int, seconds: float) -> None:
        pass


OFF_ABOVE = 0.45
"""Price of a draft, in tokens, above which drafts are switched off. The possible gain there is little more than the
cost of proposing drafts, some 20 microseconds a row."""

ON_BELOW = 0.35
"""Price below which drafts are switched on again. The gap between the two is a hysteresis against noise."""

FEW_ROWS = 16
"""Batches of at most this size draft before any price is known: most machines are bound by memory bandwidth there, and
the trial measures the price."""

MARGIN = 0.05
"""Minimum of a draft's acceptance probability above its price: proposing and rolling back cost time, too."""

LONGEST_COPIED, LONGEST_DRAWN, LONGEST_OF_HEAD = 16, 8, 4
"""Default maximum drafts of a row in a step: copied tokens cost next to nothing to propose. A head's drafts continue
from its own outputs, and are accepted less often with each position."""

PROBE_INTERVAL_STEPS = 64
"""Number of steps with drafts between two steps without, which measure the present step time."""


class StepCosts:
    """Measured times of decode steps, by their rows; row counts within a factor of 2^(1/2) share an entry.

    Each entry holds two means over the latest steps: `plain` seconds without drafts, and `extra` seconds per draft.
    """

    DECAY = 0.9
    """Weight of the past in a mean."""

    def __init__(self) -> None:
        self._plain: dict[int, tuple[float, float]] = {}  # rows and seconds
        self._extra: dict[int, float] = {}

    @staticmethod
    def _class_of(rows: int) -> int:
        return round(2 * log2(rows))

    def record(self, rows: int, drafted: int, seconds: float) -> None:
        """Record the time of a decode step with so many rows and drafts."""
        key = self._class_of(rows)
        known = self._plain.get(key)
        if not drafted:
            if known is None:
                self._plain[key] = (rows, seconds)
            else:
                seconds = min(seconds, 3 * known[1])  # limits outliers caused by other processes
                self._plain[key] = (self._mean(known[0], rows), self._mean(known[1], seconds))
        elif known is not None:
            # A draft costs no more than a row of its own; a larger value was caused by other processes.
            extra = min(max(0.0, seconds - known[1]) / drafted, known[1] / known[0])
            self._extra[key] = self._mean(self._extra.get(key, extra), extra)

    def plain(self, rows: int) -> float | None:
        """Return the seconds of a step of so many rows without drafts; None: not measured."""
        known = self._plain.get(self._class_of(rows))
        return None if known is None else known[1]

    def price(self, rows: int) -> float | None:
        """Return the cost of a draft in a step of so many rows, relative to the cost of a row's own token: 1 when a
        draft costs as much as another row. None: not known.

        Where no drafts were measured, it is estimated from steps of more (or else fewer) rows: too high, if anything,
        because each row reads its own keys, and drafts read their row's.
        """
        key = self._class_of(rows)
        plain = self._plain.get(key)
        if plain is None:
            return None
        extra = self._extra.get(key)
        if extra is None:
            other = min((one for one in self._plain if one > key), default=None)
            if other is None:
                other = max((one for one in self._plain if one < key), default=None)
            if other is None:
                return None
            other_rows, other_seconds = self._plain[other]
            extra = max(0.0, (other_seconds - plain[1]) / (other_rows - plain[0]))
        return extra * plain[0] / plain[1]

    def _mean(self, old: float, new: float) -> float:
        return self.DECAY * old + (1 - self.DECAY) * new


class AcceptanceRates:
    """Acceptance rates of each row and of each kind, drawn towards the overall rate while there are few samples.

    A draft's odds are those of all drafts, times the odds ratios of its row and of its kind (as if the two were
    independent).

    Args:
        num_rows: rows.
        prior: rate assumed before the first sample.
    """

    WEIGHT = 4.0
    """Weight of the overall rate, in samples of a row or of a kind."""

    ROW_DECAY, KIND_DECAY, TOTAL_DECAY = 0.9, 0.99, 0.995
    """Weight of past samples after the next one."""

    def __init__(self, num_rows: int, prior: float) -> None:
        self._rows = np.zeros((num_rows, 2))  # accepted, judged
        self._kinds = np.zeros((TRUSTS, 2))
        self._all = np.array([8 * prior, 8.0])

    def forget(self, row: int) -> None:
        """Reset a row that has another owner."""
        self._rows[row] = 0

    def probability(self, row: int, kind: int) -> float:
        """Return the acceptance probability. Samples decay with time, so that a row or kind with a low rate is tried
        again."""
        share = float(self._all[0] / self._all[1])
        odds = _odds(share)
        for seen, decay in ((self._rows[row], 0.98), (self._kinds[kind], 0.995)):
            odds *= _odds((float(seen[0]) + self.WEIGHT * share) / (float(seen[1]) + self.WEIGHT)) / _odds(share)
            seen *= decay
        return odds / (1 + odds)

    def record(self, row: int | None, kind: int, accepted: int, judged: int) -> None:
        """Record `accepted` of `judged` drafts; row None: its owner has changed since."""
        counts = np.array([accepted, judged], dtype=np.float64)
        if row is not None:
            self._rows[row] = self.ROW_DECAY * self._rows[row] + counts
        self._kinds[kind] = self.KIND_DECAY * self._kinds[kind] + counts
        self._all = self.TOTAL_DECAY * self._all + counts


def _odds(share: float) -> float:
    share = min(max(share, 1e-4), 1 - 1e-4)
    return share / (1 - share)


class AdaptiveLengths:
    """Adapts the number of drafts to measured step times and to the acceptance rates of each row and each kind.

    The first draft shows whether a text is copying: where it is accepted the next ones most often are. So a row's j-th
    draft has the probability first * next^(j - 1), with two rates that are counted separately.

    Args:
        max_num_seqs: rows.
        longest: maximum drafts of a row.
    """

    def __init__(self, max_num_seqs: int, longest: int) -> None:
        self.max_drafts = longest
        self._costs = StepCosts()
        self._on = False
        self._steps_since_probe = 0
        self._steps_since_trial = 0
        self._price = 0.0
        self._epoch = np.full(max_num_seqs, -1, dtype=np.int64)
        self._first, self._next = AcceptanceRates(max_num_seqs, 0.6), AcceptanceRates(max_num_seqs, 0.7)

    def is_worthwhile(self, rows: Ints, counts: Ints) -> bool:
        """See `DraftLengths.is_worthwhile`. Steps that compute prompts are bound by compute."""
        if int(counts.max(initial=0)) > 1:
            return False
        count = int(np.count_nonzero(counts))
        price = self._costs.price(count)
        if price is None:
            self._on, price = count <= FEW_ROWS, 0.0
        else:
            self._on = price < (OFF_ABOVE if self._on else ON_BELOW)
        if not self._on:
            # With few rows a price that was measured too high is measured again: it costs next to nothing.
            self._steps_since_trial += 1
            if count > FEW_ROWS or self._steps_since_trial < PROBE_INTERVAL_STEPS:
                return False
            self._steps_since_trial, price = 0, min(price, ON_BELOW)
        self._steps_since_probe += 1
        if self._steps_since_probe >= PROBE_INTERVAL_STEPS:
            self._steps_since_probe = 0
            return False
        self._price = price + MARGIN
        return True

    def trim(self, row: int, epoch: int, trust: int, drafted: int) -> int:
        if self._epoch[row] != epoch:
            self._epoch[row] = epoch
            self._first.forget(row)
            self._next.forget(row)
        first = self._first.probability(row, trust)
        if first <= self._price:
            return 0
        return min(drafted, 1 + int(log(self._price / first) / log(self._next.probability(row, trust))))

    def record(self, row: int, epoch: int, trust: int, drafted: int, accepted: int) -> None:
        # Drafts behind the first rejected one were never judged: their context was wrong.
        own = row if self._epoch[row] == epoch else None
        self._first.record(own, trust, int(accepted > 0), 1)
        if accepted:
            self._next.record(own, trust, accepted - 1, accepted - 1 + (accepted < drafted))

    def record_step(self, rows: int, positions: int, drafted: int, seconds: float) -> None:
        if rows and positions - drafted == rows:
            self._costs.record(rows, drafted, seconds)


def resolve_max_drafts(config: SpeculationConfig) -> int:
    """Return the settings' maximum of drafts for a row in a step. Raises ValueError."""
    longest = config.longest
    if longest is None:
        of_method = {"auto": LONGEST_COPIED, "ngram": LONGEST_COPIED, "eagle3": LONGEST_OF_HEAD}
        longest = of_method.get(config.method, LONGEST_DRAWN)
    if longest < 1:
        raise ValueError(f"SpeculationConfig.longest is {longest}, but must be 1 or more")
    return longest


def make_draft_lengths(config: SpeculationConfig, max_num_seqs: int) -> DraftLengths:
    """Create the settings' `DraftLengths`. Raises ValueError."""
    longest = resolve_max_drafts(config)
    return AdaptiveLengths(max_num_seqs, longest) if config.method == "auto" else FixedLengths(longest)
