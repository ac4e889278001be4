"""Celery ingest tasks, without Celery: the implementations of `tokenmill.submit`, `status` and `cancel`.

A task may be delivered twice, be retried, or run at two intakes at once, and it carries no fixed time. So the first
delivery records one in a ticket, `intake/celery/HASH-task.json`, created if absent; the job's id is derived from this
time and the task's id. Each later delivery finds the ticket and creates the same job. Inline requests are stored as an
object with the same prefix before the job is created.

The sender chooses a task's id. Because it is hashed with the tenant, it can neither name a location nor reach another
tenant's job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import structlog
from pydantic import AwareDatetime, TypeAdapter, ValidationError

from pipeline.ingest.intake import NO_MODEL, IntakePort, IntakeRefused, JobDraft
from pipeline.ingest.validation import InvalidSubmission, check_uri, first_mistake
from pipeline.inputs.open import Pin
from pipeline.jobs.serialization import serialize_job
from pipeline.jobs.submit import DifferentJob, derived_job_id
from pipeline.ledger.ledger import JOBS, JobLedger, parse_stored
from pipeline.planner.ports import InputError
from pipeline.ports import ObjectNotFound, ObjectStore, PipelineError, World
from pipeline.runtime.availability import BadAddress
from schemas.identifiers import Id
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.job import Closing
from schemas.jobs.job_options import JobOptions
from schemas.stored import Sha256, StoredModel

INTAKE: Final = "intake/celery/"
TICKET: Final = "-task.json"
"""Suffix of the names of tickets."""
SUBMIT: Final = "tokenmill.submit"
STATUS: Final = "tokenmill.status"
CANCEL: Final = "tokenmill.cancel"
_INPUT: Final = "uri_or_requests"
_JOB_ID: Final = "id"
_MAX_ID_CHARS: Final = 1_024

logger = structlog.get_logger(__name__)


class TaskRefused(PipelineError):
    """Raised when a task can never be done: the caller gets the message, one line."""


class TryLater(PipelineError):
    """Raised when a task can't be done now. After the last retry the caller gets the message, one line."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Limits of submissions.

    Attributes:
        uri_prefixes: tenant -> prefixes of the URIs that its jobs may name, "s3://bucket/in/" or "file:///data/"; none:
            no URI at all.
        max_requests, max_bytes: limits of inline requests, as lines of JSON.

    Raises:
        BadAddress: a prefix doesn't end with a slash.
    """

    uri_prefixes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    max_requests: int = 10_000
    max_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        for tenant, prefixes in self.uri_prefixes.items():
            for prefix in prefixes:
                if not prefix.endswith("/"):  # s3://ours would allow s3://ours-not
                    raise BadAddress(f"uri prefix {prefix!r} of tenant {tenant!r} must end with a slash")


class TaskTicket(StoredModel):
    """`intake/celery/HASH-task.json`: a task was received. Written once.

    Attributes:
        at: when it was first received; its job's id is derived from it and sorts by it.
        arguments: digest of its arguments. The same id with other arguments is an error, and no second job.
    """

    version: Literal[1] = 1
    task: str
    tenant: str
    at: AwareDatetime
    arguments: Sha256

    @property
    def job_id(self) -> str:
        """The id of the task's job, which may not exist yet."""
        return derived_job_id(self.at, "celery", self.tenant, self.task)


@dataclass(frozen=True, slots=True)
class _Submission:
    """Validated arguments of a submission, with either a URI or lines."""

    options: JobOptions
    digest: str
    uri: str | None = None
    lines: bytes = b""


class CeleryTasks:
    """The tasks on the root `world.store`. Threads may share one.

    Args:
        pin: pins the current version of a URI's input, so that the job reads no later one.
    """

    def __init__(self, world: World, intake: IntakePort, pin: Pin, settings: TaskSettings | None = None) -> None:
        self._world = world
        self._intake = intake
        self._pin = pin
        self._settings = settings or TaskSettings()

    def submit(self, tenant: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Create the task's job, or find it; returns the job's id.

        Args:
            tenant: the tenant of the queue that the task came from.
            args, kwargs: `(uri_or_requests, **options)`, as received.

        Raises:
            TaskRefused: it can never become a job.  TryLater: not now.
        """
        submission = self._read(tenant, args, kwargs)
        try:
            return self._submit(tenant, task_id, submission)
        except IntakeRefused as refused:
            if refused.code == NO_MODEL:
                raise TryLater(f"{refused.code}: {refused}") from refused
            raise TaskRefused(f"{refused.code}: {refused}") from refused
        except InputError as error:
            raise TaskRefused(f"input_error: {error}") from error
        except (TaskRefused, TryLater):
            raise
        except PipelineError as error:
            raise TryLater(f"unavailable: {error}; submit the job again later") from error

    def status(self, tenant: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The tenant's job as a batch object; arguments `(id)`. Raises `TaskRefused` or `TryLater`."""
        return self._document(self._find(tenant, STATUS, args, kwargs))

    def cancel(self, tenant: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Cancel the tenant's job; returns its batch object; arguments `(id)`. A job that has ended is unchanged.
        Raises `TaskRefused` or `TryLater`."""
        ledger = self._find(tenant, CANCEL, args, kwargs)
        try:
            if ledger.manifest() is None:
                ledger.create_closing(Closing(kind="cancel", at=self._world.clock.now()))
        except PipelineError as error:
            raise TryLater(f"unavailable: {error}; cancel the job again later") from error
        return self._document(ledger)

    # -- submitting

    def _submit(self, tenant: str, task_id: str, submission: _Submission) -> str:
        ticket = self._find_ticket(tenant, task_id)
        if ticket is None or not self._has_job(ticket.job_id):
            if not self._intake.room_for(tenant):
                raise TryLater("no_room: too much is queued already; submit again when some of it is done")
            ticket = ticket or self._create_ticket(tenant, task_id, submission)
        if ticket.arguments != submission.digest:
            raise TaskRefused(f"task_id_used: task {task_id[:80]!r} came before with other arguments; use another id")
        job_id = ticket.job_id
        if self._has_job(job_id):
            # Its input is pinned; the object's current version doesn't matter. Accepting it again would need one.
            return job_id
        try:
            if submission.uri is not None:
                pinned = self._pin(_path(submission.uri))
            else:
                pinned = self._store_lines(ticket, submission.lines)
            submitted = self._intake.accept(JobDraft(pinned, submission.options, tenant, job_id))
        except (DifferentJob, IntakeRefused, InputError):
            if not self._has_job(job_id):
                raise
            return job_id  # another delivery of this task was first, and the input or the catalog has changed since
        logger.info("task_taken", job=job_id, tenant=tenant, task=ticket.task, created=submitted.created)
        return job_id

    def _has_job(self, job_id: str) -> bool:
        return self._ledger(job_id).find_job() is not None

    def _find_ticket(self, tenant: str, task_id: str) -> TaskTicket | None:
        return load_ticket(self._world.store, _ticket_key(tenant, task_id))

    def _create_ticket(self, tenant: str, task_id: str, submission: _Submission) -> TaskTicket:
        if not task_id or len(task_id) > _MAX_ID_CHARS:
            raise TaskRefused(f"bad_task_id: a task's id has 1 to {_MAX_ID_CHARS} characters; let Celery choose it")
        ticket = TaskTicket(task=task_id, tenant=tenant, at=self._world.clock.now(), arguments=submission.digest)
        if self._world.store.create(_ticket_key(tenant, task_id), ticket.to_json()):
            return ticket
        return self._find_ticket(tenant, task_id) or ticket

    def _store_lines(self, ticket: TaskTicket, lines: bytes) -> InputRef:
        """Store the requests as an immutable input file: named by task and content, so a repetition finds it."""
        digest = hashlib.sha256(lines).hexdigest()
        key = f"{_key_prefix(ticket.tenant, ticket.task)}-{digest[:32]}.jsonl"
        self._world.store.create(key, lines)
        uri = self._world.store.locate(key)
        file = InputFile(uri=uri, size=len(lines), sha256=digest)
        return InputRef(uri=uri, format=InputFormat.JSONL, files=(file,))

    # -- arguments

    def _read(self, tenant: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Submission:
        given, options = _split(SUBMIT, _INPUT, args, kwargs)
        try:
            chosen = JobOptions.model_validate(options)
        except ValidationError as error:
            known = ", ".join(JobOptions.model_fields)
            raise TaskRefused(f"invalid_options: {first_mistake(error)} (options are {known})") from None
        except (TypeError, ValueError) as error:
            raise TaskRefused(f"invalid_options: {error}") from None
        canonical = chosen.model_dump_json(exclude_defaults=True)  # unaffected by options that are added later
        if isinstance(given, str):
            self._check_uri(tenant, given)
            return _Submission(chosen, _digest(b"uri", given.encode(), canonical.encode()), uri=given)
        if not isinstance(given, list):
            raise TaskRefused(
                f"invalid_request: {_INPUT} is {_kind(given)}; give a URI, or a list of requests as in a batch file"
            )
        lines = self._lines(given)
        return _Submission(chosen, _digest(b"requests", lines, canonical.encode()), lines=lines)

    def _check_uri(self, tenant: str, uri: str) -> None:
        """Raise `TaskRefused` for a URI that the tenant may not name. An absolute path is checked as file://."""
        named = f"file://{uri}" if uri.startswith("/") else uri
        try:
            check_uri(named, self._settings.uri_prefixes.get(tenant, ()))
            named.encode()
        except InvalidSubmission as unfit:
            raise TaskRefused(f"{unfit.code}: {unfit}") from None
        except UnicodeEncodeError:
            raise TaskRefused("bad_uri: the uri holds half a character; give it as proper text") from None

    def _lines(self, requests: Sequence[Any]) -> bytes:
        max_requests, max_bytes = self._settings.max_requests, self._settings.max_bytes
        hint = "put them into a file and submit its URI"
        if not requests:
            raise TaskRefused("invalid_request: the list of requests is empty; give at least one")
        if len(requests) > max_requests:
            raise TaskRefused(f"too_large: {len(requests)} requests, but a task brings {max_requests} at most; {hint}")
        lines, size = list[bytes](), 0
        for index, request in enumerate(requests):
            lines.append(_line(index, request))
            size += len(lines[-1])
            if size > max_bytes:
                raise TaskRefused(
                    f"too_large: the requests up to requests[{index}] have {size} bytes, but a task brings "
                    f"{max_bytes} at most; {hint}"
                )
        return b"".join(lines)

    # -- reading jobs

    def _find(self, tenant: str, task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JobLedger:
        given, others = _split(task, _JOB_ID, args, kwargs)
        if others:
            raise TaskRefused(f"invalid_request: {task} takes {_JOB_ID} only, not {min(others)[:80]!r}")
        unknown = TaskRefused(f"job_not_found: there is no job {str(given)[:80]!r}; give the id that {SUBMIT} gave")
        try:
            name = TypeAdapter[str](Id).validate_python(given, strict=True)
        except ValidationError:
            raise unknown from None
        ledger = self._ledger(name)
        try:
            job = ledger.find_job()
        except PipelineError as error:
            raise TryLater(f"unavailable: {error}; ask again later") from error
        if job is None or job.tenant != tenant:  # the existence of another tenant's job is not disclosed
            raise unknown
        return ledger

    def _document(self, ledger: JobLedger) -> dict[str, Any]:
        try:
            return serialize_job(ledger).model_dump(mode="json")
        except PipelineError as error:
            raise TryLater(f"unavailable: {error}; ask again later") from error

    def _ledger(self, job_id: str) -> JobLedger:
        return JobLedger(self._world.store, f"{JOBS}{job_id}/")


def load_ticket(store: ObjectStore, key: str) -> TaskTicket | None:
    """Read a ticket; None when it is gone. Raises `LedgerError` for a damaged one."""
    try:
        data = store.read(key)
    except ObjectNotFound:
        return None
    return parse_stored(store.locate(key), data, TaskTicket)


def _ticket_key(tenant: str, task_id: str) -> str:
    return f"{_key_prefix(tenant, task_id)}{TICKET}"


def _key_prefix(tenant: str, task_id: str) -> str:
    """The common key prefix of all objects of a task: they are garbage-collected as one."""
    return INTAKE + _digest(tenant.encode(), task_id.encode(errors="surrogatepass"))[:32]


def _digest(*parts: bytes) -> str:
    """The digest of the parts and of their boundaries."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


def _split(task: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The one positional argument, and the keyword arguments."""
    others = dict(kwargs)
    given = [*args, *([others.pop(name)] if name in others else [])]
    if len(given) != 1:
        raise TaskRefused(f"invalid_request: {task} takes one {name}, not {len(given)}; options go by their names")
    return given[0], others


def _line(index: int, request: Any) -> bytes:
    """A request as a line of JSON. Celery's JSON has more types than JSON, and NaN: those are refused."""
    where = f"requests[{index}]"
    if not isinstance(request, dict):
        raise TaskRefused(f"invalid_request: {where} is {_kind(request)}; give an object as in a line of a batch file")
    try:
        text = json.dumps(request, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        why = "is nested too deeply" if isinstance(error, RecursionError) else f"is no JSON: {error}"
        raise TaskRefused(f"invalid_request: {where} {why}; send plain JSON") from None
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        raise TaskRefused(f"invalid_request: {where} holds half a character (a lone surrogate); send text") from None


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _path(uri: str) -> str:
    return uri.removeprefix("file://")
