"""Forecasts of jobs' ends, compared with results by hand and with a simulation in tiny slices."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from pipeline.dispatcher.forecast import JobLoad, forecast
from schemas.jobs.job import Tier

STANDARD, BULK = Tier.STANDARD, Tier.BULK


def load(job: str, tokens: float, tier: Tier = STANDARD, tenant: str = "t", model: str = "m") -> JobLoad:
    return JobLoad(job, model, tier, tenant, tokens)


def test_a_lone_job_takes_its_tokens_over_the_speed() -> None:
    assert forecast([load("a", 1_000)], {"m": 50.0}, {}) == {"a": 20.0}


def test_a_tenants_jobs_follow_each_other_as_they_come() -> None:
    ends = forecast([load("soon", 300), load("late", 100)], {"m": 100.0}, {})
    assert ends == {"soon": 3.0, "late": 4.0}


def test_tenants_share_by_weight_and_inherit_what_others_leave() -> None:
    # 3:1 of 100 a second: "a" ends at 300/75 = 4 s; "b" has 100 by then and gets all for the other 200.
    ends = forecast([load("a", 300, tenant="a"), load("b", 300, tenant="b")], {"m": 100.0}, {"a": 3.0})
    assert ends == pytest.approx({"a": 4.0, "b": 6.0})


def test_bulk_has_its_floor_while_there_is_urgent_work_and_all_afterwards() -> None:
    # 950 at 95 a second: 10 s, in which bulk gets 50; the other 950 at 100 a second.
    ends = forecast([load("urgent", 950), load("bulk", 1_000, BULK)], {"m": 100.0}, {}, floor=0.05)
    assert ends == pytest.approx({"urgent": 10.0, "bulk": 19.5})
    starved = forecast([load("urgent", 1_000), load("bulk", 1_000, BULK)], {"m": 100.0}, {}, floor=0.0)
    assert starved == pytest.approx({"urgent": 10.0, "bulk": 20.0})


def test_models_have_workers_of_their_own_and_a_job_of_two_ends_with_the_later_one() -> None:
    loads = [load("a", 100, model="x"), load("both", 100, model="x"), load("both", 50, model="y")]
    assert forecast(loads, {"x": 100.0, "y": 100.0}, {}) == {"a": 1.0, "both": 2.0}


def test_unknown_throughput_gives_no_forecast() -> None:
    loads = [load("a", 100, model="x"), load("both", 100, model="x"), load("both", 50, model="y"), load("z", 0)]
    assert forecast(loads, {"x": 100.0, "m": 1.0}, {}).keys() == {"a", "z"}


@pytest.mark.parametrize("seed", range(20))
def test_the_forecast_agrees_with_serving_in_tiny_slices(seed: int) -> None:
    chance = random.Random(seed)
    weights = {f"t{n}": chance.choice([0.5, 1.0, 4.0]) for n in range(3)}
    loads = [
        load(f"j{n}", chance.randint(1, 400), chance.choice([STANDARD, BULK]), f"t{chance.randrange(4)}")
        for n in range(12)
    ]
    expected = _in_slices(loads, 100.0, weights, floor=0.05, slice_seconds=0.002)
    assert forecast(loads, {"m": 100.0}, weights, 0.05) == pytest.approx(expected, abs=0.05)


def _in_slices(
    loads: list[JobLoad], rate: float, weights: dict[str, float], floor: float, slice_seconds: float
) -> dict[str, float]:
    left = {one.job: one.tokens for one in loads}
    ends: dict[str, float] = {}
    now = 0.0
    while left:
        heads: defaultdict[Tier, dict[str, str]] = defaultdict(dict)
        for one in loads:
            if one.job in left:
                heads[one.tier].setdefault(one.tenant, one.job)
        for tier, tenants in heads.items():
            share = 1.0 if len(heads) == 1 else floor if tier is BULK else 1 - floor
            total = sum(weights.get(tenant, 1.0) for tenant in tenants)
            for tenant, job in tenants.items():
                left[job] -= rate * share * weights.get(tenant, 1.0) / total * slice_seconds
        now += slice_seconds
        for job in [job for job, tokens in left.items() if tokens <= 0]:
            ends[job] = now
            del left[job]
    return ends
