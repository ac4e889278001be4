"""What every door but the command line has in common: an event becomes a job in a root, once.

The door names the job after its event (`derived_job_id`). So the same event twice, late, or at two doors at once finds
the job that it has made, whatever has changed since in settings or catalog.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Protocol

from pipeline.jobs.pending_webhooks import want_notice
from pipeline.jobs.submit import JobOrder, SubmittedJob, submit
from pipeline.ledger.active_index import mark
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.models.catalog import Catalog
from pipeline.ports import PipelineError, World
from pipeline.scaling.tenant_backlog import TenantBacklog
from schemas.jobs.inputs import InputRef
from schemas.jobs.job import Job, JobSettings, OnInvalid, Tier
from schemas.jobs.job_options import JobOptions
from schemas.models import ModelPin
from schemas.requests.errors import RowErrorCode
from schemas.requests.limits import Limits, PlanSettings

MODEL_NOT_FOUND: Final = RowErrorCode.MODEL_NOT_FOUND.value
NO_MODEL: Final = "no_model"
CAP_EXCEEDED: Final = "cap_exceeded"


class IntakeRefused(PipelineError):
    """Raised when what was asked for can't become a job, however often it is tried.

    Attributes:
        code: a short, stable name of the reason.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class JobDraft:
    """A job as a door found it. `job_id` is derived from the event that it comes from; `tenant` is never taken from
    what the sender wrote. `url`: of all its requests; None: each says its own."""

    input: InputRef
    options: JobOptions
    tenant: str
    job_id: str
    url: str | None = None


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """What stands in where a draft says nothing.

    Attributes:
        default_model: its name in the catalog; None: rows may name any model there.
        default_tier: of jobs that name none.
        caps: the largest max_tokens of each tier.
        default_max_tokens: of requests that name none.
        tenant_tokens: a tenant with so many tokens in open jobs has no room for more; None: no limit.
        look_every: between two looks at how much is open; seconds.
        noticed: tenants that want to be told when their jobs have ended.
    """

    default_model: str | None = None
    default_tier: Tier = Tier.STANDARD
    caps: dict[Tier, int] = field(default_factory=dict)
    default_max_tokens: int = 4_096
    limits: Limits = field(default_factory=Limits)
    plan: PlanSettings = field(default_factory=PlanSettings)
    tenant_tokens: int | None = None
    look_every: float = 5.0
    noticed: frozenset[str] = frozenset()


class IntakeOptions(Protocol):
    """What doors ask of an `Intake`."""

    def accept(self, draft: JobDraft) -> SubmittedJob: ...

    def room_for(self, tenant: str) -> bool: ...

    def jobs_of(self, tenant: str) -> int: ...

    def expect(self, tenant: str, job: str) -> None: ...

    def added(self, job: Job) -> None: ...


class IntakeMetrics:
    """What became of what came in. Threads may share one."""

    def __init__(self) -> None:
        self._results: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, result: str) -> None:
        """One more: "created", "repeated" or "refused"."""
        with self._lock:
            self._results[result] += 1

    def read(self) -> dict[str, int]:
        """How many there were of each."""
        with self._lock:
            return dict(self._results)


class Intake:
    """Makes jobs in the root that `world.store` is. Threads may share one.

    Args:
        figures: count what comes in.
    """

    def __init__(
        self, world: World, settings: IntakeSettings | None = None, figures: IntakeMetrics | None = None
    ) -> None:
        self._figures = figures or IntakeMetrics()
        self._world = world
        self._settings = settings or IntakeSettings()
        self._catalog = Catalog(world.store)
        self._backlog = TenantBacklog(world, self._settings.look_every)

    def accept(self, draft: JobDraft) -> SubmittedJob:
        """The draft's job, made now or by the same event before.

        Raises:
            IntakeRefused: it can never become a job.
            PipelineError: it could not be made now; try again.
        """
        ledger = JobLedger(self._world.store, f"{JOBS}{draft.job_id}/")
        standing = ledger.find_job()
        if standing is not None:
            if ledger.manifest() is None:
                mark(ledger)  # whoever made it may have been interrupted
            self._figures.note("repeated")
            return SubmittedJob(standing, created=False)
        try:
            order = self._order(draft)
        except IntakeRefused as error:
            if error.code != NO_MODEL:  # else the door asks again
                self._figures.note("refused")
            raise
        self.expect(draft.tenant, draft.job_id)
        submitted = submit(order, ledger, self._world, job_id=draft.job_id)
        self._backlog.added(submitted.job)
        self._figures.note("created" if submitted.created else "repeated")
        return submitted

    def expect(self, tenant: str, job: str) -> None:
        """A job of this id is about to be made: whoever wants to know of its end will be told."""
        if tenant in self._settings.noticed:
            want_notice(self._world.store, job, self._world.clock.now())

    def room_for(self, tenant: str) -> bool:
        """Whether the tenant may submit more now. The figure is some seconds old, and an estimate."""
        limit = self._settings.tenant_tokens
        return limit is None or self._backlog.tokens_of(tenant) < limit

    def jobs_of(self, tenant: str) -> int:
        """How many open jobs the tenant has; some seconds old, but for what was accepted here."""
        return self._backlog.jobs_of(tenant)

    def added(self, job: Job) -> None:
        """A job was made here, and not by `accept`: it counts at once."""
        self._backlog.added(job)

    def _order(self, draft: JobDraft) -> JobOrder:
        options, settings = draft.options, self._settings
        tier = options.tier or settings.default_tier
        return JobOrder(
            input=draft.input,
            models=self._models(options.model or settings.default_model),
            settings=JobSettings(
                seed=options.seed or 0,
                on_invalid=options.on_invalid or OnInvalid.ROW,
                limit=options.limit,
                default_max_tokens=settings.default_max_tokens,
                max_output_tokens=self._cap(tier, options.max_output_tokens),
                url=draft.url,
                limits=settings.limits,
                plan=settings.plan,
            ),
            tenant=draft.tenant,
            tier=tier,
            deadline=options.deadline,
            max_cost=options.max_cost,
            refuse_late=options.refuse_late,
            output_expires_after=options.output_expires_after,
            metadata=options.metadata,
        )

    def _models(self, name: str | None) -> tuple[ModelPin, ...]:
        if name is not None:
            entry = self._catalog.find(name)
            if entry is not None:
                return (entry.pin,)
        entries = self._catalog.entries()
        came = [entry.pin for entry in entries if entry.pin.name == name]
        if came:  # between the two looks
            return (came[0],)
        known = ", ".join(entry.pin.name for entry in entries) or "none yet: start a worker"
        if not entries:  # not for ever: doors wait for the first worker
            raise IntakeRefused(NO_MODEL, f"no model is served here ({known}); submit again then")
        if name is not None:
            raise IntakeRefused(MODEL_NOT_FOUND, f"model {name[:80]!r} is not served here ({known})")
        return tuple(entry.pin for entry in entries)

    def _cap(self, tier: Tier, wanted: int | None) -> int:
        cap = self._settings.caps.get(tier, JobSettings().max_output_tokens)
        if wanted is not None and wanted > cap:
            raise IntakeRefused(CAP_EXCEEDED, f"max_output_tokens is {wanted}, but the {tier} tier's cap is {cap}")
        return wanted or cap
