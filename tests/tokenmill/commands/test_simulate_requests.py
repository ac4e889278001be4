"""`tokenmill simulate-requests` as it is typed."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from pipeline.planner.estimates.published_models import PUBLISHED_MODELS
from pipeline.simulator.serving.requests import REQUEST_MIXES
from tokenmill.commands.simulate_requests import PublishedModel, RequestMix

QUICK = (
    "simulate-requests",
    "--whole",
    "2xh100",
    "--seconds",
    5,
    "--rate",
    4,
    "--prompt-tokens",
    8_000,
    "--answer-tokens",
    9,
)


@pytest.mark.slow
def test_given_workers_when_simulated_then_each_deployment_has_its_line(tokenmill: Any) -> None:
    found = json.loads(tokenmill(*QUICK, "--price", "h100=2", "--json").out)
    assert found["prices"] == {"h100": 2.0}
    whole, placed, always = found["deployments"]
    assert whole["name"] == "2xh100, chunked prefill"
    assert whole["report"]["requests"] == 100
    assert always["report"]["placements"] == {"split": 99, "whole_on_prefill": 1}, "one answer has one token"
    assert {one["price_per_hour"] for one in found["deployments"]} == {4.0}
    done = tokenmill(*QUICK)
    assert f"{placed['goodput']:.2f}" in done.out
    assert "1xh100 + 1xh100, always split" in done.out
    assert json.loads(tokenmill(*QUICK, "--price", "h100=2", "--json").out) == found


@pytest.mark.slow
def test_given_mixed_machines_then_the_load_follows_the_price(tokenmill: Any) -> None:
    mixed = ("--prefill", "1xh100", "--decode", "2xa100", "--price", "h100=3", "--price", "a100=1.5")
    found = json.loads(tokenmill(*QUICK, *mixed, "--json").out)["deployments"]
    assert [one["price_per_hour"] for one in found] == [6.0, 6.0, 6.0]
    assert found[1]["name"] == "1xh100 + 2xa100, split where it pays"


def test_given_a_job_then_requests_arrive_at_once(tokenmill: Any) -> None:
    options = ("--whole", "2xl40s", "--offline", 30, "--prompt-tokens", 500, "--answer-tokens", 20)
    assert tokenmill("simulate-requests", *options).out.count("at once") == 3
    whole, *_ = json.loads(tokenmill("simulate-requests", *options, "--json").out, parse_constant=pytest.fail)[
        "deployments"
    ]
    assert (whole["goodput"], whole["requests_per_second"], whole["report"]["requests"]) == (None, None, 30)


def test_the_names_that_help_offers_are_those_that_there_are() -> None:
    assert sorted(get_args(PublishedModel)) == sorted(PUBLISHED_MODELS)
    assert sorted(get_args(RequestMix)) == sorted(REQUEST_MIXES)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--whole", "h100"), 2, "4xh100"),
        (("--whole", "2xh900"), 2, "devices are"),
        (("--whole", "0xh100"), 2, "no worker"),
        (("--prefill", "1xh100"), 2, "--prefill and --decode"),
        (("--rate", 1, "--offline", 5), 2, "leave out"),
        (("--answer-tokens", 5), 2, "with --prompt-tokens"),
        (("--prompt-tokens", 5, "--mix", "8k"), 2, "not both"),
        (("--price", "h100=0"), 2, "above 0"),
        (("--price", "l4=1"), 2, "no such device"),
        (("--model", "llama-3.1-70b", "--whole", "2xl4"), 1, "leave no room"),
        (("--mix", "32k", "--whole", "2xl4"), 1, "room for"),
        (("--ttft", 0.001, "--mix", "mixed"), 1, "at no rate"),
    ],
)
@pytest.mark.slow
def test_given_wrong_arguments_then_they_are_refused(
    tokenmill: Any, arguments: tuple[object, ...], code: int, says: str
) -> None:
    done = tokenmill("simulate-requests", *arguments)
    assert done.code == code, done.err
    assert says in done.err
