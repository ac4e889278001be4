"""The dispatcher's counts, from which its metrics are made: open jobs, and rows, tokens and costs committed while it
ran. The metrics' names and help: `pipeline.observability.metric_definitions`.

The thread that ticks writes; any thread reads. Counts start at zero with the dispatcher. Parts that a job had when the
dispatcher added it were counted by another dispatcher, or before a restart.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pipeline.answers.index import AnswerStoreCounts
from pipeline.dispatcher.job_state import NewPart, OpenJob, ShardId
from pipeline.observability.histogram import LatencyRecorder
from pipeline.observability.metric_definitions import OTHER
from pipeline.scaling.tenant_backlog import BYTES_PER_TOKEN
from schemas.jobs.job import Job
from schemas.jobs.outcome import JobStatus, Manifest, Usage
from schemas.jobs.results import RowStatus

JOB_BOUNDS: Final = (
    1.0, 3.0, 10.0, 30.0, 60.0, 300.0, 900.0, 1_800.0, 3_600.0, 10_800.0, 21_600.0, 43_200.0, 86_400.0, 172_800.0,
    604_800.0,
)  # fmt: skip
"""Upper bounds of the buckets of job durations, seconds."""


@dataclass(frozen=True, slots=True)
class OpenJobsMetrics:
    """A snapshot of the open jobs.

    Attributes:
        backlog: (model, tier) -> tokens still to be computed.
        jobs: (tier, status) -> number of jobs.
        shards: (tier, state) -> number of shards; states are "waiting", "queued", "held".
        oldest: tier -> creation time of the oldest job with a shard that waits for a worker.
        attention: jobs that are paused after an error; not counted in `jobs`.
    """

    backlog: Mapping[tuple[str, str], int]
    jobs: Mapping[tuple[str, str], int]
    shards: Mapping[tuple[str, str], int]
    oldest: Mapping[str, datetime]
    attention: int = 0


class DispatchMetrics:
    """The metrics of one dispatcher.

    Attributes:
        snapshot: the latest snapshot; None: another dispatcher leads, or this one has not ticked yet.
        job_durations: tier -> durations of jobs, from creation to end.
        answers: the use of the answer store by jobs.
    """

    def __init__(self) -> None:
        self.snapshot: OpenJobsMetrics | None = None
        self.job_durations: dict[str, LatencyRecorder] = {}
        self.answers = AnswerStoreCounts()
        self._lock = threading.Lock()
        self._rows: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[tuple[str, str, str]] = Counter()
        self._ended: Counter[tuple[str, str]] = Counter()
        self._cost: defaultdict[tuple[str, str], float] = defaultdict(float)

    def rows(self) -> dict[tuple[str, str], int]:
        """(tier, status) -> rows committed."""
        with self._lock:
            return dict(self._rows)

    def tokens(self) -> dict[tuple[str, str, str], int]:
        """(model, tier, kind) -> tokens of rows committed."""
        with self._lock:
            return dict(self._tokens)

    def ended(self) -> dict[tuple[str, str], int]:
        """(tier, status) -> ended jobs."""
        with self._lock:
            return dict(self._ended)

    def cost(self) -> dict[tuple[str, str], float]:
        """(model, tier) -> cost of ended jobs."""
        with self._lock:
            return dict(self._cost)

    # -- called by the thread that ticks

    def count_part(self, open_job: OpenJob, found: NewPart) -> None:
        """Count the rows and tokens of a new part."""
        entry, shard = found
        if not open_job.is_new_part(entry.number):
            return
        tier, counts, usage = open_job.job.tier.value, entry.summary.counts, entry.summary.usage
        model = OTHER if shard is None else model_of(open_job.job, open_job.key_of(shard))
        with self._lock:
            for status in RowStatus:
                self._rows[tier, status.value] += getattr(counts, status.value)
            for kind in Usage.model_fields:
                self._tokens[model, tier, kind] += getattr(usage, kind)

    def count_ended(self, open_job: OpenJob, manifest: Manifest, now: datetime) -> None:
        """Count a job that has ended with all its parts. Its manifest has the cost, and tokens that were repeated
        outside of its parts."""
        job = open_job.job
        with self._lock:
            more = manifest.usage.repeated - open_job.progress().usage.repeated
            self._tokens[model_of(job, job.models[0].key), job.tier.value, "repeated"] += more
            for spent in manifest.spending:
                if spent.cost is not None:
                    name = spent.model if job.model_named(spent.model) is not None else OTHER
                    self._cost[name, job.tier.value] += spent.cost
        self._count_end(job, manifest.status, now)

    def count_ended_unplanned(self, job: Job, now: datetime, status: JobStatus = JobStatus.FAILED) -> None:
        """Count a job that ended before its plan was complete."""
        self._count_end(job, status, now)

    def refresh(self, jobs: Collection[OpenJob], held: Set[ShardId], attention: int = 0) -> None:
        """Take a new snapshot. `held`: shards that workers hold. `attention`: number of paused jobs."""
        backlog: Counter[tuple[str, str]] = Counter()
        count: Counter[tuple[str, str]] = Counter()
        shards: Counter[tuple[str, str]] = Counter()
        oldest: dict[str, datetime] = {}
        holding = Counter(name for name, _ in held)
        for open_job in jobs:
            job, tier = open_job.job, open_job.job.tier.value
            count[tier, open_job.status.value] += 1
            for model, tokens in _remaining_tokens(open_job):
                backlog[model, tier] += tokens
            held_shards = min(holding[job.id], len(open_job.open_shards))
            queued = sum((job.id, number) not in held for number in open_job.queued)
            waiting = len(open_job.open_shards) - held_shards - queued
            for state, number in (("held", held_shards), ("queued", queued), ("waiting", max(0, waiting))):
                shards[tier, state] += number
            if open_job.closing is None and (queued or waiting or not open_job.is_planned):
                oldest[tier] = min(job.created_at, oldest.get(tier, job.created_at))
        self.snapshot = OpenJobsMetrics(backlog, count, shards, oldest, attention)

    def stand_by(self) -> None:
        """Clear the snapshot: another dispatcher leads and knows the jobs' state."""
        self.snapshot = None

    def _count_end(self, job: Job, status: JobStatus, now: datetime) -> None:
        tier = job.tier.value
        with self._lock:
            self._ended[tier, status.value] += 1
        if tier not in self.job_durations:
            self.job_durations[tier] = LatencyRecorder(JOB_BOUNDS)
        self.job_durations[tier].add(max(0.0, (now - job.created_at).total_seconds()))


def model_of(job: Job, key: str) -> str:
    """The name of the model that the job has pinned under this key; `OTHER` for a name that only a user gave, since
    such names are unbounded."""
    return next((pin.name for pin in job.models if pin.key == key), OTHER)


def _remaining_tokens(open_job: OpenJob) -> list[tuple[str, int]]:
    """(model, tokens) still to be computed of a job; estimated by its input's size until it is planned."""
    job = open_job.job
    if not open_job.is_planned:
        return [
            (model_of(job, job.models[0].key), max(open_job.tokens_left.total(), job.input.size // BYTES_PER_TOKEN))
        ]
    return [(model_of(job, key), tokens) for key, tokens in open_job.tokens_left.items()]
