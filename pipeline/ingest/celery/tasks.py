"""The door of Celery tasks, without Celery: what `tokenmill.submit`, `status` and `cancel` do with their arguments.

A task may be delivered twice, retried, or be at two intakes at once, and it carries no moment that belongs to it for
ever. So the first delivery writes one down, `intake/celery/HASH-task.json`, created if absent; the job is named by it
and by the task's id. Whoever finds it makes the same job. Requests given inline are an object beside it before there is
a job.

A task's id is the sender's to choose. Hashed with the tenant, it can neither name a place nor reach another's job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import structlog
from pydantic import AwareDatetime, TypeAdapter, ValidationError

from pipeline.ingest.intake import NO_MODEL, IntakeOptions, IntakeRefused, JobDraft
from pipeline.ingest.validation import InvalidSubmission, check_uri, first_mistake
from pipeline.inputs.open import Pin
from pipeline.jobs.serialization import job_document
from pipeline.jobs.submit import DifferentJob, derived_job_id
from pipeline.ledger.ledger import JOBS, JobLedger, parse_stored
from pipeline.planner.api import InputError
from pipeline.ports import ObjectNotFound, ObjectStore, PipelineError, World
from pipeline.runtime.availability import BadAddress
from schemas.identifiers import Id
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.job import Closing
from schemas.jobs.job_options import JobOptions
from schemas.stored import Sha256, StoredModel

INTAKE: Final = "intake/celery/"
TICKET: Final = "-task.json"
"""How the names of tickets end."""
SUBMIT: Final = "tokenmill.submit"
STATUS: Final = "tokenmill.status"
CANCEL: Final = "tokenmill.cancel"
_ASKED: Final = "uri_or_requests"
_ID: Final = "id"
_LONGEST_ID: Final = 1_024

logger = structlog.get_logger(__name__)


class TaskRefused(PipelineError):
    """Raised when a task can't be done, however often it is tried: the caller gets the one line that it holds."""


class TryLater(PipelineError):
    """Raised when a task can't be done now. After the last try the caller gets the one line that it holds."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What callers may ask for.

    Attributes:
        uri_prefixes: tenant -> beginnings of the URIs that its jobs may name, "s3://bucket/in/" or "file:///data/";
            none: no URI at all.
        most_requests, most_bytes: of a task that brings its requests along, as lines of JSON.

    Raises:
        BadAddress: a beginning doesn't end with a slash.
    """

    uri_prefixes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    most_requests: int = 10_000
    most_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        for tenant, prefixes in self.uri_prefixes.items():
            for prefix in prefixes:
                if not prefix.endswith("/"):  # s3://ours would let s3://ours-not in
                    raise BadAddress(f"uri prefix {prefix!r} of tenant {tenant!r} must end with a slash")


class TaskTicket(StoredModel):
    """`intake/celery/HASH-task.json`: a task was heard of. Written once.

    Attributes:
        at: when; its job is named and sorted by it.
        arguments: digest of what it asks for. The same id with other arguments is a mistake, and no second job.
    """

    version: Literal[1] = 1
    task: str
    tenant: str
    at: AwareDatetime
    arguments: Sha256

    @property
    def job_id(self) -> str:
        """Of the job that the task became, or is to become."""
        return derived_job_id(self.at, "celery", self.tenant, self.task)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A submission whose arguments can be used: a URI or lines, one of the two."""

    options: JobOptions
    digest: str
    uri: str | None = None
    lines: bytes = b""


class CeleryTasks:
    """The tasks on the root that `world.store` is. Threads may share one.

    Args:
        pin: fixes what a URI names, so that the job reads that and nothing later.
    """

    def __init__(self, world: World, intake: IntakeOptions, pin: Pin, settings: TaskSettings | None = None) -> None:
        self._world = world
        self._intake = intake
        self._pin = pin
        self._settings = settings or TaskSettings()

    def submit(self, tenant: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Make the task's job, or find the one that it has made; the job's id.

        Args:
            tenant: whose queue the task came from.
            args, kwargs: `(uri_or_requests, **options)`, as they came.

        Raises:
            TaskRefused: it can never become a job.  TryLater: not now.
        """
        asked = self._read(tenant, args, kwargs)
        try:
            return self._submit(tenant, task_id, asked)
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
        """The job of the tenant as `job_document` has it; `(id)`. Raises `TaskRefused` or `TryLater`."""
        return self._document(self._find(tenant, STATUS, args, kwargs))

    def cancel(self, tenant: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """End the tenant's job before its time, and say how it stands; `(id)`. A job that has ended stays as it is.
        Raises `TaskRefused` or `TryLater`."""
        ledger = self._find(tenant, CANCEL, args, kwargs)
        try:
            if ledger.manifest() is None:
                ledger.create_closing(Closing(kind="cancel", at=self._world.clock.now()))
        except PipelineError as error:
            raise TryLater(f"unavailable: {error}; cancel the job again later") from error
        return self._document(ledger)

    # -- submitting

    def _submit(self, tenant: str, task_id: str, asked: _Asked) -> str:
        ticket = self._find_ticket(tenant, task_id)
        if ticket is None or not self._stands(ticket.job_id):
            if not self._intake.room_for(tenant):
                raise TryLater("no_room: too much is queued already; submit again when some of it is done")
            ticket = ticket or self._make_ticket(tenant, task_id, asked)
        if ticket.arguments != asked.digest:
            raise TaskRefused(f"task_id_used: task {task_id[:80]!r} came before with other arguments; use another id")
        job_id = ticket.job_id
        if self._stands(job_id):
            # Its input is pinned; what lies there now is of no interest. To accept it again would need one.
            return job_id
        try:
            pinned = self._pin(_path(asked.uri)) if asked.uri is not None else self._store_lines(ticket, asked.lines)
            submitted = self._intake.accept(JobDraft(pinned, asked.options, tenant, job_id))
        except (DifferentJob, IntakeRefused, InputError):
            if not self._stands(job_id):
                raise
            return job_id  # another delivery of this task was first, and the input or the catalog has changed since
        logger.info("task_taken", job=job_id, tenant=tenant, task=ticket.task, created=submitted.created)
        return job_id

    def _stands(self, job_id: str) -> bool:
        return self._ledger(job_id).find_job() is not None

    def _find_ticket(self, tenant: str, task_id: str) -> TaskTicket | None:
        return load_ticket(self._world.store, _ticket_key(tenant, task_id))

    def _make_ticket(self, tenant: str, task_id: str, asked: _Asked) -> TaskTicket:
        if not task_id or len(task_id) > _LONGEST_ID:
            raise TaskRefused(f"bad_task_id: a task's id has 1 to {_LONGEST_ID} characters; let Celery choose it")
        ticket = TaskTicket(task=task_id, tenant=tenant, at=self._world.clock.now(), arguments=asked.digest)
        if self._world.store.create(_ticket_key(tenant, task_id), ticket.to_json()):
            return ticket
        return self._find_ticket(tenant, task_id) or ticket

    def _store_lines(self, ticket: TaskTicket, lines: bytes) -> InputRef:
        """The requests as an input file that nobody changes: named by task and content, so a repeat finds it."""
        digest = hashlib.sha256(lines).hexdigest()
        key = f"{_beginning(ticket.tenant, ticket.task)}-{digest[:32]}.jsonl"
        self._world.store.create(key, lines)
        uri = self._world.store.locate(key)
        file = InputFile(uri=uri, size=len(lines), sha256=digest)
        return InputRef(uri=uri, format=InputFormat.JSONL, files=(file,))

    # -- arguments

    def _read(self, tenant: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Asked:
        wanted, options = _split(SUBMIT, _ASKED, args, kwargs)
        try:
            chosen = JobOptions.model_validate(options)
        except ValidationError as error:
            known = ", ".join(JobOptions.model_fields)
            raise TaskRefused(f"invalid_options: {first_mistake(error)} (options are {known})") from None
        except (TypeError, ValueError) as error:
            raise TaskRefused(f"invalid_options: {error}") from None
        told = chosen.model_dump_json(exclude_defaults=True)  # the same, whatever options there will be later
        if isinstance(wanted, str):
            self._check_uri(tenant, wanted)
            return _Asked(chosen, _digest(b"uri", wanted.encode(), told.encode()), uri=wanted)
        if not isinstance(wanted, list):
            raise TaskRefused(
                f"invalid_request: {_ASKED} is {_kind(wanted)}; give a URI, or a list of requests as in a batch file"
            )
        lines = self._lines(wanted)
        return _Asked(chosen, _digest(b"requests", lines, told.encode()), lines=lines)

    def _check_uri(self, tenant: str, uri: str) -> None:
        """Raises `TaskRefused` for a URI that the tenant may not name. An absolute path is judged as file://."""
        named = f"file://{uri}" if uri.startswith("/") else uri
        try:
            check_uri(named, self._settings.uri_prefixes.get(tenant, ()))
            named.encode()
        except InvalidSubmission as unfit:
            raise TaskRefused(f"{unfit.code}: {unfit}") from None
        except UnicodeEncodeError:
            raise TaskRefused("bad_uri: the uri holds half a character; give it as proper text") from None

    def _lines(self, requests: Sequence[Any]) -> bytes:
        most, most_bytes = self._settings.most_requests, self._settings.most_bytes
        hint = "put them into a file and submit its URI"
        if not requests:
            raise TaskRefused("invalid_request: the list of requests is empty; give at least one")
        if len(requests) > most:
            raise TaskRefused(f"too_large: {len(requests)} requests, but a task brings {most} at most; {hint}")
        lines, size = list[bytes](), 0
        for index, request in enumerate(requests):
            lines.append(_line(index, request))
            size += len(lines[-1])
            if size > most_bytes:
                raise TaskRefused(
                    f"too_large: the requests up to requests[{index}] have {size} bytes, but a task brings "
                    f"{most_bytes} at most; {hint}"
                )
        return b"".join(lines)

    # -- looking at jobs

    def _find(self, tenant: str, task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JobLedger:
        wanted, others = _split(task, _ID, args, kwargs)
        if others:
            raise TaskRefused(f"invalid_request: {task} takes {_ID} only, not {min(others)[:80]!r}")
        unknown = TaskRefused(f"job_not_found: there is no job {str(wanted)[:80]!r}; give the id that {SUBMIT} gave")
        try:
            name = TypeAdapter[str](Id).validate_python(wanted, strict=True)
        except ValidationError:
            raise unknown from None
        ledger = self._ledger(name)
        try:
            job = ledger.find_job()
        except PipelineError as error:
            raise TryLater(f"unavailable: {error}; ask again later") from error
        if job is None or job.tenant != tenant:  # another's job is nobody's business, not even that it is there
            raise unknown
        return ledger

    def _document(self, ledger: JobLedger) -> dict[str, Any]:
        try:
            return job_document(ledger)
        except PipelineError as error:
            raise TryLater(f"unavailable: {error}; ask again later") from error

    def _ledger(self, job_id: str) -> JobLedger:
        return JobLedger(self._world.store, f"{JOBS}{job_id}/")


def load_ticket(store: ObjectStore, key: str) -> TaskTicket | None:
    """A ticket; None when it has gone. Raises `LedgerError` for a damaged one."""
    try:
        data = store.read(key)
    except ObjectNotFound:
        return None
    return parse_stored(store.locate(key), data, TaskTicket)


def _ticket_key(tenant: str, task_id: str) -> str:
    return f"{_beginning(tenant, task_id)}{TICKET}"


def _beginning(tenant: str, task_id: str) -> str:
    """What the names of all objects of a task have in common: they are collected together."""
    return INTAKE + _digest(tenant.encode(), task_id.encode(errors="surrogatepass"))[:32]


def _digest(*parts: bytes) -> str:
    """Of the parts and where one ends."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


def _split(task: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The one argument that may stand by itself, and the others."""
    others = dict(kwargs)
    given = [*args, *([others.pop(name)] if name in others else [])]
    if len(given) != 1:
        raise TaskRefused(f"invalid_request: {task} takes one {name}, not {len(given)}; options go by their names")
    return given[0], others


def _line(index: int, request: Any) -> bytes:
    """A request as a line. Celery's JSON has more types than JSON, and NaN: those are refused."""
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
