"""The cost of a job: the busy time of the workers that computed it, each at its own price.

Workers meter their time shard by shard, and record time and price in each part (and checkpoint). So the cost is added
up from the ledger like rows and tokens, by any reader at any time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.ledger.records import PartSummary
from schemas.jobs.outcome import ModelSpending, Usage, WorkerTime

MILLION = 1_000_000


@dataclass(slots=True)
class JobCost:
    """A sum of worker time and its cost.

    Attributes:
        seconds: busy seconds of all workers.
        cost: cost of the time with a known price.  unpriced: seconds without a known price.
    """

    seconds: float = 0.0
    cost: float = 0.0
    unpriced: float = 0.0

    def add(self, worked: WorkerTime, default_price: float | None) -> None:
        """Add worker time; `default_price` per hour applies where the worker has recorded no price."""
        cost = worked.cost(default_price)
        self.seconds += worked.seconds
        if cost is None:
            self.unpriced += worked.seconds
        else:
            self.cost += cost

    @property
    def known(self) -> float | None:
        """The cost; None when the price of some of the time is unknown."""
        return None if self.unpriced else self.cost

    @property
    def price_per_hour(self) -> float | None:
        """The mean price per hour; None when it is unknown or there is no time."""
        return None if self.unpriced or not self.seconds else self.cost * 3600 / self.seconds


def worker_times(summary: PartSummary) -> Mapping[str, WorkerTime]:
    """Worker time of the attempts on a part, by attempt id. A part of an earlier version lacks it: there it is the time
    between the start and the end of its engine."""
    if summary.worked or summary.engine_started_at is None or summary.engine_finished_at is None:
        return summary.worked
    seconds = (summary.engine_finished_at - summary.engine_started_at).total_seconds()
    return {summary.attempt_id: WorkerTime(seconds=max(0.0, seconds))}


def part_cost(summary: PartSummary, default_price: float | None) -> JobCost:
    """The cost of a part, including all attempts recorded in it."""
    spent = JobCost()
    for worked in worker_times(summary).values():
        spent.add(worked, default_price)
    return spent


def per_million(cost: float | None, tokens: int) -> float | None:
    """The cost of a million tokens; None when there are no tokens, or the cost isn't known."""
    return None if cost is None or not tokens else cost / tokens * MILLION


def cost_by_model(
    parts: Iterable[tuple[str, PartSummary]], more: Iterable[tuple[str, WorkerTime]], default_price: float | None
) -> tuple[ModelSpending, ...]:
    """The cost of the shards of each model, by model name.

    Args:
        parts: each with its model.  more: worker time of attempts that is not recorded in the parts.
    """
    spent: defaultdict[str, JobCost] = defaultdict(JobCost)
    usage: defaultdict[str, Usage] = defaultdict(Usage)
    for model, summary in parts:
        usage[model] += summary.usage
        for worked in worker_times(summary).values():
            spent[model].add(worked, default_price)
    for model, worked in more:
        spent[model].add(worked, default_price)
    return tuple(
        ModelSpending(
            model=model,
            busy_seconds=spent[model].seconds,
            prompt=usage[model].prompt,
            completion=usage[model].completion,
            cost=spent[model].known,
            cost_per_million_tokens=per_million(spent[model].known, usage[model].prompt + usage[model].completion),
            cost_per_million_output_tokens=per_million(spent[model].known, usage[model].completion),
        )
        for model in sorted(usage)
    )
