"""SLO control: limits the tokens of other work in a step, so that interactive requests meet their latency objectives.

Class 0 is urgent: its requests are interactive. Its rows come first in every step, but they also wait for the whole
step, so other work in it costs them time. Two limits bound that, each in tokens of a step:

- with streams (urgent rows that are answering): their own next tokens are always planned; then chunks of other urgent
  prompts, then all other classes, up to the limit that meets the inter-token latency (ITL);
- with prompts (urgent rows without a first token): other classes up to the limit that meets the time to first token
  (TTFT).

A step without urgent rows has no limit.

No model of step times is needed: each limit follows measurements. A step that was too slow lowers it to a little less
than that step held. A step that was in time while work was held back raises it, by so much less that at equilibrium the
objective's share of the samples is in time. (A stochastic approximation of a quantile, Robbins and Monro 1951: steps
along the subgradient of the objective in `SloStats.objective`, on a logarithmic scale.)
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
"""The class of interactive requests."""

GAIN = 0.2
"""Step size of a limit, per sample."""

RECENT = 0.995
"""Decay, per step, of the averages that are reported."""

MIN_CHUNK_TOKENS = 128
"""Minimum of prompt tokens that urgent rows may compute in a step with streams: with none, no first token would ever
be sampled."""


@dataclass(frozen=True, slots=True)
class StepContents:
    """The contents of a planned step.

    Attributes:
        streams, prompts: urgent rows that were answering; that had yet to begin, those that wait for a row included.
        other_tokens: all but those of the streams.  other_class_tokens: of them, of other classes.
        is_limited: a limit excluded work that the budget had room for.
    """

    streams: int
    prompts: int
    other_tokens: int
    other_class_tokens: int
    is_limited: bool


@dataclass(frozen=True, slots=True)
class SloTerms:
    """One number for each term of the objective: the weights w1 to w4, or the terms' values.

    Attributes:
        ttft, itl: the tracked quantile of each, as a multiple of its objective.
        utilisation: share of the latest limited steps from which work was held back.
        drops: requests of class 0 that missed their deadline, as a share of all.
    """

    ttft: float = 0.0
    itl: float = 0.0
    utilisation: float = 0.0
    drops: float = 0.0

    def weighed(self, by: SloTerms) -> float:
        """Return the sum of all terms, each times its weight."""
        return by.ttft * self.ttft + by.itl * self.itl + by.utilisation * self.utilisation + by.drops * self.drops


@dataclass(frozen=True, slots=True)
class SloStats:
    """SLO statistics of class 0. Counts since the start; seconds.

    Attributes:
        first_tokens, late_first_tokens: all, and those that missed the objective.
        later_tokens, late_tokens: times between two tokens of a row, and those that missed the objective.
        steps, throttled_steps: steps with urgent rows, and those from which work was held back.
        drops: requests of class 0 that missed their deadline.
        ttft, itl: the tracked quantile of each objective (nan: no sample yet).
        beside_streams, beside_prompts: the limits, in tokens of a step.
        utilisation: share of the latest limited steps from which no work was held back.
        others: share of other classes in the tokens of the latest limited steps.
        weights, terms: of the objective, and the present values.
    """

    first_tokens: int = 0
    late_first_tokens: int = 0
    later_tokens: int = 0
    late_tokens: int = 0
    steps: int = 0
    throttled_steps: int = 0
    drops: int = 0
    ttft: float = nan
    itl: float = nan
    beside_streams: int = 0
    beside_prompts: int = 0
    utilisation: float = 1.0
    others: float = 0.0
    weights: SloTerms = field(default_factory=SloTerms)
    terms: SloTerms = field(default_factory=SloTerms)

    @property
    def objective(self) -> float:
        """The function that the controller minimises: weight_ttft * ttft / its objective + weight_itl * itl / its
        objective + weight_utilisation * (1 - utilisation) + weight_drops * drops per request."""
        return self.terms.weighed(self.weights)


class Limit:
    """A limit in tokens, as large as the objective allows.

    Args:
        min_tokens, max_tokens: its bounds.
        quantile: share of the samples that should be in time.
        weight, pull: see `weigh`.
    """

    def __init__(self, min_tokens: int, max_tokens: int, quantile: float, weight: float, pull: float) -> None:
        self._min_tokens, self._max_tokens, self._quantile = min_tokens, max_tokens, quantile
        self._value = float(max_tokens)
        self.weigh(weight, pull)

    def weigh(self, weight: float, pull: float) -> None:
        """Set the weight of samples, and that of steps from which no work is held back."""
        self._down = exp(-GAIN * weight * self._quantile)
        self._up = exp(GAIN * (1 - self._quantile) * (weight + pull))

    @property
    def tokens(self) -> int:
        return int(self._value)

    def record(self, *, late: bool, used: int, is_limited: bool) -> None:
        """Record a sample from a step with `used` tokens under this limit. `is_limited`: work was held back from it."""
        if late and used > 0:
            self._value = max(self._min_tokens, min(self._value, used) * self._down)
        elif is_limited and not late:
            self._value = min(self._max_tokens, self._value * self._up)


class Quantile:
    """Tracks a quantile of positive samples by the same rule."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self.value = nan

    def record(self, sample: float) -> None:
        if not self.value > 0:
            self.value = max(sample, 1e-6)
        else:
            self.value *= exp(GAIN * (self._quantile - (sample <= self.value)))


class SloController:
    """Controls the limits of one engine's steps by measured latencies.

    Args:
        config: the objectives.
        batch: rows and their owners.
        budget: maximum tokens of a step.
    """

    def __init__(self, config: SloConfig, batch: RunningBatch, budget: int) -> None:
        min_tokens = min(config.min_tokens, budget)
        self._config = config
        self._weights = SloTerms(config.weight_ttft, config.weight_itl, config.weight_utilisation, config.weight_drops)
        self._batch = batch
        self._streams = Limit(min_tokens, budget, config.quantile, config.weight_itl, config.weight_utilisation)
        self._prompts = Limit(min_tokens, budget, config.quantile, config.weight_ttft, config.weight_utilisation)
        self._ttft, self._itl = Quantile(config.quantile), Quantile(config.quantile)
        self._last = np.full(len(batch.owners), -inf)  # time of each row's latest token
        self._epoch = np.full(len(batch.owners), -1, dtype=np.int64)
        self._first_tokens = self._late_first = self._later = self._late = self._drops = 0
        self._num_steps = self._throttled_steps = 0
        self._steps = self._utilisation = 1.0
        self._tokens = self._others = 0.0  # of latest steps

    @property
    def stats(self) -> SloStats:
        config = self._config
        utilisation = self._utilisation / self._steps
        terms = SloTerms(
            ttft=self._ttft.value / config.ttft_seconds if self._ttft.value > 0 else 0.0,
            itl=self._itl.value / config.itl_seconds if self._itl.value > 0 else 0.0,
            utilisation=1 - utilisation,
            drops=self._drops / max(1, self._drops + self._first_tokens),
        )
        return SloStats(
            self._first_tokens, self._late_first, self._later, self._late, self._num_steps, self._throttled_steps,
            self._drops, self._ttft.value, self._itl.value, self._streams.tokens, self._prompts.tokens, utilisation,
            others=self._others / self._tokens if self._tokens else 0.0,
            weights=self._weights,
            terms=terms,
        )  # fmt: skip

    def weigh(self, weights: SloTerms) -> None:
        """Set the weights of the objective. The limits go on from their present values."""
        self._weights = weights
        self._streams.weigh(weights.itl, weights.utilisation)
        self._prompts.weigh(weights.ttft, weights.utilisation)

    def chunk(self) -> int:
        """Return the prompt tokens that urgent rows may compute in a step with streams."""
        return max(MIN_CHUNK_TOKENS, self._streams.tokens)

    def others(self, streams: int, prompts: int, prompt_tokens: int) -> int:
        """Return the tokens that other classes may compute in a step.

        Args:
            streams, prompts: as in `StepContents`.
            prompt_tokens: of urgent rows in the step.
        """
        if self._config.fixed_tokens is not None:
            return self._config.fixed_tokens
        limit = self._prompts.tokens if prompts else self._streams.tokens
        if streams:
            limit = min(limit, self._streams.tokens - prompt_tokens)
        return max(limit, self._config.min_tokens)

    def record(self, plan: StepPlan, sampled: NDArray[np.bool_], contents: StepContents, now: float) -> None:
        """Record a step's tokens.

        Args:
            sampled: bool [B], rows that have a new token and whose owner has not changed since planning.
            now: seconds.
        """
        unlimited = 0.0 if contents.is_limited else 1.0
        self._num_steps += 1
        self._throttled_steps += contents.is_limited
        self._steps = RECENT * self._steps + 1
        self._utilisation = RECENT * self._utilisation + unlimited
        self._tokens = RECENT * self._tokens + contents.streams + contents.other_tokens
        self._others = RECENT * self._others + contents.other_class_tokens
        rows = plan.rows[sampled & (self._batch.priority[plan.rows] == URGENT)]
        begun = self._epoch[rows] == self._batch.epoch[rows]
        for row in rows[~begun].tolist():
            owner = self._batch.owner(row)
            if not owner.preemptions:  # else it had its first token long ago
                self._first(now - owner.arrived_at, contents)
        if begun.any():
            gaps = now - self._last[rows[begun]]
            for gap in gaps.tolist():
                self._itl.record(gap)
            late = int((gaps > self._config.itl_seconds).sum())
            self._later += len(gaps)
            self._late += late
            self._streams.record(late=late > 0, used=contents.other_tokens, is_limited=contents.is_limited)
        self._epoch[rows] = self._batch.epoch[rows]
        self._last[rows] = now

    def _first(self, seconds: float, contents: StepContents) -> None:
        late = seconds > self._config.ttft_seconds
        self._ttft.record(seconds)
        self._first_tokens += 1
        self._late_first += late
        self._prompts.record(late=late, used=contents.other_class_tokens, is_limited=contents.is_limited)

    def record_missed_deadline(self) -> None:
        """Record a request of class 0 that missed its deadline."""
        self._drops += 1
        if self._weights.drops:
            self._prompts.record(late=True, used=self._prompts.tokens, is_limited=False)
