"""The autoscaler's decisions, from metrics alone; the test sets the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.scaling.fleet import Demand, Fleet, PendingStart, workers_for
from pipeline.scaling.policy import Decision, PolicyState, PoolObservation, decide
from schemas.settings.autoscaling import ScalingLimits

LIMITS = ScalingLimits(max_workers=100, cold_start_seconds=300.0)
HOUR = 3_600.0


class Pool:
    """A pool whose machines come when they should: `live` follows the number that was wanted a cold start ago."""

    def __init__(self, limits: ScalingLimits = LIMITS, live: int = 0) -> None:
        self.limits = limits
        self.live = live
        self.now = 1_000_000.0
        self.memory = PolicyState()

    def decide(self, *demands: Demand, **seen: float) -> Decision:
        decision = decide(self.limits, self.memory, PoolObservation(demands, self.live, **seen), self.now)  # type: ignore[arg-type]
        self.memory = decision.memory
        return decision

    def settle(self, *demands: Demand, seconds: float = HOUR, **seen: float) -> Decision:
        """Decide every half minute for so long, with machines that come at once; the last decision."""
        until = self.now + seconds
        while True:
            decision = self.decide(*demands, **seen)
            self.live = decision.desired
            self.now += 30.0
            if self.now >= until:
                return decision


def within_plainly(left: float) -> float:
    return left


# -- how many workers some work needs


@pytest.mark.parametrize(
    ("demands", "wanted"),
    [
        ([], 0),
        ([Demand(100.0, 1_000.0)], 1),
        ([Demand(1_000.0, 1_000.0)], 1),
        ([Demand(1_001.0, 1_000.0)], 2),
        ([Demand(1_000.0, 1_000.0), Demand(3_000.0, 2_000.0)], 2),  # 4,000 s of work in 2,000 s
        ([Demand(4_000.0, 1_000.0), Demand(100.0, 9_000.0)], 4),  # the first deadline decides
    ],
)
def test_given_workers_that_come_at_once_then_the_densest_deadline_decides(demands: list[Demand], wanted: int) -> None:
    assert workers_for(Fleet(0, (), 0.0), demands, within_plainly, 1.0) == wanted


def test_given_a_cold_start_then_new_workers_count_only_after_it() -> None:
    # 3,000 s of work in 1,000 s: three that live, but of those that take 500 s to come six.
    work = [Demand(3_000.0, 1_000.0)]
    assert workers_for(Fleet(3, (), 500.0), work, within_plainly, 1.0) == 3
    assert workers_for(Fleet(0, (), 500.0), work, within_plainly, 1.0) == 6
    assert workers_for(Fleet(1, (), 500.0), work, within_plainly, 1.0) == 1 + 4
    assert workers_for(Fleet(1, ((2, 0.0),), 500.0), work, within_plainly, 1.0) == 3, "two are nearly there"
    assert workers_for(Fleet(1, ((9, 250.0),), 500.0), work, within_plainly, 1.0) == 1 + 3, (
        "not all that come are needed"
    )


def test_given_a_deadline_nearer_than_a_start_then_no_worker_is_started_for_it() -> None:
    assert workers_for(Fleet(2, (), 500.0), [Demand(9_000.0, 400.0)], within_plainly, 1.0) == 2


@given(
    st.lists(st.tuples(st.floats(1, 1e5), st.floats(1_000, 1e5)), min_size=1, max_size=12),
    st.integers(0, 20), st.floats(0, 900),
)  # fmt: skip
def test_given_any_work_then_so_many_are_enough_and_one_less_is_not(
    drawn: list[tuple[float, float]], live: int, cold: float
) -> None:
    demands = [Demand(seconds, due) for seconds, due in drawn]
    count = workers_for(Fleet(live, (), cold), demands, within_plainly, 1.0)

    def enough(workers: int) -> bool:
        done, ordered = 0.0, sorted(demands, key=lambda one: one.due or 0.0)
        for demand in ordered:
            done += demand.seconds
            due = demand.due or 0.0
            can = min(live, workers) * due + max(0, workers - live) * max(0.0, due - cold)
            if can < done * (1 - 1e-6):
                return False
        return True

    assert enough(count)
    assert count == 0 or not enough(count - 1)


# -- decisions


def test_given_no_work_then_no_worker_is_desired_and_work_starts_one() -> None:
    pool = Pool()
    assert pool.decide().desired == 0
    pool.now += 30
    woken = pool.decide(Demand(10.0))  # neither a deadline nor bulk: it may not wait
    assert (woken.desired, woken.hard) == (1, 1)


def test_given_a_deadline_then_as_many_as_it_needs_with_margin_and_reserve() -> None:
    # 20 h of one worker's work, due in 2 h: with 30 % more and 13 minutes spared, and 5 minutes until any has come.
    decision = Pool().decide(Demand(20 * HOUR, 2 * HOUR))
    usable = 2 * HOUR - (60 + 0.1 * 2 * HOUR)
    assert decision.hard == -(-20 * HOUR * 1.3 // (usable - 300))
    assert decision.desired >= decision.hard


def test_given_work_without_deadline_then_its_age_gives_it_one() -> None:
    fresh = Pool(live=1).decide(Demand(5 * HOUR, None, waited=0.0, bulk=True))
    old = Pool(live=1).decide(Demand(5 * HOUR, None, waited=5.5 * HOUR, bulk=True))
    standard = Pool(live=1).decide(Demand(5 * HOUR, None, waited=0.0))
    assert fresh.hard < standard.hard <= old.hard


def test_given_much_work_far_off_then_it_is_begun_with_as_many_as_are_worth_their_start() -> None:
    decision = Pool().decide(Demand(30 * HOUR, 12 * HOUR))
    assert decision.hard < decision.ahead <= 30 * HOUR / LIMITS.scale_up_work_seconds
    assert decision.desired == decision.ahead


def test_given_more_than_there_may_be_then_it_stays_within_its_limits() -> None:
    pool = Pool(ScalingLimits(min_workers=2, max_workers=5))
    assert pool.decide(Demand(900 * HOUR, HOUR)).desired == 5
    assert pool.settle(seconds=2 * HOUR).desired == 2


def test_given_less_and_less_work_then_the_pool_shrinks_late_and_slowly() -> None:
    pool = Pool(live=40)
    pool.settle(Demand(100 * HOUR, 4 * HOUR), seconds=60)
    assert pool.live >= 40
    held = pool.decide()
    assert (held.desired, held.retained) == (pool.live, 0), "a moment without work removes no worker"
    pool.now += LIMITS.scale_down_after_seconds + LIMITS.scale_down_cooldown_seconds
    assert pool.decide().desired == 0


def test_given_a_short_drop_in_work_then_no_worker_is_removed() -> None:
    pool = Pool(live=40)
    assert pool.decide().desired == 40
    pool.now += LIMITS.scale_down_after_seconds - 1
    assert pool.decide().desired == 40
    pool.now += 1
    assert pool.decide().desired == 0
    # The number that was wanted in between stays.
    again = Pool(live=40)
    again.decide()
    again.now += LIMITS.scale_down_after_seconds / 2
    again.decide(Demand(HOUR, 2 * HOUR))
    again.now += LIMITS.scale_down_after_seconds / 2
    assert again.decide(Demand(60.0, 2 * HOUR)).desired == HOUR / LIMITS.scale_down_work_seconds


def test_given_steps_then_no_change_is_larger() -> None:
    pool = Pool(ScalingLimits(max_workers=100, max_scale_up=7, max_scale_down=4, max_changes_per_hour=1_000), live=10)
    assert pool.decide(Demand(900 * HOUR, 2 * HOUR)).desired == 17
    pool.live = 17
    pool.now += 60
    assert pool.decide(Demand(900 * HOUR, 2 * HOUR)).desired == 24
    pool.live = 24
    pool.settle(seconds=LIMITS.scale_down_cooldown_seconds - 30)
    pool.now += 60
    assert pool.decide().desired == 20


def test_given_a_target_that_grows_each_second_then_it_cools_down_between() -> None:
    pool = Pool()
    first = pool.decide(Demand(HOUR, 2 * HOUR)).desired
    pool.now += 10
    assert pool.decide(Demand(50 * HOUR, 2 * HOUR)).desired == first
    pool.now += LIMITS.scale_up_cooldown_seconds
    assert pool.decide(Demand(50 * HOUR, 2 * HOUR)).desired > first


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 4e5), st.floats(60, 4e4), st.integers(0, 120)), min_size=40, max_size=200))
def test_given_any_history_then_changes_an_hour_are_bounded_and_limits_hold(
    history: list[tuple[float, float, int]],
) -> None:
    limits = ScalingLimits(
        min_workers=1,
        max_workers=100,
        max_changes_per_hour=6,
        scale_up_cooldown_seconds=0,
        scale_down_cooldown_seconds=0,
        scale_down_after_seconds=0,
    )
    memory, changed, now = PolicyState(), list[float](), 0.0
    for seconds, due, live in history:
        now += 60
        decision = decide(limits, memory, PoolObservation([Demand(seconds, due)], live), now)
        memory = decision.memory
        assert limits.min_workers <= decision.desired <= limits.max_workers
        if decision.desired != decision.before:
            changed.append(now)
        assert len([at for at in changed if at > now - HOUR]) <= limits.max_changes_per_hour


def test_given_the_same_work_for_hours_then_the_desired_workers_settle() -> None:
    pool = Pool()
    pool.settle(Demand(30 * HOUR, 4 * HOUR), seconds=HOUR)
    before = pool.live
    pool.settle(Demand(30 * HOUR, 4 * HOUR), seconds=6 * HOUR)
    assert pool.live == before
    assert not pool.memory.changed


def test_given_measured_speed_that_wavers_then_the_pool_does_not() -> None:
    pool = Pool()
    work = [30 * HOUR * factor for factor in (1.0, 0.93, 1.06, 0.97, 1.03)]
    for turn in range(20):
        pool.live = pool.decide(Demand(work[turn % 5], 4 * HOUR)).desired
        pool.now += 30
    changes = len(pool.memory.changed)
    for turn in range(400):
        pool.live = pool.decide(Demand(work[turn % 5], 4 * HOUR)).desired
        pool.now += 30
    assert changes <= 3
    assert len(pool.memory.changed) <= 1


def changed(pool: Pool, times: int) -> None:
    """So many changes have been made within the hour."""
    pool.memory = replace(pool.memory, changed=tuple(pool.now - 1_000.0 + number for number in range(times)))


@pytest.mark.parametrize(("changes", "left", "goes"), [(0, 31, True), (6, 17, False), (6, 15, True), (9, 15, False)])
def test_given_changes_that_were_made_then_only_a_large_part_is_let_go(changes: int, left: int, goes: bool) -> None:
    pool = Pool(live=32)
    changed(pool, changes)
    work = Demand(left * LIMITS.scale_down_work_seconds - 1.0, 12 * HOUR)
    pool.decide(work)
    pool.now += LIMITS.scale_down_after_seconds
    assert pool.decide(work).desired == (left if goes else 32)


def test_given_nothing_left_then_all_may_go_but_the_last_change_is_reserved_for_starting_some() -> None:
    for changes, goes in ((10, True), (11, False)):
        pool = Pool(live=32)
        changed(pool, changes)
        pool.decide()
        pool.now += LIMITS.scale_down_after_seconds
        assert pool.decide().desired == (0 if goes else 32)


def test_given_changes_that_were_made_then_a_growth_is_larger_as_far_as_there_is_work() -> None:
    def grown(changes: int, seconds: float, due: float) -> Decision:
        pool = Pool(ScalingLimits(max_workers=100, scale_up_work_seconds=1e6), live=20)
        changed(pool, changes)
        return pool.decide(Demand(seconds, due))

    few, many = grown(0, 21 * HOUR, 1.5 * HOUR), grown(8, 21 * HOUR, 1.5 * HOUR)
    assert 20 < few.hard == few.desired == many.hard < 25
    assert many.desired == ceil(20 * (1 + 8 / 12 / 2))
    short = grown(8, 23 * LIMITS.scale_down_work_seconds, 1_010.0)
    assert short.hard <= short.desired == 23, "more workers would have nothing to do"


# -- machines that go and come


def test_given_interrupted_spot_machines_then_the_target_stays_and_they_are_requested_again() -> None:
    pool = Pool(live=10)
    work = Demand(20 * HOUR, 3 * HOUR)
    wanted = pool.settle(work, seconds=600).desired
    pool.live -= 4
    decision = pool.decide(work)
    assert decision.desired >= wanted
    assert sum(start.count for start in decision.memory.starting) >= 4
    assert {start.since for start in decision.memory.starting} == {pool.now}


def test_given_workers_that_are_starting_then_they_are_not_requested_twice() -> None:
    pool = Pool()
    work = Demand(20 * HOUR, 3 * HOUR)
    wanted = pool.decide(work).desired
    for _ in range(9):  # no worker has come yet, and nothing is done
        pool.now += 30
        assert pool.decide(work).desired == wanted


def test_given_machines_that_never_come_then_deadlines_are_planned_without_them() -> None:
    assert PendingStart(3, 0.0).ready_in(300.0, 100.0) == (3, 200.0)
    assert PendingStart(3, 0.0).ready_in(300.0, 299.0) == (3, 1.0)
    assert PendingStart(3, 0.0).ready_in(300.0, 400.0) == (3, 0.0)
    assert PendingStart(3, 0.0).ready_in(300.0, 700.0) == (3, 300.0), "as late as one that is requested now"


# -- callers who wait


def settled(pool: Pool, seen: dict[str, float], work: Sequence[Demand] = ()) -> int:
    return pool.settle(*work, seconds=2 * HOUR, **seen).desired


@pytest.mark.parametrize(
    ("seen", "grows"),
    [
        ({"ttft_p95": 3.0, "callers": 5}, True),
        ({"ttft_p95": 1.0, "callers": 5}, False),
        ({"kv_used": 0.99, "callers": 5, "callers_waiting": 2}, True),
        ({"kv_used": 0.99}, False),  # batch work fills it, as it should
        ({"kv_used": 0.5, "callers": 5, "callers_waiting": 2}, False),
    ],
)
def test_given_callers_that_wait_too_long_then_more_workers_are_desired(seen: dict[str, float], grows: bool) -> None:
    pool = Pool(ScalingLimits(min_workers=4, max_workers=100), live=4)
    assert (pool.decide(**seen).desired == 5) is grows


@pytest.mark.parametrize(
    ("least", "goodput", "desired"), [(0.9, 0.89, 5), (0.9, 0.9, 4), (0.9, None, 4), (None, 0.1, 4)]
)
def test_given_too_few_answers_in_time_then_more_workers_are_desired(
    least: float | None, goodput: float | None, desired: int
) -> None:
    pool = Pool(ScalingLimits(min_workers=4, max_workers=100, min_goodput=least), live=4)
    assert pool.decide(goodput=goodput, callers=5).desired == desired  # type: ignore[arg-type]


def test_given_a_goodput_just_above_its_objective_then_the_pool_does_not_shrink() -> None:
    """Of 0.1 late answers that are allowed, 0.07 let the pool shrink."""
    limits = ScalingLimits(min_workers=1, max_workers=100, min_goodput=0.9)
    assert settled(Pool(limits, live=6), {"goodput": 0.92, "callers": 5}) == 6
    assert settled(Pool(limits, live=6), {"goodput": 0.94, "callers": 5}) == 1
    unlimited = limits.model_copy(update={"min_goodput": None})
    assert settled(Pool(unlimited, live=6), {"goodput": 0.1, "callers": 5}) == 1


def test_given_pressure_while_workers_start_then_it_is_seen_first_what_they_bring() -> None:
    pool = Pool(ScalingLimits(min_workers=4, max_workers=100), live=4)
    assert pool.decide(ttft_p95=9.0, callers=5).desired == 5
    pool.now += 120
    assert pool.decide(ttft_p95=9.0, callers=5).desired == 5
    pool.live = 5
    assert pool.decide(ttft_p95=9.0, callers=5).desired == 7


def test_given_a_ttft_just_below_its_objective_then_the_pool_does_not_shrink() -> None:
    pool = Pool(ScalingLimits(min_workers=1, max_workers=100), live=6)
    assert settled(pool, {"ttft_p95": 1.9, "callers": 5}) == 6
    assert settled(pool, {"ttft_p95": 0.4, "callers": 5}) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_workers": 9, "max_workers": 8},
        {"max_workers": 0},
        {"target_share": 0},
        {"work_factor": 0.9},
        {"max_scale_up": 0},
        {"cold_start_seconds": -1},
    ],
)
def test_given_limits_that_contradict_themselves_then_they_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ScalingLimits.model_validate(wrong)


def test_given_none_and_time_to_gather_then_the_first_worker_waits_for_more_work() -> None:
    pool = Pool(ScalingLimits(max_workers=100, gather_seconds=600.0))
    assert pool.decide(Demand(100.0, 6 * HOUR)).reason == "gathering work"
    assert pool.decide(Demand(100.0, 6 * HOUR, waited=599.0)).desired == 0
    assert pool.decide(Demand(100.0, 6 * HOUR, waited=600.0)).desired == 1


@pytest.mark.parametrize(
    ("demand", "seen"),
    [
        (Demand(3_000.0, 6 * HOUR), {}),  # enough for one
        (Demand(100.0, 800.0), {}),  # due soon
        (Demand(100.0), {}),  # neither a deadline nor bulk: it may not wait
        (Demand(2_200.0, 1.1 * HOUR), {}),  # two would be needed later
        (Demand(100.0, 6 * HOUR), {"callers": 1}),
    ],
)
def test_given_a_reason_to_begin_then_nothing_is_gathered(demand: Demand, seen: dict[str, float]) -> None:
    assert Pool(ScalingLimits(max_workers=100, gather_seconds=600.0)).decide(demand, **seen).desired >= 1


def test_given_callers_and_no_work_then_one_worker_comes_at_once_and_goes_when_they_have_gone() -> None:
    pool = Pool()
    woken = pool.decide(callers=1, callers_waiting=1)
    assert (woken.desired, woken.reason) == (1, "callers wait")
    assert pool.settle(callers=1).desired == 1
    assert pool.settle().desired == 0
