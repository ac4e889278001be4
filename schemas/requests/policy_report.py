"""The verdicts of content policies on a request, as its result row and its response have them. They quote no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, StringConstraints

EXTENSION: Final = "tokenmill"
FIELD: Final = "content_policies"
"""A response has its report under `tokenmill.content_policies`."""

PolicyAction = Literal["refuse", "route", "flag"]
JudgedSide = Literal["prompt", "answer"]
Name = Annotated[str, StringConstraints(max_length=4_096)]
Tokens = Annotated[int, Field(ge=0, lt=2**53)]
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class ContentVerdict:
    """A policy's verdict on a text that doesn't simply pass.

    Attributes:
        policy, rule: their names; `rule` may be empty.
        on: the judged text.
        model: to which a `route` sends the request.
        failed: the policy could not judge the text, which passes as the operator chose.
    """

    __pydantic_config__ = _STRICT

    policy: Name
    rule: Name
    action: PolicyAction
    on: JudgedSide
    model: Name | None = None
    failed: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The verdict as JSON has it; `model` and `failed` only where they say something."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False)}


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """All verdicts on a request, and the tokens of the guard models that judged it."""

    __pydantic_config__ = _STRICT

    verdicts: Annotated[tuple[ContentVerdict, ...], Field(max_length=1_000)] = ()
    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0

    def __bool__(self) -> bool:
        return bool(self.verdicts or self.prompt_tokens or self.completion_tokens)

    @property
    def fields(self) -> dict[str, Any]:
        """The report as JSON has it: `verdicts`, and `usage` of guard models."""
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return {"verdicts": [verdict.fields for verdict in self.verdicts], "usage": usage}


NO_REPORT: Final = PolicyReport()


def add_report(response: Mapping[str, Any], report: PolicyReport) -> dict[str, Any]:
    """The response with this report, in addition to that which it has."""
    if not report:
        return dict(response)
    extension = dict(response.get(EXTENSION) or {})
    found, added = extension.get(FIELD), report.fields
    if found is not None:
        added["verdicts"] += [verdict for verdict in found["verdicts"] if verdict not in added["verdicts"]]
        added["usage"] = {name: count + found["usage"][name] for name, count in added["usage"].items()}
    return {**response, EXTENSION: extension | {FIELD: added}}


def extension_of(response: Mapping[str, Any]) -> dict[str, Any]:
    """The field of a response with its report; empty if it has none."""
    return {EXTENSION: response[EXTENSION]} if response.get(EXTENSION) else {}


def is_routed(response: Mapping[str, Any]) -> bool:
    """Whether a content policy sent the request of this response to another model."""
    return any(verdict["action"] == "route" for verdict in _verdicts(response))


def may_be_repeated(response: Mapping[str, Any]) -> bool:
    """Whether the same request may get this response again: the requested model made it, and all of its texts were
    judged."""
    return not is_routed(response) and not any(verdict.get("failed") for verdict in _verdicts(response))


def _verdicts(response: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = ((response.get(EXTENSION) or {}).get(FIELD) or {}).get("verdicts", ())
    return found
