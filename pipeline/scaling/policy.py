"""How many workers a pool should have: a pure function of what waits, who works and what was decided before.

Work is counted in seconds of one worker: tokens over the tokens a second that workers have measured. How busy a GPU is
says nothing of that and isn't asked.

Three numbers of workers are reckoned. `hard`: the least that end all work before its deadlines, earliest first, where
those that are still to be started bring nothing while they start. `ahead`: as many as would have it done well before
that, each with enough to do that its start is small beside it: all machines cost the same for an hour's work however
many share it, so haste is free but for starts. `kept`: as many as have something to do now. While there are callers
each of the three is one at least: a request on the lane has a worker started for it where there is none. The pool grows
to the larger of the first two, shrinks to the larger of the first and the last, and stays where it is in between; that
is wide enough that it settles. Cooldowns, step limits and a bound on changes an hour hold whatever the figures do.
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
    """How a pool stands.

    Attributes:
        demands: what is open, in worker-seconds.
        live: workers that beat and are not ending.
        ttft_p95: seconds, of requests whose callers wait; None: too few of late.
        callers: such requests, with workers or on the lane.  callers_waiting: of them, those that have no place in a
            batch yet.
        kv_used: mean share of KV caches in use; None: not known.
    """

    demands: Sequence[Demand] = ()
    live: int = 0
    ttft_p95: float | None = None
    callers: int = 0
    callers_waiting: int = 0
    kv_used: float | None = None

    @property
    def work(self) -> float:
        """Seconds of one worker."""
        return sum(demand.seconds for demand in self.demands)


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the policy keeps from one decision to the next. Moments are seconds on any one clock.

    Attributes:
        desired: what was wished last; None: nothing yet.
        live: workers that were seen last.
        starting: workers that were wished for and haven't been seen.
        changed: when the wish changed, within the last hour.
        lower_since, lower: since when fewer would do, and the most that were wanted since.
    """

    desired: int | None = None
    live: int = 0
    starting: tuple[PendingStart, ...] = ()
    changed: tuple[float, ...] = ()
    lower_since: float | None = None
    lower: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers there should be, and why.

    Attributes:
        desired: workers.  before: that were wished for until now.
        hard, ahead, kept: see above.
        reason: in a few words.  memory: for the next decision.
    """

    desired: int
    before: int
    hard: int
    ahead: int
    kept: int
    reason: str
    memory: PolicyState


def decide(limits: ScalingLimits, memory: PolicyState, observed: PoolObservation, now: float) -> Decision:
    """The pool's next wish. `now`: seconds, on the clock of `memory`."""
    before = observed.live if memory.desired is None else memory.desired
    before = min(max(before, limits.least), limits.most)
    starting = awaited(memory.starting, memory.live, observed.live, before, now)
    fleet = Fleet(observed.live, tuple(start.ready_in(limits.cold_start, now) for start in starting), limits.cold_start)
    due = [_due(limits, demand) for demand in observed.demands if demand.seconds > 0]
    hard = workers_for(fleet, due, lambda left: _usable(limits, left), limits.margin)
    eager = workers_for(fleet, due, lambda left: limits.aim * _usable(limits, left), limits.margin)
    ahead = min(eager, int(observed.work / limits.busy))
    careful = workers_for(fleet, due, lambda left: _usable(limits, left), limits.margin * (1 + limits.tolerance))
    kept = max(careful, ceil(observed.work / limits.keep))
    if observed.callers:
        hard, ahead, kept = max(hard, 1), max(ahead, 1), max(kept, 1)
    target, reason = _target(limits, observed, before, hard, ahead, kept)
    if before == 0 and target and _may_gather(limits, observed, fleet, due, hard):
        target, reason = 0, "gathering work"
    target = min(max(target, limits.least), limits.most)
    kept_memory = replace(
        memory, desired=before, live=observed.live, starting=starting,
        changed=tuple(at for at in memory.changed if at > now - HOUR),
    )  # fmt: skip
    if target >= before:
        kept_memory = replace(kept_memory, lower_since=None, lower=0)
    if target > before:
        desired, reason = _grow(limits, kept_memory, before, target, int(observed.work / limits.keep), reason, now)
    elif target < before:
        desired, reason, kept_memory = _shrink(limits, kept_memory, before, target, reason, now)
    else:
        desired = before
    if desired != before:
        kept_memory = replace(
            kept_memory,
            desired=desired,
            changed=(*kept_memory.changed, now),
            starting=awaited(starting, observed.live, observed.live, desired, now),
        )
    return Decision(desired, before, hard, ahead, kept, reason, kept_memory)


def _target(
    limits: ScalingLimits, observed: PoolObservation, before: int, hard: int, ahead: int, kept: int
) -> tuple[int, str]:
    """Where it should go, whatever cooldowns say."""
    pressed = _pressed(limits, observed)
    most = max(hard, ahead)
    if pressed and observed.live >= before:  # those that are starting may be enough
        most = max(most, before + max(1, ceil(limits.pressure_share * before)))
    if most > before and (most == hard or most > before * (1 + limits.tolerance)):
        if not before and observed.callers and observed.work < limits.busy:
            return most, "callers wait"
        return most, "deadlines" if most == hard else pressed or "backlog"
    if before > kept:
        if pressed or (observed.callers and (observed.ttft_p95 or 0.0) > limits.ttft_settled * limits.ttft):
            return before, pressed or "TTFT p95 is not well below its objective"
        return kept, "nothing left" if not kept else "less work than workers"
    return before, "enough"


def _may_gather(
    limits: ScalingLimits, observed: PoolObservation, fleet: Fleet, due: Sequence[Demand], hard: int
) -> bool:
    """Whether the first worker may wait for more work to share its start."""
    if observed.live or observed.callers or observed.work >= limits.busy:
        return False
    wait = min((_patience(limits, demand) for demand in observed.demands if demand.seconds > 0), default=0.0)
    if wait <= 0:
        return False
    later = [replace(demand, due=(demand.due or 0.0) - wait) for demand in due]
    in_time = all((demand.due or 0.0) > 2 * limits.cold_start for demand in later)
    return in_time and workers_for(fleet, later, lambda left: _usable(limits, left), limits.margin) <= hard


def _patience(limits: ScalingLimits, demand: Demand) -> float:
    """Seconds that work may still wait for its first worker. What has a deadline or is bulk says itself that it is in
    no hurry; the rest says nothing, and is begun."""
    if demand.due is None and not demand.bulk:
        return 0.0
    whole = limits.bulk_within if demand.due is None else demand.due + demand.waited
    return min(limits.gather, limits.gather_share * whole) - demand.waited


def _pressed(limits: ScalingLimits, observed: PoolObservation) -> str:
    """Why callers are kept waiting, if they are. A KV cache that batch work fills is as it should be: it counts only
    while callers wait for a place."""
    if observed.ttft_p95 is not None and observed.ttft_p95 > limits.ttft:
        return "TTFT p95"
    if observed.callers_waiting and observed.kv_used is not None and observed.kv_used >= limits.kv_full:
        return "KV caches are full and callers wait"
    return ""


def _grow(
    limits: ScalingLimits, memory: PolicyState, before: int, target: int, worthwhile: int, reason: str, now: float
) -> tuple[int, str]:
    used = len(memory.changed) / limits.changes_an_hour
    if used >= 1:
        return before, f"{reason}; {len(memory.changed)} changes within the hour"
    # From none nothing goes forward at all: that waits for no cooldown.
    if before and now - max(memory.changed, default=-inf) < limits.up_cooldown:
        return before, f"{reason}; cooling down"
    # The fewer changes are left, the larger is each, as far as there is work for so many.
    larger = min(ceil(before * (1 + used / 2)), worthwhile, limits.most)
    return min(max(target, larger), before + limits.up_step), reason


def _shrink(
    limits: ScalingLimits, memory: PolicyState, before: int, target: int, reason: str, now: float
) -> tuple[int, str, PolicyState]:
    since = now if memory.lower_since is None else memory.lower_since
    lower = max(memory.lower, target) if target else 0
    waiting = replace(memory, lower_since=since, lower=lower)
    if now - since < limits.down_after:
        return before, f"{reason}; for {now - since:.0f} s", waiting
    changes = len(memory.changed)
    # Half of the workers may go when half of the hour's changes are used, and only all of them before the last one.
    if before - lower < before * changes / limits.changes_an_hour or changes >= max(1, limits.changes_an_hour - 1):
        return before, f"{reason}; {changes} changes within the hour", waiting
    if now - max(memory.changed, default=-inf) < limits.down_cooldown:
        return before, f"{reason}; cooling down", waiting
    return max(lower, before - limits.down_step), reason, replace(memory, lower_since=None, lower=0)


def _due(limits: ScalingLimits, demand: Demand) -> Demand:
    """Work without a deadline gets one by its age, so that nothing waits for ever."""
    if demand.due is not None:
        return demand
    within = limits.bulk_within if demand.bulk else limits.standard_within
    return replace(demand, due=max(within - demand.waited, limits.overdue_within))


def _usable(limits: ScalingLimits, left: float) -> float:
    """Of the time until a deadline, what work is planned into."""
    return left - min(limits.reserve + limits.reserve_share * left, left / 2)
