"""The shadow client gives a candidate's worker copies of committed shards, and stores its results for the comparison
only.

It needs no queue and no dispatcher: committed parts are in the root, and a hash selects the shards of the share. No job
waits for a shadow copy. The client sends no heartbeat that a dispatcher could take for a worker's, and writes nothing
below `jobs/`. Two workers with the same candidate may compute a shard twice; one copy counts.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import structlog

from pipeline.jobs.lost_shards import read_table
from pipeline.ledger.active_index import marked_jobs
from pipeline.ledger.ledger import JOBS, JobLedger, LedgerError
from pipeline.ledger.records import ShardReport
from pipeline.models.registry import ModelRegistry
from pipeline.models.shadow_results import ShadowCopies
from pipeline.ports import ObjectNotFound, World
from pipeline.worker_client.ports import BY_URGENCY, CheckpointWork, RevokedShards, ShardWork, WorkerLoad
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import Job, Tier
from schemas.jobs.plan import ShardRef
from schemas.models import ModelPin
from schemas.releases import Release
from schemas.workers.metrics import WorkerMetrics

POLL_INTERVAL_SECONDS: Final = 1.0
"""Interval between two polls for new parts and for the end of the release."""

NEWEST: Final = 50
"""Newest jobs that are polled in addition to the open ones: short jobs may have ended between two polls."""

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Watched:
    """A job with rows that the stable version computes. `shards`: shards of the share that are not taken yet."""

    ledger: JobLedger
    job: Job
    shards: dict[int, ShardRef] = field(default_factory=dict)
    segments: int = 0


class ShadowClient:
    """`ShardSource` and `ShardSink` of one worker during one release. The worker's threads may share it."""

    def __init__(self, worker: str, world: World, release: Release) -> None:
        self.worker = worker
        self._world = world
        self._release = release
        self._registry = ModelRegistry(world.store)
        self._copies = ShadowCopies(world.store, release)
        self._jobs: dict[str, _Watched | None] = {}  # None: the job is unrelated to this release
        self._waiting: deque[tuple[_Watched, ShardRef]] = deque()
        self._next_poll = 0.0
        self._ended = False
        self._load = WorkerLoad()

    @property
    def metrics(self) -> WorkerMetrics | None:
        """The worker's last reported metrics."""
        return self._load.metrics

    # -- ShardSource

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        """The next shard to copy, or None after `timeout` seconds."""
        clock = self._world.clock
        until = clock.monotonic() + timeout
        while not self._ended:
            while self._waiting:
                watched, shard = self._waiting.popleft()
                if not self._copies.has(watched.job.id, shard.number):
                    try:
                        return self._open(watched, shard)
                    except (LedgerError, ObjectNotFound) as error:
                        logger.info("a shard can't be read, and isn't compared", job=watched.job.id, reason=str(error))
            now = clock.monotonic()
            if now >= self._next_poll:
                self._poll(now)
                continue
            if now >= until:
                return None
            clock.sleep(min(until, self._next_poll) - now)
        return None

    def finished(self) -> bool:
        """True once the release has ended."""
        return self._ended

    # -- ShardSink

    def commit(self, work: ShardWork, finished: FinishedRows, report: ShardReport) -> bool:
        """Store the copy's results; False when another worker's copy is stored already."""
        written = self._copies.write(work.job.id, work.shard, finished, self.worker, self._world.clock.now())
        logger.info("shadow copy computed", job=work.job.id, shard=work.shard, release=self._release.id, first=written)
        return written

    def begin(self, work: ShardWork) -> None:
        """No-op: attempts at shadow copies are not recorded, since nothing is lost with them."""

    def checkpoint(self, work: ShardWork, new: CheckpointWork) -> None:
        """As `begin`."""

    def record(self, work: ShardWork, rows: Sequence[int]) -> None:
        """As `begin`."""

    def release(self, work: ShardWork, generated: int, busy_seconds: float = 0.0) -> None:
        """As `begin`."""

    def give_up(self, work: ShardWork, error: Exception, generated: int = 0, busy_seconds: float = 0.0) -> None:
        """Leave the copy out of the comparison, and count the error."""
        self._world.errors.record("worker", error, job=work.job.id, shard=work.shard)

    def send_heartbeat(self, shards: Sequence[ShardWork], load: WorkerLoad) -> None:
        """Store the load for `metrics`; no heartbeat is sent, since no other worker would take the copies."""
        self._load = load

    def find_revoked(self, shards: Sequence[ShardWork]) -> RevokedShards:
        """All shards once the release has ended: their copies are not needed any more."""
        self._refresh_end()
        return RevokedShards(frozenset((work.job.id, work.shard) for work in shards) if self._ended else frozenset())

    # -- inside

    def _refresh_end(self) -> None:
        last = self._registry.last(self._release.name)
        self._ended = last is None or last.release.id != self._release.id or last.outcome is not None

    def _poll(self, now: float) -> None:
        self._next_poll = now + POLL_INTERVAL_SECONDS
        self._refresh_end()
        if self._ended:
            return
        for ledger in self._jobs_to_poll():
            try:
                self._poll_job(ledger)
            except (LedgerError, ObjectNotFound) as error:
                self._jobs[ledger.name] = None
                logger.warning("a job can't be read, and isn't compared", job=ledger.name, reason=str(error))

    def _jobs_to_poll(self) -> Iterator[JobLedger]:
        store = self._world.store
        seen: set[str] = set()
        newest = (JobLedger(store, prefix) for prefix in islice(store.folders(JOBS), NEWEST))
        for ledger in (*marked_jobs(store), *newest):
            if ledger.name not in seen and self._jobs.get(ledger.name, True) is not None:
                seen.add(ledger.name)
                yield ledger

    def _poll_job(self, ledger: JobLedger) -> None:
        """Find the job's new parts."""
        watched = self._jobs.get(ledger.name)
        if watched is None:
            job = ledger.find_job()
            if job is None:
                return  # it is being made
            pinned = {pin.name for pin in job.models if pin.key == self._release.stable.pin.key}
            watched = self._jobs[ledger.name] = _Watched(ledger, job) if pinned else None
            if watched is None:
                return
        pinned = {pin.name for pin in watched.job.models if pin.key == self._release.stable.pin.key}
        for segment in ledger.segments(watched.segments):
            watched.segments = segment.index + 1
            for shard in segment.shards:
                if shard.model in pinned and self._is_in_share(watched.job.id, shard.number):
                    watched.shards[shard.number] = shard
        if not watched.shards or ledger.tombstone() is not None:
            return
        for number, _ in ledger.parts():
            if (found := watched.shards.pop(number, None)) is not None:
                self._waiting.append((watched, found))

    def _is_in_share(self, job: str, shard: int) -> bool:
        """Whether the shard belongs to the share: decided by a hash, so that all workers agree whenever they start."""
        digest = hashlib.sha256(f"{self._release.id}\0{job}\0{shard}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self._release.rules.share * 2**64

    def _open(self, watched: _Watched, shard: ShardRef) -> ShardWork:
        table = read_table(watched.ledger, shard)
        models = tuple(self._replace_pin(pin) for pin in watched.job.models)
        job = watched.job.model_copy(update={"models": models})
        attempt_id = self._world.random.token(8).hex()
        return ShardWork(job, shard.number, 1, attempt_id, table, self._world.clock.now())

    def _replace_pin(self, pin: ModelPin) -> ModelPin:
        """The candidate's pin in place of the stable version's, under the name that the rows use."""
        if pin.key != self._release.stable.pin.key:
            return pin
        return self._release.candidate.pin.model_copy(update={"name": pin.name})
