"""Admission of requests by the limits of tenants and keys: requests and tokens in a sliding window of a minute (rate
limits), concurrent requests and rows, open jobs.

Tokens are taken when a request is admitted: the estimated prompt and the maximum output. Unused tokens are released
when the request ends within the window in which they were taken. The `limits` library counts, on Redis for all gateways
or in this process. While Redis can't be reached, all requests are admitted, and the log has a warning: serving has
priority over counting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeVar
from urllib.parse import quote

import structlog
from limits import RateLimitItem, RateLimitItemPerSecond
from limits.errors import StorageError
from limits.storage import MemoryStorage, RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.limits.concurrency_slots import ConcurrencySlots, MemoryConcurrencySlots
from pipeline.gateway.limits.storage_quota import StorageQuota
from pipeline.ports import Clock
from pipeline.runtime.availability import ServiceUnavailable
from schemas.requests.limits import RateLimits

WINDOW_SECONDS: Final = 60
CODE: Final = "rate_limit_exceeded"
_AWAY_SECONDS: Final = 5.0
"""For this long after a failure Redis isn't contacted: otherwise each request would wait for a timeout."""
_SOON: Final = 1
_ROWS: Final = ":rows"
"""The suffix of names whose slots count rows instead of requests."""

_JOBS_SECONDS: Final = 30

Counted = Literal["requests", "tokens"]
Result = TypeVar("Result")
Headers = dict[str, str]

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RateSettings:
    """The limits of tenants and keys.

    Attributes:
        tenant: of each tenant, over all of its keys.  tenants: overrides for single tenants.
        key: of each key; the limits of the key's own record have precedence.
        default_stored: the storage quota of a tenant with keys, when neither it nor the key has one.
        default_rows: running rows of a tenant with keys, when neither it nor the key limits running requests or rows;
            None: no limit.
        window: the length of the sliding window in seconds.
    """

    tenant: RateLimits = field(default_factory=RateLimits)
    tenants: Mapping[str, RateLimits] = field(default_factory=dict)
    key: RateLimits = field(default_factory=RateLimits)
    default_rows: Callable[[], int] | None = None
    default_stored: StorageQuota = field(default_factory=StorageQuota)
    window: int = WINDOW_SECONDS


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """An admitted inference request.

    Attributes:
        names: of the concurrency slots that it holds.  rows: the number of its answers (`n`).
        tokens: taken for it, in windows of which the first ends at `until` (monotonic).
        headers: rate-limit headers of its response.
    """

    caller: Caller
    request: str
    names: tuple[str, ...]
    rows: int
    tokens: int
    until: float
    headers: Headers

    @property
    def empty(self) -> bool:
        """Whether no limit applies, so that nothing has to be released."""
        return not (self.names or self.headers)


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit that applies to the caller. `whose` names its owner in error messages."""

    whose: str
    name: str
    limits: RateLimits


@dataclass(frozen=True, slots=True)
class _Window:
    """The state of a limit's sliding window.

    Attributes:
        amount: the limit.
        before, now: counted in the previous window and in the current one.
        before_left, now_left: seconds until these counts expire, two windows after the beginning of each.
    """

    amount: int
    before: int
    before_left: float
    now: int
    now_left: float

    def remaining(self, window: float) -> int:
        """The amount that may still be taken."""
        used = math.floor(self.before * self.before_left / window) + self.now
        return min(self.amount, max(0, self.amount - used))

    @property
    def reset(self) -> float:
        """Seconds until the full amount is available again."""
        return self.now_left if self.now > 0 else self.before_left if self.before > 0 else 0.0


class RateLimiter:
    """Enforces the limits of requests, tokens, concurrency and open jobs. Thread-safe.

    Args:
        windows, running: the storage of the windows and of the concurrency slots; None: this process.
    """

    def __init__(
        self,
        clock: Clock,
        settings: RateSettings | None = None,
        windows: RedisStorage | None = None,
        running: ConcurrencySlots | None = None,
    ) -> None:
        self._clock = clock
        self._settings = settings or RateSettings()
        self._away_until = -math.inf
        self._windows: MemoryStorage | RedisStorage = windows or MemoryStorage()
        self._running = running or MemoryConcurrencySlots(clock)
        self._counter = SlidingWindowCounterRateLimiter(self._windows)

    def take_request(self, caller: Caller) -> Headers:
        """Count a request to any route; returns the rate-limit headers. Raises `ApiError` (429)."""
        return self._headers("requests", self._take("requests", caller, 1))

    def admit(
        self, caller: Caller, request: str, tokens: int, seconds: float, rows: int = 1, multiplier: str = "n"
    ) -> AdmittedRequest:
        """Admit an inference request, or raise `ApiError` (429). The caller releases it with `release`.

        Args:
            tokens: an upper bound of the tokens that it uses.  seconds: its time limit.
            rows: the number of its answers (`n`) or choices.  multiplier: the field to lower when they are too many.
        """
        names: list[str] = []
        try:
            for limit in self._limits(caller):
                for name, most, count in (
                    (limit.name, limit.limits.running_requests, 1),
                    (limit.name + _ROWS, limit.limits.running_rows, rows),
                ):
                    if most is not None:
                        self._enter(limit.whose, name, request, most, seconds, count, multiplier)
                        names.append(name)
            windows = self._take("tokens", caller, tokens)
        except ApiError:
            self._leave(names, request, rows)
            raise
        window_left = min((one.now_left for one in windows), default=0.0) - self._settings.window
        until = self._clock.monotonic() + window_left
        return AdmittedRequest(caller, request, tuple(names), rows, tokens, until, self._headers("tokens", windows))

    def release(self, ticket: AdmittedRequest, used: int | None) -> None:
        """Release a request that has ended: its slots and its unused tokens. `used`: tokens; None: unknown."""
        self._leave(ticket.names, ticket.request, ticket.rows)
        # After `until` the tokens would be credited to another window than the one they were taken from, which could
        # then exceed its limit.
        if used is not None and used < ticket.tokens and self._clock.monotonic() < ticket.until:
            for item, limit in self._items("tokens", ticket.caller):
                self._hit(item, limit, used - ticket.tokens)

    def check_jobs(self, caller: Caller, running: Callable[[], int]) -> None:
        """Raises `ApiError` (429) when the tenant has reached its limit of open jobs. `running` returns their
        number."""
        allowed = [limit.limits.running_jobs for limit in self._limits(caller)]
        most = min((most for most in allowed if most is not None), default=None)
        if most is not None and running() >= most:
            message = f"{most} jobs of yours are open, and no more may be; submit again when one has ended"
            raise ApiError(429, CODE, message, headers={"Retry-After": str(_JOBS_SECONDS)})

    def storage_quota(self, caller: Caller) -> StorageQuota:
        """The storage quota of the caller's tenant."""
        limits = [limit.limits for limit in self._limits(caller)]
        default = StorageQuota() if caller.key is None else self._settings.default_stored
        return StorageQuota(
            min((one.stored_bytes for one in limits if one.stored_bytes), default=default.max_bytes),
            min((one.stored_files for one in limits if one.stored_files), default=default.max_files),
        )

    # -- inside

    def _limits(self, caller: Caller) -> Iterator[_Limit]:
        settings = self._settings
        tenant = settings.tenants.get(caller.tenant, settings.tenant)
        key = caller.limits.over(settings.key)
        chosen = any(one.running_requests or one.running_rows for one in (tenant, key))
        if caller.key is not None and settings.default_rows is not None and not chosen:
            tenant = tenant.model_copy(update={"running_rows": settings.default_rows()})
        yield _Limit("this tenant", f"tenant/{quote(caller.tenant, safe='', errors='surrogatepass')}", tenant)
        if caller.key is not None:
            yield _Limit("this API key", f"key/{caller.key}", key)

    def _items(self, what: Counted, caller: Caller) -> list[tuple[RateLimitItem, _Limit]]:
        found: list[tuple[RateLimitItem, _Limit]] = []
        for limit in self._limits(caller):
            amount = limit.limits.requests_per_minute if what == "requests" else limit.limits.tokens_per_minute
            if amount is not None:
                found.append((RateLimitItemPerSecond(amount, self._settings.window, what), limit))
        return found

    def _take(self, what: Counted, caller: Caller, cost: int) -> list[_Window]:
        """Take `cost` from all limits, or from none; returns their windows. Raises `ApiError` (429)."""
        items = self._items(what, caller)
        for number, (item, limit) in enumerate(items):
            if cost > item.amount:
                why = f"this request may need {cost:,} {what}, but {limit.whose} has {item.amount:,} a minute"
                refused = {"x-should-retry": "false"}  # OpenAI's clients would retry, and never succeed
            elif self._hit(item, limit, cost):
                continue
            else:
                wait = self._wait(item, limit, cost)
                why = f"{limit.whose} has {item.amount:,} {what} a minute, and too few are left now; wait {wait} s"
                refused = {"Retry-After": str(wait)}
            for taken, whose in items[:number]:
                self._hit(taken, whose, -cost)
            raise ApiError(429, CODE, why, headers=self._headers(what, self._windows_of(items)) | refused)
        return self._windows_of(items)

    def _headers(self, what: Counted, windows: list[_Window]) -> Headers:
        """OpenAI's rate-limit headers, for the limit with the least remaining."""
        if not windows:
            return {}
        window = self._settings.window
        remaining, nearest = min(((one.remaining(window), one) for one in windows), key=lambda one: one[0])
        return {
            f"x-ratelimit-limit-{what}": str(nearest.amount),
            f"x-ratelimit-remaining-{what}": str(remaining),
            f"x-ratelimit-reset-{what}": _amount(nearest.reset),
        }

    def _wait(self, item: RateLimitItem, limit: _Limit, cost: int) -> int:
        """Seconds until `cost` fits: first the count of the previous window decays linearly, then that of the current
        one."""
        window = self._settings.window
        state = self._window(item, limit)
        room = item.amount - cost
        if state.now <= room:
            seconds = state.before_left - (room - state.now) * window / state.before if state.before else 0.0
        else:
            seconds = max(0.0, state.now_left - window) + window - room * window / state.now
        return max(_SOON, math.ceil(seconds))

    def _hit(self, item: RateLimitItem, limit: _Limit, cost: int) -> bool:
        return self._call(lambda: self._counter.hit(item, limit.name, cost=cost), True)

    def _windows_of(self, items: list[tuple[RateLimitItem, _Limit]]) -> list[_Window]:
        return [self._window(item, limit) for item, limit in items]

    def _window(self, item: RateLimitItem, limit: _Limit) -> _Window:
        key, window = item.key_for(limit.name), self._settings.window
        found = self._call(lambda: self._windows.get_sliding_window(key, window), (0, 0.0, 0, 0.0))
        return _Window(item.amount, *found)

    def _enter(
        self, whose: str, name: str, request: str, most: int, seconds: float, count: int, multiplier: str
    ) -> None:
        """Take `count` concurrency slots; raises `ApiError` (429)."""
        if count > most:
            message = f"{multiplier} asks for {count} rows, but {whose} may have {most} under way; send more requests"
            raise ApiError(429, CODE, message, param=multiplier, headers={"x-should-retry": "false"})
        if not self._call(partial(self._running.enter, name, request, most, seconds, count), True):
            message = f"{whose} has {most} requests under way already; ask again when one has ended"
            if name.endswith(_ROWS):
                message = (
                    f"{whose} may have {most} rows under way, and too few are free; ask again when some have ended"
                )
            raise ApiError(429, CODE, message, headers={"Retry-After": str(_SOON)})

    def _leave(self, names: list[str] | tuple[str, ...], request: str, rows: int) -> None:
        for name in names:
            count = rows if name.endswith(_ROWS) else 1
            self._call(partial(self._running.leave, name, request, count), None)

    def _call(self, what: Callable[[], Result], fallback: Result) -> Result:
        """Call the storage; returns `fallback` while it can't be reached."""
        if self._clock.monotonic() < self._away_until:
            return fallback
        try:
            return what()
        except (StorageError, ServiceUnavailable) as error:
            self._away_until = self._clock.monotonic() + _AWAY_SECONDS
            logger.warning("limits_not_counted", reason=_reason(error), seconds=_AWAY_SECONDS)
            return fallback


def _reason(error: StorageError | ServiceUnavailable) -> str:
    """The reason of a storage failure without the address, which may hold a password."""
    return type(error.storage_error).__name__ if isinstance(error, StorageError) else str(error)


def _amount(seconds: float) -> str:
    """A duration in OpenAI's format: 1m30s."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
