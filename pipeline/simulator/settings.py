"""What is simulated, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.dispatcher.dispatcher import DispatchSettings
from pipeline.simulator.worker_model import WorkerModel
from pipeline.simulator.workers import SimJob
from schemas.requests.limits import PlanSettings
from schemas.settings.autoscaling import ScalingLimits


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """What is simulated; times in seconds.

    Attributes:
        worker: how fast one is, and how long it takes to come.
        scaling: the autoscaler's limits; `most` is the number of GPUs.
        fixed: so many workers from the beginning to the end, without an autoscaler; None: it decides.
        every: between two looks of the autoscaler.
        plan: how jobs are cut.  dispatching: how shards are handed out.
        take_up, rows_planned: from a job's arrival until it is seen, and rows a second of planning its first segment;
            before that none of its shards is handed out.
        answer_error: answers turn out longer or shorter than estimated, job by job, by a factor exp(N(0, this)).
        cold_start_spread: cold starts take up to this share more or less.
        unnoticed: share of the interruptions that come without notice; then a worker's last `unlogged` seconds are
            computed again, and its shards are missed for `silence`.
        seed: of what is drawn.
    """

    worker: WorkerModel
    scaling: ScalingLimits
    fixed: int | None = None
    every: float = 30.0
    plan: PlanSettings = field(default_factory=PlanSettings)
    dispatching: DispatchSettings = field(default_factory=DispatchSettings)
    take_up: float = 1.0
    rows_planned: float = 15_000.0
    answer_error: float = 0.2
    cold_start_spread: float = 0.1
    unnoticed: float = 0.1
    unlogged: float = 15.0
    silence: float = 12.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """How it stood at a moment. `backlog`: seconds of one worker."""

    at: float
    desired: int
    live: int
    backlog: float


@dataclass(slots=True)
class SimulationOutcome:
    """What has happened.

    Attributes:
        jobs: all, ended or not.  seconds: until the last of them ended and the last worker went.
        worker_seconds, busy_seconds: paid for, and of them, those with a shard in hand.
        changes: when the wish changed, and to what.  samples: at each look of the autoscaler.
        shards, repeated_rows: put on queues; computed again after an interruption.
        starts, interrupted: workers.
        longest_queue: shards that waited in a queue.  tokens: computed, as they turned out.
        computed_until: when the last shard was finished.
    """

    jobs: list[SimJob] = field(default_factory=list)
    seconds: float = 0.0
    worker_seconds: float = 0.0
    busy_seconds: float = 0.0
    changes: list[tuple[float, int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    shards: int = 0
    repeated_rows: float = 0.0
    starts: int = 0
    interrupted: int = 0
    longest_queue: int = 0
    tokens: float = 0.0
    computed_until: float = 0.0
