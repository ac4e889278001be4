"""What speculation gains, from steps as they were: tokens that stayed, against the time that the drafts took.

A step with drafts that decodes `rows` rows samples `rows + accepted` tokens in `seconds`, which hold all that the
drafts cost: guessing them, computing and checking them. Without drafts a step of as many rows takes `plain` seconds, by
what such steps took here lately, so the same time would have brought `rows * seconds / plain` tokens. What the drafts
gained is the difference:

    gained = accepted - rows * (seconds - plain) / plain

tokens, less than 0 where they cost more than they brought. Only steps in which every row decodes are compared; of steps
with so many rows as were never seen without drafts nothing can be said, and they are left out.
"""

from __future__ import annotations

from engine.speculative.draft_lengths import StepCosts


class Gain:
    """Adds up what drafts gained.

    Attributes:
        tokens: gained, over all steps with drafts that could be compared.  seconds: of these steps.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self.seconds = 0.0
        self._costs = StepCosts()

    def note(self, rows: int, drafted: int, accepted: int, seconds: float) -> float:
        """A step of so many rows, all decoding, took this time; of so many drafts in it, so many stayed. Returns what
        they gained; 0 where that can't be said."""
        if not drafted:
            self._costs.note(rows, 0, seconds)
        elif (plain := self._costs.plain(rows)) is not None:
            gained = accepted - rows * (seconds - plain) / plain
            self.tokens += gained
            self.seconds += seconds
            return gained
        return 0.0

    def can_compare(self, rows: int) -> bool:
        """Whether it is known what a step of so many rows takes without drafts."""
        return self._costs.plain(rows) is not None
