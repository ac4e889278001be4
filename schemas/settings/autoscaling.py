"""Settings of the autoscaler, and the state that it stores between two decisions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from schemas.settings.kv_transfer import Role
from schemas.stored import Count, StoredReport

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, strict=False)]
AtLeastOne = Annotated[int, Field(ge=1, strict=False)]


class ScalingLimits(BaseModel):
    """Limits of the scaling policy (`pipeline.scaling.policy`).

    Attributes:
        min_workers, max_workers: bounds of the number of workers. With a minimum of 0 a pool without work has none.
        cold_start_seconds: from the request for a worker until it computes: machine, image, weights.
        deadline_reserve_seconds: safety margin before deadlines.
        deadline_reserve_share: of the time until a deadline, in addition to that margin.
        work_factor: factor on the estimated work.
        target_share: target share of the time until a deadline, where finishing earlier costs little.
        scale_up_work_seconds: work for each worker from which on a worker is started for `target_share`.
        gather_seconds: with no worker running, the longest time that work with a deadline and bulk work wait for more
            work to share a cold start. It doesn't wait where a deadline would then need more workers, nor once
            `scale_up_work_seconds` is reached. 0: it starts at once.
        gather_share: longest such wait, as a share of the time from arrival to deadline.
        scale_down_work_seconds: work for each worker below which workers are removed.
        standard_target_seconds, bulk_target_seconds: target time from arrival to completion of work without a deadline.
        overdue_target_seconds: target time from now for work that has waited longer than that.
        scale_down_after_seconds: how long fewer workers must have been enough before a scale-down.
        scale_up_cooldown_seconds, scale_down_cooldown_seconds: from any change to the next scale-up, or scale-down.
        max_scale_up, max_scale_down: workers that one change starts or ends.
        max_changes_per_hour: changes of the desired number; scale-downs leave half of them for scale-ups.
        growth_tolerance: a growth of this share or less causes no change, unless a deadline needs it.
        ttft_target_seconds: target of the 95th percentile of interactive requests' time to the first token.
        min_goodput: least share of answers that keep the latency promises of `lane.slo`; below it the pool grows as for
            a late TTFT. None: goodput doesn't count.
        ttft_settled_share: share of `ttft_target_seconds`, and of the late answers that `min_goodput` allows, below
            which the pool may shrink.
        kv_pressure_share: share of the KV caches from which on queued interactive requests count as pressure.
        pressure_step_share: share of the workers that are added under pressure; one at least.
        interactive_target_share: target share of a pool with a role that interactive requests use: of the time of
            prefill workers, and of the KV caches of decode workers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_workers: Whole = 0
    max_workers: AtLeastOne = 8
    cold_start_seconds: Seconds = 300.0
    deadline_reserve_seconds: Seconds = 60.0
    deadline_reserve_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    work_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.3
    target_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    scale_up_work_seconds: Above = 2_700.0
    gather_seconds: Seconds = 3_600.0
    gather_share: Annotated[float, Field(ge=0, le=1)] = 0.33
    scale_down_work_seconds: Above = 600.0
    standard_target_seconds: Above = 3_600.0
    bulk_target_seconds: Above = 21_600.0
    overdue_target_seconds: Above = 1_800.0
    scale_down_after_seconds: Seconds = 60.0
    scale_up_cooldown_seconds: Seconds = 60.0
    scale_down_cooldown_seconds: Seconds = 120.0
    max_scale_up: AtLeastOne = 250
    max_scale_down: AtLeastOne = 250
    max_changes_per_hour: AtLeastOne = 12
    growth_tolerance: Seconds = 0.1
    ttft_target_seconds: Above = 2.0
    min_goodput: Annotated[float, Field(gt=0, lt=1)] | None = None
    ttft_settled_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    kv_pressure_share: Annotated[float, Field(gt=0, le=1)] = 0.95
    pressure_step_share: Above = 0.25
    interactive_target_share: Annotated[float, Field(gt=0, le=1)] = 0.7

    @model_validator(mode="after")
    def _least_is_not_more(self) -> ScalingLimits:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers is {self.min_workers}, and max_workers {self.max_workers}: it must not be more"
            )
        return self


class PoolOptions(BaseModel):
    """Workers that serve the same models.

    Attributes:
        models: their names in requests.  limits: None: those of all pools.
        role: of the workers (`worker --role`). A model has one pool of both roles, or one of each; shards of jobs count
            for the decode workers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    limits: ScalingLimits | None = None
    role: Role = "both"


class AutoscaleOptions(BaseModel):
    """Settings of the autoscaler.

    Attributes:
        interval_seconds: of decisions.
        limits: of pools without their own.
        pools: by name, each with its models; a model in none is a pool by itself, under its own name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    interval_seconds: Above = 30.0
    limits: ScalingLimits = ScalingLimits()
    pools: dict[Annotated[str, Field(min_length=1, max_length=255)], PoolOptions] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_pool_each(self) -> AutoscaleOptions:
        roles: dict[str, list[Role]] = {}
        for pool in self.pools.values():
            for model in pool.models:
                roles.setdefault(model, []).append(pool.role)
        for model, its in roles.items():
            if len(its) > 1 and sorted(its) != ["decode", "prefill"]:
                raise ValueError(
                    f"the model {model!r} is in pools of the roles {', '.join(its)}; name it in one pool, or in one of "
                    "the role prefill and one of the role decode"
                )
        return self


class PoolMemory(StoredReport):
    """The stored state of one pool; see `pipeline.scaling.policy.PolicyState`. Times are seconds since 1970.

    Attributes:
        ttft_counts, ttft_since: the workers' TTFT histogram at that time, by bucket.
        answers, answers_since, answers_live: answers by latency (`pipeline.lane.ports.AnswerCounts`) when the window of
            the next goodput began, that time, and the live workers.
    """

    desired: Count | None = None
    live: Count = 0
    starting: tuple[tuple[Count, float], ...] = ()
    changed: tuple[float, ...] = ()
    lower_since: float | None = None
    lower: Count = 0
    ttft_counts: tuple[Count, ...] = ()
    ttft_since: float | None = None
    answers: tuple[Count, ...] = ()
    answers_since: float | None = None
    answers_live: Count = 0


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
