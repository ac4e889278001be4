"""The token budget of a step, below the settings' one while the device is short of memory.

A step that runs out of memory halves the budget. After some hundred steps without that, the budget is doubled again, up
to the settings' one. Each further failure doubles that interval, so that a device with too little memory is seldom
retried, and a device that other processes used for a while is fully used again.
"""

from __future__ import annotations

STEPS_BEFORE_GROWTH = 256
"""Initial number of steps without failure before larger ones are tried."""

MAX_STEPS_BEFORE_GROWTH = 1 << 16


class TokenBudget:
    """Adapts the token budget of a step to the device's memory.

    Args:
        max_tokens: the settings' budget.

    Attributes:
        tokens: the current budget; 1 at least.
    """

    def __init__(self, max_tokens: int) -> None:
        self.tokens = max_tokens
        self._max_tokens = max_tokens
        self._steps_before_growth = STEPS_BEFORE_GROWTH
        self._num_succeeded = 0

    def shrink(self) -> bool:
        """Halve the budget after a step ran out of memory. False: it is 1 already."""
        self._num_succeeded = 0
        self._steps_before_growth = min(2 * self._steps_before_growth, MAX_STEPS_BEFORE_GROWTH)
        if self.tokens == 1:
            return False
        self.tokens //= 2
        return True

    def record_success(self) -> None:
        """Record a step that did not run out of memory."""
        if self.tokens == self._max_tokens:
            return
        self._num_succeeded += 1
        if self._num_succeeded >= self._steps_before_growth:
            self._num_succeeded = 0
            self.tokens = min(2 * self.tokens, self._max_tokens)
