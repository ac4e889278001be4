"""The forecast of a request's time to first token and of its end, and when it is refused because of that. Pure
functions of measured loads.

An interactive request needs a row of a worker's batch, which it holds from its prompt's first step until its end. While
a row is free it begins at once. Else it waits until the requests ahead of it and enough of the running ones have ended.
Full batches free `slots / slot_seconds` rows a second: Little's law (Little 1961), as all rows are occupied. After a
burst that filled them at once, none is free before these answers end, so the ages of rows count too.

    |- wait_seconds: rows become free -|- first_token_seconds -|- the answer's other tokens -|
                                                     first token                            end

Workers take the requests of tenants in turn, so a tenant's own queue, and not that of all others, is ahead of its next
request (`requests_ahead`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final

from schemas.jobs.job import Tier

PROMISE_SHARE: Final = 0.8
"""Share of a promise that a forecast may take: forecasts are means."""

INTERACTIVE_SHARES: Final = {Tier.INTERACTIVE: 1.0, Tier.STANDARD: 0.75, Tier.BULK: 0.5}
"""Share of the interactive tier's allowance that a forecast may take for a request of each tier: they wait for the same
rows, so bulk requests are refused first, and then standard ones."""

MIN_ALLOWANCE: Final = 0.1
"""Least share of a promise that waiting may take, however long the first token takes without waiting."""

RATE_TOLERANCE: Final = 1.33
"""The workers' reports are corrected where the observed rate differs by more than this factor."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """A model's workers that take interactive requests.

    Attributes:
        slots: rows of their batches.
        running: rows that interactive requests hold.
        answer_tokens: mean tokens of an answer.
        token_seconds: mean time between two tokens of an answer.
        gap_tokens: tokens of an answer for each such time; more than 1 where drafts are accepted.
        first_token_seconds: mean time from admission to the first token while a row is free.
        ages: for how long rows have been held, of those where that is known; seconds.
    """

    slots: int
    running: float
    answer_tokens: float
    token_seconds: float
    gap_tokens: float = 1.0
    first_token_seconds: float = 0.0
    ages: tuple[float, ...] = ()

    def decode_seconds(self, tokens: float) -> float:
        """The time between the first and the last of so many tokens."""
        return max(0.0, tokens / self.gap_tokens - 1) * self.token_seconds

    @property
    def slot_seconds(self) -> float:
        """Mean time for which a request holds its row."""
        return self.first_token_seconds + self.decode_seconds(self.answer_tokens)

    def wait_seconds(self, ahead: float) -> float:
        """Time until a row is free for a request behind so many others."""
        to_end = self.running + ahead + 1 - self.slots
        if to_end <= 0:
            return 0.0
        if not self.slots:
            return inf
        return max(to_end * self.slot_seconds / self.slots, self._end_seconds(ceil(to_end), of_unknown=0.0))

    def _end_seconds(self, nth: int, of_unknown: float) -> float:
        """Time until the nth end of an answer from now, from 1, while all rows are held.

        Args:
            of_unknown: when the last of the rows whose age is not known ends, as a share of `slot_seconds`; they end in
                regular intervals until then.
        """
        slot = self.slot_seconds
        # Requests ahead will take the free rows now.
        ages = (*self.ages, *[0.0] * int(self.slots - self.running))[: self.slots]
        unknown = self.slots - len(ages)
        left = [max(0.0, slot - age) for age in ages]
        left += [slot * of_unknown * (row + 1) / unknown for row in range(unknown)]
        rounds, row = divmod(nth - 1, self.slots)
        return rounds * slot + sorted(left)[row]

    def seconds_until_wait(self, ahead: float, wait_seconds: float) -> float:
        """Time until a request behind so many others would wait so long at most."""
        to_end = ceil(self.running + ahead + 1 - self.slots)
        if to_end <= 0 or not self.slots:
            return 0.0
        may_be_left = int(wait_seconds * self.slots / self.slot_seconds) if self.slot_seconds else to_end
        by_count = self._end_seconds(to_end - may_be_left, of_unknown=1.0) if may_be_left < to_end else 0.0
        return max(by_count, self._end_seconds(to_end, of_unknown=0.0) - wait_seconds)

    def corrected(self, starts_per_second: float) -> PoolLoad:
        """The load, if the full batches are seen to begin so many answers a second: rows are then held as long as that
        says, up to `RATE_TOLERANCE`."""
        if starts_per_second <= 0 or self.slot_seconds <= 0:
            return self
        seen = self.slots / starts_per_second
        seconds = min(max(self.slot_seconds, seen / RATE_TOLERANCE), seen * RATE_TOLERANCE)
        ratio = seconds / self.slot_seconds
        first = self.first_token_seconds * ratio
        return replace(self, token_seconds=self.token_seconds * ratio, first_token_seconds=first)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now.

    Attributes:
        wait_seconds: until a row is free.  ttft_seconds: until the first token.  end_seconds: until the last one.
    """

    wait_seconds: float
    ttft_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Promises:
    """Promised times to the first token, in seconds, of interactive requests and of other tiers that have one."""

    ttft_seconds: Mapping[Tier, float]

    def allowed_wait(self, load: PoolLoad) -> float:
        """How long an interactive request may wait for a row."""
        promise = PROMISE_SHARE * self.ttft_seconds[Tier.INTERACTIVE]
        return max(promise - load.first_token_seconds, MIN_ALLOWANCE * promise)


def forecast(load: PoolLoad, ahead: float, answer_tokens: float) -> Forecast:
    """Forecast a new request.

    Args:
        ahead: requests without a first token that are taken before it (`requests_ahead`).
        answer_tokens: its expected number.
    """
    wait = load.wait_seconds(ahead)
    ttft = wait + load.first_token_seconds
    return Forecast(wait, ttft, ttft + load.decode_seconds(answer_tokens))


def requests_ahead(waiting: Mapping[str, int], total: int, tenant: str) -> float:
    """Requests that are taken before the next one of this tenant, as tenants take turns.

    Args:
        waiting: this gateway's requests without a first token, by tenant.
        total: those of all gateways. The others' tenants aren't known; they count as if they were distributed as these.
    """
    own = waiting.get(tenant, 0)
    known = sum(waiting.values())
    ahead = own + sum(min(count, own + 1) for other, count in waiting.items() if other != tenant)
    others = max(0, total - known)
    return ahead + (others * ahead / known if known else others)


def excess_seconds(
    one: Forecast, load: PoolLoad, ahead: float, promises: Promises, tier: Tier, timeout_seconds: float
) -> float:
    """Seconds until the forecast lies within the tier's promise; 0: it does now.

    Only waiting ends by itself: a request that would be late without any waiting is not refused.

    Args:
        one: the forecast behind so many requests `ahead`.
        timeout_seconds: after which the request's caller gives up.
    """
    late = one.wait_seconds - INTERACTIVE_SHARES[tier] * promises.allowed_wait(load)
    promise = promises.ttft_seconds.get(tier)
    if tier is not Tier.INTERACTIVE and promise is not None:
        late = max(late, one.ttft_seconds - PROMISE_SHARE * promise)
    late = min(max(late, one.end_seconds - timeout_seconds), one.wait_seconds)
    return load.seconds_until_wait(ahead, one.wait_seconds - late) if late > 0 else 0.0
