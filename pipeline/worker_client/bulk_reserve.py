"""What is urgent goes first, but bulk work is never starved: it gets a twentieth of what is computed while it waits.

With each urgent shard bulk work is owed its share of tokens. When a shard's worth is owed, the next one is taken from
the bulk queue and computed as if it were urgent; or its rows would be put back for those that are.
"""

from __future__ import annotations

from typing import Final

from schemas.jobs.job import Tier

FLOOR: Final = 0.05
"""Bulk's least share of computed tokens, while some waits."""


class BulkReserve:
    """One worker's account. `floor`: the share, below 1; 0 for none."""

    def __init__(self, floor: float = FLOOR) -> None:
        if not 0 <= floor < 1:
            raise ValueError(f"the floor is {floor}; it must be from 0 and below 1")
        self._per_token = floor / (1 - floor)
        self._owed = 0.0
        self._most = 0  # tokens of the largest shard: what waited long is not made up for all at once

    @property
    def due(self) -> bool:
        """Bulk work goes first now."""
        return self._owed > 0 and self._owed >= self._most

    def took(self, tier: Tier, tokens: int) -> None:
        """A shard was taken, of so many expected tokens."""
        self._most = max(self._most, tokens)
        change = -tokens if tier is Tier.BULK else tokens * self._per_token
        self._owed = max(0.0, min(self._owed + change, self._most))
