"""Settings of overload: when a gateway refuses requests, and the steps by which it degrades its service."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from schemas.requests.limits import Positive

StepName = Literal["pause_bulk", "cap_max_tokens", "drafts_off", "route_small"]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Load = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PauseBulk(BaseModel):
    """Workers compute no rows of bulk jobs, and requests of the bulk tier are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["pause_bulk"]


class CapMaxTokens(BaseModel):
    """Answers of new interactive requests end after `max_tokens`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["cap_max_tokens"]
    max_tokens: Positive


class DraftsOff(BaseModel):
    """Workers don't speculate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["drafts_off"]


class RouteSmall(BaseModel):
    """New requests for a key of `models` are answered by the model that is its value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["route_small"]
    models: Annotated[dict[str, str], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_models(self) -> RouteSmall:
        if same := sorted(name for name, small in self.models.items() if name == small):
            raise ValueError(f"route_small replaces {same[0]} by itself; name a smaller model, or leave it out")
        return self


def _by_name(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) else given


DegradationStep = Annotated[
    PauseBulk | CapMaxTokens | DraftsOff | RouteSmall, Field(discriminator="name"), BeforeValidator(_by_name)
]


class OverloadOptions(BaseModel):
    """Settings of overload.

    Attributes:
        shed: refuse requests whose forecast time to first token, or end, passes its promise (`lane.slo`, and its
            `tiers`).
        steps: in this order, such as ["pause_bulk", {"name": "cap_max_tokens", "max_tokens": 256}, "drafts_off",
            {"name": "route_small", "models": {"large": "small"}}].
        enter_load: the next step begins when the forecast wait takes this share of what a promise allows.
        leave_load: the last step ends when it takes no more than this share.
        enter_seconds, leave_seconds: how long the wait must stay beyond that threshold, counted from the previous
            change at the earliest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shed: bool = False
    steps: tuple[DegradationStep, ...] = ()
    enter_load: Load = 0.8
    leave_load: Load = 0.4
    enter_seconds: Seconds = 1.0
    leave_seconds: Seconds = 10.0

    @model_validator(mode="after")
    def _check(self) -> OverloadOptions:
        names = [step.name for step in self.steps]
        if len(set(names)) < len(names):
            raise ValueError("steps names a step twice; name each once")
        if self.leave_load >= self.enter_load:
            raise ValueError(f"leave_load is {self.leave_load}, but must be below enter_load ({self.enter_load})")
        return self

    @property
    def is_used(self) -> bool:
        """Whether loads have to be known."""
        return self.shed or bool(self.steps)
