"""The bulk tier's reserved share: urgent work goes first, but waiting bulk work gets a twentieth of computed tokens.

With each urgent shard, bulk work is owed its share of tokens. When a shard's worth is owed, the next shard is taken
from the bulk queue and computed as if it were urgent; else its rows would be preempted by urgent ones.
"""

from __future__ import annotations

from typing import Final

from schemas.jobs.job import Tier

FLOOR: Final = 0.05
"""Minimum share of computed tokens for bulk work, while some waits."""


class BulkReserve:
    """One worker's account of owed tokens. `floor`: the reserved share, below 1; 0 for none."""

    def __init__(self, floor: float = FLOOR) -> None:
        if not 0 <= floor < 1:
            raise ValueError(f"the floor is {floor}; it must be from 0 and below 1")
        self._per_token = floor / (1 - floor)
        self._owed = 0.0
        self._max_owed = 0  # tokens of the largest shard: a long wait is not made up for all at once

    @property
    def due(self) -> bool:
        """Whether bulk work goes first now."""
        return self._owed > 0 and self._owed >= self._max_owed

    def took(self, tier: Tier, tokens: int) -> None:
        """Account for a taken shard of so many expected tokens."""
        self._max_owed = max(self._max_owed, tokens)
        change = -tokens if tier is Tier.BULK else tokens * self._per_token
        self._owed = max(0.0, min(self._owed + change, self._max_owed))
