"""Rows of jobs wait for a content policy that can't judge at present. Requests whose callers wait never do.

A row waits until the policy judges at all, not until it has judged the row's own text. So all rows wait for the same
outage, and a text that alone takes the policy too long fails soon.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import structlog

from pipeline.ports import Clock
from workers.errors import WorkerError

MAX_TRIES: Final = 2
"""How often a text is judged while the policy is available."""

POLL_SECONDS: Final = 0.1
"""Interval in which a waiting row looks whether it may wait any longer."""

MIN_PROBE_SECONDS: Final = 1.0
MAX_PROBE_SECONDS: Final = 10.0
"""Bounds of the interval of probes, which grows with the outage."""

Verdict = TypeVar("Verdict")

logger = structlog.get_logger(__name__)


class PolicyUnavailable(WorkerError):
    """Raised by a policy that can't judge a text now, and may be able to later."""


class JudgingInterrupted(WorkerError):
    """Raised when a row must not wait for a policy any longer: the worker stops, or waits for the row's thread. The row
    has no outcome; its shard is released."""


class PolicyRetry:
    """Judges texts again after outages of the policies that have `retry_seconds` and `is_available` (see
    `ContentPolicy`). Thread-safe.

    Args:
        may_wait: whether rows may wait at present.
    """

    def __init__(self, clock: Clock, may_wait: Callable[[], bool]) -> None:
        self._clock = clock
        self._may_wait = may_wait
        self._lock = threading.Lock()
        self._outages: dict[int, _Outage] = {}

    def judge(self, name: str, policy: Any, judge: Callable[[], Verdict]) -> Verdict:
        """The verdict of `judge`, which asks the policy. It is called again after an outage of the policy, for at most
        its `retry_seconds` since the outage began, and once more where there is none.

        Raises:
            PolicyUnavailable: that of the last call.  JudgingInterrupted: see there.
        """
        retry_seconds = getattr(policy, "retry_seconds", 0.0)
        if not retry_seconds:
            return judge()
        outage = self._outage_of(name, policy)
        tries = 0
        while True:
            began = self._clock.monotonic()
            try:
                verdict = judge()
            except PolicyUnavailable:
                if not self._wait(outage, retry_seconds):
                    raise
                tries += began >= outage.ended_at
                if tries >= MAX_TRIES:
                    raise
            else:
                if outage.is_on:  # the verdict doesn't show that it is over: it may be one that is remembered
                    outage.is_over(began)
                return verdict

    def _outage_of(self, name: str, policy: Any) -> _Outage:
        with self._lock:
            return self._outages.setdefault(id(policy), _Outage(name, policy, self._clock))

    def _wait(self, outage: _Outage, retry_seconds: float) -> bool:
        """Wait until the policy is available; False: the outage lasts longer than `retry_seconds`."""
        failed_at = self._clock.monotonic()
        while True:
            if not self._may_wait():
                raise JudgingInterrupted("a row waited for a content policy, and is not judged")
            if outage.is_over(failed_at):
                return True
            if outage.seconds >= retry_seconds:
                return False
            self._clock.sleep(POLL_SECONDS)


class _Outage:
    """Whether a policy is available, as its last probe found. Thread-safe.

    Attributes:
        ended_at: end of the last outage, by the clock.
    """

    def __init__(self, name: str, policy: Any, clock: Clock) -> None:
        self._name = name
        self._policy = policy
        self._now = clock.monotonic
        self._lock = threading.Lock()
        self._since = math.inf  # no outage
        self._next_probe = 0.0
        self._available_at = -math.inf
        self.ended_at = -math.inf

    @property
    def is_on(self) -> bool:
        """Whether the last probe found an outage."""
        return not math.isinf(self._since)

    @property
    def seconds(self) -> float:
        """How long the outage has lasted; 0: there is none."""
        return max(0.0, self._now() - self._since)

    def is_over(self, failed_at: float) -> bool:
        """Whether the policy is available: a probe after `failed_at` found so. Probes when it is time."""
        with self._lock:
            began = self._now()
            if self._available_at >= failed_at:
                return True
            if began < self._next_probe:
                return False
            if self._policy.is_available():
                self._end(began)
                return True
            now = self._now()
            if not self.is_on:
                self._since = failed_at
                logger.error("a content policy can't judge: rows of jobs wait for it", policy=self._name)
            self._next_probe = now + min(MAX_PROBE_SECONDS, max(MIN_PROBE_SECONDS, (now - self._since) / 4))
            return False

    def _end(self, began: float) -> None:
        """A probe that began then was answered."""
        self._available_at, self._next_probe = began, 0.0
        if not self.is_on:
            return
        logger.info("a content policy judges again", policy=self._name, seconds=round(self.seconds, 1))
        self._since, self.ended_at = math.inf, self._now()
