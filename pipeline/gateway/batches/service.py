"""OpenAI's batch API on top of jobs: a batch is a job, and its id is the job's id."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated, Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pipeline.gateway.batches.finalizer import AT_ONCE_ROWS, Finalizer
from pipeline.gateway.batches.requests import BatchRequest, read_batch
from pipeline.gateway.batches.serialization import find_order, serialize_batch
from pipeline.gateway.files.service import Files
from pipeline.gateway.http.errors import ApiError, bad_request, not_found, unavailable
from pipeline.gateway.http.idempotency import record_idempotency_key
from pipeline.gateway.http.pagination import PageRequest, list_ids, map_chunks, take_page
from pipeline.gateway.records import BatchOrder, StoredFile
from pipeline.gateway.response_models import ListPage, list_page
from pipeline.ingest.intake import MODEL_NOT_FOUND, NO_MODEL, IntakePort, IntakeRefused, JobDraft
from pipeline.ingest.validation import first_mistake
from pipeline.jobs.retry import NothingToRetry, RetryOverrides, choose_rows, submit_retry
from pipeline.jobs.submit import derived_job_id, new_job_id
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.ledger.tenant_index import TenantIndex, batches_of
from pipeline.ports import StoreFull, World
from pipeline.results.export import part_lines
from schemas.jobs.batch import Batch
from schemas.jobs.job import Closing, Job, Tier
from schemas.jobs.job_options import AMOUNT_PATTERN, parse_amount
from schemas.jobs.results import RowStatus

_AT_ONCE: Final = 8
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_MAX_PARTS: Final = 1_000_000
_WITHOUT_SUCCEEDED: Final = {"items": {"enum": ["failed", "expired", "cancelled"]}}


class RetryBody(BaseModel):
    """The body of `POST /v1/batches/ID/retry`. Without fields all rows that didn't succeed are retried, with the same
    options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    only: Annotated[tuple[RowStatus, ...], Field(min_length=1, json_schema_extra=_WITHOUT_SUCCEEDED)] = (
        RowStatus.FAILED,
        RowStatus.EXPIRED,
        RowStatus.CANCELLED,
    )
    include_invalid: bool = False
    tier: Tier | None = None
    completion_window: Annotated[str, Field(json_schema_extra={"pattern": AMOUNT_PATTERN})] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_cost: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @field_validator("only")
    @classmethod
    def _not_succeeded(cls, only: tuple[RowStatus, ...]) -> tuple[RowStatus, ...]:
        if RowStatus.SUCCEEDED in only:
            raise ValueError("name failed, expired or cancelled")
        return only

    @field_validator("tier")
    @classmethod
    def _of_a_job(cls, tier: Tier | None) -> Tier | None:
        if tier is Tier.INTERACTIVE:
            raise ValueError("a batch is standard or bulk")
        return tier


@dataclass(frozen=True, slots=True)
class Results:
    """The committed results of a batch.

    Attributes:
        incomplete: further results may follow.  parts: all committed parts, also those that the caller excluded, as
            `0-3,7`.
        lines: lines of OpenAI's output file, each with its newline, part by part.
    """

    incomplete: bool
    parts: str
    lines: Iterator[bytes]


class Batches:
    """The batches of all tenants in `world.store`. Thread-safe.

    Args:
        executor: reads several batches of a page in parallel.
    """

    def __init__(
        self, world: World, intake: IntakePort, files: Files, finalizer: Finalizer, executor: Executor
    ) -> None:
        self._world = world
        self._store = world.store
        self._intake = intake
        self._files = files
        self._finalizer = finalizer
        self._executor = executor

    def create(
        self, tenant: str, body: dict[str, Any], key: str | None = None, check: Callable[[], None] = lambda: None
    ) -> Batch:
        """Create the batch that `body` describes, or find the one that the same request created before.

        Args:
            key: the idempotency key of the request.
            check: raises `ApiError` when the caller may not create another batch.

        Raises:
            ApiError: the batch can't be created.
        """
        request = read_batch(body)
        job_id, found = self._id(tenant, "batch", body, key)
        if found:
            return self._batch(job_id)
        file = self._files.get(tenant, request.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise bad_request(f"file {file.id} holds results; upload requests with purpose=batch", "input_file_id")
        self._check_room(tenant)
        check()
        self._make(tenant, job_id, request, file)
        return self._batch(job_id)

    def create_without_files(
        self,
        tenant: str,
        body: dict[str, Any],
        request: BatchRequest,
        store: Callable[[], StoredFile],
        key: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Batch:
        """Create a message batch, or find the one that the same request created before. Its results stay in Parquet,
        and no output files are made of them.

        Args:
            store: stores the requests as a file, which has no other reader; it is removed when no batch reads it.
            key, check: as for `create`.

        Raises:
            ApiError: the batch can't be created.
        """
        job_id, found = self._id(tenant, "message_batch", body, key)
        if found:
            return self._batch(job_id)
        self._check_room(tenant)
        check()
        file = store()
        try:
            self._files.add_reader(file, job_id)
            self._submit(tenant, job_id, request, file)
        finally:
            job = self._ledger(job_id).find_job()
            # A repetition of this request, with a file of its own, may have been first.
            if job is None or job.input.uri != self._files.as_input(file).uri:
                self._files.remove_reader(file.id, job_id)
                self._files.delete(tenant, file.id)
        return self._batch(job_id)

    def get(self, tenant: str, batch_id: str) -> Batch:
        """The tenant's batch; raises `ApiError` (404)."""
        ledger, _ = self.find(tenant, batch_id)
        # On a full disk the files of an ended batch can't be written; `Finalizer.run` retries, and logs the reason.
        with contextlib.suppress(StoreFull):
            self._finalizer.finish(ledger.name, AT_ONCE_ROWS)
        return serialize_batch(ledger)

    def page(self, tenant: str, page: PageRequest, index: TenantIndex | None = None) -> ListPage[Batch]:
        """A page of the tenant's batches. `index`: of some of them; None: of all."""

        def read(name: str) -> Batch | None:
            ledger = self._ledger(name)
            return None if ledger.find_job() is None else serialize_batch(ledger)

        names = list_ids(self._store, index or batches_of(tenant), page)
        batches = map_chunks(read, names, self._executor.map, _AT_ONCE)
        return list_page(*take_page(batches, page.limit))

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Cancel the batch. Results of finished rows are retained.

        Raises:
            ApiError: there is no such batch (404), or it has ended (409).
        """
        ledger, _ = self.find(tenant, batch_id)
        manifest = ledger.manifest()
        if manifest is not None:
            raise ApiError(
                409, "batch_ended", f"batch {batch_id} is {manifest.status.value} already, and stays so", param="id"
            )
        ledger.create_closing(Closing(kind="cancel", at=self._world.clock.now()))
        return serialize_batch(ledger)

    def open_jobs(self, tenant: str) -> int:
        """The number of the tenant's open jobs; the value is some seconds old."""
        return self._intake.jobs_of(tenant)

    def retry(
        self, tenant: str, batch_id: str, body: dict[str, Any], check: Callable[[], None] = lambda: None
    ) -> Batch:
        """Create a batch of the rows that have no response; repeating the request finds that batch.

        Args:
            check: raises `ApiError` when the caller may not create another batch.

        Raises:
            ApiError: there is no such batch (404), or nothing to retry (409).
        """
        ledger, job = self.find(tenant, batch_id)
        try:
            request = RetryBody.model_validate_json(orjson.dumps(body), strict=True)
            window = None if request.completion_window is None else parse_amount(request.completion_window)
        except ValidationError as error:
            raise bad_request(first_mistake(error)) from None
        except ValueError as error:
            raise bad_request(f"completion_window: {error}", "completion_window") from None
        max_tokens = request.max_output_tokens
        if max_tokens is not None and max_tokens > job.settings.max_output_tokens:
            raise bad_request(
                f"max_output_tokens is {max_tokens}, but must be from 1 to {job.settings.max_output_tokens}",
                "max_output_tokens",
            )
        try:
            chosen = choose_rows(ledger, request.only, include_invalid=request.include_invalid)
        except NothingToRetry as error:
            raise ApiError(409, "nothing_to_retry", str(error).partition(": ")[2] or str(error)) from None
        manifest = ledger.manifest()
        assert manifest is not None, "a job that has not ended has nothing to retry"
        first = find_order(self._store, job.id)

        def before(made: str) -> None:
            self._check_room(tenant)
            check()
            self._intake.expect(tenant, made)
            if first is not None:
                window, now = request.completion_window, self._world.clock.now()
                self._finalizer.expect(made, first.model_copy(update={"completion_window": window, "at": now}))

        overrides = RetryOverrides(request.tier, window, request.max_output_tokens, request.max_cost)
        made = submit_retry(chosen, manifest, overrides, self._world, before)
        if made.created:
            self._intake.added(made.job)
        return self._batch(made.job.id)

    def results(self, tenant: str, batch_id: str, without: str | None = None) -> Results:
        """The results that are committed now; raises `ApiError`.

        Args:
            without: parts to exclude, as `X-Parts` of an earlier response named them.
        """
        ledger, _ = self.find(tenant, batch_id)
        had = _numbers(without)
        manifest = ledger.manifest()
        ledger.check_results()
        numbers = ledger.result_parts(manifest)
        new = [number for number in numbers if number not in had]
        lines = (line.data + b"\n" for number in new for line in part_lines(0, ledger, number))
        return Results(manifest is None, _ranges(numbers), lines)

    # -- inside

    def _check_room(self, tenant: str) -> None:
        if not self._intake.room_for(tenant):
            message = "too much is queued already; submit again when some of it is done"
            raise ApiError(429, "backlog_full", message, headers={"Retry-After": "60"})

    def _make(self, tenant: str, job_id: str, request: BatchRequest, file: StoredFile) -> None:
        self._files.add_reader(file, job_id)
        order = BatchOrder(
            tenant=tenant,
            input_file_id=file.id,
            endpoint=request.endpoint,
            completion_window=request.completion_window,
            at=self._world.clock.now(),
        )
        self._finalizer.expect(job_id, order)
        self._submit(tenant, job_id, request, file)

    def _submit(self, tenant: str, job_id: str, request: BatchRequest, file: StoredFile) -> None:
        """Submit the job that reads the file; raises `ApiError`."""
        draft = JobDraft(self._files.as_input(file), request.options, tenant, job_id, url=request.endpoint)
        try:
            self._intake.accept(draft)
        except IntakeRefused as refused:
            if self._ledger(job_id).find_job() is None:  # otherwise a repetition of this request created it
                self._finalizer.forget(job_id)
                self._files.remove_reader(file.id, job_id)
                raise _refusal(refused) from refused

    def _id(self, tenant: str, kind: str, body: dict[str, Any], key: str | None) -> tuple[str, bool]:
        """The id for the job, and whether the job exists already."""
        if key is None:
            return new_job_id(self._world.clock.now(), self._world.random), False
        digest = hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
        at = record_idempotency_key(self._world, tenant, kind, key, digest)
        job_id = derived_job_id(at, "http", tenant, kind, key)
        return job_id, self._ledger(job_id).find_job() is not None

    def find(self, tenant: str, batch_id: str) -> tuple[JobLedger, Job]:
        """The tenant's job; raises `ApiError` (404)."""
        if _JOB_ID.fullmatch(batch_id) is not None:
            ledger = self._ledger(batch_id)
            job = ledger.find_job()
            if job is not None and job.tenant == tenant:
                return ledger, job
        raise not_found("batch", batch_id)

    def _batch(self, job_id: str) -> Batch:
        return serialize_batch(self._ledger(job_id))

    def _ledger(self, job_id: str) -> JobLedger:
        return JobLedger(self._store, f"{JOBS}{job_id}/")


def _refusal(refused: IntakeRefused) -> ApiError:
    if refused.code == NO_MODEL:
        return unavailable(str(refused), NO_MODEL, seconds=10)
    return ApiError(404 if refused.code == MODEL_NOT_FOUND else 400, refused.code, str(refused))


def _numbers(given: str | None) -> set[int]:
    """Parse part numbers such as `0-3,7`; raises `ApiError`."""
    found: set[int] = set()
    last = -1
    for one in given.split(",") if given else []:
        match = _RANGE.fullmatch(one)
        first = last if match is None else int(match[1])
        if match is None or first <= last or int(match[2] or first) < first:
            raise bad_request("without must be what X-Parts said, such as 0-3,7", "without")
        last = int(match[2] or first)
        if len(found) + last - first >= _MAX_PARTS:
            raise bad_request("without names too many parts", "without")
        found.update(range(first, last + 1))
    return found


def _ranges(numbers: Iterable[int]) -> str:
    """Format sorted part numbers as `0-3,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
