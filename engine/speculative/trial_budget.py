"""The trial budget: limits the tokens that drafts may lose to a small share of the decoded ones.

Only a trial shows whether drafts pay, and a trial costs time. A job of a few short answers ends before it has recovered
that cost. So drafts have a budget in tokens. It grows by `SHARE` of the decoded tokens, with or without drafts, and by
the drafts' gain (`engine.speculative.gain`), and shrinks by their loss. Drafting begins when the budget covers the
worst cost of a trial and the running rows may still get `PAYBACK` times as many tokens; it ends when the budget is
used up.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.05
"""Share of the decoded tokens that drafts may lose."""

TRIAL_TOKENS: Final = 4
"""Worst cost of a trial, for each row: a step with some drafts of which none is accepted."""

PAYBACK: Final = 8
"""Minimum of the tokens that the rows may still get, as a multiple of a trial's cost."""


class TrialBudget:
    """Decides whether rows may draft, by the gain and loss of drafts so far.

    Attributes:
        tokens: that drafts may lose now.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self._begun = False

    def allows(self, rows: int, left: int) -> bool:
        """Whether so many rows, which may get `left` more tokens in total, may draft."""
        if self._begun:
            self._begun = self.tokens > 0
        else:
            cost = TRIAL_TOKENS * rows
            self._begun = self.tokens >= cost and left >= PAYBACK * cost
        return self._begun

    def record(self, rows: int, drafted: int, gained: float) -> None:
        """Record a decode-only step: its rows, drafts and gain in tokens. A draft loses at most one token; a larger
        loss was caused by other processes."""
        change = SHARE * rows + max(gained, -drafted)
        # The budget is capped, so that drafts end soon where a text stops copying.
        self.tokens = min(self.tokens + change, max(self.tokens, 2.0 * TRIAL_TOKENS * rows))
