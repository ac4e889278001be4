"""A cascade: a small model answers a job, and larger ones answer the rows whose answers are not accepted."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import Field, StringConstraints, field_validator, model_validator

from schemas.stored import StoredModel
from schemas.virtual_models import ModelName

MAX_SCHEMA_BYTES: Final = 65_536
MAX_MODELS: Final = 4
"""Of a cascade, the first one included."""

Length = Annotated[int, Field(ge=0)]


class Acceptance(StoredModel):
    """What an answer must be to be accepted, all of it; by default any answer is. A row without one never is.

    Attributes:
        json_schema: of the text, which must be JSON.
        pattern: RE2 syntax; some of the text must match it.
        min_chars, max_chars: of the text.
        finish_reasons: the answer must have ended so; None: any way.
        min_mean_logprob: least mean log-probability of the answer's tokens, in nats. Its rows are computed with
            log-probabilities.
        agreement: `min_mean_logprob` is chosen instead, so that this share of all answers are the next model's.
        sample_rows: rows that the next model answers to choose it.
    """

    json_schema: dict[str, Any] | None = None
    pattern: Annotated[str, StringConstraints(min_length=1, max_length=4_096)] | None = None
    min_chars: Length | None = None
    max_chars: Length | None = None
    finish_reasons: Annotated[tuple[Literal["stop", "length", "tool_calls"], ...], Field(min_length=1)] | None = None
    min_mean_logprob: Annotated[float, Field(le=0, allow_inf_nan=False)] | None = None
    agreement: Annotated[float, Field(gt=0, lt=1)] | None = None
    sample_rows: Annotated[int, Field(ge=20, le=10_000)] = 200

    @field_validator("json_schema")
    @classmethod
    def _bounded(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and len(orjson.dumps(schema)) > MAX_SCHEMA_BYTES:
            raise ValueError(f"has more than {MAX_SCHEMA_BYTES} bytes as JSON")
        return schema

    @model_validator(mode="after")
    def _has_no_contradiction(self) -> Acceptance:
        if self.agreement is not None and self.min_mean_logprob is not None:
            raise ValueError("min_mean_logprob is what agreement chooses; give one of them")
        if self.min_chars is not None and self.max_chars is not None and self.min_chars > self.max_chars:
            raise ValueError(f"min_chars {self.min_chars} is above max_chars {self.max_chars}")
        return self

    @property
    def needs_logprobs(self) -> bool:
        """Whether rows must be computed with log-probabilities."""
        return self.min_mean_logprob is not None or self.agreement is not None


class CascadeSettings(StoredModel):
    """The cascade of which a job is a step.

    Attributes:
        models: names of the models of later steps, in their order; none: it is the last step.
        accept: which answers of this job are final.
    """

    models: Annotated[tuple[ModelName, ...], Field(max_length=MAX_MODELS - 1)]
    accept: Acceptance

    @model_validator(mode="after")
    def _one_threshold(self) -> CascadeSettings:
        if self.accept.agreement is not None and len(self.models) > 1:
            raise ValueError("agreement is with one next model; give min_mean_logprob for several")
        return self

    @property
    def needs_logprobs(self) -> bool:
        """Whether this job's rows must be computed with log-probabilities."""
        return bool(self.models) and self.accept.needs_logprobs
