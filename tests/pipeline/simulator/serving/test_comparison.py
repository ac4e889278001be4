"""Deployments are compared at equal cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.lane.placement import LatencyTargets
from pipeline.planner.estimates.capacity import HARDWARE
from pipeline.planner.estimates.published_models import PUBLISHED_MODELS
from pipeline.simulator.serving.comparison import (
    ComparisonSettings,
    Machines,
    TargetsNotKept,
    candidates,
    compare_deployments,
)
from pipeline.simulator.serving.requests import LengthDistribution

PRICES = {"h100": 3.0, "a100": 2.0}
MIX = (LengthDistribution(1.0, prompt_tokens=8_192.0, answer_tokens=15.0),)
SETTINGS = ComparisonSettings(PUBLISHED_MODELS["llama-3.1-8b"], MIX, seconds=10.0)
ONE = Machines(1, HARDWARE["h100"])


def test_every_division_of_the_workers_is_compared_with_the_whole() -> None:
    names = [one.name for one in candidates(SETTINGS, PRICES, replace(ONE, count=3))]
    assert names == [
        "3xh100, chunked prefill",
        "1xh100 + 2xh100, split where it pays",
        "1xh100 + 2xh100, always split",
        "2xh100 + 1xh100, split where it pays",
        "2xh100 + 1xh100, always split",
    ]


@pytest.mark.slow
def test_requests_arrive_in_proportion_to_the_price() -> None:
    given = (ONE, Machines(2, HARDWARE["a100"]))
    compared = candidates(SETTINGS, PRICES, replace(ONE, count=2), given)
    assert [one.price_per_hour for one in compared] == [6.0, 7.0, 7.0]
    found = compare_deployments(compared[:2], SETTINGS, requests_per_second=12.0)
    assert [one.requests_per_second for one in found] == pytest.approx([12.0, 14.0])
    assert [one.report.requests for one in found] == [120, 140]


@pytest.mark.slow
def test_the_goodput_is_the_highest_rate_that_keeps_the_targets() -> None:
    compared = candidates(SETTINGS, PRICES, ONE)
    (found,) = compare_deployments(compared, SETTINGS, requests_per_second=1.0)
    assert found.goodput is not None
    assert found.goodput_per_price == pytest.approx(found.goodput * 1_200)
    (at,) = compare_deployments(compared, SETTINGS, requests_per_second=found.goodput)
    (above,) = compare_deployments(compared, SETTINGS, requests_per_second=1.3 * found.goodput)
    assert above.report.in_time_share < SETTINGS.in_time_share - 0.1
    assert at.report.in_time_share >= SETTINGS.in_time_share
    ended = at.report.requests_per_second
    assert at.report.in_time_per_second == pytest.approx(ended * at.report.in_time_share)
    (chosen,) = compare_deployments(compared, SETTINGS)
    assert chosen.requests_per_second == pytest.approx(0.7 * found.goodput)


@pytest.mark.slow
def test_targets_that_no_rate_keeps_are_an_error_only_where_they_choose_the_load() -> None:
    strict = replace(SETTINGS, targets=LatencyTargets(ttft_seconds=0.001))
    compared = candidates(strict, PRICES, ONE)
    with pytest.raises(TargetsNotKept, match="at no rate"):
        compare_deployments(compared, strict)
    (found,) = compare_deployments(compared, strict, requests_per_second=1.0)
    assert (found.goodput, found.report.in_time_share) == (0.0, 0.0)


def test_a_job_reaches_all_deployments_at_once() -> None:
    job = replace(SETTINGS, requests_at_once=200)
    found = compare_deployments(candidates(job, PRICES, replace(ONE, count=2)), job)
    assert [one.goodput for one in found] == [None] * 3
    assert {one.report.requests for one in found} == {200}
    rates = [one.report.output_tokens_per_second for one in found]
    assert rates[0] > max(rates[1:]), "with chunked prefill all workers compute all the time"


def test_devices_of_one_worker_are_one_larger_device() -> None:
    machines = Machines(2, HARDWARE["h100"], devices=4)
    assert str(machines) == "2x4xh100"
    assert machines.price_per_hour(PRICES) == 24.0
    assert machines.worker_hardware.flops == 4 * HARDWARE["h100"].flops
    assert machines.worker_hardware.memory == 4 * HARDWARE["h100"].memory
