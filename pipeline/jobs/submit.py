"""Submission of a job, for all ingest sources: an order becomes a job by one object that is created if absent.

The same order again finds the job that it created before, so a repeated event or command resumes where the first one
stopped. Another order at the same location is refused with the differences, never mixed in.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline.ledger.active_index import clean_up, delete_markers, mark
from pipeline.ledger.ledger import JOB, OWN_FILES, OWN_FOLDERS, RESULTS, JobLedger, LedgerError, part_number
from pipeline.ledger.records import RunRecord
from pipeline.ledger.tenant_index import job_indexes_of
from pipeline.ports import PipelineError, Randomness, World
from pipeline.tracing import current_traceparent
from schemas.jobs.inputs import InputRef
from schemas.jobs.job import Job, JobSettings, Tier
from schemas.jobs.outcome import JobStatus
from schemas.models import ModelPin

_NEVER = 1 << 45  # milliseconds after 1970: about the year 3085
_DIGITS = "0123456789abcdefghijklmnopqrstuv"
_TIME_DIGITS = 9
_DERIVED_BYTES = 20


class DifferentJob(PipelineError):
    """Raised when the location holds a job of another order.

    Attributes:
        differences: (field, its stored value, its value now), in a stable order.
    """

    def __init__(self, where: str, job: str, differences: list[tuple[str, str, str]]) -> None:
        listed = "; ".join(f"{name} was {old}, now {new}" for name, old, new in differences)
        super().__init__(f"{where}: holds job {job} of another order: {listed}; choose another output or pass --fresh")
        self.differences = differences


@dataclass(frozen=True, slots=True)
class JobOrder:
    """A request for a job, without id and time. A deadline given as a duration counts from acceptance: the same order
    submitted later means the same deadline as before."""

    input: InputRef
    models: tuple[ModelPin, ...]
    settings: JobSettings = field(default_factory=JobSettings)
    tenant: str = "default"
    tier: Tier = Tier.STANDARD
    deadline: datetime | timedelta | None = None
    max_cost: float | None = None
    refuse_late: bool = False
    output_expires_after: timedelta | None = None
    cache: bool | None = None
    retry_of: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """The accepted job, and whether this call created it. `job.input` has the current locations of the files."""

    job: Job
    created: bool


def submit(
    order: JobOrder, ledger: JobLedger, world: World, *, job_id: str | None = None, fresh: bool = False
) -> SubmittedJob:
    """Accept the order, or find the job that the same order created here before.

    Args:
        job_id: the id that an ingest source derives from its event; by default a new one that sorts before all earlier
            ones.
        fresh: delete the job at this location and its results; files that aren't tokenmill's are left alone.

    Raises:
        DifferentJob: the location holds another order's job.
        LedgerError: the location holds results of no known job, or foreign files among the results.
    """
    standing = ledger.find_job()
    _check_location(ledger, standing)
    if standing is not None and (fresh or _failed_before_work(ledger)):
        clear(ledger)
        standing = None
    now = world.clock.now()
    if standing is None:
        deadline = now + order.deadline if isinstance(order.deadline, timedelta) else order.deadline
        job = Job(
            id=job_id or new_job_id(now, world.random), tenant=order.tenant, tier=order.tier, input=order.input,
            models=order.models, settings=order.settings, created_at=now, deadline=deadline,
            max_cost=order.max_cost, refuse_late=order.refuse_late, output_expires_after=order.output_expires_after,
            cache=order.cache, retry_of=order.retry_of, traceparent=current_traceparent(), metadata=order.metadata,
        )  # fmt: skip
        mark(ledger)
        if ledger.in_root:
            for index in job_indexes_of(order.tenant, order.settings.url):
                index.add(ledger.store, ledger.name)
        if ledger.create_job(job):
            mark(ledger)  # a sweep may have found the marker without its job
            _record_run(ledger, world, now)
            return SubmittedJob(job, created=True)
        standing = ledger.job()  # another process was first
    differences = _differences(standing, order)
    if differences:
        raise DifferentJob(ledger.location(), standing.id, differences)
    if ledger.manifest() is None:
        mark(ledger)
        _record_run(ledger, world, now)
    else:
        clean_up(ledger)  # the clean-up at the job's end may have been interrupted
    return SubmittedJob(standing.model_copy(update={"input": order.input}), created=False)


def clear(ledger: JobLedger) -> None:
    """Delete a job's objects, `job.json` last: an interruption leaves a job that can be cleared again, or run. The job
    has no outcome from the first deletion on, so it is marked as open until it is deleted."""
    mark(ledger)
    for key in OWN_FILES:
        if key != JOB:
            ledger.store.delete(ledger.prefix + key)
    for folder in OWN_FOLDERS:
        for info in ledger.store.list(ledger.prefix + folder):
            ledger.store.delete(info.key)
    ledger.store.delete(ledger.prefix + JOB)
    delete_markers(ledger)


def new_job_id(now: datetime, random: Randomness) -> str:
    """An id that sorts before all earlier ones, so that a listing begins with the newest."""
    return f"job-{time_digits(now)}{base64.b32hexencode(random.token(5)).decode().lower()}"


def derived_job_id(at: datetime, *identity: str) -> str:
    """An id that sorts like `new_job_id`'s of that moment, and is a pure function of its arguments.

    Args:
        at: a fixed time of the event, such as when an object was written.
        identity: strings that identify the event uniquely.
    """
    digest = hashlib.sha256("\0".join(identity).encode()).digest()[:_DERIVED_BYTES]
    return f"job-{time_digits(at)}{base64.b32hexencode(digest).decode().lower()}"


def time_digits(at: datetime) -> str:
    """The first characters of an id of this moment, in milliseconds: they sort the newest first."""
    left = _NEVER - int(at.timestamp() * 1000)
    return "".join(_DIGITS[left >> (5 * index) & 31] for index in reversed(range(_TIME_DIGITS)))


def id_moment(name: str) -> datetime | None:
    """The moment in the id of a job or a file (`KIND-…`); None for other names."""
    digits = name.partition("-")[2][:_TIME_DIGITS]
    if len(digits) < _TIME_DIGITS or not set(digits) <= set(_DIGITS):
        return None
    left = sum(_DIGITS.index(digit) << (5 * index) for index, digit in enumerate(reversed(digits)))
    return datetime.fromtimestamp((_NEVER - left) / 1000, UTC) if left <= _NEVER else None


def _record_run(ledger: JobLedger, world: World, now: datetime) -> None:
    ledger.record_run(world.random.token(8).hex(), RunRecord(started_at=now))


def _failed_before_work(ledger: JobLedger) -> bool:
    """Whether the job was refused as a whole. Nothing was computed, so a corrected job may replace it."""
    manifest = ledger.manifest()
    return manifest is not None and manifest.status is JobStatus.FAILED and next(ledger.parts(), None) is None


def _check_location(ledger: JobLedger, standing: Job | None) -> None:
    for info in ledger.store.list(ledger.prefix + RESULTS):
        name = info.key.removeprefix(ledger.prefix + RESULTS)
        if "/" in name or part_number(name) is None:
            raise LedgerError(
                f"{ledger.location(RESULTS + name)}: is not tokenmill's, and readers would take it for results; "
                "move it elsewhere or choose another output"
            )
    if standing is None:
        for folder in OWN_FOLDERS:
            found = next(ledger.store.list(ledger.prefix + folder), None)
            if found is not None and ledger.find_job() is None:  # else another process has just been first
                raise LedgerError(
                    f"{ledger.location(found.key.removeprefix(ledger.prefix))}: belongs to no job ({JOB} is missing); "
                    "remove it or choose another output"
                )


def _differences(job: Job, order: JobOrder) -> list[tuple[str, str, str]]:
    """The differences between the order and the job; the location of the same bytes doesn't count."""
    are_as_many = len(job.models) == len(order.models)
    old, new = (dict(_facts(one, of_models=are_as_many)) for one in (job, order))
    old["deadline"], new["deadline"] = job.deadline and job.deadline.isoformat(), None
    if isinstance(order.deadline, timedelta):
        new["deadline"] = f"{order.deadline} after acceptance"
        if job.deadline is not None:
            old["deadline"] = f"{job.deadline - job.created_at} after acceptance"
    elif order.deadline is not None:
        new["deadline"] = order.deadline.isoformat()
    absent = "absent"
    names = [*new, *(name for name in old if name not in new)]
    return [
        (name, str(old.get(name, absent)), str(new.get(name, absent)))
        for name in names
        if old.get(name, absent) != new.get(name, absent)
    ]


def _facts(order: Job | JobOrder, *, of_models: bool) -> Iterator[tuple[str, Any]]:
    """Each fact by its name; of models without `of_models` only their names."""
    yield "input.format", order.input.format.value
    yield "input.files", len(order.input.files)
    for index, file in enumerate(order.input.files):
        name = "input" if len(order.input.files) == 1 else f"input.files[{index}]"
        yield f"{name}.size", file.size
        yield f"{name}.sha256", file.sha256
        yield f"{name}.etag", file.etag
    yield "merged_adapter", next((pin.name for pin in order.models if pin.merged), None)
    if not of_models:
        yield "models", ", ".join(pin.name for pin in order.models)
    for index, pin in enumerate(order.models if of_models else ()):
        name = "model" if len(order.models) == 1 else f"models[{index}]"
        facts = pin.model_dump(mode="json")
        if pin.digest is not None:  # the same weights may have another place or name
            del facts["source"], facts["adapter"], facts["base"], facts["merged"]
        yield from _flat(name, facts)
    yield from _flat("settings", order.settings.model_dump(mode="json", exclude={"rows"}))
    yield "settings.rows", order.settings.rows and str(order.settings.rows)
    yield "tenant", order.tenant
    yield "tier", order.tier.value
    yield "max_cost", order.max_cost
    yield "output_expires_after", order.output_expires_after and str(order.output_expires_after)
    yield "cache", order.cache
    yield "retry_of", order.retry_of
    yield from _flat("metadata", order.metadata)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, value
