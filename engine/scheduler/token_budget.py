"""How many tokens a step may hold, while the device has room for fewer than the settings say.

A step that had no room halves the number; after some hundred steps that had, it is doubled again, up to what the
settings say. Each further failure doubles that wait, so that a device which is too small for good is seldom tried, and
one that others used for a while is used to the full again.
"""

from __future__ import annotations

PATIENCE = 256
"""Steps with room before larger ones are tried again, at first."""

MOST_PATIENCE = 1 << 16


class TokenBudget:
    """A step's tokens.

    Args:
        most: by the settings.

    Attributes:
        tokens: most of a step now; 1 at least.
    """

    def __init__(self, most: int) -> None:
        self.tokens = most
        self._most = most
        self._patience = PATIENCE
        self._worked = 0

    def shrink(self) -> bool:
        """A step had no room. False: it can't be smaller."""
        self._worked = 0
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        if self.tokens == 1:
            return False
        self.tokens //= 2
        return True

    def worked(self) -> None:
        """A step had room."""
        if self.tokens == self._most:
            return
        self._worked += 1
        if self._worked >= self._patience:
            self._worked = 0
            self.tokens = min(2 * self.tokens, self._most)
