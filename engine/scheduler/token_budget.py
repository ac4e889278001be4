"""The token budget of a step, below the settings' one while the device is short of memory.

A step that runs out of memory halves the budget. After some hundred steps without that, the budget is doubled again, up
to the settings' one. Each further failure doubles that interval, so that a device with too little memory is seldom
retried, and a device that other processes used for a while is fully used again.
"""

from __future__ import annotations

PATIENCE = 256
"""Initial number of steps without failure before larger ones are tried."""

MOST_PATIENCE = 1 << 16


class TokenBudget:
    """Adapts the token budget of a step to the device's memory.

    Args:
        most: the settings' budget.

    Attributes:
        tokens: the current budget; 1 at least.
    """

    def __init__(self, most: int) -> None:
        self.tokens = most
        self._most = most
        self._patience = PATIENCE
        self._worked = 0

    def shrink(self) -> bool:
        """Halve the budget after a step ran out of memory. False: it is 1 already."""
        self._worked = 0
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        if self.tokens == 1:
            return False
        self.tokens //= 2
        return True

    def worked(self) -> None:
        """Record a step that did not run out of memory."""
        if self.tokens == self._most:
            return
        self._worked += 1
        if self._worked >= self._patience:
            self._worked = 0
            self.tokens = min(2 * self.tokens, self._most)
