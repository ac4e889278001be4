"""The report of a simulation, compared with an oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from pipeline.simulator.lower_bound import OracleJob
from pipeline.simulator.oracle import OracleResult, best
from pipeline.simulator.settings import SimulationOutcome, SimulationSettings
from pipeline.simulator.trace import Trace
from schemas.jobs.job import Tier

HOUR = 3_600.0


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Results of one simulation; times in seconds.

    Attributes:
        hours: simulated time.  requests, jobs, shards, tokens: totals; tokens are actual, not estimated.
        workers_peak, workers_mean: live workers.  starts, interrupted: numbers of workers.
        worker_hours: paid hours.  busy_share: share of them with a shard.  cost: None: no price was given.
        tokens_per_second: over the time in which anything was computed.
        deadlines, deadlines_met, deadlines_oracle: jobs with a deadline, that met it, that could have met it.
        met_of_oracle: share of the jobs that could have met their deadline and did.
        oracle_worker_hours: lower bound of any schedule's worker hours.  oracle_peak: lower bound of its peak workers.
        cost_over_oracle: worker hours over `oracle_worker_hours`.
        wait_p50, wait_p95, wait_max: from a job's arrival to its first shard at a worker.
        took_p50, took_p95: from a job's arrival to its end.
        changes, changes_an_hour_max: changes of the desired workers; the most within any hour.
        longest_queue: shards.  repeated_rows: computed again after an interruption.
        series: (hour, desired, live, backlog in worker-hours), about `points` of them.
    """

    trace: str
    worker: str
    gpus: int
    hours: float
    requests: int
    jobs: int
    shards: int
    tokens: float
    workers_peak: int
    workers_mean: float
    starts: int
    interrupted: int
    worker_hours: float
    busy_share: float
    cost: float | None
    tokens_per_second: float
    deadlines: int
    deadlines_met: int
    deadlines_oracle: int
    met_of_oracle: float
    oracle_worker_hours: float
    oracle_peak: int
    cost_over_oracle: float
    wait_p50: float
    wait_p95: float
    wait_max: float
    took_p50: float
    took_p95: float
    changes: int
    changes_an_hour_max: int
    longest_queue: int
    repeated_rows: float
    series: tuple[tuple[float, int, int, float], ...]


def report(
    trace: Trace,
    settings: SimulationSettings,
    outcome: SimulationOutcome,
    price_per_hour: float | None = None,
    points: int = 96,
) -> SimulationReport:
    """Evaluate a simulation. `price_per_hour`: of a worker."""
    ideal = oracle(settings, outcome)
    with_due = [(job, could) for job, could in zip(outcome.jobs, ideal.met, strict=True) if job.due is not None]
    met = sum(is_in_time(job.ended, job.due, job.rows_left) for job, _ in with_due)
    could = [job for job, can in with_due if can]
    of_those = sum(is_in_time(job.ended, job.due, job.rows_left) for job in could)
    hours = outcome.worker_seconds / HOUR
    waits = [job.begun - job.arrival for job in outcome.jobs if job.begun is not None]
    took = [job.ended - job.arrival for job in outcome.jobs if job.ended is not None]
    live = [sample.live for sample in outcome.samples] or [settings.fixed_workers or 0]
    begun = min((job.begun for job in outcome.jobs if job.begun is not None), default=0.0)
    return SimulationReport(
        trace=trace.name,
        worker=settings.worker.name,
        gpus=settings.fixed_workers or settings.scaling.max_workers,
        hours=outcome.seconds / HOUR,
        requests=trace.requests,
        jobs=len(trace.jobs),
        shards=outcome.shards,
        tokens=outcome.tokens,
        workers_peak=max(live),
        workers_mean=sum(live) / len(live),
        starts=outcome.starts,
        interrupted=outcome.interrupted,
        worker_hours=hours,
        busy_share=outcome.busy_seconds / outcome.worker_seconds if outcome.worker_seconds else 0.0,
        cost=None if price_per_hour is None else hours * price_per_hour,
        tokens_per_second=outcome.tokens / max(1e-9, outcome.computed_until - begun),
        deadlines=len(with_due),
        deadlines_met=met,
        deadlines_oracle=len(could),
        met_of_oracle=of_those / len(could) if could else 1.0,
        oracle_worker_hours=ideal.worker_seconds / HOUR,
        oracle_peak=ideal.peak,
        cost_over_oracle=outcome.worker_seconds / ideal.worker_seconds if ideal.worker_seconds else 0.0,
        wait_p50=_quantile(waits, 0.5),
        wait_p95=_quantile(waits, 0.95),
        wait_max=max(waits, default=0.0),
        took_p50=_quantile(took, 0.5),
        took_p95=_quantile(took, 0.95),
        changes=len(outcome.changes),
        changes_an_hour_max=_most_in_an_hour([at for at, _ in outcome.changes]),
        longest_queue=outcome.longest_queue,
        repeated_rows=outcome.repeated_rows,
        series=tuple(
            (sample.at / HOUR, sample.desired, sample.live, sample.backlog / HOUR)
            for sample in outcome.samples[:: max(1, len(outcome.samples) // points)]
        ),
    )


def tasks_of(settings: SimulationSettings, outcome: SimulationOutcome) -> list[OracleJob]:
    """The oracle's jobs, with their actual work."""
    worker = settings.worker
    return [
        OracleJob(job.arrival, worker.seconds(job.rows, job.prompt, job.answer), inf if job.due is None else job.due)
        for job in outcome.jobs
    ]


def oracle(settings: SimulationSettings, outcome: SimulationOutcome) -> OracleResult:
    """The oracle's result for the jobs, with their actual work."""
    cold_start_seconds, limits = settings.worker.cold_start_seconds, settings.scaling
    slowest = (
        limits.bulk_target_seconds
        if any(job.order.tier is Tier.BULK for job in outcome.jobs)
        else limits.standard_target_seconds
    )
    ready = 0.0 if settings.fixed_workers else cold_start_seconds
    tasks = tasks_of(settings, outcome)
    return best(
        tasks,
        settings.fixed_workers or limits.max_workers,
        cold_start_seconds,
        slowest,
        settings.interval_seconds,
        ready,
    )


def is_in_time(ended: float | None, due: float | None, rows_left: float) -> bool:
    return ended is not None and due is not None and rows_left < 0.5 and ended <= due


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _most_in_an_hour(moments: Sequence[float]) -> int:
    most = begin = 0
    for end, moment in enumerate(moments):
        while moments[begin] <= moment - HOUR:
            begin += 1
        most = max(most, end - begin + 1)
    return most
