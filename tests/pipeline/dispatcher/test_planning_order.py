"""Jobs are planned by tenant in turn, and no tenant occupies all planners."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.dispatcher.planning_order import PlanningOrder

START = datetime(2026, 1, 1, tzinfo=UTC)


def order_of(planners: int, jobs: list[tuple[str, int]]) -> PlanningOrder[int]:
    """Jobs are their age's number: the lowest is the oldest."""
    order: PlanningOrder[int] = PlanningOrder(planners)
    for tenant, number in jobs:
        order.add(tenant, START + timedelta(seconds=number), number)
    return order


def test_given_many_jobs_of_one_tenant_when_another_has_one_then_it_is_the_next_to_be_planned() -> None:
    order = order_of(3, [("a", number) for number in range(1_000)] + [("b", 1_000)])
    assert [order.take(), order.take(), order.take()] == [("a", 0), ("b", 1_000), ("a", 1)]
    assert order.take() is None, "all planners are occupied"


def test_a_tenant_that_is_the_only_one_occupies_all_planners() -> None:
    order = order_of(3, [("a", number) for number in range(10)])
    assert [order.take() for _ in range(4)] == [("a", 0), ("a", 1), ("a", 2), None]


@pytest.mark.parametrize(("planners", "most"), [(1, 1), (2, 1), (4, 3)])
def test_once_two_tenants_were_seen_one_leaves_a_planner_to_others(planners: int, most: int) -> None:
    order = order_of(planners, [("b", 0)] + [("a", number) for number in range(1, 10)])
    assert order.take() == ("b", 0)
    order.ended("b")
    assert [order.take() for _ in range(planners)] == [("a", number + 1) for number in range(most)] + [None] * (
        planners - most
    )
    order.add("b", START, 99)
    assert order.take() == (("b", 99) if planners > 1 else None)
    order.ended("a")
    assert order.take() == (("a", most + 1) if planners > 1 else ("b", 99))


def test_a_tenants_jobs_are_planned_in_order_of_their_age_however_they_are_added() -> None:
    order = order_of(2, [("a", 3), ("a", 1), ("a", 2)])
    taken = []
    for _ in range(3):
        found = order.take()
        assert found is not None
        taken.append(found[1])
        order.ended("a")
    assert taken == [1, 2, 3]


@given(st.integers(1, 4), st.lists(st.one_of(st.sampled_from("abc"), st.none())))
def test_every_job_is_planned_once_within_the_bounds(planners: int, events: list[str | None]) -> None:
    order, under_way, added, taken, seen = order_of(planners, []), Counter[str](), 0, list[int](), set[str]()
    for event in [*events, *[None] * (2 * len(events))]:
        if event is not None:
            order.add(event, START + timedelta(seconds=added), added)
            added += 1
            seen.add(event)
        elif under_way:
            tenant = next(iter(under_way.elements()))
            order.ended(tenant)
            under_way = under_way - Counter([tenant])
        taken_now = []
        while (found := order.take()) is not None:
            under_way[found[0]] += 1
            taken.append(found[1])
            taken_now.append(found)
        assert under_way.total() <= planners
        if len(seen) < 2:
            continue
        fresh = {tenant for tenant, _ in taken_now}
        assert all(under_way[tenant] <= max(1, planners - 1) for tenant in fresh)
    assert sorted(taken) == list(range(added))
