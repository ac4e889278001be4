"""The dispatch order of shards: shares, urgency, and deadlines at risk."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from pipeline.dispatcher.fair_share import FairShares
from pipeline.dispatcher.shard_order import (
    DEADLINE_RISK_SECONDS,
    MAX_ADVANCE_SECONDS,
    backlog_for,
    dispatch_order,
    is_deadline_at_risk,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Job:
    id: str
    tenant: str
    deadline: datetime | None = None
    created_at: datetime = NOON


def taken(
    shares: FairShares, jobs: list[Job], room: int, *pressing: str, tokens: int = 10, lost: str = "", each: int = 100
) -> list[str]:
    """The jobs whose shards go next, `each` of so many."""
    found = []
    wanted = [(job, list(range(each, 0, -1))) for job in jobs]
    for job, _ in dispatch_order(
        shares, wanted, room, lambda job: job, lambda job: job.id in pressing, lambda job: job.id == lost
    ):
        shares.charge(job.tenant, tokens)
        found.append(job.id)
    return found


def test_given_two_tenants_then_they_take_turns_and_the_nearest_deadline_of_each_goes_first() -> None:
    jobs = [Job("a1", "a"), Job("a2", "a", NOON + timedelta(hours=1)), Job("b1", "b")]
    assert taken(FairShares(), jobs, 6) == ["a2", "b1"] * 3


def test_given_a_job_at_risk_then_it_goes_first_and_its_tenant_is_charged() -> None:
    shares, jobs = FairShares(), [Job("a1", "a", NOON + timedelta(hours=1)), Job("b1", "b")]
    assert taken(shares, jobs, 4, "a1") == ["a1"] * 4
    assert shares.ahead("a") == 40
    assert shares.ahead("b") == 0
    assert taken(shares, jobs, 4) == ["b1"] * 4


def test_given_two_jobs_at_risk_then_they_share_as_ever() -> None:
    jobs = [Job("a1", "a", NOON), Job("b1", "b", NOON), Job("c1", "c")]
    assert taken(FairShares({"b": 2.0}), jobs, 6, "a1", "b1") == ["a1", "b1", "b1", "a1", "b1", "b1"]


def test_given_two_jobs_at_risk_then_the_nearer_deadline_goes_first_of_any_tenant() -> None:
    jobs = [Job("a1", "a", NOON + timedelta(hours=1)), Job("b1", "b", NOON)]
    assert taken(FairShares(), jobs, 4, "a1", "b1", each=2) == ["b1", "b1", "a1", "a1"]


def test_given_a_job_that_is_lost_then_those_in_time_go_before_it_and_those_without_a_deadline_after_it() -> None:
    jobs = [Job("a1", "a", NOON), Job("a2", "a", NOON + timedelta(hours=1)), Job("a3", "a")]
    assert taken(FairShares(), jobs, 9, lost="a1", each=1) == ["a2", "a1", "a3"]


def test_given_more_room_than_shards_then_all_are_taken_once() -> None:
    wanted = [(Job("a", "a"), [2, 1]), (Job("b", "b"), [1])]
    went = [(job.id, number) for job, number in dispatch_order(FairShares(), wanted, 99, lambda job: job)]
    assert sorted(went) == [("a", 1), ("a", 2), ("b", 1)]
    assert went.index(("a", 1)) < went.index(("a", 2))


@pytest.mark.parametrize(
    ("left", "together", "rate", "ahead", "so"),
    [
        (None, 1e6, 1_000, 0, False),  # no deadline
        (5_000, 1e6, 0, 0, False),  # its speed isn't known
        (5_000, 1e6, 1_000, 0, False),  # 1,000 s of work: it may wait
        (2 * 1_000 + DEADLINE_RISK_SECONDS - 1, 1e6, 1_000, 0, True),
        (900, 1e6, 1_000, 0, True),  # it might still be in time
        (5_000, 4e6, 1_000, 0, True),  # what is due before it leaves it no room
        (1_500, 1e6, 1_000, MAX_ADVANCE_SECONDS * 1_000 + 1, False),  # its tenant has had enough
    ],
)
def test_given_the_tokens_left_of_a_job_then_its_deadline_is_at_risk_or_not(
    left: float | None, together: float, rate: float, ahead: float, so: bool
) -> None:
    assert is_deadline_at_risk(left, 1e6, together, rate, ahead) is so


def test_given_a_fleet_then_its_queues_are_as_long_as_it_needs() -> None:
    assert [backlog_for(2, workers, 0.25) for workers in (0, 1, 8, 9, 1_000)] == [2, 2, 2, 3, 250]


def test_given_a_job_without_allowed_shards_then_it_is_skipped_and_takes_no_room() -> None:
    shares, jobs = FairShares(), [Job("a1", "a", NOON + timedelta(hours=1)), Job("a2", "a"), Job("b1", "b")]
    wanted = [(job, list(range(100, 0, -1))) for job in jobs]
    found = []
    for job, _ in dispatch_order(
        shares, wanted, 4, lambda job: job, is_allowed=lambda job, number: job.id != "a1" or number < 2
    ):
        shares.charge(job.tenant, 10)
        found.append(job.id)
    assert found == ["a1", "b1", "a2", "b1"]
