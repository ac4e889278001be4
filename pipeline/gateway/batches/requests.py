"""What `POST /v1/batches` may say, and the options of the job that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.gateway.files.uploads import LEAST_LIFE, MOST_LIFE
from pipeline.gateway.http.errors import ApiError, bad_request
from pipeline.ingest.validation import first_mistake
from schemas.jobs.job import MetadataKey, MetadataValue, OnInvalid
from schemas.jobs.job_options import AMOUNT_PATTERN, JobOptions, parse_amount
from schemas.requests.requests import BODIES

EXTENSION: Final = "tokenmill"
"""The field for what OpenAI has no name for."""

OWN: Final = ("metadata", "output_expires_after")
"""Options of a job that OpenAI has a field for."""


class ExpiresAfter(BaseModel):
    """How long the files of results are kept, in seconds from when they are written."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=int(LEAST_LIFE.total_seconds()), le=int(MOST_LIFE.total_seconds()))]


class BatchBody(BaseModel):
    """The body, as it comes. `tokenmill` holds options of a job, but for those that have a field here."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input_file_id: str
    endpoint: Annotated[str, Field(json_schema_extra={"enum": list(BODIES)})]
    completion_window: Annotated[str, Field(json_schema_extra={"pattern": AMOUNT_PATTERN})]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
    tokenmill: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch that is asked for. `completion_window` as it was given."""

    input_file_id: str
    endpoint: str
    completion_window: str
    options: JobOptions


def read_batch(body: dict[str, Any]) -> BatchRequest:
    """The batch that the body asks for; raises `ApiError`."""
    try:
        given = BatchBody.model_validate(body)
    except ValidationError as error:
        raise _mistake(error) from None
    if given.endpoint not in BODIES:
        known = ", ".join(BODIES)
        raise bad_request(f"endpoint is {given.endpoint[:80]!r}, but must be one of {known}", param="endpoint")
    try:
        parse_amount(given.completion_window)
    except ValueError as error:
        raise bad_request(f"completion_window: {error}", param="completion_window") from None
    return BatchRequest(given.input_file_id, given.endpoint, given.completion_window, _options(given))


def _options(given: BatchBody) -> JobOptions:
    asked = dict(given.tokenmill or {})
    for name in OWN:
        if name in asked:
            raise bad_request(f"{EXTENSION}.{name}: has a field of its own beside {EXTENSION}", f"{EXTENSION}.{name}")
    for name, default in (("deadline", given.completion_window), ("on_invalid", OnInvalid.JOB.value)):
        if asked.get(name) is None:
            asked[name] = default
    try:
        options = JobOptions.model_validate_json(orjson.dumps(asked), strict=True)
    except ValidationError as error:
        raise _mistake(error, f"{EXTENSION}.") from None
    life = given.output_expires_after
    return options.model_copy(
        update={
            "metadata": given.metadata or {},
            "output_expires_after": None if life is None else timedelta(seconds=life.seconds),
        }
    )


def _mistake(error: ValidationError, beginning: str = "") -> ApiError:
    place = ".".join(str(step) for step in error.errors(include_url=False)[0]["loc"])[:200]
    return bad_request(f"{beginning}{first_mistake(error)}", param=f"{beginning}{place}" or None)
