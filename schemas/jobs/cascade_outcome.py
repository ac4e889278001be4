"""The outcome of a cascade: its steps, their costs, and the saving."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.jobs.outcome import Usage
from schemas.stored import Count, StoredReport


class CascadeStep(StoredReport):
    """One job of a cascade.

    Attributes:
        rows: that it answered.  accepted: of them, those that are final.
        rejected: the others, by the first check that they failed.
        cost: None: the price is unknown.
    """

    job: str
    model: str
    rows: Count
    accepted: Count
    rejected: dict[str, Count] = Field(default_factory=dict)
    usage: Usage = Usage()
    busy_seconds: Annotated[float, Field(ge=0)] = 0.0
    cost: Annotated[float, Field(ge=0)] | None = None


class CascadeOutcome(StoredReport):
    """`cascade.json`: the outcome of a cascade, written once and last.

    Attributes:
        steps: its jobs, the first one first.
        min_mean_logprob: the threshold that applied; None: there was none, or (with `agreement`) no answer was
            accepted by it.
        sampled_rows: that the next model answered to choose it.  agreement: on them, with that threshold.
        busy_seconds, cost: of all steps.
        saved_busy_seconds, saved_cost: less than the last model alone, estimated from its mean for a row; negative
            where the cascade took more. None: it answered nothing, or the price is unknown.
    """

    version: Literal[1] = 1
    steps: Annotated[tuple[CascadeStep, ...], Field(min_length=1)]
    min_mean_logprob: float | None = None
    sampled_rows: Count = 0
    agreement: float | None = None
    busy_seconds: Annotated[float, Field(ge=0)]
    cost: Annotated[float, Field(ge=0)] | None = None
    saved_busy_seconds: float | None = None
    saved_cost: float | None = None
