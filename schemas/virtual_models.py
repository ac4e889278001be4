"""Virtual models: a name that stands for several served models, and the rules that choose one for each request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, Field, StringConstraints, field_validator, model_validator

from schemas.stored import StoredModel

MAX_RULES: Final = 32

LANGUAGES: Final = (
    "ar", "de", "el", "en", "es", "fa", "fr", "he", "hi", "it", "ja", "ko", "nl", "pl", "pt", "ru", "sv", "th", "tr",
    "uk", "zh",
)  # fmt: skip
"""Codes (ISO 639-1) of the languages that are recognized (`pipeline.routing.language`)."""

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_HOURS = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")


class Between(StoredModel):
    """An inclusive range; at least one side is given."""

    min: Annotated[int, Field(ge=0)] | None = None
    max: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Between:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    def __contains__(self, value: int) -> bool:
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


class LabelCondition(StoredModel):
    """The label that a served classification model gives to the request's text.

    Attributes:
        model: its name in the catalog.  labels: those for which the condition holds.
        min_score: least probability of the label.
        timeout_seconds: without a label after that, the virtual model's last rule applies.
    """

    model: ModelName
    labels: Annotated[tuple[Word, ...], Field(min_length=1, max_length=64)]
    min_score: Annotated[float, Field(ge=0, le=1)] = 0.0
    timeout_seconds: Annotated[float, Field(gt=0, le=10)] = 1.0

    def accepts(self, label: tuple[str, float] | None) -> bool:
        """Whether the condition holds for a text with this label and its probability; None: it got none."""
        return label is not None and label[0] in self.labels and label[1] >= self.min_score


class Conditions(StoredModel):
    """The conditions of a rule, all of which must hold. None: no condition.

    Attributes:
        prompt_tokens: estimated tokens of the (longest) prompt.
        complexity: the score from 0 to 100 of `pipeline.routing.complexity`.
        tools: whether the model may call tools.
        response_schema: whether the answer must have a JSON schema, or another given form.
        languages: of the last user message; a text in no recognized language has none.
        tenants, tiers: of the request, or of its job.
        hours: a window of the day in UTC, such as "22:00-06:00"; its end is not part of it.
        max_price_per_million_tokens: of the workers of the rule's model, at their measured speed.
        max_waiting_requests, max_waiting_tokens: mean waiting work of the workers of the rule's model: requests that
            wait for the running batch, and expected tokens of shards.
        label: of a classification model; asked only when the other conditions hold.
    """

    prompt_tokens: Between | None = None
    complexity: Between | None = None
    tools: bool | None = None
    response_schema: bool | None = None
    languages: Annotated[tuple[str, ...], Field(min_length=1, max_length=len(LANGUAGES))] | None = None
    tenants: Annotated[tuple[Word, ...], Field(min_length=1, max_length=256)] | None = None
    tiers: Annotated[tuple[Literal["interactive", "standard", "bulk"], ...], Field(min_length=1)] | None = None
    hours: Annotated[str, StringConstraints(pattern=f"^{_HOURS.pattern}$")] | None = None
    max_price_per_million_tokens: Amount | None = None
    max_waiting_requests: Amount | None = None
    max_waiting_tokens: Amount | None = None
    label: LabelCondition | None = None

    @field_validator("languages")
    @classmethod
    def _known(cls, languages: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for language in languages or ():
            if language not in LANGUAGES:
                raise ValueError(f"{language[:20]!r} is not recognized; known are {', '.join(LANGUAGES)}")
        return languages

    @property
    def depends_on_load(self) -> bool:
        """Whether the workers' state decides."""
        bounds = (self.max_price_per_million_tokens, self.max_waiting_requests, self.max_waiting_tokens)
        return any(bound is not None for bound in bounds)


class Rule(StoredModel):
    """A model, and the conditions under which it answers; None: always."""

    model: ModelName
    when: Conditions | None = None


class VirtualModel(StoredModel):
    """Rules over served models. The first rule that holds decides; the last one has no conditions.

    Attributes:
        published_at: since when it has these rules; None: it is not published.
    """

    version: Literal[1] = 1
    name: ModelName
    rules: Annotated[tuple[Rule, ...], Field(min_length=1, max_length=MAX_RULES)]
    published_at: AwareDatetime | None = None

    @model_validator(mode="after")
    def _has_default(self) -> VirtualModel:
        for number, rule in enumerate(self.rules, start=1):
            is_last, is_free = number == len(self.rules), rule.when is None or rule.when == Conditions()
            if is_last and not is_free:
                raise ValueError(f"rule {number} is the last, which is the default: it must have no conditions")
            if is_free and not is_last:
                raise ValueError(f"rule {number} has no conditions, so the rules after it never apply")
        for name in self.names:
            if name == self.name:
                raise ValueError(f"{name[:80]!r} names itself; rules name served models")
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models that may answer, each once."""
        return tuple(dict.fromkeys(rule.model for rule in self.rules))

    @property
    def classifiers(self) -> tuple[str, ...]:
        """The names of the classification models that the rules ask, each once."""
        found = (rule.when.label.model for rule in self.rules if rule.when is not None and rule.when.label is not None)
        return tuple(dict.fromkeys(found))

    @property
    def names(self) -> Iterator[str]:
        """All names that must be in the catalog."""
        yield from self.models
        yield from self.classifiers


def is_within(hours: str, at: datetime) -> bool:
    """Whether the time (aware, UTC) lies in a window of the day; one that ends before it begins goes past midnight,
    and one that ends when it begins is the whole day."""
    match = _HOURS.fullmatch(hours)
    assert match is not None, "hours are validated"
    from_hour, from_minute, to_hour, to_minute = map(int, match.groups())
    begin, end, now = from_hour * 60 + from_minute, to_hour * 60 + to_minute, at.hour * 60 + at.minute
    return begin <= now < end if begin < end else now >= begin or now < end
