"""Pacing: what a step may hold beside the rows of somebody who waits for each token.

Class 0 is urgent: somebody reads along. Its rows come first in every step, but they also wait for the whole step, so
what else is in it costs them time. Two limits bound that, each in tokens of a step:

- beside streams (urgent rows that are answering): their own next tokens always go; then come chunks of other urgent
  prompts, then all other classes, up to the limit that keeps the time between two tokens (ITL);
- beside prompts (urgent rows without a first token): other classes up to the limit that keeps the time to the first
  token (TTFT).

Where no urgent row is, there is no limit.

No model of step times is needed: each limit follows what was measured. A step that was too slow lowers it to a little
less than that step held; one that was in time while something was held back raises it, by so much less that at rest
the wanted share of the samples is in time. (A stochastic approximation of a quantile, Robbins and Monro 1951: steps
along the subgradient of the objective in `PaceStats.objective`, on a logarithmic scale.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, nan

import numpy as np
from numpy.typing import NDArray

from engine.config import SloConfig
from engine.plan import StepPlan
from engine.scheduler.running_batch import RunningBatch

URGENT = 0
"""The class whose requests somebody waits for."""

GAIN = 0.2
"""How far one sample moves a limit."""

RECENT = 0.995
"""Weight of the past in what is reported of the latest samples."""

LEAST_CHUNK = 128
"""Prompt tokens that urgent rows may compute beside streams, however tight it is: or a first token never came."""


@dataclass(frozen=True, slots=True)
class StepContents:
    """What a planned step held.

    Attributes:
        streams, prompts: urgent rows that were answering; that had yet to begin, those that wait for a row included.
        beside: tokens beside those of the streams.  others: of them, of other classes.
        held: something had to be left out that would have had room.
    """

    streams: int
    prompts: int
    beside: int
    others: int
    held: bool


@dataclass(frozen=True, slots=True)
class PaceTerms:
    """One number for each term of the objective, w1 to w4 or what they weigh.

    Attributes:
        ttft, itl: what is followed of each, as a multiple of its promise.
        utilisation: share of the latest paced steps from which something was held back.
        drops: requests of class 0 that ran into their deadline, as a share of all.
    """

    ttft: float = 0.0
    itl: float = 0.0
    utilisation: float = 0.0
    drops: float = 0.0

    def weighed(self, by: PaceTerms) -> float:
        """The sum of all terms, each times its weight."""
        return by.ttft * self.ttft + by.itl * self.itl + by.utilisation * self.utilisation + by.drops * self.drops


@dataclass(frozen=True, slots=True)
class PaceStats:
    """How class 0 fares. Counts since the start; seconds.

    Attributes:
        first_tokens, late_first_tokens: and those that missed the objective.
        later_tokens, late_tokens: times between two tokens of a row, and those that missed the objective.
        drops: requests of class 0 that ran into their deadline.
        ttft, itl: the objectives' quantile of late samples, followed (nan: no sample yet).
        beside_streams, beside_prompts: the limits, in tokens of a step.
        utilisation: of latest paced steps, those from which nothing was held back.
        others: of the tokens in latest paced steps, those of other classes.
        weights, terms: of the objective, and what they weigh now.
    """

    first_tokens: int = 0
    late_first_tokens: int = 0
    later_tokens: int = 0
    late_tokens: int = 0
    drops: int = 0
    ttft: float = nan
    itl: float = nan
    beside_streams: int = 0
    beside_prompts: int = 0
    utilisation: float = 1.0
    others: float = 0.0
    weights: PaceTerms = field(default_factory=PaceTerms)
    terms: PaceTerms = field(default_factory=PaceTerms)

    @property
    def objective(self) -> float:
        """weight_ttft * ttft / its promise + weight_itl * itl / its promise + weight_utilisation * (1 - utilisation) +
        weight_drops * drops per request: what pacing lowers."""
        return self.terms.weighed(self.weights)


class Limit:
    """A number of tokens that is kept as large as the objective allows.

    Args:
        least, most: its bounds.
        quantile: share of the samples that should be in time.
        weight: of samples.  pull: of having nothing held back.
    """

    def __init__(self, least: int, most: int, quantile: float, weight: float, pull: float) -> None:
        self._least, self._most = least, most
        self._down = exp(-GAIN * weight * quantile)
        self._up = exp(GAIN * (1 - quantile) * (weight + pull))
        self._value = float(most)

    @property
    def tokens(self) -> int:
        return int(self._value)

    def note(self, *, late: bool, used: int, held: bool) -> None:
        """A sample from a step with so many tokens under this limit, from which something was held back or not."""
        if late and used > 0:
            self._value = max(self._least, min(self._value, used) * self._down)
        elif held and not late:
            self._value = min(self._most, self._value * self._up)


class Quantile:
    """Follows a quantile of positive samples, by the same rule."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self.value = nan

    def note(self, sample: float) -> None:
        if not self.value > 0:
            self.value = max(sample, 1e-6)
        else:
            self.value *= exp(GAIN * (self._quantile - (sample <= self.value)))


class SloController:
    """The limits of one engine's steps, and what they follow.

    Args:
        config: the objectives.
        batch: rows and their owners.
        budget: most tokens of a step.
    """

    def __init__(self, config: SloConfig, batch: RunningBatch, budget: int) -> None:
        least = min(config.least_tokens, budget)
        self._config = config
        self._batch = batch
        self._streams = Limit(least, budget, config.quantile, config.weight_itl, config.weight_utilisation)
        self._prompts = Limit(least, budget, config.quantile, config.weight_ttft, config.weight_utilisation)
        self._ttft, self._itl = Quantile(config.quantile), Quantile(config.quantile)
        self._last = np.full(len(batch.owners), -inf)  # when a row's latest token came
        self._epoch = np.full(len(batch.owners), -1, dtype=np.int64)
        self._first_tokens = self._late_first = self._later = self._late = self._drops = 0
        self._steps = self._utilisation = 1.0
        self._tokens = self._others = 0.0  # of latest steps

    @property
    def stats(self) -> PaceStats:
        config = self._config
        utilisation = self._utilisation / self._steps
        terms = PaceTerms(
            ttft=self._ttft.value / config.ttft if self._ttft.value > 0 else 0.0,
            itl=self._itl.value / config.itl if self._itl.value > 0 else 0.0,
            utilisation=1 - utilisation,
            drops=self._drops / max(1, self._drops + self._first_tokens),
        )
        return PaceStats(
            self._first_tokens, self._late_first, self._later, self._late, self._drops, self._ttft.value,
            self._itl.value, self._streams.tokens, self._prompts.tokens, utilisation,
            others=self._others / self._tokens if self._tokens else 0.0,
            weights=PaceTerms(config.weight_ttft, config.weight_itl, config.weight_utilisation, config.weight_drops),
            terms=terms,
        )  # fmt: skip

    def chunk(self) -> int:
        """Prompt tokens that urgent rows may compute beside streams."""
        return max(LEAST_CHUNK, self._streams.tokens)

    def others(self, streams: int, prompts: int, prompt_tokens: int) -> int:
        """Tokens that other classes may compute in a step.

        Args:
            streams, prompts: as `StepContents` has them.
            prompt_tokens: of urgent rows in the step.
        """
        if self._config.fixed_tokens is not None:
            return self._config.fixed_tokens
        limit = self._prompts.tokens if prompts else self._streams.tokens
        if streams:
            limit = min(limit, self._streams.tokens - prompt_tokens)
        return max(limit, self._config.least_tokens)

    def note(self, plan: StepPlan, sampled: NDArray[np.bool_], paced: StepContents, now: float) -> None:
        """A step's tokens are here.

        Args:
            sampled: bool [B], rows that have a new token and still the owner that they were planned for.
            now: seconds.
        """
        held = 0.0 if paced.held else 1.0
        self._steps = RECENT * self._steps + 1
        self._utilisation = RECENT * self._utilisation + held
        self._tokens = RECENT * self._tokens + paced.streams + paced.beside
        self._others = RECENT * self._others + paced.others
        rows = plan.rows[sampled & (self._batch.priority[plan.rows] == URGENT)]
        begun = self._epoch[rows] == self._batch.epoch[rows]
        for row in rows[~begun].tolist():
            owner = self._batch.owner(row)
            if not owner.preemptions:  # else it had its first token long ago
                self._first(now - owner.arrived_at, paced)
        if begun.any():
            gaps = now - self._last[rows[begun]]
            for gap in gaps.tolist():
                self._itl.note(gap)
            late = int((gaps > self._config.itl).sum())
            self._later += len(gaps)
            self._late += late
            self._streams.note(late=late > 0, used=paced.beside, held=paced.held)
        self._epoch[rows] = self._batch.epoch[rows]
        self._last[rows] = now

    def _first(self, seconds: float, paced: StepContents) -> None:
        late = seconds > self._config.ttft
        self._ttft.note(seconds)
        self._first_tokens += 1
        self._late_first += late
        self._prompts.note(late=late, used=paced.others, held=paced.held)

    def dropped(self) -> None:
        """A request of class 0 ran into its deadline."""
        self._drops += 1
        weight = self._config.weight_drops
        if weight:
            self._prompts.note(late=True, used=self._prompts.tokens, held=False)
