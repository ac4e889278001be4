"""Settings of interactive requests: the lane, their latency promises, and the choice of their worker."""

from __future__ import annotations

from math import ceil
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from schemas.jobs.job import Tier
from schemas.requests.limits import Positive

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LatencyPromise(BaseModel):
    """The promised latency of a tier's requests.

    Attributes:
        ttft_seconds: to the first token.  itl_seconds: between two later ones, as the mean of an answer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_seconds: Seconds
    itl_seconds: Seconds


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
            "itl_seconds": 0.5}}`: gateways count whether answers keep them, and `overload.shed` refuses what would not;
            engines don't control them. A tier without one is not counted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    throttle_batch: bool = True
    ttft_seconds: Seconds = 1.0
    itl_seconds: Seconds = 0.1
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


class LaneSettings(BaseModel):
    """Bounds of the lane, on which interactive requests wait and their answers come back. Set them the same in all
    processes: gateways, intakes, workers and `serve`.

    Attributes:
        worker_timeout_seconds: after this long without a call a worker loses its requests, and others get them. At
            least 1.
        client_timeout_seconds: a caller that hasn't checked its request for so long is dead, and the request is dropped
            if its answer hasn't begun. At least 30: callers wait as long for a lane that they can't reach.
        default_deadline_seconds: a request without a deadline is wanted for so long.
        retention_seconds: events that were not read are stored for so long after the last one.
        max_waiting: maximum number of a model's requests whose answer has not begun; further ones are refused (429),
            but not the later attempts of a request. 0: all are refused.
        max_tenant_share: share of `max_waiting` that one tenant alone may have, rounded up.
        max_events: maximum number of a request's events that are stored for its reader; one that falls further behind
            gets an error.
        max_bytes: maximum bytes of a request with the tokens of earlier attempts; a larger one is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_timeout_seconds: Seconds = 10.0
    client_timeout_seconds: Seconds = 30.0
    default_deadline_seconds: Seconds = 3_600.0
    retention_seconds: Seconds = 300.0
    max_waiting: Annotated[int, Field(ge=0, strict=False)] = 10_000
    max_tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.875
    max_events: Positive = 16_384
    max_bytes: Positive = 16 << 20

    @property
    def max_waiting_per_tenant(self) -> int:
        """Maximum number of one tenant's waiting requests for a model."""
        return ceil(self.max_waiting * self.max_tenant_share)


class LaneOptions(BaseModel):
    """Settings of interactive requests.

    Attributes:
        max_requests: most concurrent ones of a worker; None: a few more than its batch has rows.
        max_gateway_requests: most concurrent ones of a gateway, waiting or being answered; further ones are refused
            (429).
        drain_seconds: time for running ones to end after a worker's stop signal; the others go on at another worker.
        limits: of the lane.  slo: their SLOs.  routing: which worker gets them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_requests: Positive | None = None
    max_gateway_requests: Positive = 10_000
    drain_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 20.0
    limits: LaneSettings = LaneSettings()
    slo: SloOptions = SloOptions()
    routing: RoutingOptions = RoutingOptions()

    @field_validator("limits")
    @classmethod
    def _long_enough(cls, limits: LaneSettings) -> LaneSettings:
        for name, least in (("worker_timeout_seconds", 1), ("client_timeout_seconds", 30)):
            if getattr(limits, name) < least:
                raise ValueError(f"{name} is {getattr(limits, name):g}; give at least {least}")
        return limits
