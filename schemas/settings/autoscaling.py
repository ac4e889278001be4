"""Settings of the autoscaler, and the state that it stores between two decisions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from schemas.stored import Count, StoredReport

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, strict=False)]
AtLeastOne = Annotated[int, Field(ge=1, strict=False)]


class ScalingLimits(BaseModel):
    """Limits of the scaling policy (`pipeline.scaling.policy`); times in seconds.

    Attributes:
        least, most: bounds of the number of workers. With `least` 0 a pool without work has none.
        cold_start: from the request for a worker until it computes: machine, image, weights.
        reserve, reserve_share: safety margin before deadlines, plus this share of the remaining time.
        margin: factor on the estimated work.
        aim: target share of the time until a deadline, where finishing earlier costs little.
        busy: work for each worker from which on a worker is started for `aim`.
        gather, gather_share: with no worker running, the longest time that work with a deadline and bulk work wait for
            more work to share a cold start, as seconds and as a share of the time from arrival to deadline. It doesn't
            wait where a deadline would then need more workers, nor once `busy` is reached. 0: it starts at once.
        keep: work for each worker below which workers are removed.
        standard_within, bulk_within: target time from arrival to completion of work without a deadline.
        overdue_within: target time from now for work that has waited longer than that.
        down_after: how long fewer workers must have been enough before a scale-down.
        up_cooldown, down_cooldown: from any change to the next scale-up, or scale-down.
        up_step, down_step: most workers that one change starts or ends.
        changes_an_hour: most changes of the desired number; scale-downs leave half of them for scale-ups.
        tolerance: a growth of this share or less causes no change, unless a deadline needs it.
        ttft: target of the 95th percentile of interactive requests' time to the first token.
        ttft_settled: share of `ttft` below which the pool may shrink.
        kv_full: share of the KV caches from which on queued interactive requests count as pressure.
        pressure_share: share of the workers that are added under pressure; one at least.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    least: Whole = 0
    most: AtLeastOne = 8
    cold_start: Seconds = 300.0
    reserve: Seconds = 60.0
    reserve_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    margin: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.3
    aim: Annotated[float, Field(gt=0, le=1)] = 0.5
    busy: Above = 2_700.0
    gather: Seconds = 3_600.0
    gather_share: Annotated[float, Field(ge=0, le=1)] = 0.33
    keep: Above = 600.0
    standard_within: Above = 3_600.0
    bulk_within: Above = 21_600.0
    overdue_within: Above = 1_800.0
    down_after: Seconds = 60.0
    up_cooldown: Seconds = 60.0
    down_cooldown: Seconds = 120.0
    up_step: AtLeastOne = 250
    down_step: AtLeastOne = 250
    changes_an_hour: AtLeastOne = 12
    tolerance: Seconds = 0.1
    ttft: Above = 2.0
    ttft_settled: Annotated[float, Field(gt=0, le=1)] = 0.7
    kv_full: Annotated[float, Field(gt=0, le=1)] = 0.95
    pressure_share: Above = 0.25

    @model_validator(mode="after")
    def _least_is_not_more(self) -> ScalingLimits:
        if self.least > self.most:
            raise ValueError(f"least is {self.least}, and most {self.most}: it must not be more")
        return self


class PoolOptions(BaseModel):
    """Workers that serve the same models.

    Attributes:
        models: their names in requests.  limits: None: those of all pools.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    limits: ScalingLimits | None = None


class AutoscaleOptions(BaseModel):
    """Settings of the autoscaler.

    Attributes:
        every_seconds: interval of decisions.
        limits: of pools without their own.
        pools: by name, each with its models; a model in none is a pool by itself, under its own name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_seconds: Above = 30.0
    limits: ScalingLimits = ScalingLimits()
    pools: dict[Annotated[str, Field(min_length=1, max_length=255)], PoolOptions] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_pool_each(self) -> AutoscaleOptions:
        models = [model for pool in self.pools.values() for model in pool.models]
        if len(set(models)) != len(models):
            raise ValueError(f"two pools have the model {max(models, key=models.count)!r}; name it in one")
        return self


class PoolMemory(StoredReport):
    """The stored state of one pool; see `pipeline.scaling.policy.PolicyState`. Times are seconds since 1970.

    Attributes:
        ttft_counts, ttft_since: the workers' TTFT histogram at that time, by bucket.
    """

    desired: Count | None = None
    live: Count = 0
    starting: tuple[tuple[Count, float], ...] = ()
    changed: tuple[float, ...] = ()
    lower_since: float | None = None
    lower: Count = 0
    ttft_counts: tuple[Count, ...] = ()
    ttft_since: float | None = None


class StoredScaling(StoredReport):
    """`scaling/decided.json`: the last decision, for the next one. A cache: without it a pool's history is lost, and
    cooldowns restart.

    Attributes:
        speeds: last measured tokens a second of a worker of each model; used while there are no workers.
    """

    version: Literal[1] = 1
    as_of: AwareDatetime
    speeds: dict[str, Above] = Field(default_factory=dict)
    pools: dict[str, PoolMemory] = Field(default_factory=dict)
