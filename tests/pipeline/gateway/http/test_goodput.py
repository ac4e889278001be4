"""Goodput: which answers keep the promised time to first token and mean time between tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.gateway.http.goodput import GoodputMetrics
from pipeline.lane.ports import AnswerCounts
from schemas.jobs.job import Tier
from schemas.settings.lane import LatencyPromise, SloOptions
from schemas.workers.lane import EndEvent, ErrorEvent, LaneRequest, TokensEvent

PROMISES = {Tier.INTERACTIVE: LatencyPromise(ttft_seconds=1.0, itl_seconds=0.1)}
Arrivals = list[tuple[float, int]]  # of tokens: seconds after the request, their number


def _request(name: str = "r", tenant: str = "t", tier: Tier = Tier.INTERACTIVE, url: str = "") -> LaneRequest:
    return LaneRequest(name, "m", {}, url or "/v1/chat/completions", tier=tier, tenant=tenant)


def _error(status: int) -> ErrorEvent:
    return ErrorEvent("r", 1, 9, "code", "message", status)


END = EndEvent("r", 1, 9)


def _record(metrics: GoodputMetrics, request: LaneRequest, arrivals: Arrivals, choice: int = 0) -> None:
    for number, (at, tokens) in enumerate(arrivals):
        metrics.record_tokens(TokensEvent(request.id, 1, number, choice, tuple(range(tokens))), 100.0 + at)


def _counted(metrics: GoodputMetrics) -> dict[tuple[str, str, str], int]:
    return {key: count for key, count in metrics.counts().items() if count}


def _one(arrivals: Arrivals, end: EndEvent | ErrorEvent | None, at: float) -> str | None:
    """How one answer is counted; None: not at all."""
    metrics = GoodputMetrics(PROMISES, 10)
    metrics.started(_request(), 100.0)
    _record(metrics, _request(), arrivals)
    metrics.ended("r", end, 100.0 + at)
    metrics.ended("r", None, 100.0 + at)  # it is counted once
    counted = _counted(metrics)
    assert set(counted.values()) <= {1}
    return next(iter(counted))[2] if counted else None


@pytest.mark.parametrize(
    ("arrivals", "latency"),
    [
        ([(1.0, 1), (1.1, 1)], "in_time"),
        ([(1.01, 1)], "late_first_token"),
        ([(0.5, 1), (0.71, 1), (0.72, 1)], "late_tokens"),  # 0.11 s a gap
        ([(0.5, 1), (0.9, 1), (0.91, 4)], "in_time"),  # one gap is long, their mean is not
        ([(0.5, 5), (0.9, 1)], "in_time"),  # five gaps: tokens that came together count each
        ([(1.01, 1), (9.0, 1)], "late_first_token"),  # both are late: the first decides
        ([(0.5, 0), (1.5, 1)], "late_first_token"),  # text without tokens is no first token
        ([(0.5, 1)], "in_time"),  # one token has no gap
    ],
)
def test_an_answer_keeps_its_promise_by_its_first_token_and_its_mean_gap(arrivals: Arrivals, latency: str) -> None:
    assert _one(arrivals, END, 10.0) == latency


@pytest.mark.parametrize(
    ("end", "at", "latency"),
    [
        (END, 0.5, "late_first_token"),
        (None, 0.9, None),
        (None, 1.1, "late_first_token"),
        (_error(408), 0.9, None),
        (_error(408), 1.1, "late_first_token"),
        (_error(429), 0.1, "refused"),
        (_error(400), 5.0, None),
        (_error(500), 0.1, "failed"),
        (_error(503), 5.0, "failed"),
    ],
)
def test_an_answer_without_tokens_counts_by_its_end(
    end: EndEvent | ErrorEvent | None, at: float, latency: str | None
) -> None:
    assert _one([], end, at) == (None if end is END else latency)


def test_a_caller_who_leaves_counts_if_the_tokens_came_too_slowly() -> None:
    assert _one([(0.5, 1), (0.8, 1)], None, 0.9) == "late_tokens"
    assert _one([(0.5, 1), (0.55, 1)], None, 9.0) is None


def test_the_slowest_choice_decides_and_the_earliest_first_token() -> None:
    metrics = GoodputMetrics(PROMISES, 10)
    for name, gap in (("fast", 0.05), ("slow", 0.2)):
        request = _request(name)
        metrics.started(request, 100.0)
        _record(metrics, request, [(0.5, 1), (0.55, 1)], choice=0)
        _record(metrics, request, [(1.5, 1), (1.5 + gap, 1)], choice=1)
        metrics.ended(name, EndEvent(name, 1, 9), 110.0)
    assert _counted(metrics) == {("interactive", "t", "in_time"): 1, ("interactive", "t", "late_tokens"): 1}


def test_tiers_without_a_promise_and_embeddings_are_not_counted() -> None:
    metrics = GoodputMetrics(PROMISES, 10)
    for request in (_request(tier=Tier.BULK), _request(url="/v1/embeddings")):
        metrics.started(request, 100.0)
        metrics.refused(request)
        metrics.started(request, 100.0)
        _record(metrics, request, [(9.0, 1)])
        metrics.ended("r", END, 110.0)
    assert metrics.counts() == {}


def test_the_number_of_tenants_is_bounded_and_each_has_all_latencies() -> None:
    metrics = GoodputMetrics(PROMISES, 2)
    for tenant in ("a", "b", "c", "d", "a"):
        metrics.refused(_request(tenant=tenant))
    assert _counted(metrics) == {
        ("interactive", "a", "refused"): 2, ("interactive", "b", "refused"): 1, ("interactive", "other", "refused"): 2,
    }  # fmt: skip
    assert len(metrics.counts()) == 3 * 5, "an increase from a zero is an increase for Prometheus"


def test_reports_are_by_model_and_leave_out_failures() -> None:
    metrics = GoodputMetrics(PROMISES, 0)
    for number, (model, arrivals, end) in enumerate(
        [
            ("a", [(0.5, 1)], END), ("a", [(2.0, 1)], END), ("b", [(0.5, 1), (5.0, 1)], END), ("b", [], _error(500)),
        ]
    ):  # fmt: skip
        request = replace(_request(str(number)), model=model)
        metrics.started(request, 100.0)
        _record(metrics, request, arrivals)
        metrics.ended(request.id, end, 110.0)
    routed = {"tokenmill": {"content_policies": {"verdicts": [{"action": "route"}], "usage": {}}}}
    metrics.started(_request("routed"), 100.0)
    _record(metrics, _request("routed"), [(9.0, 1)])
    metrics.ended("routed", replace(END, request="routed", response=routed), 110.0)
    assert sum(metrics.counts().values()) == 5, "counted, but it says nothing about its model's workers"
    metrics.refused(replace(_request(), model="a"))
    assert metrics.take_reports() == {
        "a": AnswerCounts(in_time=1, late_first_tokens=2), "b": AnswerCounts(late_tokens=1),
    }  # fmt: skip
    assert metrics.take_reports() == {}


def test_the_settings_give_each_tier_its_promise() -> None:
    standard = LatencyPromise(ttft_seconds=5.0, itl_seconds=0.5)
    slo = SloOptions(ttft_seconds=2.0, tiers={Tier.STANDARD: standard})
    assert slo.promises == {
        Tier.INTERACTIVE: LatencyPromise(ttft_seconds=2.0, itl_seconds=0.1), Tier.STANDARD: standard,
    }  # fmt: skip
    with pytest.raises(ValueError, match="the promise of interactive requests is ttft_seconds"):
        SloOptions(tiers={Tier.INTERACTIVE: standard})
