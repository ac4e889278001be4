"""Latencies and throughput of simulated requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.lane.placement import LatencyTargets
from pipeline.simulator.serving.simulation import Deployment, ServingOutcome


@dataclass(frozen=True, slots=True)
class ServingReport:
    """Results of one simulation.

    Attributes:
        requests, seconds: number, and time until the last one ended.
        ttft_p50, ttft_p99: seconds to the first token.
        itl_p50, itl_p99: seconds between two tokens, over all tokens of all answers.
        output_tokens_per_second, requests_per_second: ended, over the whole time.
        in_time_share: share of requests whose first token and mean time between tokens kept their targets.
        in_time_per_second: these requests, over the whole time: the goodput at this load, as gateways count it.
        busy_share: of all workers' time, the share with a step.
        placements: number of requests by placement.
        moved_bytes: of keys and values, between workers.
    """

    requests: int
    seconds: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    output_tokens_per_second: float
    requests_per_second: float
    in_time_share: float
    in_time_per_second: float
    busy_share: float
    placements: Mapping[str, int]
    moved_bytes: float


def serving_report(outcome: ServingOutcome, deployment: Deployment, targets: LatencyTargets) -> ServingReport:
    """Evaluate a simulation of at least one request."""
    requests = outcome.requests
    first = sorted((request.ttft_seconds, 1) for request in requests)
    between = sorted([*outcome.step_itls, *((seconds, 1) for seconds in outcome.single_itls)])
    workers = deployment.decode.count + (0 if deployment.prefill is None else deployment.prefill.count)
    in_time = sum(
        request.ttft_seconds <= targets.ttft_seconds and request.mean_itl_seconds <= targets.itl_seconds
        for request in requests
    )
    return ServingReport(
        requests=len(requests),
        seconds=outcome.seconds,
        ttft_p50=_quantile(first, 0.5),
        ttft_p99=_quantile(first, 0.99),
        itl_p50=_quantile(between, 0.5),
        itl_p99=_quantile(between, 0.99),
        output_tokens_per_second=sum(request.answer_tokens for request in requests) / outcome.seconds,
        requests_per_second=len(requests) / outcome.seconds,
        in_time_share=in_time / len(requests),
        in_time_per_second=in_time / outcome.seconds,
        busy_share=outcome.busy_seconds / (workers * outcome.seconds),
        placements=dict(Counter(str(request.placement) for request in requests)),
        moved_bytes=outcome.moved_bytes,
    )


def _quantile(samples: Sequence[tuple[float, int]], share: float) -> float:
    """The smallest value that so many of the samples, each (value, count) and in order, don't exceed; 0.0 without
    any."""
    rank, seen = share * sum(count for _, count in samples), 0
    for value, count in samples:
        seen += count
        if seen >= rank:
            return value
    return 0.0
