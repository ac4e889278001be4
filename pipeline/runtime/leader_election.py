"""Whose turn it is, of several that could all do the same work: a lease that is renewed in time.

It only saves work. Without an answer from where the lease lies everybody's turn has come, which is safe for all and
wrong for none.
"""

from __future__ import annotations

from typing import Final

import structlog

from pipeline.ports import Clock, Lease
from pipeline.runtime.availability import ServiceUnavailable

RENEW_SECONDS: Final = 2.0
"""Between two renewals."""

logger = structlog.get_logger(__name__)


class Leading:
    """One contender, of one thread. `lease` None: nobody else is there, and it always leads.

    Args:
        what: is done by whoever leads, for the log.
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
        """Whether the work is ours now."""
        at = self._clock.monotonic()
        if self._lease is not None and at >= self._next_renewal:
            self._next_renewal = at + self._renew_interval_seconds
            try:
                leads = self._lease.renew()
            except ServiceUnavailable as error:
                logger.warning("the lease can't be asked for", what=self._what, reason=str(error))
                leads = True
            if leads is not self._leads:
                logger.info("leading" if leads else "another leads", what=self._what)
            self._leads = leads
        return self._leads

    def give_up(self) -> None:
        """Let another have its turn at once."""
        if self._lease is not None and self._leads:
            try:
                self._lease.release()
            except ServiceUnavailable as error:
                logger.warning("the lease can't be given back", what=self._what, reason=str(error))
