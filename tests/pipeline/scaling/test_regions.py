"""The choice of a job's region: its data stay where they may be, and it runs where it is in time and cheap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.scaling.fleet import Demand
from pipeline.scaling.regions import NoAllowedRegion, PriceFrom, RegionalJob, RegionState, choose_region, mean_price
from schemas.settings.autoscaling import ScalingLimits

LIMITS = ScalingLimits()
ALL = frozenset({"eu", "us", "ap"})
HOUR = 3_600.0


def region(name: str, *prices: float, workers: int = 10, demands: tuple[Demand, ...] = ()) -> RegionState:
    """A region with its prices of the coming hours."""
    return RegionState(
        name, tuple(PriceFrom(hour * HOUR, price) for hour, price in enumerate(prices)), workers, 0, 300.0, demands
    )


def job(
    seconds: float = HOUR, due: float | None = 10 * HOUR, allowed: frozenset[str] = ALL, gigabytes: float = 0.0
) -> RegionalJob:
    return RegionalJob(Demand(seconds, due), "eu", allowed, gigabytes * 1e9, 0.02)


def chosen(of: RegionalJob, *regions: RegionState) -> str:
    return choose_region(of, regions, LIMITS).region


amounts = st.floats(min_value=0, max_value=1e6)
demands = st.builds(Demand, amounts, st.none() | st.floats(min_value=-100, max_value=1e6), amounts, st.booleans())
names = st.sampled_from(sorted(ALL))
states = st.lists(
    st.builds(
        RegionState,
        names,
        st.lists(st.builds(PriceFrom, st.just(0.0), amounts), min_size=1, max_size=1),
        st.integers(1, 1_000),
        st.just(0),
        st.floats(min_value=0, max_value=1_000),
        st.lists(demands, max_size=4),
    ),
    max_size=3,
    unique_by=lambda one: one.name,
)


@given(st.builds(RegionalJob, demands, names, st.frozensets(names), amounts, amounts), states)
def test_given_any_state_then_data_stay_in_their_regions(of: RegionalJob, regions: list[RegionState]) -> None:
    available = {one.name for one in regions} & of.allowed
    if not available:
        with pytest.raises(NoAllowedRegion, match="none is available"):
            choose_region(of, regions, LIMITS)
        return
    assert choose_region(of, regions, LIMITS).region in available


@given(st.permutations(sorted(ALL)), st.floats(min_value=0, max_value=1e4), demands)
def test_given_equal_regions_then_the_home_region_wins_and_without_it_the_first(
    order: list[str], price: float, demand: Demand
) -> None:
    regions = [region(name, price, price, price) for name in order]
    of = replace(job(), demand=demand)
    assert chosen(of, *regions) == "eu"
    others = [one for one in regions if one.name != "eu"]
    assert chosen(of, *others) == others[0].name


@given(st.lists(st.tuples(st.floats(min_value=1, max_value=HOUR), names, amounts), min_size=1), states.filter(bool))
def test_given_room_for_all_then_the_choices_cost_no_more_than_any_one_region(
    arrivals: list[tuple[float, str, float]], regions: list[RegionState]
) -> None:
    regions = [replace(one, max_workers=1_000, demands=(), cold_start_seconds=0.0) for one in regions]
    jobs = [RegionalJob(Demand(seconds, 10 * HOUR), home, ALL, size, 0.02) for seconds, home, size in arrivals]
    total = sum(choose_region(one, regions, LIMITS).cost for one in jobs)
    for alone in regions:
        assert total <= sum(choose_region(one, [alone], LIMITS).cost for one in jobs) * (1 + 1e-6)


def test_given_a_price_that_rises_during_the_job_then_its_mean_counts() -> None:
    # Ten hours of one worker, due in ten hours: it is expected to run for about four and a half.
    of = job(10 * HOUR)
    assert chosen(of, region("eu", 1.0), region("us", 0.1, 2.0, 2.0, 2.0, 2.0)) == "eu"
    assert chosen(of, region("eu", 1.0), region("us", 0.1, 1.1, 1.1, 1.1, 1.1)) == "us"
    # A short deadline: only the price now matters.
    assert chosen(job(300.0, HOUR), region("eu", 1.0), region("us", 0.1, 2.0, 2.0, 2.0, 2.0)) == "us"


def test_given_work_before_a_job_then_the_prices_until_its_own_end_count_and_no_later_ones() -> None:
    # Of 10 workers: 20 h of work before the job delay it until the dear hours, and 20 h after it don't.
    cheap_now = region("us", 0.1, 0.1, 9.0)
    before, after = (Demand(20 * HOUR, 3.5 * HOUR),), (Demand(20 * HOUR, 30 * HOUR),)
    of = job(due=4 * HOUR)
    assert chosen(of, region("eu", 1.0), replace(cheap_now, demands=after)) == "us"
    assert chosen(of, region("eu", 1.0), replace(cheap_now, demands=before)) == "eu"


def test_given_prices_by_hour_then_their_mean_is_weighted_by_time() -> None:
    prices = (PriceFrom(0.0, 1.0), PriceFrom(1_800.0, 3.0), PriceFrom(5_400.0, 9.0))
    assert mean_price(prices, 0.0) == 1.0
    assert mean_price(prices, 1_800.0) == 1.0
    assert mean_price(prices, 3_600.0) == 2.0
    assert mean_price(prices, 7_200.0) == pytest.approx((1.0 + 2 * 3.0 + 9.0) / 4)


def test_given_a_large_input_then_its_transfer_counts_against_the_lower_price() -> None:
    # One worker-hour: 0.5 is saved, and a GB costs 0.02.
    regions = region("eu", 1.0), region("us", 0.5)
    assert chosen(job(gigabytes=24), *regions) == "us"
    assert chosen(job(gigabytes=26), *regions) == "eu"
    assert choose_region(job(gigabytes=24), regions, LIMITS).cost == pytest.approx(0.98)


def test_given_a_cheap_region_that_is_full_then_the_job_goes_where_it_is_in_time() -> None:
    backlog = (Demand(100 * HOUR, 10 * HOUR),)
    assert chosen(job(), region("eu", 1.0), region("us", 0.5, demands=backlog)) == "eu"
    # Work that is due later waits for the job.
    later = (Demand(100 * HOUR, 30 * HOUR),)
    assert chosen(job(), region("eu", 1.0), region("us", 0.5, demands=later)) == "us"


def test_given_a_job_that_would_make_later_work_late_then_it_goes_elsewhere() -> None:
    # 10 workers can do 10 * 30 h * (1 - reserve) / 1.3 hours by then; 200 h are due.
    tight = (Demand(200 * HOUR, 30 * HOUR),)
    assert chosen(job(), region("eu", 1.0), region("us", 0.5, demands=tight)) == "us"
    assert chosen(job(20 * HOUR), region("eu", 1.0), region("us", 0.5, demands=tight)) == "eu"


def test_given_no_region_in_time_then_the_least_loaded_one_is_chosen() -> None:
    of = job(100 * HOUR, HOUR)
    found = choose_region(of, [region("eu", 0.1, workers=5), region("us", 9.0, workers=20)], LIMITS)
    assert found.region == "us"
    assert found.load > 1
    # Nothing starts before the deadline, unless workers are there already.
    soon = job(60.0, 200.0)
    assert chosen(soon, region("eu", 0.1), replace(region("us", 9.0), live=1)) == "us"


def test_given_work_without_a_deadline_then_its_target_counts() -> None:
    full = (Demand(20 * HOUR, HOUR),)
    regions = region("eu", 1.0), region("us", 0.5, demands=full)
    assert chosen(replace(job(), demand=Demand(60.0)), *regions) == "eu"
    assert chosen(replace(job(), demand=Demand(60.0, bulk=True)), *regions) == "us"
