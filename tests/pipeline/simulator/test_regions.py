"""Installations in several regions: no job leaves its regions, prices are followed, and lost regions are left."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.simulator.regional_simulation import RegionalOutcome, RegionalReport, regional_report, simulate_regions
from pipeline.simulator.regions import BadRegions, RegionSettings, draw_regional_trace, read_regions
from pipeline.simulator.settings import SimulationSettings
from pipeline.simulator.trace import Trace, TracedJob, TraceSettings, draw_trace
from pipeline.simulator.worker_model import EXAMPLE
from schemas.jobs.job import Tier
from schemas.settings.autoscaling import ScalingLimits

GPUS = 8
PER_WORKER = EXAMPLE.rows_per_second(EXAMPLE.batch, 300.0, 200.0)
SETTINGS = SimulationSettings(EXAMPLE, ScalingLimits())
NIGHT_IS_CHEAP = (0.5,) * 12 + (1.5,) * 12
DAY_IS_CHEAP = (1.5,) * 12 + (0.5,) * 12


def regions(prices: dict[str, Any], **more: Any) -> RegionSettings:
    """Regions with these prices."""
    each = [
        {"name": name, "gpus": GPUS, "price_per_hour": price, "transfer_price_per_gb": 0.02}
        for name, price in prices.items()
    ]
    return RegionSettings.model_validate({"region": each, **more})


def drawn(load: float, hours: float = 24.0, jobs: int = 120) -> TraceSettings:
    """A trace that so much of one region's workers could do."""
    return TraceSettings(round(load * GPUS * PER_WORKER * 3_600 * hours), hours, jobs)


def numbers(found: RegionalOutcome) -> dict[str, list[int]]:
    """Each region's jobs, as their numbers in the trace."""
    return {name: sorted(int(job.order.id) for job in outcome.jobs) for name, outcome in found.outcomes.items()}


TENANTS = {"a": ("eu",), "b": ("us", "ap")}
regional_jobs = st.builds(
    TracedJob,
    at=st.floats(min_value=0, max_value=9_000),
    rows=st.integers(1, 50_000),
    tier=st.sampled_from([Tier.STANDARD, Tier.BULK]),
    tenant=st.sampled_from(["a", "b", "c"]),
    deadline=st.none() | st.floats(min_value=60, max_value=20_000),
)
outages = st.lists(
    st.builds(
        lambda region, begin, seconds: {"region": region, "begin": begin, "end": begin + seconds},
        st.sampled_from(["eu", "us", "ap"]),
        st.floats(min_value=0, max_value=9_000),
        st.floats(min_value=1, max_value=5_000),
    ),
    max_size=3,
    unique_by=lambda one: one["region"],
)


@given(st.lists(regional_jobs, min_size=1, max_size=6), outages, st.integers(0, 99))
@settings(max_examples=25, deadline=None)
@pytest.mark.slow
def test_given_any_trace_then_no_job_leaves_its_regions_and_each_ends_in_one(
    jobs: list[TracedJob], lost: list[dict[str, Any]], seed: int
) -> None:
    where = regions({"eu": 2.0, "us": 0.5, "ap": NIGHT_IS_CHEAP}, tenants=TENANTS, outage=lost)
    trace = Trace("any", tuple(sorted(jobs, key=lambda job: job.at)))
    found = simulate_regions(trace, replace(SETTINGS, seed=seed), where)
    for name, of_region in numbers(found).items():
        assert all(name in TENANTS.get(trace.jobs[number].tenant, ("eu", "us", "ap")) for number in of_region)
    assert sorted(chain.from_iterable(numbers(found).values())) == list(range(len(jobs)))
    assert all(job.ended is not None for outcome in found.outcomes.values() for job in outcome.jobs)


@pytest.mark.slow
def test_given_equal_prices_then_all_jobs_run_at_home() -> None:
    where = regions({"eu": 1.0, "us": 1.0, "ap": 1.0})
    found = regional_report(draw_regional_trace("daynight", drawn(0.3, 8.0), 1, where), SETTINGS, where)
    assert [one.moved for one in found.regions] == [0, 0, 0]
    assert all(one.jobs for one in found.regions)
    assert (found.total.transfer_cost, found.total.late) == (0.0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "second",
    [
        pytest.param(DAY_IS_CHEAP, id="the other half of the day"),
        pytest.param(0.9, id="always", marks=pytest.mark.exhaustive),
    ],
)
def test_given_another_region_that_is_cheaper_then_all_together_cost_no_more_than_the_best_one(
    second: Any, seed: int
) -> None:
    where = regions({"eu": NIGHT_IS_CHEAP, "us": second})
    found = regional_report(draw_regional_trace("daynight", drawn(0.3), seed, where), SETTINGS, where)
    assert {one.name for one in found.single} == {"eu", "us"}
    best = next(one for one in found.single if one.name == found.best_single)
    assert (found.total.late, best.late) == (0, 0)
    assert found.total.cost <= best.cost
    assert found.total.moved > 0
    assert found.total.tokens == pytest.approx(best.tokens), "the same work is compared"


def lost_region(tenants: dict[str, tuple[str, ...]]) -> tuple[RegionalOutcome, RegionalReport]:
    """Two jobs at home in a cheap region that is lost for hours while they run."""
    lost = {"region": "us", "begin": 3_000.0, "end": 20_000.0}
    where = regions({"eu": 1.0, "us": 0.5}, outage=[lost], tenants=tenants)
    jobs = tuple(TracedJob(at=0, rows=400_000, tenant=name, home="us", deadline=25_000.0) for name in ("bound", "free"))
    trace = Trace("two", jobs)
    return simulate_regions(trace, SETTINGS, where), regional_report(trace, SETTINGS, where)


def test_given_a_lost_region_then_jobs_that_may_move_do_and_the_others_wait() -> None:
    found, report = lost_region({"bound": ("us",)})
    assert numbers(found) == {"eu": [1], "us": [0]}
    moved, waiting = found.outcomes["eu"].jobs[0], found.outcomes["us"].jobs[0]
    assert moved.arrival == 3_000.0
    assert moved.due == waiting.due == 25_000.0
    assert moved.rows_left < 0.5, "it began anew, and ended before its deadline"
    assert moved.ended is not None
    assert moved.ended < 25_000.0
    assert waiting.ended is not None
    assert waiting.ended > 20_000.0
    assert found.outcomes["us"].interrupted > 0
    assert report.regions[0].moved == 1
    assert report.regions[0].transfer_cost == pytest.approx(400_000 * 300 * 4 / 1e9 * 0.02)
    assert [one.name for one in report.single] == ["us"], "one job may not be in the other"


@pytest.mark.slow
def test_given_a_lost_region_then_nothing_is_paid_or_computed_there_until_it_is_back() -> None:
    found, _ = lost_region({})
    assert numbers(found) == {"eu": [0, 1], "us": []}
    assert not [one for one in found.outcomes["us"].paid if one[1] > 3_000.0]
    bound, _ = lost_region({"bound": ("us",), "free": ("us",)})
    assert not [one for one in bound.outcomes["us"].paid if one[0] < 20_000.0 and one[1] > 3_000.0]
    assert [one for one in bound.outcomes["us"].paid if one[0] >= 20_000.0]


def test_given_a_lost_region_then_its_jobs_divide_where_one_region_has_no_room_for_all() -> None:
    where = regions({"us": 0.1, "eu": 0.5, "ap": 1.0}, outage=[{"region": "us", "begin": 1_500.0, "end": 9_000.0}])
    rows = round(0.5 * GPUS * PER_WORKER * 3_600)  # from 1,500 s on, a region can complete one of them in time
    jobs = tuple(TracedJob(at=0.0, rows=rows, deadline=6_000.0) for _ in range(2))
    assert numbers(simulate_regions(Trace("two", jobs), SETTINGS, where)) == {"us": [], "eu": [0], "ap": [1]}


def test_given_a_job_that_arrives_during_the_outage_of_its_only_region_then_it_waits_there() -> None:
    where = regions({"eu": 1.0, "us": 1.0}, outage=[{"region": "us", "begin": 10.0, "end": 5_000.0}])
    jobs = (TracedJob(at=100.0, rows=10, regions=("us",)), TracedJob(at=100.0, rows=10, home="us"))
    found = simulate_regions(Trace("two", jobs), replace(SETTINGS, fixed_workers=GPUS), where)
    assert numbers(found) == {"eu": [1], "us": [0]}
    ended = found.outcomes["us"].jobs[0].ended
    assert ended is not None
    assert ended > 5_000.0, "a fixed fleet comes back"


def test_given_two_jobs_at_once_then_the_second_choice_counts_the_first() -> None:
    where = regions({"eu": 1.0, "us": 0.5})
    rows = round(0.5 * GPUS * PER_WORKER * 3_600)  # the cheap region can complete one of them in time
    jobs = tuple(TracedJob(at=50.0, rows=rows, deadline=3_600.0) for _ in range(2))
    assert numbers(simulate_regions(Trace("two", jobs), SETTINGS, where)) == {"eu": [1], "us": [0]}


def test_given_prices_by_hour_then_each_paid_hour_costs_its_own() -> None:
    where = regions({"eu": (2.0, 3.0) + (0.0,) * 22})
    # Two hours of eight workers' work: all are paid from the beginning to the end of the second job.
    jobs = (TracedJob(at=0, rows=1), TracedJob(at=7_000.0, rows=1))
    found = regional_report(Trace("two", jobs), replace(SETTINGS, fixed_workers=GPUS), where)
    seconds = found.total.worker_hours / GPUS * 3_600
    assert 7_000 < seconds < 7_200
    assert found.total.cost == pytest.approx(GPUS * (2.0 + 3.0 * (seconds - 3_600) / 3_600))


@pytest.mark.slow
def test_given_a_seed_then_the_report_is_the_same() -> None:
    where = regions({"eu": NIGHT_IS_CHEAP, "us": 1.0}, outage=[{"region": "eu", "begin": 4_000.0, "end": 8_000.0}])

    def report(seed: int) -> RegionalReport:
        trace = draw_regional_trace("bursts", drawn(0.2, 4.0, 40), seed, where)
        return regional_report(trace, replace(SETTINGS, seed=seed), where)

    assert report(5) == report(5)
    assert report(5) != report(6)


def test_given_a_drawn_trace_then_each_region_has_its_own_time_of_day_and_tenants_stay_at_home() -> None:
    where = RegionSettings.model_validate({
        "region": [
            {"name": "eu", "gpus": 1, "price_per_hour": 1},
            {"name": "ap", "gpus": 1, "price_per_hour": 1, "utc_offset_hours": 8},
        ],
        "tenants": {"tenant-0": ["eu"]},
    })  # fmt: skip
    how = TraceSettings(10**6, jobs=2_000)
    jobs = draw_regional_trace("daynight", how, 3, where).jobs
    assert [job.at for job in jobs] == sorted(job.at for job in jobs)
    assert {where.home(job).name for job in jobs if job.tenant == "tenant-0"} == {"eu"}
    half = replace(how, requests=500_000, jobs=1_000)
    local = {job.at for job in draw_trace("daynight", half, 4).jobs if job.tenant != "tenant-0"}
    at_home = {(job.at + 8 * 3_600) % 86_400 for job in jobs if job.home == "ap"}
    assert sorted(at_home) == pytest.approx(sorted(local))


def outage(region: str, begin: float, end: float) -> str:
    return f'[[outage]]\nregion = "{region}"\nbegin = {begin}\nend = {end}\n'


FILE = '[[region]]\nname = "eu"\ngpus = 2\nprice_per_hour = 1\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "can't be read as TOML"),
        ("", "region"),
        (FILE + FILE, "eu is there twice"),
        (FILE.replace("= 1", "= [1, 2]"), "region.0.price_per_hour.*24"),
        (FILE.replace("= 1", "= -1"), "price_per_hour"),
        (FILE + 'color = "red"\n', "color"),
        (FILE + '[tenants]\na = ["us"]\n', "no region us"),
        (FILE + outage("us", 1, 2), "no region us"),
        (FILE + outage("eu", 2, 2), "must be later"),
        (FILE + outage("eu", 1, 5) + outage("eu", 4, 6), "overlap"),
    ],
)
def test_given_an_invalid_file_then_the_error_has_the_reason(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "regions.toml"
    path.write_text(text)
    with pytest.raises(BadRegions, match=says):
        read_regions(path)


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (TracedJob(at=7, rows=1, regions=("us", "ap")), "names ap, which is no region"),
        (TracedJob(at=7, rows=1, home="ap"), "names ap, which is no region"),
        (TracedJob(at=7, rows=1, home="us", regions=("eu",)), "its home is us"),
        (TracedJob(at=7, rows=1, tenant="a", regions=("us",)), "may be in no region"),
    ],
)
def test_given_a_job_that_has_no_region_then_the_trace_is_refused(job: TracedJob, says: str) -> None:
    with pytest.raises(BadRegions, match=says):
        simulate_regions(Trace("one", (job,)), SETTINGS, regions({"eu": 1.0, "us": 1.0}, tenants={"a": ("eu",)}))
