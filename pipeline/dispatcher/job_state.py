"""The dispatcher's cached state of one open job: its plan, its committed parts, and its closing.

All of it is read from the ledger and can be read again. The cache saves reads; correctness doesn't depend on it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Set
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pipeline.answers.index import AnswerIndex
from pipeline.answers.job_answers import store_job
from pipeline.dispatcher.job_cost import OpenJobCost
from pipeline.dispatcher.job_reporter import JobReporter
from pipeline.jobs.closing import close_shard, find_closing, give_up_shard, status_while
from pipeline.jobs.event_sink import EventSink
from pipeline.jobs.manifest import PartTotals, build_manifest, failed_manifest
from pipeline.ledger.active_index import clean_up
from pipeline.ledger.ledger import REJECTS, JobLedger, LedgerError, part_key
from pipeline.ports import ObjectNotFound, World, queue_name
from pipeline.results.part_files import PartEntry, read_part
from pipeline.results.rejected_part import commit_rejects
from schemas.jobs.job import Closing, Job
from schemas.jobs.outcome import JobError, JobStatus, Manifest
from schemas.jobs.plan import PlanSegment, ShardRef
from schemas.jobs.progress import Progress

MAX_RESUME_ATTEMPTS: Final = 3
"""Attempts that could not resume a shard, after which its rows fail."""

ShardId = tuple[str, int]
"""A shard by its job's id and its number."""
NewPart = tuple[PartEntry, ShardRef | None]
"""A new part, and its shard (None: a part of rejected rows)."""


@dataclass(frozen=True, slots=True)
class OpenJobSettings:
    """Intervals of an open job; times in seconds.

    Attributes:
        sweep_interval_seconds: interval between two full listings of the parts (in between only queued shards are
            checked).
        cache_interval_seconds: shortest interval between two writes of progress.json.
        eta_interval_seconds: shortest interval between two writes because of a changed forecast alone: the forecasts of
            all open jobs change at the same time.
        closing_interval_seconds: interval between two checks for a cancellation.
        grace_seconds: time after which the shards of a job that is being closed are closed though workers hold them;
            until then workers release them with all rows computed so far.
        price_per_hour: of workers that report no price, for the job's cost; None: unknown.
    """

    sweep_interval_seconds: float = 30.0
    cache_interval_seconds: float = 2.0
    eta_interval_seconds: float = 10.0
    closing_interval_seconds: float = 1.0
    grace_seconds: float = 10.0
    price_per_hour: float | None = None


@dataclass(slots=True)
class QueuedShard:
    """A shard on a queue: when it was queued (monotonic), the time-out after which it is queued again, and whether a
    worker has held it."""

    queued_at: float
    retry_timeout_seconds: float
    was_held: bool = False


class OpenJob:
    """A job that has no outcome yet.

    Attributes:
        job: the order.  ledger: the job's ledger.
        open_shards: planned shards without a part, in plan order.
        queued: the open shards that are on a queue.
        tokens_left: estimated tokens of the open shards, prompts and answers, by model (`ModelPin.key`).
        cost: the cost so far.
        eta: forecast end of the job; None: not known.
        closing: why the job is being closed; None: it isn't.
        attention: why the job was paused before, until it has run for a while; None: it wasn't.
        unread_parts: committed parts that are still to be read.
        sweep_at: when all parts are listed next.  plan_read_at: when new segments were read last.
        is_complete: all parts are committed.
    """

    def __init__(
        self,
        ledger: JobLedger,
        job: Job,
        world: World,
        events: EventSink,
        settings: OpenJobSettings,
        background: Executor,
        answers: AnswerIndex | None = None,
        *,
        taken_over: bool = False,
    ) -> None:
        """`background`: executor of writes in the background. `answers`: the answer store that the job's answers go to.
        `taken_over`: another dispatcher may have driven the job before."""
        self._answers = answers
        self.ledger = ledger
        self.job = job
        self.open_shards: dict[int, ShardRef] = {}
        self.queued: dict[int, QueuedShard] = {}
        self.tokens_left: Counter[str] = Counter()
        self.cost = OpenJobCost(ledger, settings.price_per_hour, taken_over=taken_over)
        self.eta: datetime | None = None
        self.closing: Closing | None = None
        self.attention: str | None = None
        self.unread_parts: deque[int] = deque()
        self.sweep_at = self.plan_read_at = 0.0
        self._world = world
        self._settings = settings
        self._reporter = JobReporter(
            ledger, events, world.clock, background, settings.cache_interval_seconds, settings.eta_interval_seconds
        )
        self._segments: list[PlanSegment] = []
        self._segment_of: dict[int, PlanSegment] = {}  # by open shard
        self._open_rejects: dict[int, PlanSegment] = {}  # segments whose rejected rows have no part yet
        self._parts: dict[int, PartEntry] = {}
        self._tally = PartTotals()
        self._keys = {pin.name: pin.key for pin in job.models}
        self._base_keys = {pin.key: pin.base_key for pin in job.models}
        self._planned_rows = self._planned_shards = 0
        self._next_closing = 0.0
        self._grace_ends = 0.0  # when shards are closed though workers hold them
        self._taken_over = taken_over
        self._first_listing: frozenset[int] | None = None  # parts of the first listing

    @property
    def is_planned(self) -> bool:
        """Whether the plan is complete."""
        return bool(self._segments) and self._segments[-1].last

    @property
    def is_dispatchable(self) -> bool:
        """Whether shards may be queued. None is before part 0 is committed, so that the results can always be read."""
        return REJECTS in self._parts and self.closing is None

    @property
    def is_complete(self) -> bool:
        return self.is_planned and not self.open_shards and not self._open_rejects

    @property
    def status(self) -> JobStatus:
        """The job's status while it has no outcome."""
        if self.closing is not None:
            return status_while(self.closing)
        return JobStatus.IN_PROGRESS if REJECTS in self._parts else JobStatus.VALIDATING

    @property
    def _is_late(self) -> bool:
        return self.job.deadline is not None and self._world.clock.now() >= self.job.deadline

    def queue_of(self, shard: ShardRef) -> str:
        """The name of the shard's queue."""
        return queue_name(self.key_of(shard), self.job.tier)

    def key_of(self, shard: ShardRef) -> str:
        """The key of the shard's model; of a model that the job doesn't pin its name, which no worker serves."""
        return self._keys.get(shard.model, shard.model)

    def base_key_of(self, key: str) -> str:
        """The key of the model whose workers compute shards with this key: another one for an adapter's."""
        return self._base_keys.get(key, key)

    def read_plan(self) -> list[PlanSegment]:
        """Read the new segments, without applying them. Any thread may call it."""
        return list(self.ledger.segments(len(self._segments)))

    def apply_plan(self, segments: Iterable[PlanSegment], now: float) -> None:
        """Add new segments to the state."""
        self.plan_read_at = now
        for segment in segments:
            self._segments.append(segment)
            self._planned_rows += segment.total
            self._planned_shards += len(segment.shards)
            self._reporter.mark_changed()
            self.open_shards.update((shard.number, shard) for shard in segment.shards)
            self._segment_of.update((shard.number, segment) for shard in segment.shards)
            for shard in segment.shards:
                self.tokens_left[self.key_of(shard)] += estimated_tokens(shard)
            if segment.rejects is not None:
                self._open_rejects[segment.rejects.number] = segment
            if segment.last:  # from now on unplanned parts can be detected
                self.sweep_at = now

    def list_parts(self) -> list[int]:
        """List the committed parts, without applying them. Any thread may call it."""
        return [number for number, _ in self.ledger.parts()]

    def apply_part_listing(self, standing: Iterable[int], now: float) -> None:
        """Apply a listing of the committed parts: new ones are to be read. Raises `LedgerError` for a part that isn't
        planned."""
        self.sweep_at = now + self._settings.sweep_interval_seconds
        standing = frozenset(standing)
        if self._first_listing is None:
            self._first_listing = standing
        known = {*self._parts, *self.unread_parts}
        for number in sorted(standing):
            if number in known or number in self._open_rejects:
                continue
            if number in self.open_shards:
                self.unread_parts.append(number)
            elif self.is_planned:
                raise LedgerError(
                    f"{self.ledger.location(part_key(number))}: no such part is planned, but readers would count it; "
                    "move it elsewhere"
                )

    def is_new_part(self, number: int) -> bool:
        """Whether the part was committed after the job was added, as far as that is known."""
        return not self._taken_over or (self._first_listing is not None and number not in self._first_listing)

    def shards_to_check(self, held: set[ShardId]) -> list[int]:
        """Shards that may have parts by now: they were queued, and no worker holds them. A worker that holds a shard
        releases it when its part is committed."""
        return [number for number in self.queued if (self.job.id, number) not in held]

    def read_part(self, number: int) -> PartEntry | None:
        """Read a part, if it is committed, without applying it. Any thread may call it."""
        try:
            return read_part(self.ledger, number)
        except ObjectNotFound:
            return None

    def apply_part(self, entry: PartEntry) -> NewPart | None:
        """Add a committed part to the state; None: it was added before."""
        return None if entry.number in self._parts else self._add_part(entry)

    def missing_rejects(self) -> list[int]:
        """Parts of rejected rows that are not known to be committed."""
        return list(self._open_rejects)

    def make_rejects(self, number: int) -> PartEntry:
        """Commit a part of rejected rows, unless it is committed, and read it. Any thread may call it; the state
        doesn't change."""
        commit_rejects(self.ledger, self._open_rejects[number], self._world)
        return read_part(self.ledger, number)

    def close(self, held: set[ShardId], now: float, *, marked: bool, until: float) -> list[NewPart]:
        """Once the job is cancelled or expired, make the parts of its open shards that no worker holds; returns the new
        parts.

        Args:
            marked: the job may have a closing (`jobs_to_close`).
            until: after this time (monotonic) no further part is begun, once one was made: the others wait.
        """
        if self.closing is None:
            if now < self._next_closing or not (marked or self._is_late or not self.ledger.in_root):
                return []
            self._next_closing = now + self._settings.closing_interval_seconds
            self.closing = find_closing(self.ledger, self.job, self._world.clock.now())
            if self.closing is None:
                return []
            self._grace_ends = now + self._settings.grace_seconds
            self._reporter.mark_changed()
        found = []
        for number, shard in list(self.open_shards.items()):
            if (self.job.id, number) in held and now < self._grace_ends:
                continue
            if not self.ledger.has_part(number):
                segment = self._segment_of[number]
                close_shard(self.ledger, self.job, segment, shard, self.closing, self._world)
            found.append(self._add_part(read_part(self.ledger, number)))
            if self._world.clock.monotonic() > until:
                break
        return found

    def give_up(self, number: int, serving: Set[str]) -> NewPart | None:
        """Make the part of an open shard that `MAX_RESUME_ATTEMPTS` attempts could not resume, by as many workers or by
        all that serve its model: a failure on one of several workers may be that worker's fault. None: too few have
        tried.

        Args:
            serving: the live workers that serve the shard's model.

        Raises:
            RowsUnknown: the shard's rows are not known.  LedgerError: objects of the whole job can't be read.
        """
        records = self.ledger.unreadable(number)
        failed = {record.worker for record in records}
        if len(records) < MAX_RESUME_ATTEMPTS or (
            len(failed) < MAX_RESUME_ATTEMPTS and not (serving and serving <= failed)
        ):
            return None
        self.ledger.job()
        if self.ledger.closing() is not None:
            return None  # the closing makes the part
        reason = max(records, key=lambda record: record.at).reason
        give_up_shard(self.ledger, self.job, self._segment_of[number], self.open_shards[number], reason, self._world)
        return self._add_part(read_part(self.ledger, number))

    def end_as_failed(self, code: str, message: str) -> Manifest:
        """Write the outcome of a job that can't be completed: its committed parts count, and no other row has a result.
        Raises `LedgerError` when a part can't be read."""
        for number, _ in self.ledger.parts():
            if number not in self._parts:
                self._parts[number] = read_part(self.ledger, number)
        error = JobError(code=code, message=message)
        return self._conclude(failed_manifest(self.ledger, self.job, self._parts, self._world.clock.now(), (error,)))

    def cache_attention(self) -> None:
        """Write the reason for the pause into the cached progress."""
        self._reporter.write(self.progress())

    def recover(self) -> None:
        """Clear the attention: the job has run for a while without a failure."""
        self.attention = None
        self._reporter.mark_changed()

    def progress(self) -> Progress:
        """The job's progress now."""
        return Progress(
            job=self.job.id,
            status=self.status,
            counts=self._tally.counts(self._planned_rows if REJECTS in self._parts else None),
            usage=self._tally.usage(),
            cost=self.cost.spent.known if self.cost.spent.seconds else None,
            shards_total=self._planned_shards,
            shards_done=self._planned_shards - len(self.open_shards),
            tokens_left=self.tokens_left.total() if self.is_planned else None,
            attention=self.attention,
            eta=self.eta,
            started_at=self.job.created_at,
            as_of=self._world.clock.now(),
        )

    def set_eta(self, eta: datetime | None) -> None:
        """Set the forecast end."""
        self.eta = eta
        self._reporter.mark_eta(eta)

    def report(self, now: float) -> None:
        """Emit events and write the cached progress, if the state has changed."""
        self._reporter.report(self.progress, now)

    def end(self) -> Manifest:
        """Write the outcome once all parts are committed; returns the outcome that counts, which is another
        dispatcher's if that one was first."""
        manifest = build_manifest(
            self.ledger, self.job, self._segments, self._parts, self._world.clock.now(), self._settings.price_per_hour
        )
        if self._answers is not None and self._answers.options.includes(self.job.cache):
            store_job(self._answers, self.ledger, self.job, manifest, self._parts)  # before readers see the end
        return self._conclude(manifest)

    def _conclude(self, manifest: Manifest) -> Manifest:
        if not self.ledger.create_manifest(manifest):
            manifest = self.ledger.manifest() or manifest
        progress = self.progress().model_copy(
            update={
                "eta": None,
                "attention": None,
                "status": manifest.status,
                "usage": manifest.usage,
                "as_of": manifest.finished_at,
            }
        )
        self._reporter.report_end(progress)
        clean_up(self.ledger)
        return manifest

    def _add_part(self, entry: PartEntry) -> NewPart:
        number = entry.number
        self._parts[number] = entry
        self._tally.add(entry)
        shard = self.open_shards.pop(number, None)
        self._segment_of.pop(number, None)
        if shard is not None:
            model, tokens = self.key_of(shard), estimated_tokens(shard)
            self.tokens_left[model] -= tokens
            self.cost.add_part(entry, model, tokens)
        self._open_rejects.pop(number, None)
        self.queued.pop(number, None)
        self._reporter.emit_part(self.job.id, entry)
        return entry, shard


def estimated_tokens(shard: ShardRef) -> int:
    """Estimated tokens of the shard, prompts and answers."""
    return shard.prompt_tokens + shard.expected_tokens
