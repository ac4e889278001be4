"""Leader election among processes that could all do the same work, by a lease that the leader renews.

It only saves work. While the lease server doesn't answer, every contender leads, which is safe: the work is idempotent.
"""

from __future__ import annotations

from typing import Final

import structlog

from pipeline.ports import Clock, Lease
from pipeline.runtime.availability import ServiceUnavailable

RENEW_SECONDS: Final = 2.0
"""Interval between two renewals."""

logger = structlog.get_logger(__name__)


class LeaderElection:
    """One contender, used by one thread. With `lease` None it is the only contender, and always leads.

    Args:
        what: the leader's work, for the log.
    """

    def __init__(
        self, lease: Lease | None, clock: Clock, what: str, renew_interval_seconds: float = RENEW_SECONDS
    ) -> None:
        self._lease = lease
        self._clock = clock
        self._what = what
        self._renew_interval_seconds = renew_interval_seconds
        self._leads = lease is None
        self._next_renewal = 0.0

    def now(self) -> bool:
        """Whether this contender leads now; renews the lease when that is due."""
        at = self._clock.monotonic()
        if self._lease is not None and at >= self._next_renewal:
            self._next_renewal = at + self._renew_interval_seconds
            try:
                leads = self._lease.renew()
            except ServiceUnavailable as error:
                logger.warning("the lease can't be requested", what=self._what, reason=str(error))
                leads = True
            if leads is not self._leads:
                logger.info("leading" if leads else "another leads", what=self._what)
            self._leads = leads
        return self._leads

    def give_up(self) -> None:
        """Release the lease, so that another contender can lead immediately."""
        if self._lease is not None and self._leads:
            try:
                self._lease.release()
            except ServiceUnavailable as error:
                logger.warning("the lease can't be released", what=self._what, reason=str(error))
