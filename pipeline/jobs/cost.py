"""What a job has cost: the time that workers computed for it, each at its own price.

Workers meter their time shard by shard, and say in each part (and checkpoint) what it took and what they cost. So what
was spent is added up from the ledger like rows and tokens, whoever looks, and whenever.
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
    """Time and money, added up.

    Attributes:
        seconds: busy ones, of all workers together.
        cost: of the time whose price is known.  unpriced: seconds whose price nobody knows.
    """

    seconds: float = 0.0
    cost: float = 0.0
    unpriced: float = 0.0

    def add(self, worked: WorkerTime, otherwise: float | None) -> None:
        """Count this, too; `otherwise` is the price where the worker doesn't say."""
        cost = worked.cost(otherwise)
        self.seconds += worked.seconds
        if cost is None:
            self.unpriced += worked.seconds
        else:
            self.cost += cost

    @property
    def known(self) -> float | None:
        """The cost; None: of some of the time nobody knows the price."""
        return None if self.unpriced else self.cost

    @property
    def price_per_hour(self) -> float | None:
        """Of such an hour, on the mean."""
        return None if self.unpriced or not self.seconds else self.cost * 3600 / self.seconds


def work_of(summary: PartSummary) -> Mapping[str, WorkerTime]:
    """What attempts took for a part, by attempt. A part without such words is of an earlier version: it says when its
    engine began and ended."""
    if summary.worked or summary.engine_started_at is None or summary.engine_finished_at is None:
        return summary.worked
    seconds = (summary.engine_finished_at - summary.engine_started_at).total_seconds()
    return {summary.attempt_id: WorkerTime(seconds=max(0.0, seconds))}


def spent_on(summary: PartSummary, otherwise: float | None) -> JobCost:
    """What a part has cost, with all attempts at it that it knows of."""
    spent = JobCost()
    for worked in work_of(summary).values():
        spent.add(worked, otherwise)
    return spent


def per_million(cost: float | None, tokens: int) -> float | None:
    """The price of a million of such tokens; None where there are none, or the cost isn't known."""
    return None if cost is None or not tokens else cost / tokens * MILLION


def by_model(
    parts: Iterable[tuple[str, PartSummary]], more: Iterable[tuple[str, WorkerTime]], otherwise: float | None
) -> tuple[ModelSpending, ...]:
    """What the shards of each model have cost, by the models' names.

    Args:
        parts: each with its model.  more: what attempts took beyond what the parts know of.
    """
    spent: defaultdict[str, JobCost] = defaultdict(JobCost)
    usage: defaultdict[str, Usage] = defaultdict(Usage)
    for model, summary in parts:
        usage[model] += summary.usage
        for worked in work_of(summary).values():
            spent[model].add(worked, otherwise)
    for model, worked in more:
        spent[model].add(worked, otherwise)
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
