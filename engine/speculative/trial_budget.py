"""What drafts may lose: a small share of the tokens that were decoded, so that none are tried before they can pay.

Whether drafts pay is only known when some were tried, and a trial costs time. A job of a few short answers ends before
it has paid that back. So drafts have a budget in tokens: it grows by `SHARE` of what is decoded, with or without
drafts, and by what drafts gain (`engine.speculative.gain`), and shrinks by what they lose. They begin when it holds
what a trial costs at worst, beside rows that may still get `PAYBACK` times as many tokens, and end when nothing is
left of it.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.05
"""Of the tokens that are decoded, what drafts may lose."""

TRIAL_TOKENS: Final = 4
"""What a trial costs at worst, for each row: a step with some drafts of which none stays."""

PAYBACK: Final = 8
"""So many times a trial's cost the rows must still be able to get."""


class TrialBudget:
    """Says whether rows may draft, by what drafts have gained and lost.

    Attributes:
        tokens: that drafts may lose now.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self._begun = False

    def allows(self, rows: int, left: int) -> bool:
        """Whether so many rows, which may get `left` tokens more together, may draft."""
        if self._begun:
            self._begun = self.tokens > 0
        else:
            cost = TRIAL_TOKENS * rows
            self._begun = self.tokens >= cost and left >= PAYBACK * cost
        return self._begun

    def note(self, rows: int, drafted: int, gained: float) -> None:
        """A step in which so many rows, and nothing else, decoded, with so many drafts, which gained so many tokens. A
        draft loses no more than a token, whatever else ran on the machine."""
        change = SHARE * rows + max(gained, -drafted)
        # What is gained is no licence: where a text stops copying, drafts end soon.
        self.tokens = min(self.tokens + change, max(self.tokens, 2.0 * TRIAL_TOKENS * rows))
