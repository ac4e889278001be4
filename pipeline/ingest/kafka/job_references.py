"""Topics of jobs by reference: a record names a whole input, which becomes one job; the job's id is derived from the
record's topic, partition and offset.

The value is `{"uri": …, "options": {…}}`. The settings limit the URIs that a tenant may name by prefixes, and allow no
local files unless a prefix does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.ingest.intake import NO_MODEL, IntakePort, IntakeRefused, JobDraft
from pipeline.ingest.kafka.dead_letters import KafkaDeadLetters
from pipeline.ingest.kafka.micro_batches import Origin, PartitionId, moment, origin_key
from pipeline.ingest.kafka.records import (
    JOB_LABEL,
    OPTION_HEADERS,
    Record,
    RecordRules,
    Refused,
    check_value,
    read_headers,
)
from pipeline.ingest.kafka.settings import KafkaIngestSettings
from pipeline.ingest.validation import InvalidSubmission, check_uri, first_mistake
from pipeline.inputs.open import Pin
from pipeline.jobs.submit import derived_job_id
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.planner.ports import InputError
from pipeline.ports import PipelineError, World
from pipeline.tracing import ingest_span
from schemas.jobs.job_options import JobOptions
from schemas.requests.limits import Limits

_MAX_BYTES: Final = 1 << 20

logger = structlog.get_logger(__name__)


class JobRequest(BaseModel):
    """The value of a record of a jobs topic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = Field(min_length=1, max_length=4_096)
    options: dict[str, Any] = Field(default_factory=dict)


class JobRecords:
    """Handler of a partition of jobs by reference.

    Args:
        pin: pins the current version of a URI's input, so that the job reads no later one.
    """

    def __init__(
        self, world: World, intake: IntakePort, dead_letters: KafkaDeadLetters, settings: KafkaIngestSettings, pin: Pin
    ) -> None:
        self._world = world
        self._intake = intake
        self._dead_letters = dead_letters
        self._settings = settings
        self._pin = pin

    def begin(self, partition_id: PartitionId, offset: int) -> int:
        """No work: each record is identified by its own offset."""
        return offset

    def store(self, partition_id: PartitionId, first: int, records: Sequence[Record]) -> int:
        """Create a job or a dead letter for each record; returns the offset after them."""
        for record in records:
            try:
                self._accept(partition_id, record)
            except IntakeRefused as refused:
                if refused.code == NO_MODEL:
                    raise PipelineError(f"{partition_id}: {refused}; the record waits") from refused
                self._dead_letters.write(partition_id, [Refused(record, refused.code, str(refused))])
            except InputError as error:
                self._dead_letters.write(partition_id, [Refused(record, "input_error", str(error))])
            except InvalidSubmission as unfit:
                self._dead_letters.write(partition_id, [Refused(record, unfit.code, str(unfit))])
        return records[-1].offset + 1

    def _accept(self, partition_id: PartitionId, record: Record) -> None:
        request, options, reply_to = self._read(partition_id, record)
        identity = (partition_id.cluster, partition_id.topic, str(partition_id.partition), str(record.offset))
        job_id = derived_job_id(moment(record.timestamp), "kafka job", *identity)
        self._world.store.create(origin_key(job_id), Origin(reply_to=reply_to).to_json())
        try:
            if JobLedger(self._world.store, f"{JOBS}{job_id}/").find_job() is not None:
                return  # its input is pinned; the current version doesn't matter
            pinned = self._pin(request.uri.removeprefix("file://"))
            with ingest_span(self._world.traces, "kafka job", (record.traceparent,)) as span:
                span.set({"messaging.system": "kafka", "messaging.destination.name": partition_id.topic})
                span.set({"messaging.kafka.offset": record.offset, "tokenmill.job.id": job_id})
                self._intake.accept(JobDraft(pinned, options, partition_id.tenant, job_id))
        except (IntakeRefused, InputError):
            self._world.store.delete(origin_key(job_id))
            raise
        logger.info(
            "kafka_job_taken", job=job_id, partition=str(partition_id), offset=record.offset, tenant=partition_id.tenant
        )

    def _read(self, partition_id: PartitionId, record: Record) -> tuple[JobRequest, JobOptions, str | None]:
        """Parse the record. An option takes precedence over the header of its name."""
        group, reply_to = read_headers(record.headers, self._settings.reply_topics)
        value = check_value(record.value, RecordRules(partition_id.tenant, _MAX_BYTES, limits=Limits()))
        given = {name: found for name in OPTION_HEADERS if (found := getattr(group, name)) is not None}
        try:
            request = JobRequest.model_validate(value)
            metadata = dict(request.options.get("metadata") or {})
            if group.job is not None:
                metadata.setdefault(JOB_LABEL, group.job)
            options = JobOptions.model_validate(given | request.options | {"metadata": metadata})
        except (ValidationError, TypeError, ValueError) as error:
            raise InvalidSubmission("invalid_request", _first(error)) from None
        check_uri(request.uri, self._settings.uri_prefixes.get(partition_id.tenant, ()))
        return request, options, reply_to


def _first(error: ValidationError | TypeError | ValueError) -> str:
    return first_mistake(error) if isinstance(error, ValidationError) else f"options.metadata: {error}"
