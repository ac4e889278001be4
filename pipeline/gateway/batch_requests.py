"""What `POST /v1/batches` may say, and the options of the job that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.doors.unfit import first_mistake
from pipeline.gateway.errors import ApiError, bad_request
from pipeline.gateway.uploads import checked_life
from schemas.job import OnInvalid
from schemas.options import JobOptions, parse_amount
from schemas.requests import BODIES

EXTENSION: Final = "tokenmill"
"""The field for what OpenAI has no name for."""

_OWN: Final = ("metadata", "output_expires_after")
"""Options of a job that OpenAI has a field for."""


class BatchBody(BaseModel):
    """The body, as it comes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None
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
        window = parse_amount(given.completion_window)
    except ValueError as error:
        raise bad_request(f"completion_window: {error}", param="completion_window") from None
    return BatchRequest(given.input_file_id, given.endpoint, given.completion_window, _options(given, window))


def _options(given: BatchBody, window: timedelta) -> JobOptions:
    asked = dict(given.tokenmill or {})
    for name in _OWN:
        if name in asked:
            raise bad_request(f"{EXTENSION}.{name}: has a field of its own beside {EXTENSION}", f"{EXTENSION}.{name}")
    asked = {"deadline": window, "on_invalid": OnInvalid.JOB} | asked
    try:
        options = JobOptions.model_validate(asked)
    except ValidationError as error:
        raise _mistake(error, f"{EXTENSION}.") from None
    except ValueError as error:
        raise bad_request(f"{EXTENSION}: {error}", param=EXTENSION) from None
    life = given.output_expires_after
    if life is not None and life.keys() != {"anchor", "seconds"}:
        raise bad_request("output_expires_after takes anchor and seconds", param="output_expires_after")
    try:
        return JobOptions.model_validate(
            options.model_dump(exclude_unset=True)
            | {"metadata": given.metadata or {}}
            | ({} if life is None else {"output_expires_after": _life(life)})
        )
    except ValidationError as error:
        raise _mistake(error) from None


def _life(given: dict[str, Any]) -> timedelta:
    return checked_life(given["anchor"], given["seconds"], "output_expires_after")


def _mistake(error: ValidationError, beginning: str = "") -> ApiError:
    place = ".".join(str(step) for step in error.errors(include_url=False)[0]["loc"])[:200]
    return bad_request(f"{beginning}{first_mistake(error)}", param=f"{beginning}{place}" or None)
