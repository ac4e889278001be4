"""One open job as a dispatcher sees it: what is planned, what stands, and what is to be told.

All that is kept here is learnt from the ledger and can be learnt again; it saves looking, and nothing rests on it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Set
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from pipeline.jobs.closing import close_shard, find_closing, give_up_shard, status_while
from pipeline.jobs.cost import JobCost, spent_on
from pipeline.jobs.event_sink import EventSink
from pipeline.jobs.manifest import PartTotals, build_manifest, failed_manifest
from pipeline.ledger.active_index import tidy
from pipeline.ledger.ledger import REJECTS, JobLedger, LedgerError, part_key
from pipeline.ports import ObjectNotFound, World, queue_name
from pipeline.results.checkpoints import read_worked
from pipeline.results.parts import PartEntry, read_part
from pipeline.results.rejected_rows import commit_rejects
from schemas.jobs.events import JobChanged, ProgressMade, ShardCommitted
from schemas.jobs.job import Closing, Job
from schemas.jobs.outcome import JobError, JobStatus, Manifest
from schemas.jobs.plan import PlanSegment, ShardRef
from schemas.jobs.progress import Progress

ETA_PRECISION: Final = 0.02
"""A forecast that moved by less of the time that is left is not told anew."""

TRIES: Final = 3
"""Attempts that could not go on with a shard, after which its rows are failed."""

Shard = tuple[str, int]
"""A shard by its job's id and its number."""
Found = tuple[PartEntry, ShardRef | None]
"""A part that is new, and the shard that it is of (None: refused rows)."""


@dataclass(frozen=True, slots=True)
class OpenJobSettings:
    """How an open job is looked at; times in seconds.

    Attributes:
        sweep_every: between two full listings of the parts (in between only shards that were put are looked at).
        cache_every: between two writes of progress.json.
        eta_every: between two of them for nothing but a forecast that moved: those of all open jobs move at once.
        closing_every: between two looks whether a job was cancelled.
        grace: after this long the shards of a job that is being closed are closed though workers hold them; until then
            they are given back with all that was reached.
        price_per_hour: of workers that don't say theirs, for what the job costs; None: unknown.
    """

    sweep_every: float = 30.0
    cache_every: float = 2.0
    eta_every: float = 10.0
    closing_every: float = 1.0
    grace: float = 10.0
    price_per_hour: float | None = None


@dataclass(slots=True)
class QueuedShard:
    """A shard that was put on the queue: when (monotonic), after how many seconds it is put again, and whether a worker
    was ever seen with it."""

    at: float
    patience: float
    held: bool = False


class OpenJob:
    """A job that has no outcome yet.

    Attributes:
        job: the order.  ledger: where it lies.
        open_shards: planned shards without a part, in plan order.
        puts: of these, those that were put on the queue.
        left: estimated tokens, prompts and answers, of the open shards, by what computes them (`ModelPin.key`).
        spent: what its parts have cost.  spent_by_day: the same by the day of their commit (UTC, `YYYY-MM-DD`).
        logged: what attempts at open shards are known to have cost, where that was asked for.
        eta: when it should be done, as far as that is known.
        closing: why the job ends before its time, if it does.
        attention: why it stood still when it was looked at before, until it has gone on for a while.
        unread: parts that stand, and are still to be read.
        sweep_at: when all parts are to be listed again.  plan_read_at: when new segments were last looked for.
        whole: all parts stand.
    """

    def __init__(
        self,
        ledger: JobLedger,
        job: Job,
        world: World,
        events: EventSink,
        settings: OpenJobSettings,
        beside: Executor,
        *,
        taken_over: bool = False,
    ) -> None:
        """`beside`: runs what needn't be waited for. `taken_over`: others may have been at the job before."""
        self.ledger = ledger
        self.job = job
        self.open_shards: dict[int, ShardRef] = {}
        self.puts: dict[int, QueuedShard] = {}
        self.left: Counter[str] = Counter()
        self.spent = JobCost()
        self.spent_by_day: defaultdict[str, float] = defaultdict(float)
        self.logged: dict[int, float] = {}
        self.eta: datetime | None = None
        self.closing: Closing | None = None
        self.attention: str | None = None
        self.unread: deque[int] = deque()
        self.sweep_at = self.plan_read_at = 0.0
        self._world = world
        self._events = events
        self._settings = settings
        self._beside = beside
        self._caching: Future[None] | None = None
        self._segments: list[PlanSegment] = []
        self._segment_of: dict[int, PlanSegment] = {}  # by open shard
        self._open_rejects: dict[int, PlanSegment] = {}  # whose refused rows are no part yet
        self._parts: dict[int, PartEntry] = {}
        self._tally = PartTotals()
        self._cost_of: defaultdict[str, float] = defaultdict(float)  # of parts, by what computed them
        self._tokens_of: Counter[str] = Counter()  # that were planned for them
        self._knows_logged = not taken_over
        self._keys = {pin.name: pin.key for pin in job.models}
        self._planned_rows = self._planned_shards = 0
        self._cached_at = float("-inf")
        self._next_closing = 0.0
        self._grace_ends = 0.0  # when nobody is waited for any more
        self._shown: JobStatus | None = None  # the status last told
        self._untold = self._uncached = True
        self._told_eta: datetime | None = None
        self._taken_over = taken_over
        self._stood: frozenset[int] | None = None  # parts when they were listed first

    @property
    def planned(self) -> bool:
        """The whole plan stands."""
        return bool(self._segments) and self._segments[-1].last

    @property
    def ready(self) -> bool:
        """Shards may be handed out. Nothing is before part 0 stands, so that the results can always be read."""
        return REJECTS in self._parts and self.closing is None

    @property
    def whole(self) -> bool:
        return self.planned and not self.open_shards and not self._open_rejects

    @property
    def status(self) -> JobStatus:
        """What it would be without an outcome."""
        if self.closing is not None:
            return status_while(self.closing)
        return JobStatus.IN_PROGRESS if REJECTS in self._parts else JobStatus.VALIDATING

    @property
    def _is_late(self) -> bool:
        return self.job.deadline is not None and self._world.clock.now() >= self.job.deadline

    def queue_of(self, shard: ShardRef) -> str:
        """The queue that the shard is put on."""
        return queue_name(self.key_of(shard), self.job.tier)

    def key_of(self, shard: ShardRef) -> str:
        """What computes it; a model that the job doesn't pin is asked for by its name, in vain."""
        return self._keys.get(shard.model, shard.model)

    def read_plan(self) -> list[PlanSegment]:
        """The segments that are new. On any thread; nothing is learnt yet."""
        return list(self.ledger.segments(len(self._segments)))

    def learn_plan(self, segments: Iterable[PlanSegment], now: float) -> None:
        """These segments stand, too."""
        self.plan_read_at = now
        for segment in segments:
            self._segments.append(segment)
            self._planned_rows += segment.total
            self._planned_shards += len(segment.shards)
            self._untold = True
            self.open_shards.update((shard.number, shard) for shard in segment.shards)
            self._segment_of.update((shard.number, segment) for shard in segment.shards)
            for shard in segment.shards:
                self.left[self.key_of(shard)] += cost(shard)
            if segment.rejects is not None:
                self._open_rejects[segment.rejects.number] = segment
            if segment.last:  # from here on all parts can be told from those that nobody planned
                self.sweep_at = now

    def list_parts(self) -> list[int]:
        """The parts that stand. On any thread; nothing is learnt yet."""
        return [number for number, _ in self.ledger.parts()]

    def learn_standing(self, standing: Iterable[int], now: float) -> None:
        """These parts stand; those that are new are to be read. Raises `LedgerError` where nobody planned one."""
        self.sweep_at = now + self._settings.sweep_every
        standing = frozenset(standing)
        if self._stood is None:
            self._stood = standing
        known = {*self._parts, *self.unread}
        for number in sorted(standing):
            if number in known or number in self._open_rejects:
                continue
            if number in self.open_shards:
                self.unread.append(number)
            elif self.planned:
                raise LedgerError(
                    f"{self.ledger.place(part_key(number))}: no such part is planned, but readers would count it; "
                    "move it elsewhere"
                )

    def is_news(self, number: int) -> bool:
        """Whether the part was made after the job was taken up, as far as that is known."""
        return not self._taken_over or (self._stood is not None and number not in self._stood)

    def unsure(self, held: set[Shard]) -> list[int]:
        """Shards that may have their parts by now: they were put, and nobody has them. Of those that workers hold
        nobody expects a part: they let go when it stands."""
        return [number for number in self.puts if (self.job.id, number) not in held]

    def read_part(self, number: int) -> PartEntry | None:
        """A part, if it stands. On any thread; nothing is learnt yet."""
        try:
            return read_part(self.ledger, number)
        except ObjectNotFound:
            return None

    def learn_part(self, entry: PartEntry) -> Found | None:
        """The part stands; None: that is known."""
        return None if entry.number in self._parts else self._found(entry)

    def unmade(self) -> list[int]:
        """Parts of refused rows that aren't known to stand."""
        return list(self._open_rejects)

    def make_rejects(self, number: int) -> PartEntry:
        """Make such a part, unless it stands. On any thread; nothing is learnt yet."""
        commit_rejects(self.ledger, self._open_rejects[number], self._world)
        return read_part(self.ledger, number)

    def close(self, held: set[Shard], now: float, *, marked: bool, until: float) -> list[Found]:
        """Once the job is cancelled or expired: make the parts of its open shards, as soon as no worker holds them;
        the parts that are new.

        Args:
            marked: it may have a closing (`jobs_to_close`).
            until: after this moment (monotonic) no further part is begun, once one was made: the rest waits.
        """
        if self.closing is None:
            if now < self._next_closing or not (marked or self._is_late or not self.ledger.in_root):
                return []
            self._next_closing = now + self._settings.closing_every
            self.closing = find_closing(self.ledger, self.job, self._world.clock.now())
            if self.closing is None:
                return []
            self._grace_ends = now + self._settings.grace
            self._untold = True
        found = []
        for number, shard in list(self.open_shards.items()):
            if (self.job.id, number) in held and now < self._grace_ends:
                continue
            if not self.ledger.has_part(number):
                segment = self._segment_of[number]
                close_shard(self.ledger, self.job, segment, shard, self.closing, self._world)
            found.append(self._found(read_part(self.ledger, number)))
            if self._world.clock.monotonic() > until:
                break
        return found

    def give_up(self, number: int, serving: Set[str]) -> Found | None:
        """Make the part of an open shard that `TRIES` attempts could not go on with: of as many workers, or of all that
        could compute it. What fails on one of several workers may be that worker's fault. None: too few have tried.

        Args:
            serving: the workers that live and serve the shard's model.

        Raises:
            RowsUnknown: nothing says which rows it has.  LedgerError: what can't be read is not the shard's alone.
        """
        records = self.ledger.unreadable(number)
        failed = {record.worker for record in records}
        if len(records) < TRIES or (len(failed) < TRIES and not (serving and serving <= failed)):
            return None
        self.ledger.job()
        if self.ledger.closing() is not None:
            return None  # the shard is closed soon
        reason = max(records, key=lambda record: record.at).reason
        give_up_shard(self.ledger, self.job, self._segment_of[number], self.open_shards[number], reason, self._world)
        return self._found(read_part(self.ledger, number))

    def end_as_failed(self, code: str, message: str) -> Manifest:
        """Write the outcome of a job that can't be completed: its parts that stand count, and no other row has a
        result. Raises `LedgerError` when a part can't be read."""
        for number, _ in self.ledger.parts():
            if number not in self._parts:
                self._parts[number] = read_part(self.ledger, number)
        error = JobError(code=code, message=message)
        return self._conclude(failed_manifest(self.ledger, self.job, self._parts, self._world.clock.now(), (error,)))

    def show_attention(self) -> None:
        """Write into the cached progress why the job stands still."""
        self._is_cached(wait=True)
        self.ledger.cache_progress(self.progress())

    def recover(self) -> None:
        """The job has gone on for a while: it needs no attention any more."""
        self.attention, self._untold = None, True

    def cost_per_token(self, model: str) -> float | None:
        """What a planned token has cost in the job's own parts that `model` computed; None: there are none."""
        tokens = self._tokens_of[model]
        return self._cost_of[model] / tokens if tokens else None

    def learn_all_logged(self) -> None:
        """What attempts before this dispatcher have cost at shards that are open; asks only once."""
        if not self._knows_logged:
            self._knows_logged = True
            self.learn_logged(self.ledger.troubled() & self.open_shards.keys())

    def learn_logged(self, shards: Iterable[int]) -> None:
        """What attempts at these open shards are known to have cost by now."""
        for number in shards:
            costs = (one.cost(self._settings.price_per_hour) for one in read_worked(self.ledger, number).values())
            self.logged[number] = sum(cost for cost in costs if cost is not None)

    def progress(self) -> Progress:
        """How far it is."""
        return Progress(
            job=self.job.id,
            status=self.status,
            counts=self._tally.counts(self._planned_rows if REJECTS in self._parts else None),
            usage=self._tally.usage(),
            cost=self.spent.known if self.spent.seconds else None,
            shards_total=self._planned_shards,
            shards_done=self._planned_shards - len(self.open_shards),
            tokens_left=self.left.total() if self.planned else None,
            attention=self.attention,
            eta=self.eta,
            started_at=self.job.created_at,
            as_of=self._world.clock.now(),
        )

    def expect(self, eta: datetime | None) -> None:
        """It should be done by then; what readers know is renewed where that makes a difference to them."""
        self.eta, told = eta, self._told_eta
        if eta is None or told is None:
            self._uncached |= eta is not told
        elif self._world.clock.monotonic() - self._cached_at >= self._settings.eta_every:
            ahead = (eta - self._world.clock.now()).total_seconds()
            self._uncached |= abs((eta - told).total_seconds()) > max(1.0, ETA_PRECISION * ahead)

    def tell(self, now: float) -> None:
        """Events, and the cached progress, where something is new."""
        if self._untold:
            progress = self.progress()
            self._events.emit(_progress_event(progress, f"{progress.shards_done}"))
            if self._shown is not progress.status:
                self._events.emit(_status_event(progress))
            self._shown = progress.status
            self._untold, self._uncached = False, True
        if self._uncached and now - self._cached_at >= self._settings.cache_every and self._is_cached():
            self._uncached, self._cached_at, self._told_eta = False, now, self.eta
            self._caching = self._beside.submit(self.ledger.cache_progress, self.progress())

    def _is_cached(self, *, wait: bool = False) -> bool:
        """Whether the last write of progress is over; raises what it raised."""
        if self._caching is None or not (wait or self._caching.done()):
            return self._caching is None
        caching, self._caching = self._caching, None
        caching.result()
        return True

    def end(self) -> Manifest:
        """Write the outcome once all parts stand; the one that counts, if another dispatcher was first."""
        manifest = build_manifest(
            self.ledger, self.job, self._segments, self._parts, self._world.clock.now(), self._settings.price_per_hour
        )
        return self._conclude(manifest)

    def _conclude(self, manifest: Manifest) -> Manifest:
        if not self.ledger.create_manifest(manifest):
            manifest = self.ledger.manifest() or manifest
        self._is_cached(wait=True)  # or it would come behind the last one
        progress = self.progress().model_copy(
            update={
                "eta": None,
                "attention": None,
                "status": manifest.status,
                "usage": manifest.usage,
                "as_of": manifest.finished_at,
            }
        )
        self.ledger.cache_progress(progress)
        self._events.emit(_progress_event(progress, "end"))
        self._events.emit(_status_event(progress))
        tidy(self.ledger)
        return manifest

    def _note_spent(self, entry: PartEntry, shard: ShardRef) -> None:
        self.logged.pop(entry.number, None)
        spent, model = spent_on(entry.summary, self._settings.price_per_hour), self.key_of(shard)
        self.spent.seconds += spent.seconds
        self.spent.cost += spent.cost
        self.spent.unpriced += spent.unpriced
        self.spent_by_day[entry.summary.committed_at.astimezone(UTC).date().isoformat()] += spent.cost
        if not spent.unpriced and spent.seconds:
            self._cost_of[model] += spent.cost
            self._tokens_of[model] += cost(shard)

    def _found(self, entry: PartEntry) -> Found:
        number = entry.number
        self._parts[number] = entry
        self._tally.add(entry)
        shard = self.open_shards.pop(number, None)
        self._segment_of.pop(number, None)
        if shard is not None:
            self.left[self.key_of(shard)] -= cost(shard)
            self._note_spent(entry, shard)
        self._open_rejects.pop(number, None)
        self.puts.pop(number, None)
        self._untold = True
        self._events.emit(
            ShardCommitted(
                id=f"{self.job.id}/part/{number}",
                job=self.job.id,
                at=entry.summary.committed_at,
                shard=number,
                rows=entry.rows,
                attempt=entry.summary.attempt,
                usage=entry.summary.usage,
            )
        )
        return entry, shard


def cost(shard: ShardRef) -> int:
    """Estimated tokens that it computes, prompts and answers."""
    return shard.prompt_tokens + shard.expected_tokens


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
