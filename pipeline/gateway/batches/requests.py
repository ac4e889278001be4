"""The body of `POST /v1/batches`, and its conversion into job options."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.gateway.files.uploads import MAX_LIFETIME, MIN_LIFETIME
from pipeline.gateway.http.errors import ApiError, bad_request
from pipeline.ingest.validation import first_mistake
from schemas.jobs.job import MetadataKey, MetadataValue, OnInvalid
from schemas.jobs.job_options import AMOUNT_PATTERN, JobOptions, parse_amount
from schemas.requests.parsing import BODIES

EXTENSION: Final = "tokenmill"
"""The field for options that OpenAI's API doesn't have."""

OWN: Final = ("metadata", "output_expires_after")
"""Job options that have their own field in OpenAI's API."""


class ExpiresAfter(BaseModel):
    """The lifetime of the result files, in seconds from their creation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=int(MIN_LIFETIME.total_seconds()), le=int(MAX_LIFETIME.total_seconds()))]


class BatchBody(BaseModel):
    """The body of a batch request. `tokenmill` holds the job options that have no field of their own here."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input_file_id: str
    endpoint: Annotated[str, Field(json_schema_extra={"enum": list(BODIES)})]
    completion_window: Annotated[str, Field(json_schema_extra={"pattern": AMOUNT_PATTERN})]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
    tokenmill: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A validated batch request. `completion_window` is the text of the body."""

    input_file_id: str
    endpoint: str
    completion_window: str
    options: JobOptions


def read_batch(body: dict[str, Any]) -> BatchRequest:
    """Validate a batch request; raises `ApiError`."""
    try:
        given = BatchBody.model_validate(body)
    except ValidationError as error:
        raise body_mistake(error) from None
    if given.endpoint not in BODIES:
        known = ", ".join(BODIES)
        raise bad_request(f"endpoint is {given.endpoint[:80]!r}, but must be one of {known}", param="endpoint")
    try:
        parse_amount(given.completion_window)
    except ValueError as error:
        raise bad_request(f"completion_window: {error}", param="completion_window") from None
    return BatchRequest(given.input_file_id, given.endpoint, given.completion_window, _options(given))


def _options(given: BatchBody) -> JobOptions:
    fields = dict(given.tokenmill or {})
    for name in OWN:
        if name in fields:
            raise bad_request(f"{EXTENSION}.{name}: has its own field outside of {EXTENSION}", f"{EXTENSION}.{name}")
    for name, default in (("deadline", given.completion_window), ("on_invalid", OnInvalid.JOB.value)):
        if fields.get(name) is None:
            fields[name] = default
    try:
        options = JobOptions.model_validate_json(orjson.dumps(fields), strict=True)
    except ValidationError as error:
        raise body_mistake(error, f"{EXTENSION}.") from None
    life = given.output_expires_after
    return options.model_copy(
        update={
            "metadata": given.metadata or {},
            "output_expires_after": None if life is None else timedelta(seconds=life.seconds),
        }
    )


def body_mistake(error: ValidationError, prefix: str = "") -> ApiError:
    """The first mistake of a body, as the response to it."""
    field = ".".join(str(step) for step in error.errors(include_url=False)[0]["loc"])[:200]
    return bad_request(f"{prefix}{first_mistake(error)}", param=f"{prefix}{field}" or None)
