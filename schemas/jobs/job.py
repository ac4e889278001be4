"""A job as it was accepted, and the record that ends it early."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from schemas.identifiers import Id, Traceparent
from schemas.jobs.cascade import CascadeSettings
from schemas.jobs.inputs import InputRef
from schemas.jobs.row_selection import RowSelection
from schemas.models import ModelPin
from schemas.requests.limits import Limits, PlanSettings
from schemas.requests.truncation import TruncatePrompt
from schemas.stored import StoredModel
from schemas.virtual_models import VirtualModel

MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]

MAX_TRIES = 100


class Tier(StrEnum):
    """Priority class: interactive (the streaming lane), standard (usually with a deadline) or bulk (spare capacity)."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"


class OnInvalid(StrEnum):
    """The effect of an invalid line: it fails alone, or stops the job before anything is computed."""

    ROW = "row"
    JOB = "job"


class JobSettings(StoredModel):
    """The settings that change a job's answers or its plan; frozen at submission, so that planning is deterministic.

    Attributes:
        seed: of sampled requests without one; each row's random numbers are keyed by it and the row's index.
        on_invalid: the effect of an invalid line.
        limit: maximum number of input rows to read.
        rows: the only rows to answer, under their index in the input; None: all.
        default_max_tokens: for requests without max_tokens (or what is left of the context, if less).
        max_output_tokens: requests for more are refused.
        truncate_prompt: what a prompt loses that is too long for the model's context; None: it is refused.
        url: of all requests; a request with another is invalid. None: each request has its own.
        content_policies: the fingerprint of the job's own policies, as `run` sets them; None: it has none. In a root
            the workers' settings decide.
        model: of requests that name none; others may name it or a virtual model. None: the pinned one if there is only
            one, and others may name a pinned or a virtual model.
        virtual_models: names that requests may use besides those of the pinned models, with their rules; the rules'
            models are pinned. None: there are none.
        cascade: of which the job is a step. None: of none.
        max_tries: answers are judged, and a row whose answer is not accepted is asked again, at most so often in all.
            None: answers are not judged.
        answer_check: the name of the Python object that judges answers besides their form, in the process that runs
            the job. None: their form alone counts.
    """

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    on_invalid: OnInvalid = OnInvalid.ROW
    limit: Annotated[int, Field(ge=1)] | None = None
    rows: RowSelection | None = None
    default_max_tokens: Annotated[int, Field(ge=1)] = 4_096
    max_output_tokens: Annotated[int, Field(ge=1)] = 131_072
    truncate_prompt: TruncatePrompt | None = None
    url: Annotated[str, Field(max_length=256)] | None = None
    content_policies: Annotated[str, Field(max_length=64)] | None = None
    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    virtual_models: tuple[VirtualModel, ...] | None = None
    cascade: CascadeSettings | None = None
    max_tries: Annotated[int, Field(ge=1, le=MAX_TRIES)] | None = None
    answer_check: Annotated[str, Field(max_length=256)] | None = None
    limits: Limits = Limits()
    plan: PlanSettings = PlanSettings()


class Job(StoredModel):
    """`jobs/ID/job.json`: the job, as accepted.

    Attributes:
        deadline: rows that have no answer by then expire.
        max_cost: spending limit; no shard starts that would exceed it, and the job ends there. None: no limit.
        refuse_late: fail without computing if the estimate before planning is later than the deadline.
        output_expires_after: retention of the results after the end; None: the installation's.
        cache: use the answer store; None: the installation's default.
        traceparent: span context of the submission, where the ingest source traces; it doesn't change the job.
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
    cache: bool | None = None
    retry_of: str | None = None
    traceparent: Traceparent | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_pin_per_name(self) -> Job:
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models are pinned twice: {names}")
        for virtual in self.settings.virtual_models or ():
            if missing := set(virtual.models) - set(names):
                raise ValueError(f"{virtual.name}: its models {', '.join(sorted(missing))} are not pinned")
        return self

    @property
    def only_model(self) -> str | None:
        """The model of requests that name none; None: there are several. Adapters beside models, and virtual models,
        must be named."""
        names = [model.name for model in self.models]
        own = [model.name for model in self.models if model.adapter is None] or names
        return own[0] if self.settings.model is None and len(own) == 1 else self.settings.model

    @property
    def computed_by(self) -> str | None:
        """The name of its only model; of a model with adapters, of the loaded one. None: there are several."""
        if len(self.models) == 1:
            return self.models[0].name
        loaded = {model.loaded_name for model in self.models}
        return loaded.pop() if len(loaded) == 1 else None

    def model_named(self, name: str) -> ModelPin | None:
        """The pin that requests with this `model` run on."""
        return next((model for model in self.models if model.name == name), None)


ClosedBy = Literal["cancel", "expire", "spend"]
"""A user cancelled it, its deadline passed, or it reached its spending limit."""


class Closing(StoredModel):
    """`closing.json`: the reason why the job ends early. The first one written counts.

    Attributes:
        kind: the cause.
        reason: details, for the rows that get no answer.
    """

    version: Literal[1] = 1
    kind: ClosedBy
    at: AwareDatetime
    reason: Annotated[str, Field(max_length=1_000)] | None = None
