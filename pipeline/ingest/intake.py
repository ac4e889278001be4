"""Intake, shared by all ingest sources except the command line: an event becomes a job in a root, exactly once.

The ingest source derives the job's id from its event (`derived_job_id`). So the same event twice, late, or at two
ingest sources at once finds the job that it created, even if settings or catalog have changed since.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from pipeline.jobs.pending_webhooks import request_webhook
from pipeline.jobs.submit import JobOrder, SubmittedJob, submit
from pipeline.ledger.active_index import mark
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.models.catalog import Catalog
from pipeline.models.virtual_models import VirtualModels
from pipeline.ports import PipelineError, World
from pipeline.scaling.tenant_backlog import TenantBacklog
from schemas.jobs.inputs import InputRef
from schemas.jobs.job import Job, JobSettings, OnInvalid, Tier
from schemas.jobs.job_options import JobOptions
from schemas.models import ModelPin, merged_hint
from schemas.requests.errors import RowErrorCode
from schemas.requests.limits import Limits, PlanSettings
from schemas.virtual_models import VirtualModel

MODEL_NOT_FOUND: Final = RowErrorCode.MODEL_NOT_FOUND.value
NO_MODEL: Final = "no_model"
CAP_EXCEEDED: Final = "cap_exceeded"


class IntakeRefused(PipelineError):
    """Raised when a submission can't become a job, and a retry is useless.

    Attributes:
        code: a short, stable name of the reason.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class JobDraft:
    """A job to submit, as an ingest source read it. `job_id` is derived from its event; `tenant` is never taken from
    the sender's data. `url`: the endpoint of all its requests; None: each names its own."""

    input: InputRef
    options: JobOptions
    tenant: str
    job_id: str
    url: str | None = None


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """Defaults and limits of drafts.

    Attributes:
        default_model: its name in the catalog; None: rows may name any model there.
        default_tier: tier of jobs that name none.
        caps: the largest max_tokens of each tier.
        default_max_tokens: max_tokens of requests that name none.
        max_tenant_tokens: maximum tokens in a tenant's open jobs; None: no limit.
        refresh_interval_seconds: seconds between two refreshes of the open tokens.
        noticed: tenants with webhooks on the end of their jobs.
    """

    default_model: str | None = None
    default_tier: Tier = Tier.STANDARD
    caps: dict[Tier, int] = field(default_factory=dict)
    default_max_tokens: int = 4_096
    limits: Limits = field(default_factory=Limits)
    plan: PlanSettings = field(default_factory=PlanSettings)
    max_tenant_tokens: int | None = None
    refresh_interval_seconds: float = 5.0
    noticed: frozenset[str] = frozenset()


class IntakePort(Protocol):
    """The operations of an `Intake` that ingest sources use."""

    def accept(self, draft: JobDraft) -> SubmittedJob: ...

    def room_for(self, tenant: str) -> bool: ...

    def jobs_of(self, tenant: str) -> int: ...

    def expect(self, tenant: str, job: str) -> None: ...

    def added(self, job: Job) -> None: ...


class IntakeMetrics:
    """Counts submissions by result. Threads may share one."""

    def __init__(self) -> None:
        self._results: Counter[str] = Counter()
        self._lock = threading.Lock()

    def record(self, result: str) -> None:
        """Count one more result: "created", "repeated" or "refused"."""
        with self._lock:
            self._results[result] += 1

    def read(self) -> dict[str, int]:
        """The number of submissions by result."""
        with self._lock:
            return dict(self._results)


class Intake:
    """Creates jobs in the root `world.store`. Threads may share one.

    Args:
        metrics: counts submissions.
    """

    def __init__(
        self, world: World, settings: IntakeSettings | None = None, metrics: IntakeMetrics | None = None
    ) -> None:
        self._metrics = metrics or IntakeMetrics()
        self._world = world
        self._settings = settings or IntakeSettings()
        self._catalog = Catalog(world.store)
        self._virtual_models = VirtualModels(world.store)
        self._backlog = TenantBacklog(world, self._settings.refresh_interval_seconds)

    def accept(self, draft: JobDraft) -> SubmittedJob:
        """The draft's job, created now or by the same event before.

        Raises:
            IntakeRefused: the draft can never become a job.
            PipelineError: the job could not be created now; try again.
        """
        ledger = JobLedger(self._world.store, f"{JOBS}{draft.job_id}/")
        standing = ledger.find_job()
        if standing is not None:
            if ledger.manifest() is None:
                mark(ledger)  # its creation may have been interrupted before the marker
            self._metrics.record("repeated")
            return SubmittedJob(standing, created=False)
        try:
            order = self._order(draft)
        except IntakeRefused as error:
            if error.code != NO_MODEL:  # else the ingest source tries again
                self._metrics.record("refused")
            raise
        self.expect(draft.tenant, draft.job_id)
        submitted = submit(order, ledger, self._world, job_id=draft.job_id)
        if submitted.created:
            self._backlog.added(submitted.job)
        self._metrics.record("created" if submitted.created else "repeated")
        return submitted

    def expect(self, tenant: str, job: str) -> None:
        """Request the tenant's webhooks for a job that is about to be created under this id."""
        if tenant in self._settings.noticed:
            request_webhook(self._world.store, job, self._world.clock.now())

    def room_for(self, tenant: str) -> bool:
        """Whether the tenant may submit more now, by an estimate that is some seconds old."""
        limit = self._settings.max_tenant_tokens
        return limit is None or self._backlog.tokens_of(tenant) < limit

    def jobs_of(self, tenant: str) -> int:
        """The number of the tenant's open jobs, some seconds old, plus those accepted here since."""
        return self._backlog.jobs_of(tenant)

    def added(self, job: Job) -> None:
        """Count a job that was created here without `accept` at once."""
        self._backlog.added(job)

    def _order(self, draft: JobDraft) -> JobOrder:
        options, settings = draft.options, self._settings
        tier, name = options.tier or settings.default_tier, options.model or settings.default_model
        pins, virtual_models = self._models(name)
        return JobOrder(
            input=draft.input,
            models=pins,
            settings=JobSettings(
                seed=options.seed or 0,
                on_invalid=options.on_invalid or OnInvalid.ROW,
                limit=options.limit,
                default_max_tokens=settings.default_max_tokens,
                max_output_tokens=self._cap(tier, options.max_output_tokens),
                truncate_prompt=options.truncate_prompt,
                url=draft.url,
                model=name if virtual_models else None,
                virtual_models=virtual_models or None,
                limits=settings.limits,
                plan=settings.plan,
            ),
            tenant=draft.tenant,
            tier=tier,
            deadline=options.deadline,
            max_cost=options.max_cost,
            refuse_late=options.refuse_late,
            output_expires_after=options.output_expires_after,
            cache=options.cache,
            metadata=options.metadata,
        )

    def _models(self, name: str | None) -> tuple[tuple[ModelPin, ...], tuple[VirtualModel, ...]]:
        """The pins of a job for the model of this name, or for all models (None), and its virtual models."""
        if name is not None:
            entry = self._catalog.find(name)
            if entry is not None:
                return (entry.pin,), ()
        entries = sorted(self._catalog.entries(), key=lambda entry: entry.pin.adapter is not None)  # models come first
        pins = {entry.pin.name: entry.pin for entry in entries}
        if name in pins:  # added between the two reads
            return (pins[name],), ()
        if not entries:  # not for ever: ingest sources wait for the first worker
            raise IntakeRefused(NO_MODEL, "no model is served here (none yet: start a worker); submit again then")
        if name is None:
            virtual_models = tuple(one for one in self._virtual_models.all() if one.name not in pins)
            return self._pins_for(virtual_models, pins), virtual_models
        virtual = self._virtual_models.find(name)
        if virtual is None:
            known = ", ".join([*pins, *(one.name for one in self._virtual_models.all())])
            hint = merged_hint(pins.values(), name)
            raise IntakeRefused(MODEL_NOT_FOUND, f"model {name[:80]!r} is not served here ({known}){hint}")
        return self._pins_for((virtual,), {}), (virtual,)

    def _pins_for(self, virtual_models: Sequence[VirtualModel], pins: Mapping[str, ModelPin]) -> tuple[ModelPin, ...]:
        """These pins, and those of all models that the rules name, which may be versions (`NAME@sha256:…`)."""
        found = dict(pins)
        for virtual in virtual_models:
            for model in virtual.models:
                entry = None if model in found else self._catalog.find(model)
                if entry is not None:
                    found[model] = entry.pin
                elif model not in found:
                    message = f"model {virtual.name[:80]!r}: {model[:80]!r}, which its rules name, is not served here"
                    raise IntakeRefused(MODEL_NOT_FOUND, message)
        return tuple(found.values())

    def _cap(self, tier: Tier, wanted: int | None) -> int:
        cap = self._settings.caps.get(tier, JobSettings().max_output_tokens)
        if wanted is not None and wanted > cap:
            raise IntakeRefused(CAP_EXCEEDED, f"max_output_tokens is {wanted}, but the {tier} tier's cap is {cap}")
        return wanted or cap
