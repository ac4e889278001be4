"""The reconcile loop: what is wanted, minus what is committed, minus what a live worker holds, goes on the queue.

The queue may lose and repeat, workers may die and race: each tick looks again at what is, so a lost message costs
time and never a shard, and a doubled one costs a look. Shards are put as soon as their segment of the plan stands.
Ends a job by writing its manifest when all parts stand, and makes the missing parts of one that was cancelled or whose
deadline has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pipeline.active import tidy
from pipeline.closing import close_shard, find_closing, status_while
from pipeline.events import EventSink, NoEvents
from pipeline.ledger import REJECTS, JobLedger, LedgerError, part_key
from pipeline.manifest import Tally, build_manifest
from pipeline.ports import Heartbeats, ShardQueue, ShardTask, World
from pipeline.rejects import commit_rejects
from pipeline.results import PartEntry, read_part
from schemas.events import JobChanged, ProgressMade, ShardCommitted
from schemas.job import Closing, Job, JobStatus, Manifest, PlanSegment, Progress, ShardRef, Tier

_TIER_RANK = {Tier.INTERACTIVE: 0, Tier.STANDARD: 1, Tier.BULK: 2}
_FAR = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How the dispatcher works; times in seconds.

    Attributes:
        backlog: shards put on the queue and not yet taken; short, so that order and priority can still change.
        patience: after this long a shard that was put, but that nobody holds, is put again; doubles each time.
        sweep_every: between two full listings of the parts (in between only shards that were put are looked at).
        cache_every: between two writes of progress.json.
        closing_every: between two looks whether a job was cancelled.
        grace: after this long the shards of a job that is being closed are closed though workers hold them; until then
            they are given back with all that was reached.
        tick_every: between two looks, in `run`.
        price_per_hour: of this machine, for the manifest's cost; None: no cost.
    """

    backlog: int = 2
    patience: float = 30.0
    sweep_every: float = 30.0
    cache_every: float = 2.0
    closing_every: float = 1.0
    grace: float = 10.0
    tick_every: float = 0.2
    price_per_hour: float | None = None


@dataclass(slots=True)
class _Put:
    """A shard that was put on the queue: when (monotonic), how often, and whether a worker was ever seen with it."""

    at: float
    times: int = 1
    held: bool = False


@dataclass(slots=True)
class _OpenJob:
    ledger: JobLedger
    job: Job
    segments: list[PlanSegment] = field(default_factory=list)
    open_shards: dict[int, ShardRef] = field(default_factory=dict)  # in plan order; committed ones are removed
    open_rejects: dict[int, PlanSegment] = field(default_factory=dict)  # whose refused rows are no part yet
    parts: dict[int, PartEntry] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)  # of the parts
    planned_rows: int = 0
    planned_shards: int = 0
    puts: dict[int, _Put] = field(default_factory=dict)
    next_sweep: float = 0.0
    next_cache: float = 0.0
    closing: Closing | None = None
    next_closing: float = 0.0  # when to look for it again
    grace_ends: float = 0.0  # when nobody is waited for any more
    shown: JobStatus | None = None  # the status last told
    untold: bool = True  # something changed since the last telling
    uncached: bool = True

    @property
    def planned(self) -> bool:
        return bool(self.segments) and self.segments[-1].last

    @property
    def ready(self) -> bool:
        """Nothing is dispatched before part 0 stands, so that the results can always be read."""
        return REJECTS in self.parts

    @property
    def whole(self) -> bool:
        """All parts stand."""
        return self.planned and not self.open_shards and not self.open_rejects

    @property
    def status(self) -> JobStatus:
        if self.closing is not None:
            return status_while(self.closing)
        return JobStatus.IN_PROGRESS if self.ready else JobStatus.VALIDATING

    @property
    def order(self) -> tuple[int, datetime, datetime, str]:
        """Which job's shards go first."""
        return (_TIER_RANK[self.job.tier], self.job.deadline or _FAR, self.job.created_at, self.job.id)


class Dispatcher:
    """Drives the jobs given to `add` to their end. `tick` is called by one thread; the rest by any."""

    def __init__(
        self,
        world: World,
        queue: ShardQueue,
        heartbeats: Heartbeats,
        events: EventSink | None = None,
        settings: DispatchSettings | None = None,
    ) -> None:
        self._world = world
        self._queue = queue
        self._heartbeats = heartbeats
        self._events = events or NoEvents()
        self._settings = settings or DispatchSettings()
        self._jobs: dict[str, _OpenJob] = {}
        self._outcomes: dict[str, Manifest] = {}

    def add(self, ledger: JobLedger) -> None:
        """Take a job up; raises `JobNotFound`. A job that has ended is only remembered, and what it needs no more is
        removed if that was interrupted."""
        job = ledger.job()
        manifest = ledger.manifest()
        if manifest is not None:
            self._outcomes[job.id] = manifest
            tidy(ledger)
        elif job.id not in self._jobs:
            self._jobs[job.id] = _OpenJob(ledger, job)

    def finished(self) -> bool:
        """Whether all jobs have ended."""
        return not self._jobs

    def outcome(self, job: str) -> Manifest | None:
        """The manifest of a job that has ended."""
        return self._outcomes.get(job)

    def run(self, stop: threading.Event) -> None:
        """Tick until all jobs have ended or `stop` is set. Raises what `tick` raises."""
        while not stop.is_set():
            self.tick()
            if self.finished():
                return
            self._world.clock.sleep(self._settings.tick_every)

    def tick(self) -> None:
        """Look at what is, put what is missing, end what is whole. Raises `PipelineError` when a job contradicts
        itself or the store fails."""
        now = self._world.clock.monotonic()
        held = self._heartbeats.held()
        for open_job in list(self._jobs.values()):
            self._look(open_job, now)
            if not open_job.whole:
                self._close(open_job, held, now)
            if open_job.whole:
                self._end(open_job)
            else:
                self._tell(open_job, now)
        self._put_missing(held, now)

    # -- looking

    def _look(self, open_job: _OpenJob, now: float) -> None:
        """Learn which segments and parts stand by now."""
        if not open_job.planned:
            for segment in open_job.ledger.segments(len(open_job.segments)):
                open_job.segments.append(segment)
                open_job.planned_rows += segment.total
                open_job.planned_shards += len(segment.shards)
                open_job.untold = True
                open_job.open_shards.update((shard.number, shard) for shard in segment.shards)
                if segment.rejects is not None:
                    open_job.open_rejects[segment.rejects.number] = segment
                if segment.last:  # from here on all parts can be told from those that nobody planned
                    open_job.next_sweep = now
        for number, segment in list(open_job.open_rejects.items()):
            commit_rejects(open_job.ledger, segment, self._world)
            self._found(open_job, number)
        if now >= open_job.next_sweep:
            open_job.next_sweep = now + self._settings.sweep_every
            standing: Iterable[int] = [number for number, _ in open_job.ledger.parts()]
        else:
            standing = [number for number in open_job.puts if open_job.ledger.has_part(number)]
        for number in standing:
            if number in open_job.parts:
                continue
            if number in open_job.open_shards:
                self._found(open_job, number)
            elif open_job.planned:
                raise LedgerError(
                    f"{open_job.ledger.place(part_key(number))}: no such part is planned, but readers would count it; "
                    "move it elsewhere"
                )

    def _found(self, open_job: _OpenJob, number: int) -> None:
        entry = read_part(open_job.ledger, number)
        open_job.parts[number] = entry
        open_job.tally.add(entry)
        open_job.open_shards.pop(number, None)
        open_job.open_rejects.pop(number, None)
        open_job.puts.pop(number, None)
        open_job.untold = True
        self._events.emit(
            ShardCommitted(
                id=f"{open_job.job.id}/part/{number}",
                job=open_job.job.id,
                at=entry.summary.committed_at,
                shard=number,
                rows=entry.rows,
                attempt=entry.summary.attempt,
                usage=entry.summary.usage,
            )
        )

    # -- closing

    def _close(self, open_job: _OpenJob, held: set[tuple[str, int]], now: float) -> None:
        """Once the job is cancelled or expired: make the parts of its open shards, as soon as no worker holds them."""
        if open_job.closing is None:
            if now < open_job.next_closing:
                return
            open_job.next_closing = now + self._settings.closing_every
            open_job.closing = find_closing(open_job.ledger, open_job.job, self._world.clock.now())
            if open_job.closing is None:
                return
            open_job.grace_ends = now + self._settings.grace
            open_job.untold = True
        for number, shard in list(open_job.open_shards.items()):
            if (open_job.job.id, number) in held and now < open_job.grace_ends:
                continue
            if not open_job.ledger.has_part(number):
                close_shard(open_job.ledger, open_job.job, shard, open_job.closing, self._world)
            self._found(open_job, number)

    # -- putting

    def _put_missing(self, held: set[tuple[str, int]], now: float) -> None:
        """Fill the backlog, by tier, then deadline, then age of the job, then the planner's order."""
        waiting = 0
        for open_job in self._jobs.values():
            if open_job.closing is not None:
                continue
            for number, put in list(open_job.puts.items()):
                if (open_job.job.id, number) in held:
                    put.held = True
                elif put.held or now - put.at >= self._settings.patience * 2 ** (put.times - 1):
                    self._put(open_job, number, put.times + (0 if put.held else 1), now)
                    waiting += 1
                else:
                    waiting += 1
        for open_job in sorted(self._jobs.values(), key=lambda job: job.order):
            if not open_job.ready or open_job.closing is not None:
                continue
            for number in open_job.open_shards:
                if waiting >= self._settings.backlog:
                    return
                if number not in open_job.puts and (open_job.job.id, number) not in held:
                    self._put(open_job, number, 1, now)
                    waiting += 1

    def _put(self, open_job: _OpenJob, number: int, times: int, now: float) -> None:
        self._queue.put(ShardTask(open_job.job.id, number))
        open_job.puts[number] = _Put(now, times)

    # -- telling

    def progress(self, job: str) -> Progress | None:
        """How far an open job is."""
        open_job = self._jobs.get(job)
        return None if open_job is None else self._progress(open_job)

    def _progress(self, open_job: _OpenJob) -> Progress:
        return Progress(
            job=open_job.job.id,
            status=open_job.status,
            counts=open_job.tally.counts(open_job.planned_rows if open_job.ready else None),
            usage=open_job.tally.usage(),
            shards_total=open_job.planned_shards,
            shards_done=open_job.planned_shards - len(open_job.open_shards),
            started_at=open_job.job.created_at,
            as_of=self._world.clock.now(),
        )

    def _tell(self, open_job: _OpenJob, now: float) -> None:
        if open_job.untold:
            progress = self._progress(open_job)
            self._events.emit(_progress_event(progress, f"{progress.shards_done}"))
            if open_job.shown is not progress.status:
                self._events.emit(_status_event(progress))
            open_job.shown = progress.status
            open_job.untold, open_job.uncached = False, True
        if open_job.uncached and now >= open_job.next_cache:
            open_job.uncached, open_job.next_cache = False, now + self._settings.cache_every
            open_job.ledger.cache_progress(self._progress(open_job))

    def _end(self, open_job: _OpenJob) -> None:
        job = open_job.job
        manifest = build_manifest(
            open_job.ledger,
            job,
            open_job.segments,
            open_job.parts,
            self._world.clock.now(),
            self._settings.price_per_hour,
        )
        if not open_job.ledger.create_manifest(manifest):
            manifest = open_job.ledger.manifest() or manifest
        progress = self._progress(open_job).model_copy(
            update={"status": manifest.status, "usage": manifest.usage, "as_of": manifest.finished_at}
        )
        open_job.ledger.cache_progress(progress)
        self._events.emit(_progress_event(progress, "end"))
        self._events.emit(_status_event(progress))
        self._outcomes[job.id] = manifest
        del self._jobs[job.id]
        tidy(open_job.ledger)


def _progress_event(progress: Progress, name: str) -> ProgressMade:
    return ProgressMade(
        id=f"{progress.job}/progress/{name}",
        job=progress.job,
        at=progress.as_of,
        counts=progress.counts,
        usage=progress.usage,
    )


def _status_event(progress: Progress) -> JobChanged:
    return JobChanged(
        id=f"{progress.job}/status/{progress.status.value}",
        job=progress.job,
        at=progress.as_of,
        status=progress.status,
        counts=progress.counts,
    )
