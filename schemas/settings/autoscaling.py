"""How many workers there may be, who decides it, and what is remembered between two decisions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from schemas.stored import Count, StoredReport

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, strict=False)]
AtLeastOne = Annotated[int, Field(ge=1, strict=False)]


class ScalingLimits(BaseModel):
    """What the policy of `pipeline.scaling.policy` may do; times in seconds.

    Attributes:
        least, most: workers. With `least` 0 a pool without work has none.
        cold_start: from the wish for a worker until it computes: machine, image, weights.
        reserve, reserve_share: deadlines are to be met so long before, plus this share of the time that is left.
        margin: work is taken for so many times what is estimated.
        aim: of the time until a deadline, the share in which work should be done where haste costs little.
        busy: a worker is started for that only where so much work waits for each.
        gather, gather_share: from no worker at all, work with a deadline and bulk work may wait so long for more to
            share the start of one, but no more than this share of the time from its arrival to its deadline; not where
            a deadline would then need more workers, nor when `busy` is there already. 0: it is begun at once.
        keep: workers are let go only when less work than this waits for each.
        standard_within, bulk_within: work without a deadline is to be done so long after it came.
        overdue_within: and what has waited longer than that, from now.
        down_after: fewer must have been enough for so long.
        up_cooldown, down_cooldown: after any change, until there may be more, or fewer.
        up_step, down_step: workers that one change starts or ends at most.
        changes_an_hour: of the wish, at most; letting workers go leaves half of them for starting some.
        tolerance: a growth of this share or less isn't worth a change, unless a deadline asks for it.
        ttft: of requests whose callers wait, 95 % should have their first token so soon.
        ttft_settled: below this share of it the pool may shrink.
        kv_full: share of the KV caches from which on callers who wait for a place count as kept waiting.
        pressure_share: of the workers, so many more for that; one at least.
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
        models: as requests call them.  limits: None: those of all pools.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    limits: ScalingLimits | None = None


class AutoscaleOptions(BaseModel):
    """How many workers are wished for.

    Attributes:
        every_seconds: between two decisions.
        limits: of pools that have none of their own.
        pools: by name, each with its models; a model that is in none is a pool by itself, of its own name.
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
    """What is remembered of one pool; see `pipeline.scaling.policy.PolicyState`. Moments are seconds since 1970.

    Attributes:
        ttft_counts, ttft_since: what workers had counted by then of times to first tokens, in their buckets.
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
    """`scaling/decided.json`: what was decided last, for whoever decides next. A cache: without it a pool's past is
    forgotten, and cooldowns begin anew.

    Attributes:
        speeds: tokens a second that a worker of each model measured last; they hold when the workers are gone.
    """

    version: Literal[1] = 1
    as_of: AwareDatetime
    speeds: dict[str, Above] = Field(default_factory=dict)
    pools: dict[str, PoolMemory] = Field(default_factory=dict)
