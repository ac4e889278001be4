"""The options of a job, alike for all ingest sources: the command line, a sidecar file, headers, a task's arguments."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from schemas.jobs.job import MetadataKey, MetadataValue, OnInvalid, Tier
from schemas.requests.structured import invalid
from schemas.requests.truncation import TruncatePrompt

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_AMOUNT = re.compile(r"([1-9][0-9]{0,8})([smhd])")
AMOUNT_PATTERN: Final = f"^{_AMOUNT.pattern}$"
"""Pattern of an amount of time, for JSON schemas."""
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
MAX_DAYS: Final = 3_650


def parse_amount(text: str) -> timedelta:
    """Parse "90s", "30m", "6h" or "2d"; raises `ValueError`."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no amount of time; write a number and s, m, h or d, as in 6h")
    amount = timedelta(seconds=int(match[1]) * _SECONDS[match[2]])
    if amount.days > MAX_DAYS:
        raise ValueError(f"{text} is more than {MAX_DAYS} days")
    return amount


def _amount(given: Any) -> Any:
    if isinstance(given, str):
        return parse_amount(given)
    if isinstance(given, (int, float)):  # pydantic would take seconds
        raise ValueError("an amount of time is text, such as 30d")  # noqa: TRY004
    return given


Amount = Annotated[timedelta, BeforeValidator(_amount), WithJsonSchema({"type": "string", "pattern": AMOUNT_PATTERN})]
"""An amount of time, in the format of `parse_amount`."""


class PartialJobOptions(BaseModel):
    """Options from one of several sources. All are optional; the defaults are the installation's settings.

    Attributes:
        model: the catalog name of the model for rows that name none. With it the job's rows may name no other model;
            without it, any in the catalog.
        deadline: an amount of time ("6h") from the job's acceptance, or a time with its zone.
        max_cost: spending limit, in the currency of the installation's prices: no shard starts that would exceed it.
            Rows without an answer then end with `spend_limit`.
        refuse_late: if the backlog and the workers' speed make the deadline unreachable, the job fails at once with
            `deadline_unreachable` and nothing is computed.
        seed: of sampled requests without one.
        on_invalid: the effect of an invalid line.
        limit: maximum number of rows to read.
        max_output_tokens: requests for more are refused; at most the tier's cap.
        truncate_prompt: what a prompt loses that is too long for the model's context; default: it is refused.
        output_expires_after: retention of the results after the job's end; default: the installation's.
        cache: take answers of equal requests from the answer store, and store this job's; default: the installation's
            `answers.always`.
        metadata: at most 16 pairs, stored with the job.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tier: Tier | None = None
    deadline: Annotated[
        timedelta | AwareDatetime | None,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "pattern": AMOUNT_PATTERN},
                    {"type": "string", "format": "date-time"},
                    {"type": "null"},
                ]
            }
        ),
    ] = None
    max_cost: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    refuse_late: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    on_invalid: OnInvalid | None = None
    limit: Annotated[int, Field(ge=1)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    truncate_prompt: TruncatePrompt | None = None
    output_expires_after: Amount | None = None
    cache: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = Field(default_factory=dict)

    @field_validator("deadline", mode="before")
    @classmethod
    def _amount_or_moment(cls, given: Any) -> Any:
        if isinstance(given, str):
            try:
                return parse_amount(given) if _AMOUNT.fullmatch(given) else datetime.fromisoformat(given)
            except ValueError as error:
                raise invalid(str(error)) from None
        if isinstance(given, (int, float)):  # pydantic would take seconds
            raise invalid("a deadline is text: an amount such as 6h, or a moment such as 2026-01-31T18:00Z")
        return given

    @field_validator("deadline")
    @classmethod
    def _moment_since_1970(cls, deadline: timedelta | datetime | None) -> timedelta | datetime | None:
        if isinstance(deadline, datetime) and deadline < _EPOCH:  # OpenAI's batches have seconds since then
            raise invalid("a deadline is a moment since 1970; correct its year")
        return deadline

    @field_validator("tier")
    @classmethod
    def _of_a_job(cls, tier: Tier | None) -> Tier | None:
        if tier is Tier.INTERACTIVE:
            raise invalid("a job is standard or bulk; interactive requests are not jobs")
        return tier


class JobOptions(PartialJobOptions):
    """All options of a job, joined from their sources."""

    @model_validator(mode="after")
    def _check_refuse_late(self) -> JobOptions:
        if self.refuse_late and self.deadline is None:
            raise invalid("refuse_late needs a deadline")
        return self
