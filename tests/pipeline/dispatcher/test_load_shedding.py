"""Load shedding gives up as few deadlines as possible."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.dispatcher.load_shedding import JobDeadline, SheddingPlan, plan_shedding


def in_time(jobs: list[JobDeadline], rate: float) -> bool:
    """Whether earliest deadline first meets all deadlines."""
    total = 0.0
    for due in sorted(jobs, key=lambda due: due.time_left):
        total += due.tokens
        if total > due.time_left * rate:
            return False
    return True


def test_given_room_for_all_then_none_is_lost_and_each_has_the_work_before_it() -> None:
    found = plan_shedding([JobDeadline("late", 100.0, 500.0), JobDeadline("soon", 50.0, 400.0)], 10.0)
    assert found == SheddingPlan(frozenset(), {"soon": 400.0, "late": 900.0})


def test_given_too_much_then_the_largest_that_is_in_the_way_is_given_up() -> None:
    jobs = [
        JobDeadline("huge", 40.0, 390.0),
        JobDeadline("a", 50.0, 200.0),
        JobDeadline("b", 60.0, 200.0),
        JobDeadline("later", 500.0, 900.0),
    ]
    found = plan_shedding(jobs, 10.0)
    assert found.lost == {"huge"}
    assert found.cumulative_tokens == {"a": 200.0, "b": 400.0, "later": 1_300.0}


def test_given_a_deadline_that_has_passed_or_no_known_speed_then_it_is_lost_or_nothing_is() -> None:
    assert plan_shedding([JobDeadline("gone", -1.0, 1.0)], 10.0).lost == {"gone"}
    assert plan_shedding([JobDeadline("gone", -1.0, 1.0)], 0.0) == SheddingPlan()


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8))
def test_given_any_jobs_then_the_others_are_in_time_and_none_could_be_saved_besides(
    drawn: list[tuple[int, int]],
) -> None:
    jobs = [JobDeadline(f"{index}", float(left), float(tokens)) for index, (left, tokens) in enumerate(drawn)]
    lost = plan_shedding(jobs, 1.0).lost
    assert in_time([due for due in jobs if due.job not in lost], 1.0)
    most = max(
        len(some) for size in range(len(jobs) + 1) for some in combinations(jobs, size) if in_time(list(some), 1)
    )
    assert len(jobs) - len(lost) == most
