"""Settings and outcome of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.dispatcher.dispatcher import DispatchSettings
from pipeline.simulator.worker_model import WorkerModel
from pipeline.simulator.workers import SimJob
from schemas.requests.limits import PlanSettings
from schemas.settings.autoscaling import ScalingLimits


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Settings of a simulation; times in seconds.

    Attributes:
        worker: throughput and cold start of a worker.
        scaling: the autoscaler's limits; `most` is the number of GPUs.
        fixed_workers: constant number of workers, without an autoscaler; None: the autoscaler decides.
        interval_seconds: interval between two decisions of the autoscaler.
        plan: how jobs are split.  dispatching: how shards are dispatched.
        discovery_seconds, planned_rows_per_second: delay from a job's arrival until it is found, and rows per second of
            planning its first segment; before that none of its shards is dispatched.
        answer_error: actual answers differ from the estimate by a factor exp(N(0, this)), drawn per job.
        cold_start_spread: cold starts take up to this share more or less.
        unannounced_fraction: share of the interruptions that come without notice; then a worker's last
            `unwritten_seconds` seconds are computed again, and the loss of its shards is detected after
            `detection_seconds`.
        seed: seed of the random numbers.
    """

    worker: WorkerModel
    scaling: ScalingLimits
    fixed_workers: int | None = None
    interval_seconds: float = 30.0
    plan: PlanSettings = field(default_factory=PlanSettings)
    dispatching: DispatchSettings = field(default_factory=DispatchSettings)
    discovery_seconds: float = 1.0
    planned_rows_per_second: float = 15_000.0
    answer_error: float = 0.2
    cold_start_spread: float = 0.1
    unannounced_fraction: float = 0.1
    unwritten_seconds: float = 15.0
    detection_seconds: float = 12.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one time. `backlog`: seconds of one worker."""

    at: float
    desired: int
    live: int
    backlog: float


@dataclass(slots=True)
class SimulationOutcome:
    """The outcome of a simulation.

    Attributes:
        jobs: all, ended or not.  seconds: until the last job ended and the last worker left.
        worker_seconds, busy_seconds: paid time, and the part of it with a shard.
        paid: from when until when each worker was paid.
        changes: times and values of changes of the desired workers.  samples: one per decision of the autoscaler.
        shards, repeated_rows: shards put on queues; rows computed again after an interruption.
        starts, interrupted: numbers of workers.
        longest_queue: most shards that waited in a queue.  tokens: actual computed tokens.
        computed_until: when the last shard was finished.
    """

    jobs: list[SimJob] = field(default_factory=list)
    seconds: float = 0.0
    worker_seconds: float = 0.0
    busy_seconds: float = 0.0
    paid: list[tuple[float, float]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    shards: int = 0
    repeated_rows: float = 0.0
    starts: int = 0
    interrupted: int = 0
    longest_queue: int = 0
    tokens: float = 0.0
    computed_until: float = 0.0
