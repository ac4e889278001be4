"""Sampling parameters that a model's authors recommend, for requests that don't set them.

They are filled in where a request is accepted (by the planner, the gateway and the Celery tasks), before anything is
derived from its body: whether equal requests share an answer, the key of a cached response, the worker's parameters.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from schemas.requests.bodies import INT32_MAX, Finite, GenerationBody
from schemas.requests.scoring import Body

FILLED_IN: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of a body that a model's defaults fill in."""


class SamplingDefaults(BaseModel):
    """A model's own values of sampling parameters; None: it has none, and the API's default applies.

    Attributes:
        max_new_tokens: most tokens of an answer whose request has no max_tokens; the job's or the service's default
            applies where it is less.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None


def fill_in(body: Body, defaults: SamplingDefaults | None) -> Body:
    """The body with a model's defaults for the fields that its request left out."""
    if defaults is None or not isinstance(body, GenerationBody):
        return body
    update: dict[str, Any] = {
        name: value
        for name in FILLED_IN
        if name not in body.model_fields_set and (value := getattr(defaults, name)) is not None
    }
    return body.model_copy(update=update) if update else body


def answer_limit(defaults: SamplingDefaults | None, default_max_tokens: int) -> int:
    """The most tokens of an answer whose request has no max_tokens; `default_max_tokens`: the job's or the service's
    own."""
    own = None if defaults is None else defaults.max_new_tokens
    return default_max_tokens if own is None else min(own, default_max_tokens)
