"""The measured gain of speculation: accepted tokens against the time that the drafts took.

A step with drafts that decodes `rows` rows samples `rows + accepted` tokens in `seconds`, which include all costs of
the drafts: proposing, computing and verifying them. Without drafts a step of as many rows takes `plain` seconds, the
mean of the latest such steps, so the same time would have yielded `rows * seconds / plain` tokens. The gain is the
difference:

    gained = accepted - rows * (seconds - plain) / plain

tokens, negative where the drafts cost more than they yielded. Only steps in which every row decodes are compared. Steps
with a row count that was never measured without drafts are left out.
"""

from __future__ import annotations

from engine.speculative.draft_lengths import StepCosts


class Gain:
    """Sums the gain of drafts.

    Attributes:
        tokens: gained, over all steps with drafts that could be compared.  seconds: of these steps.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self.seconds = 0.0
        self._costs = StepCosts()

    def record(self, rows: int, drafted: int, accepted: int, seconds: float) -> float:
        """Record a step in which all rows decode: its rows, drafts, accepted drafts and time. Returns the gain; 0 where
        there is no measurement to compare with."""
        if not drafted:
            self._costs.record(rows, 0, seconds)
        elif (plain := self._costs.plain(rows)) is not None:
            gained = accepted - rows * (seconds - plain) / plain
            self.tokens += gained
            self.seconds += seconds
            return gained
        return 0.0

    def can_compare(self, rows: int) -> bool:
        """Whether the time of a step of so many rows without drafts is known."""
        return self._costs.plain(rows) is not None
