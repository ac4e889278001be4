"""The scaling policy: the number of workers of a pool as a pure function of its backlog, workers and last state.

Work is measured in seconds of one worker: tokens over the throughput that workers have measured. GPU utilisation is no
measure of waiting work and isn't used.

The policy computes three numbers of workers. `hard`: the smallest number that completes all work before its deadlines,
earliest first; starting workers contribute nothing during their cold start. `ahead`: the number that completes the work
well before that, as long as each worker has enough work that its cold start is small in comparison: an hour of work
costs the same on any number of machines, so only cold starts make speed expensive. `retained`: the number that has work
now. While there are callers each of the three is at least one: a request on the lane starts a worker if there is none.
In a pool of prefill or of decode workers `ahead` and `retained` are at least what interactive requests need, which the
observation measures (`pool_observer`).
The pool grows to the larger of `hard` and `ahead`, shrinks to the larger of `hard` and `retained`, and stays unchanged
in between; this band is wide enough that the pool settles. Cooldowns, step limits and a bound on changes per hour
always apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from pipeline.scaling.fleet import Demand, Fleet, PendingStart, awaited, workers_for
from schemas.settings.autoscaling import ScalingLimits

HOUR = 3_600.0


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """The state of a pool.

    Attributes:
        demands: open work, in worker-seconds.
        live: workers that send heartbeats and are not draining.
        ttft_p95: seconds, of interactive requests; None: too few samples.
        callers: open interactive requests, at workers or on the lane.
        callers_waiting: of these, the ones that are in no batch yet.
        kv_used: mean share of KV caches in use; None: not known.
        interactive_workers: workers that interactive requests need, of a pool with a role; 0.0 in other pools.
        goodput: share of the answers to callers that kept their latency promise; None: too few samples.
    """

    demands: Sequence[Demand] = ()
    live: int = 0
    ttft_p95: float | None = None
    callers: int = 0
    callers_waiting: int = 0
    kv_used: float | None = None
    interactive_workers: float = 0.0
    goodput: float | None = None

    @property
    def work(self) -> float:
        """Open work in seconds of one worker."""
        return sum(demand.seconds for demand in self.demands)


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The policy's state between two decisions. Times are seconds on one clock.

    Attributes:
        desired: workers of the last decision; None: there was none.
        live: live workers at the last decision.
        starting: requested workers that are not live yet.
        changed: times of changes within the last hour.
        lower_since, lower: time since when fewer workers suffice, and the largest target since then.
    """

    desired: int | None = None
    live: int = 0
    starting: tuple[PendingStart, ...] = ()
    changed: tuple[float, ...] = ()
    lower_since: float | None = None
    lower: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of workers that a pool should have, and the reason.

    Attributes:
        desired: workers from now on.  before: workers desired until now.
        hard, ahead, retained: see the module.
        reason: a short text.  memory: the state for the next decision.
    """

    desired: int
    before: int
    hard: int
    ahead: int
    retained: int
    reason: str
    memory: PolicyState


def decide(limits: ScalingLimits, memory: PolicyState, observed: PoolObservation, now: float) -> Decision:
    """Decide the pool's number of workers. `now`: seconds, on the clock of `memory`."""
    before = observed.live if memory.desired is None else memory.desired
    before = min(max(before, limits.min_workers), limits.max_workers)
    starting = awaited(memory.starting, memory.live, observed.live, before, now)
    fleet = Fleet(
        observed.live,
        tuple(start.ready_in(limits.cold_start_seconds, now) for start in starting),
        limits.cold_start_seconds,
    )
    due = [with_deadline(limits, demand) for demand in observed.demands if demand.seconds > 0]
    hard = workers_for(fleet, due, lambda left: usable_seconds(limits, left), limits.work_factor)
    eager = workers_for(fleet, due, lambda left: limits.target_share * usable_seconds(limits, left), limits.work_factor)
    ahead = min(eager, int(observed.work / limits.scale_up_work_seconds))
    careful = workers_for(
        fleet, due, lambda left: usable_seconds(limits, left), limits.work_factor * (1 + limits.growth_tolerance)
    )
    retained = max(careful, ceil(observed.work / limits.scale_down_work_seconds))
    if observed.callers:
        hard, ahead, retained = max(hard, 1), max(ahead, 1), max(retained, 1)
    interactive = ceil(observed.interactive_workers)
    ahead, retained = max(ahead, interactive), max(retained, interactive)
    target, reason = _target(limits, observed, before, hard, ahead, retained)
    if before == 0 and target and _may_gather(limits, observed, fleet, due, hard):
        target, reason = 0, "gathering work"
    target = min(max(target, limits.min_workers), limits.max_workers)
    next_memory = replace(
        memory, desired=before, live=observed.live, starting=starting,
        changed=tuple(at for at in memory.changed if at > now - HOUR),
    )  # fmt: skip
    if target >= before:
        next_memory = replace(next_memory, lower_since=None, lower=0)
    if target > before:
        desired, reason = _grow(
            limits, next_memory, before, target, int(observed.work / limits.scale_down_work_seconds), reason, now
        )
    elif target < before:
        desired, reason, next_memory = _shrink(limits, next_memory, before, target, reason, now)
    else:
        desired = before
    if desired != before:
        next_memory = replace(
            next_memory,
            desired=desired,
            changed=(*next_memory.changed, now),
            starting=awaited(starting, observed.live, observed.live, desired, now),
        )
    return Decision(desired, before, hard, ahead, retained, reason, next_memory)


def _target(
    limits: ScalingLimits, observed: PoolObservation, before: int, hard: int, ahead: int, retained: int
) -> tuple[int, str]:
    """The number of workers before cooldowns and step limits, and the reason."""
    pressed = _pressed(limits, observed)
    most = max(hard, ahead)
    if pressed and observed.live >= before:  # starting workers may be enough
        most = max(most, before + max(1, ceil(limits.pressure_step_share * before)))
    if most > before and (most == hard or most > before * (1 + limits.growth_tolerance)):
        if not before and observed.callers and observed.work < limits.scale_up_work_seconds:
            return most, "callers wait"
        if most == hard:
            return most, "deadlines"
        return most, "interactive requests" if most == ceil(observed.interactive_workers) else pressed or "backlog"
    if before > retained:
        if kept := pressed or _unsettled(limits, observed):
            return before, kept
        return retained, "nothing left" if not retained else "less work than workers"
    return before, "enough"


def _may_gather(
    limits: ScalingLimits, observed: PoolObservation, fleet: Fleet, due: Sequence[Demand], hard: int
) -> bool:
    """Whether the first worker's start may be delayed, so that more work shares its cold start."""
    if observed.live or observed.callers or observed.work >= limits.scale_up_work_seconds:
        return False
    wait = min((_max_wait_seconds(limits, demand) for demand in observed.demands if demand.seconds > 0), default=0.0)
    if wait <= 0:
        return False
    later = [replace(demand, due=(demand.due or 0.0) - wait) for demand in due]
    in_time = all((demand.due or 0.0) > 2 * limits.cold_start_seconds for demand in later)
    return in_time and workers_for(fleet, later, lambda left: usable_seconds(limits, left), limits.work_factor) <= hard


def _max_wait_seconds(limits: ScalingLimits, demand: Demand) -> float:
    """Seconds that work may still wait for its first worker. Bulk work and work with a deadline may wait; other work
    starts immediately."""
    if demand.due is None and not demand.bulk:
        return 0.0
    whole = limits.bulk_target_seconds if demand.due is None else demand.due + demand.waited
    return min(limits.gather_seconds, limits.gather_share * whole) - demand.waited


def _pressed(limits: ScalingLimits, observed: PoolObservation) -> str:
    """The reason why callers wait too long; empty: they don't. A KV cache filled with batch work is normal: it counts
    only while callers wait for a slot."""
    if observed.ttft_p95 is not None and observed.ttft_p95 > limits.ttft_target_seconds:
        return "TTFT p95"
    if limits.min_goodput is not None and observed.goodput is not None and observed.goodput < limits.min_goodput:
        return "goodput"
    if observed.callers_waiting and observed.kv_used is not None and observed.kv_used >= limits.kv_pressure_share:
        return "KV caches are full and callers wait"
    return ""


def _unsettled(limits: ScalingLimits, observed: PoolObservation) -> str:
    """The reason why fewer workers might make callers wait too long; empty: they would not."""
    if observed.callers and (observed.ttft_p95 or 0.0) > limits.ttft_settled_share * limits.ttft_target_seconds:
        return "TTFT p95 is not well below its objective"
    if limits.min_goodput is not None and observed.goodput is not None:
        allowed = limits.ttft_settled_share * (1 - limits.min_goodput)
        return "goodput is not well above its objective" if 1 - observed.goodput > allowed else ""
    return ""


def _grow(
    limits: ScalingLimits, memory: PolicyState, before: int, target: int, worthwhile: int, reason: str, now: float
) -> tuple[int, str]:
    used = len(memory.changed) / limits.max_changes_per_hour
    if used >= 1:
        return before, f"{reason}; {len(memory.changed)} changes within the hour"
    # With no worker no work progresses: the first start waits for no cooldown.
    if before and now - max(memory.changed, default=-inf) < limits.scale_up_cooldown_seconds:
        return before, f"{reason}; cooling down"
    # The fewer changes are left this hour, the larger each one is, limited by the work.
    larger = min(ceil(before * (1 + used / 2)), worthwhile, limits.max_workers)
    return min(max(target, larger), before + limits.max_scale_up), reason


def _shrink(
    limits: ScalingLimits, memory: PolicyState, before: int, target: int, reason: str, now: float
) -> tuple[int, str, PolicyState]:
    since = now if memory.lower_since is None else memory.lower_since
    lower = max(memory.lower, target) if target else 0
    waiting = replace(memory, lower_since=since, lower=lower)
    if now - since < limits.scale_down_after_seconds:
        return before, f"{reason}; for {now - since:.0f} s", waiting
    changes = len(memory.changed)
    # The more of the hour's changes are used, the larger a cut must be (half of the workers at half of the changes);
    # the last change is reserved for growth.
    if before - lower < before * changes / limits.max_changes_per_hour or changes >= max(
        1, limits.max_changes_per_hour - 1
    ):
        return before, f"{reason}; {changes} changes within the hour", waiting
    if now - max(memory.changed, default=-inf) < limits.scale_down_cooldown_seconds:
        return before, f"{reason}; cooling down", waiting
    return max(lower, before - limits.max_scale_down), reason, replace(memory, lower_since=None, lower=0)


def with_deadline(limits: ScalingLimits, demand: Demand) -> Demand:
    """Derive a deadline by age for work without one, so that no work waits for ever."""
    if demand.due is not None:
        return demand
    within = limits.bulk_target_seconds if demand.bulk else limits.standard_target_seconds
    return replace(demand, due=max(within - demand.waited, limits.overdue_target_seconds))


def usable_seconds(limits: ScalingLimits, left: float) -> float:
    """The part of the time until a deadline that work is planned into; the rest is a reserve."""
    return left - min(limits.deadline_reserve_seconds + limits.deadline_reserve_share * left, left / 2)
