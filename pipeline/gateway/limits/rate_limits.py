"""How much a tenant and a key may ask for: requests and tokens in a sliding minute, and requests that run at once.

Tokens are taken when a request is admitted: its prompt, as it is estimated, and the most that it may be answered. When
it ends within the window in which they were taken, what it did not use is given back. Counted by the `limits` library,
on Redis for all gateways together, or in this process. Where Redis can't be asked, everything is let through, and the
log says so: to serve is worth more than to count.
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
from pipeline.gateway.limits.concurrency import ConcurrencySlots, MemoryRunning
from pipeline.gateway.limits.storage_quota import StorageQuota
from pipeline.ports import Clock
from pipeline.runtime.availability import ServiceUnavailable
from schemas.requests.limits import RateLimits

WINDOW_SECONDS: Final = 60
CODE: Final = "rate_limit_exceeded"
_AWAY_SECONDS: Final = 5.0
"""After a failure Redis isn't asked for so long: requests would wait for it one after the other."""
_SOON: Final = 1
_ROWS: Final = ":rows"
"""Behind a name under which rows are counted, and not requests."""

_JOBS_SECONDS: Final = 30

Counted = Literal["requests", "tokens"]
Result = TypeVar("Result")
Headers = dict[str, str]

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RateSettings:
    """Who may ask for how much.

    Attributes:
        tenant: of each tenant, over all of its keys.  tenants: of those that have their own.
        key: of each key; what a key says itself comes first.
        default_stored: bytes and files of a tenant with keys, where neither it nor the key has such limits.
        default_rows: running rows of a tenant with keys, where neither it nor the key has a limit of running requests
            or rows; None: there is no such limit.
        window: seconds over which is counted.
    """

    tenant: RateLimits = field(default_factory=RateLimits)
    tenants: Mapping[str, RateLimits] = field(default_factory=dict)
    key: RateLimits = field(default_factory=RateLimits)
    default_rows: Callable[[], int] | None = None
    default_stored: StorageQuota = field(default_factory=StorageQuota)
    window: int = WINDOW_SECONDS


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request to a model that was admitted.

    Attributes:
        names: under which it runs.  rows: its answers.
        tokens: taken for it, in windows of which the first ends at `until` (monotonic).
        headers: of its answer.
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
        """No limit holds for it: there is nothing to give back."""
        return not (self.names or self.headers)


@dataclass(frozen=True, slots=True)
class _Limit:
    """One that holds for the caller. `whose` names it in messages."""

    whose: str
    name: str
    limits: RateLimits


@dataclass(frozen=True, slots=True)
class _Window:
    """How a limit stands.

    Attributes:
        amount: that may be counted.
        before, now: counted in the window before, and in this one.
        before_left, now_left: seconds until they count for nothing, two windows from the beginning of each.
    """

    amount: int
    before: int
    before_left: float
    now: int
    now_left: float

    def left(self, window: float) -> int:
        """How many may still be counted."""
        used = math.floor(self.before * self.before_left / window) + self.now
        return min(self.amount, max(0, self.amount - used))

    @property
    def reset(self) -> float:
        """Seconds until all may be again."""
        return self.now_left if self.now > 0 else self.before_left if self.before > 0 else 0.0


class RateLimiter:
    """Counts. Threads may share one.

    Args:
        windows, running: where is counted; None: in this process.
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
        self._running = running or MemoryRunning(clock)
        self._counter = SlidingWindowCounterRateLimiter(self._windows)

    def take_request(self, caller: Caller) -> Headers:
        """Count a request of any kind; the headers that say how many are left. Raises `ApiError` (429)."""
        return self._headers("requests", self._take("requests", caller, 1))

    def admit(self, caller: Caller, request: str, tokens: int, seconds: float, rows: int = 1) -> AdmittedRequest:
        """Let a request to a model begin, or raise `ApiError` (429). It is to be given back with `done`.

        Args:
            tokens: that it may use at most, as far as is known.  seconds: that it takes at most.
            rows: answers that it has: `n`.
        """
        names: list[str] = []
        try:
            for limit in self._limits(caller):
                for name, most, count in (
                    (limit.name, limit.limits.running_requests, 1),
                    (limit.name + _ROWS, limit.limits.running_rows, rows),
                ):
                    if most is not None:
                        self._enter(limit.whose, name, request, most, seconds, count)
                        names.append(name)
            windows = self._take("tokens", caller, tokens)
        except ApiError:
            self._leave(names, request, rows)
            raise
        left = min((one.now_left for one in windows), default=0.0) - self._settings.window
        until = self._clock.monotonic() + left
        return AdmittedRequest(caller, request, tuple(names), rows, tokens, until, self._headers("tokens", windows))

    def done(self, ticket: AdmittedRequest, used: int | None) -> None:
        """The request has ended, after so many tokens; None: it isn't known."""
        self._leave(ticket.names, ticket.request, ticket.rows)
        # Later they would be given to another window than they were taken from: more could be asked for in it then.
        if used is not None and used < ticket.tokens and self._clock.monotonic() < ticket.until:
            for item, limit in self._items("tokens", ticket.caller):
                self._hit(item, limit, used - ticket.tokens)

    def check_jobs(self, caller: Caller, running: Callable[[], int]) -> None:
        """Raises `ApiError` (429) when as many jobs of the tenant are open as may be."""
        allowed = [limit.limits.running_jobs for limit in self._limits(caller)]
        most = min((most for most in allowed if most is not None), default=None)
        if most is not None and running() >= most:
            message = f"{most} jobs of yours are open, and no more may be; submit again when one has ended"
            raise ApiError(429, CODE, message, headers={"Retry-After": str(_JOBS_SECONDS)})

    def storage_quota(self, caller: Caller) -> StorageQuota:
        """What the caller's tenant may have stored."""
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
        """Count against all limits, or against none; how they stand."""
        items = self._items(what, caller)
        for number, (item, limit) in enumerate(items):
            if cost > item.amount:
                why = f"this request may need {cost:,} {what}, but {limit.whose} has {item.amount:,} a minute"
                refused = {"x-should-retry": "false"}  # OpenAI's clients would ask again, and never succeed
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
        """OpenAI's, of the limit that is the nearest."""
        if not windows:
            return {}
        left, nearest = min(((one.left(self._settings.window), one) for one in windows), key=lambda one: one[0])
        return {
            f"x-ratelimit-limit-{what}": str(nearest.amount),
            f"x-ratelimit-remaining-{what}": str(left),
            f"x-ratelimit-reset-{what}": _amount(nearest.reset),
        }

    def _wait(self, item: RateLimitItem, limit: _Limit, cost: int) -> int:
        """Seconds until `cost` fits: what was counted in the window before counts less and less, and then what is
        counted in this one does."""
        window = self._settings.window
        stands = self._window(item, limit)
        room = item.amount - cost
        if stands.now <= room:
            seconds = stands.before_left - (room - stands.now) * window / stands.before if stands.before else 0.0
        else:
            seconds = max(0.0, stands.now_left - window) + window - room * window / stands.now
        return max(_SOON, math.ceil(seconds))

    def _hit(self, item: RateLimitItem, limit: _Limit, cost: int) -> bool:
        return self._ask(lambda: self._counter.hit(item, limit.name, cost=cost), True)

    def _windows_of(self, items: list[tuple[RateLimitItem, _Limit]]) -> list[_Window]:
        return [self._window(item, limit) for item, limit in items]

    def _window(self, item: RateLimitItem, limit: _Limit) -> _Window:
        key, window = item.key_for(limit.name), self._settings.window
        found = self._ask(lambda: self._windows.get_sliding_window(key, window), (0, 0.0, 0, 0.0))
        return _Window(item.amount, *found)

    def _enter(self, whose: str, name: str, request: str, most: int, seconds: float, count: int) -> None:
        """Take as many places; raises `ApiError`."""
        if count > most:
            message = f"n is {count}, but {whose} may have {most} rows under way; lower n"
            raise ApiError(429, CODE, message, param="n", headers={"x-should-retry": "false"})
        if not self._ask(partial(self._running.enter, name, request, most, seconds, count), True):
            message = f"{whose} has {most} requests under way already; ask again when one has ended"
            if name.endswith(_ROWS):
                message = (
                    f"{whose} may have {most} rows under way, and too few are free; ask again when some have ended"
                )
            raise ApiError(429, CODE, message, headers={"Retry-After": str(_SOON)})

    def _leave(self, names: list[str] | tuple[str, ...], request: str, rows: int) -> None:
        for name in names:
            count = rows if name.endswith(_ROWS) else 1
            self._ask(partial(self._running.leave, name, request, count), None)

    def _ask(self, what: Callable[[], Result], without: Result) -> Result:
        """What Redis says; `without` where it can't be asked."""
        if self._clock.monotonic() < self._away_until:
            return without
        try:
            return what()
        except (StorageError, ServiceUnavailable) as error:
            self._away_until = self._clock.monotonic() + _AWAY_SECONDS
            logger.warning("limits_not_counted", reason=_reason(error), seconds=_AWAY_SECONDS)
            return without


def _reason(error: StorageError | ServiceUnavailable) -> str:
    """Without the address, which may hold a password."""
    return type(error.storage_error).__name__ if isinstance(error, StorageError) else str(error)


def _amount(seconds: float) -> str:
    """As OpenAI gives it: 1m30s."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
