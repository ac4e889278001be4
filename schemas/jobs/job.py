"""The order for a job, as it was accepted, and the word that ends it before its time."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from schemas.identifiers import Id, Traceparent
from schemas.jobs.inputs import InputRef
from schemas.jobs.row_selection import RowSelection
from schemas.models import ModelPin
from schemas.requests.limits import Limits, PlanSettings
from schemas.stored import StoredModel

MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class Tier(StrEnum):
    """How urgent: the streaming lane, with a deadline, or whenever there is room."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"


class OnInvalid(StrEnum):
    """What an invalid line does: fail by itself, or stop the job before anything is computed."""

    ROW = "row"
    JOB = "job"


class JobSettings(StoredModel):
    """Everything that changes a job's answers or its plan; frozen at submission, so that planning twice is the same.

    Attributes:
        seed: of sampled requests that bring none; the draw of each row is keyed by it and the row.
        on_invalid: what an invalid line does.
        limit: read only so many rows of the input.
        rows: answer these only, under the index that they have in the input; None: all.
        default_max_tokens: for requests without max_tokens (or what is left of the context, if less).
        max_output_tokens: a request that asks for more is refused.
        url: of all requests; one that names another is invalid. None: each says its own.
        content_policies: the fingerprint of those that the order itself names, as `run` does; None: it names none. In a
            root they are the workers' matter.
    """

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    on_invalid: OnInvalid = OnInvalid.ROW
    limit: Annotated[int, Field(ge=1)] | None = None
    rows: RowSelection | None = None
    default_max_tokens: Annotated[int, Field(ge=1)] = 4_096
    max_output_tokens: Annotated[int, Field(ge=1)] = 131_072
    url: Annotated[str, Field(max_length=256)] | None = None
    content_policies: Annotated[str, Field(max_length=64)] | None = None
    limits: Limits = Limits()
    plan: PlanSettings = PlanSettings()


class Job(StoredModel):
    """`jobs/ID/job.json`: the order, as accepted.

    Attributes:
        deadline: rows that have no answer by then expire.
        max_cost: what it may cost; no shard is begun that would pass that, and at that it ends. None: no limit.
        refuse_late: if it can't be done by then, as it looks before it is planned, nothing of it is done.
        output_expires_after: how long the results are kept after the end; None: as the installation says.
        traceparent: what the job belongs to, where its door traces; no part of the order.
    """

    version: Literal[1] = 1
    id: Id
    tenant: Annotated[str, Field(min_length=1, max_length=256)] = "default"
    tier: Tier = Tier.STANDARD
    input: InputRef
    models: Annotated[tuple[ModelPin, ...], Field(min_length=1)]
    settings: JobSettings = JobSettings()
    created_at: AwareDatetime
    deadline: AwareDatetime | None = None
    max_cost: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    refuse_late: bool = False
    output_expires_after: timedelta | None = None
    retry_of: str | None = None
    traceparent: Traceparent | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_pin_per_name(self) -> Job:
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models are pinned twice: {names}")
        return self

    def model_named(self, name: str) -> ModelPin | None:
        """The pin that requests with this `model` run on."""
        return next((model for model in self.models if model.name == name), None)


ClosedBy = Literal["cancel", "expire", "spend"]
"""Its user wanted it, its deadline passed, or it would cost more than it may."""


class Closing(StoredModel):
    """`closing.json`: why the job ends before its time. The first one written counts.

    Attributes:
        kind: what ends it.
        reason: more about that, for the rows that get no answer.
    """

    version: Literal[1] = 1
    kind: ClosedBy
    at: AwareDatetime
    reason: Annotated[str, Field(max_length=1_000)] | None = None
