"""What a gateway knows by itself of one model's queue: its own requests, as they are sent, begin and end, and how many
wait on the lane in all. It is exact at once where the workers' reports are seconds old."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Final

from pipeline.overload.forecast import PoolLoad

_WINDOW_SECONDS: Final = 5.0
_MIN_WINDOW_SECONDS: Final = 1.0
_MIN_STARTS: Final = 5
_MAX_STARTS: Final = 4_096
"""Starts at other gateways that are remembered: rows of all batches, at most."""
_SMOOTHING: Final = 0.2
"""Weight of the latest sample in the mean time to a first token without waiting."""


@dataclass(slots=True)
class OwnRequest:
    """An open request of this gateway.

    Attributes:
        model: `ModelPin.key`.
        admitted_at: seconds.
        is_unhindered: a row was free when it was admitted.
        has_begun: it has its first token.
    """

    model: str
    tenant: str
    admitted_at: float
    is_unhindered: bool
    has_begun: bool = False


@dataclass(slots=True)
class QueueState:
    """The queue of one model.

    Attributes:
        waiting: this gateway's requests without a first token, by tenant.
        running: its others, by id -> time of the first token.
        others_waiting: those of other gateways, when the lane was read last (`set_total`).
        first_token_seconds: mean time from admission to the first token while a row was free.
        reported: the load by the workers' reports; None: not measured, or too long ago.
        peak: the highest load since the ladder was updated.
    """

    waiting: Counter[str] = field(default_factory=Counter)
    running: dict[str, float] = field(default_factory=dict)
    others_waiting: int = 0
    first_token_seconds: float | None = None
    reported: PoolLoad | None = None
    peak: float = 0.0
    _others_starts: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_STARTS))
    _starts: deque[float] = field(default_factory=deque)
    _full_since: float | None = None
    _held_before: float = 0.0  # rows that were held before that
    _totals: deque[int] = field(default_factory=lambda: deque(maxlen=2))  # waiting, at the last two readings

    @property
    def total_waiting(self) -> int:
        """Requests without a first token, of all gateways."""
        return self.waiting.total() + self.others_waiting

    def set_total(self, total: int, own: int, now: float) -> None:
        """Record the requests that wait on the lane, and the own ones among them. Others that wait no longer have
        begun since the last reading, but for those whose callers left."""
        self._totals.append(total)
        others = max(0, total - own)
        self._others_starts.extend([now] * (self.others_waiting - others))
        self.others_waiting = others

    def enter(self, request: OwnRequest) -> None:
        """Count an admitted request."""
        self.waiting[request.tenant] += 1

    def begin(self, request_id: str, request: OwnRequest, now: float) -> None:
        """The request has its first token."""
        request.has_begun = True
        self._leave_queue(request)
        self.running[request_id] = now
        self._starts.append(now)
        if request.is_unhindered:
            seconds, mean = now - request.admitted_at, self.first_token_seconds
            self.first_token_seconds = seconds if mean is None else mean + _SMOOTHING * (seconds - mean)

    def end(self, request_id: str, request: OwnRequest) -> None:
        """The request has ended, in whatever way."""
        if request.has_begun:
            del self.running[request_id]
        else:
            self._leave_queue(request)

    def _leave_queue(self, request: OwnRequest) -> None:
        self.waiting[request.tenant] -= 1
        if not self.waiting[request.tenant]:
            del self.waiting[request.tenant]

    def load(self, now: float) -> PoolLoad | None:
        """The load now: the reported one, with this gateway's own requests, and corrected by the rate at which their
        answers begin while all rows are held."""
        if self.reported is None:
            return None
        load = replace(self.reported, first_token_seconds=self.first_token_seconds or 0.0)
        running = max(load.running, float(len(self.running)))
        beginning = load.slots * load.first_token_seconds / load.slot_seconds if load.slot_seconds else 0.0
        if min(self._totals, default=0) > beginning + 1:  # else they would have begun: no row is free
            running = max(running, load.slots - beginning)
        if running + self.total_waiting <= load.slots:
            self._full_since, self._held_before = None, running
            return replace(load, running=running, ages=self._ages(load, running, now))
        self._full_since = now if self._full_since is None else self._full_since
        load = replace(load, running=running, ages=self._ages(load, running, now))
        window = min(_WINDOW_SECONDS, now - self._full_since)
        while self._starts and self._starts[0] < now - _WINDOW_SECONDS:
            self._starts.popleft()
        starts, own = sum(at > now - window for at in self._starts), self.waiting.total()
        if window < _MIN_WINDOW_SECONDS or starts < _MIN_STARTS or not own:
            return load
        return load.corrected(starts / window * self.total_waiting / own)

    def _ages(self, load: PoolLoad, running: float, now: float) -> tuple[float, ...]:
        """For how long rows have been held: by own requests, by others since they don't wait, and the rows that were
        free before all were held. Rows of others that are older than a mean answer have probably ended."""
        first = load.first_token_seconds
        own = [now - began + first for began in self.running.values()]
        others = [now - at + first for at in reversed(self._others_starts)]
        if self._full_since is not None:
            others += [now - self._full_since + first] * int(running - self._held_before)
        return (*own, *(age for age in others if age < load.slot_seconds))[: int(running)]
