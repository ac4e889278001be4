"""Settings of interactive requests: the lane, their latency promises, and the choice of their worker."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from schemas.jobs.job import Tier
from schemas.requests.limits import Positive


class LatencyPromise(BaseModel):
    """The promised latency of a tier's requests.

    Attributes:
        ttft_seconds: to the first token.  itl_seconds: between two later ones, as the mean of an answer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    itl_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SloOptions(BaseModel):
    """The SLOs of interactive requests in a worker's engine, and their weights against batch work.

    Attributes:
        throttle_batch: throttle batch work where the SLOs can't be met otherwise.
        ttft_seconds: from a request's arrival in the engine until its first token.
        itl_seconds: between two of its tokens.
        quantile: share of the first tokens, and of the later ones, that should be in time.
        weight_ttft, weight_itl, weight_drops: weights of late tokens, and of requests that time out.
        weight_utilisation: weight of throttled batch work. With a larger one more tokens may be late.
        min_batch_tokens: tokens of an engine's step that are always reserved for batch work.
        tiers: promises to callers of the tiers standard and bulk, such as `{"standard": {"ttft_seconds": 5,
            "itl_seconds": 0.5}}`: gateways count whether answers keep them, and engines don't control them. A tier
            without one is not counted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    throttle_batch: bool = True
    ttft_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    itl_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.97
    weight_ttft: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    weight_itl: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    weight_utilisation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.3
    weight_drops: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    min_batch_tokens: Positive = 1
    tiers: dict[Tier, LatencyPromise] = Field(default_factory=dict)

    @field_validator("tiers")
    @classmethod
    def _not_twice(cls, tiers: dict[Tier, LatencyPromise]) -> dict[Tier, LatencyPromise]:
        if Tier.INTERACTIVE in tiers:
            raise ValueError("the promise of interactive requests is ttft_seconds and itl_seconds; set these")
        return tiers

    @property
    def promises(self) -> dict[Tier, LatencyPromise]:
        """The promise to callers of each tier that has one."""
        interactive = LatencyPromise(ttft_seconds=self.ttft_seconds, itl_seconds=self.itl_seconds)
        return {Tier.INTERACTIVE: interactive, **self.tiers}


class RoutingOptions(BaseModel):
    """Settings of the choice of an interactive request's worker.

    Attributes:
        by_prefix: a gateway sends requests that share a prefix to the same worker, which probably has it in its prefix
            cache; else any worker takes them.
        max_load_ratio: bound of a worker's open requests, as a multiple of the mean of a model's workers, rounded up;
            further ones go to the next worker. Counted by each gateway for itself.
        steal_after_seconds: how long such a request waits for its worker, before another one with room takes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    by_prefix: bool = True
    max_load_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.25
    steal_after_seconds: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0.25


class LaneOptions(BaseModel):
    """Settings of interactive requests at a worker.

    Attributes:
        max_requests: most concurrent ones of a worker; None: a few more than its batch has rows.
        drain_seconds: time for running ones to end after the stop signal; the others go on at another worker.
        slo: their SLOs.  routing: which worker gets them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_requests: Positive | None = None
    drain_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20.0
    slo: SloOptions = SloOptions()
    routing: RoutingOptions = RoutingOptions()
