"""How many drafts a row gets: a fixed number, or as many as are worth their time.

The price of a draft is the time that one more position adds to a step; it is measured, by rows in the step. With what
the batch yields in that time without it, the price is a number of tokens, and the j-th draft of a row pays when its
chance to stay is higher. (The goodput rule of Liu et al. 2024, TurboSpec, section 4, taken one
draft at a time.) A thin batch waits for memory, so its price is near 0; a full one computes all the time, and there
it comes near to 1. Then nobody drafts, and nothing is even looked up.
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
    """Decides on lengths, and hears what came of it."""

    def worthwhile(self, rows: Ints, counts: Ints) -> bool:
        """Whether any drafts are wanted in a step of these rows with these many positions; int32 [B] each."""
        ...

    @property
    def max_drafts(self) -> int:
        """Most drafts of a row."""
        ...

    def keep(self, row: int, epoch: int, trust: int, drafted: int) -> int:
        """Of so many drafts that were made, how many are worth checking; `trust`: see `Draft`; `epoch` counts the row's
        owners."""
        ...

    def note(self, row: int, epoch: int, trust: int, drafted: int, accepted: int) -> None:
        """What became of a row's drafts."""
        ...

    def timed(self, rows: int, positions: int, drafted: int, seconds: float) -> None:
        """A step is done: its rows, the positions it computed, the drafts among them, and its time."""
        ...


class FixedLengths:
    """Always the same.

    Args:
        length: drafts a row gets.
    """

    def __init__(self, length: int) -> None:
        self.max_drafts = length

    def worthwhile(self, rows: Ints, counts: Ints) -> bool:
        return True

    def keep(self, row: int, epoch: int, trust: int, drafted: int) -> int:
        return drafted

    def note(self, row: int, epoch: int, trust: int, drafted: int, accepted: int) -> None:
        pass

    def timed(self, rows: int, positions: int, drafted: int, seconds: float) -> None:
        pass


OFF_ABOVE = 0.45
"""Price of a draft, in tokens, above which nobody drafts. What could be gained there is little more than what it takes
to look for drafts, some 20 microseconds a row."""

ON_BELOW = 0.35
"""Below it drafts come back. Between the two all stays as it is, so that noise doesn't switch them."""

FEW_ROWS = 16
"""So few rows draft before any price is known: they wait for memory on most machines, and then the price is known."""

MARGIN = 0.05
"""By how much a draft's chance must be above its price: to look it up and to take it back costs time, too."""

LONGEST_COPIED, LONGEST_DRAWN, LONGEST_OF_HEAD = 16, 8, 4
"""Drafts of a row in a step, at most, where nothing else is said: what is copied costs next to nothing to guess.
A head's guesses go on from what it made up itself, and fare worse with each place."""

LOOK_EVERY = 64
"""Steps that draft, after which one goes without, to see what it takes now."""


class StepCosts:
    """What steps of decoding rows take, by their number; numbers within a factor of 2^(1/2) count as one.

    A mean over the latest steps is kept of each: `plain` seconds without drafts, and `extra` seconds for each draft.
    """

    KEPT = 0.9
    """Weight of the past in a mean."""

    def __init__(self) -> None:
        self._plain: dict[int, tuple[float, float]] = {}  # rows and seconds
        self._extra: dict[int, float] = {}

    @staticmethod
    def _class_of(rows: int) -> int:
        return round(2 * log2(rows))

    def note(self, rows: int, drafted: int, seconds: float) -> None:
        """A step of so many decoding rows, with so many drafts behind them, took this time."""
        key = self._class_of(rows)
        known = self._plain.get(key)
        if not drafted:
            if known is None:
                self._plain[key] = (rows, seconds)
            else:
                seconds = min(seconds, 3 * known[1])  # something else ran on the machine
                self._plain[key] = (self._mean(known[0], rows), self._mean(known[1], seconds))
        elif known is not None:
            # A draft is no dearer than a row of its own, whatever else ran on the machine.
            extra = min(max(0.0, seconds - known[1]) / drafted, known[1] / known[0])
            self._extra[key] = self._mean(self._extra.get(key, extra), extra)

    def plain(self, rows: int) -> float | None:
        """Seconds of a step of so many rows without drafts; None: not known."""
        known = self._plain.get(self._class_of(rows))
        return None if known is None else known[1]

    def price(self, rows: int) -> float | None:
        """What a draft costs beside so many rows, as a share of what a row's own token costs: 1 when drafts could as
        well be rows of their own. None: not known.

        Where no drafts were measured, it is estimated from steps of more (or else fewer) rows: too high, if anything,
        because rows read their own keys, and drafts read their row's.
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
            rows_there, seconds_there = self._plain[other]
            extra = max(0.0, (seconds_there - plain[1]) / (rows_there - plain[0]))
        return extra * plain[0] / plain[1]

    def _mean(self, old: float, new: float) -> float:
        return self.KEPT * old + (1 - self.KEPT) * new


class AcceptanceRates:
    """How often something stayed, of each row and of each kind; drawn towards the share of all while little was seen.

    A draft's odds are those of all drafts, times what its row, and what its kind, makes of these (as if the two were
    independent).

    Args:
        num_rows: rows.
        prior: share assumed before anything has been seen.
    """

    WEIGHT = 4.0
    """Judgements of a row, or of a kind, that what is known of all is worth."""

    ROWS_KEPT, KINDS_KEPT, ALL_KEPT = 0.9, 0.99, 0.995
    """What past judgements still count after the next ones."""

    def __init__(self, num_rows: int, prior: float) -> None:
        self._rows = np.zeros((num_rows, 2))  # stayed, judged
        self._kinds = np.zeros((TRUSTS, 2))
        self._all = np.array([8 * prior, 8.0])

    def forget(self, row: int) -> None:
        """The row has another owner."""
        self._rows[row] = 0

    def of(self, row: int, kind: int) -> float:
        """The chance. Who fared badly is forgiven with time, or would never be tried again."""
        share = float(self._all[0] / self._all[1])
        odds = _odds(share)
        for seen, forgiven in ((self._rows[row], 0.98), (self._kinds[kind], 0.995)):
            odds *= _odds((float(seen[0]) + self.WEIGHT * share) / (float(seen[1]) + self.WEIGHT)) / _odds(share)
            seen *= forgiven
        return odds / (1 + odds)

    def note(self, row: int | None, kind: int, stayed: int, judged: int) -> None:
        """Of so many that were judged, so many stayed; row None: of a row that has another owner by now."""
        counts = np.array([stayed, judged], dtype=np.float64)
        if row is not None:
            self._rows[row] = self.ROWS_KEPT * self._rows[row] + counts
        self._kinds[kind] = self.KINDS_KEPT * self._kinds[kind] + counts
        self._all = self.ALL_KEPT * self._all + counts


def _odds(share: float) -> float:
    share = min(max(share, 1e-4), 1 - 1e-4)
    return share / (1 - share)


class AdaptiveLengths:
    """As many as pay, by measured step times, and by how drafts of each row and each kind have fared.

    Whether a text is copying shows with the first draft: where that one stays the next ones most often do. So a row's
    j-th draft has the chance first * next^(j - 1), with two shares that are counted apart.

    Args:
        max_num_seqs: rows.
        longest: drafts a row gets at most.
    """

    def __init__(self, max_num_seqs: int, longest: int) -> None:
        self.max_drafts = longest
        self._costs = StepCosts()
        self._on = False
        self._since_look = 0
        self._since_try = 0
        self._price = 0.0
        self._epoch = np.full(max_num_seqs, -1, dtype=np.int64)
        self._first, self._next = AcceptanceRates(max_num_seqs, 0.6), AcceptanceRates(max_num_seqs, 0.7)

    def worthwhile(self, rows: Ints, counts: Ints) -> bool:
        """As `DraftLengths.worthwhile`. Steps that compute prompts are not thin, and keep the machine busy."""
        if int(counts.max(initial=0)) > 1:
            return False
        count = int(np.count_nonzero(counts))
        price = self._costs.price(count)
        if price is None:
            self._on, price = count <= FEW_ROWS, 0.0
        else:
            self._on = price < (OFF_ABOVE if self._on else ON_BELOW)
        if not self._on:
            # Where so few decode a price that was once measured too high is measured again: it costs next to nothing.
            self._since_try += 1
            if count > FEW_ROWS or self._since_try < LOOK_EVERY:
                return False
            self._since_try, price = 0, min(price, ON_BELOW)
        self._since_look += 1
        if self._since_look >= LOOK_EVERY:
            self._since_look = 0
            return False
        self._price = price + MARGIN
        return True

    def keep(self, row: int, epoch: int, trust: int, drafted: int) -> int:
        if self._epoch[row] != epoch:
            self._epoch[row] = epoch
            self._first.forget(row)
            self._next.forget(row)
        first = self._first.of(row, trust)
        if first <= self._price:
            return 0
        return min(drafted, 1 + int(log(self._price / first) / log(self._next.of(row, trust))))

    def note(self, row: int, epoch: int, trust: int, drafted: int, accepted: int) -> None:
        # What stands behind the first rejected draft was never judged: its context was wrong.
        own = row if self._epoch[row] == epoch else None
        self._first.note(own, trust, int(accepted > 0), 1)
        if accepted:
            self._next.note(own, trust, accepted - 1, accepted - 1 + (accepted < drafted))

    def timed(self, rows: int, positions: int, drafted: int, seconds: float) -> None:
        if rows and positions - drafted == rows:
            self._costs.note(rows, drafted, seconds)


def longest_of(config: SpeculationConfig) -> int:
    """Most guesses for a row in a step, by the settings. Raises ValueError."""
    longest = config.longest
    if longest is None:
        of_method = {"auto": LONGEST_COPIED, "ngram": LONGEST_COPIED, "eagle3": LONGEST_OF_HEAD}
        longest = of_method.get(config.method, LONGEST_DRAWN)
    if longest < 1:
        raise ValueError(f"SpeculationConfig.longest is {longest}, but must be 1 or more")
    return longest


def lengths_of(config: SpeculationConfig, max_num_seqs: int) -> DraftLengths:
    """What decides, by the settings. Raises ValueError."""
    longest = longest_of(config)
    return AdaptiveLengths(max_num_seqs, longest) if config.method == "auto" else FixedLengths(longest)
