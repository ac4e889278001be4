"""The cost of one open job, for spending limits: of its parts, and of attempts at shards that are still open."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from datetime import UTC

from pipeline.jobs.cost import JobCost, part_cost
from pipeline.ledger.ledger import JobLedger
from pipeline.results.part_files import PartEntry
from pipeline.results.shard_history import read_worked


class OpenJobCost:
    """Adds up a job's cost.

    Args:
        price_per_hour: of workers that report no price; None: unknown.
        taken_over: another dispatcher may have driven the job before, so attempts at open shards may have cost already.

    Attributes:
        spent: cost of the parts.  by_day: the same by day of commit (UTC, `YYYY-MM-DD`).
        logged_cost: cost of attempts at open shards, by shard, where it was read.
    """

    def __init__(self, ledger: JobLedger, price_per_hour: float | None, *, taken_over: bool) -> None:
        self.spent = JobCost()
        self.by_day: defaultdict[str, float] = defaultdict(float)
        self.logged_cost: dict[int, float] = {}
        self._ledger = ledger
        self._price_per_hour = price_per_hour
        self._has_logged_costs = not taken_over
        self._cost_of: defaultdict[str, float] = defaultdict(float)  # of parts, by model
        self._tokens_of: Counter[str] = Counter()  # planned for these parts, by model

    def add_part(self, entry: PartEntry, model: str, tokens: int) -> None:
        """Add the part of a shard of this model, for which `tokens` were planned."""
        self.logged_cost.pop(entry.number, None)
        cost = part_cost(entry.summary, self._price_per_hour)
        self.spent.seconds += cost.seconds
        self.spent.cost += cost.cost
        self.spent.unpriced += cost.unpriced
        self.by_day[entry.summary.committed_at.astimezone(UTC).date().isoformat()] += cost.cost
        if not cost.unpriced and cost.seconds:
            self._cost_of[model] += cost.cost
            self._tokens_of[model] += tokens

    def cost_per_token(self, model: str) -> float | None:
        """Cost of a planned token in the job's own parts of `model`; None: there are no such parts."""
        tokens = self._tokens_of[model]
        return self._cost_of[model] / tokens if tokens else None

    def read_all_logged_costs(self, open_shards: Set[int]) -> None:
        """Read the cost of earlier attempts, under another dispatcher; only the first call reads."""
        if not self._has_logged_costs:
            self._has_logged_costs = True
            self.read_logged_costs(self._ledger.troubled() & open_shards)

    def read_logged_costs(self, shards: Iterable[int]) -> None:
        """Read the cost of attempts at these open shards so far."""
        for number in shards:
            costs = (one.cost(self._price_per_hour) for one in read_worked(self._ledger, number).values())
            self.logged_cost[number] = sum(cost for cost in costs if cost is not None)
