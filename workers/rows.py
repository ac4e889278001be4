"""The rows of a shard in a worker: prepared, then finished."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from engine.request import Completion, Request
from schemas.jobs.checkpoints import FormerTry
from schemas.requests.dialects.dialect import Dialect
from schemas.requests.errors import RowError
from schemas.requests.parsing import Body
from schemas.requests.policy_report import NO_REPORT, PolicyReport
from workers.policies.policy import PolicyGuard


class RowName(NamedTuple):
    """Identifies a result: the input's row index, and the user's id for it."""

    row: int
    custom_id: str


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that the engine can compute, and its copies, which get the same answer.

    Attributes:
        names: the row itself first, then its copies.
        guard: checks its answers against the content policies; None: there are none.
        given_tokens: of its prompts, before any were cut off; None: none can be cut off.
        dialect: of the request and its response; None: OpenAI's chat, completion or embedding.
        is_judged: its answer must be accepted.  tries: those before this one, which were not.
    """

    names: tuple[RowName, ...]
    body: Body
    request: Request
    guard: PolicyGuard | None = None
    dialect: Dialect | None = None
    given_tokens: int | None = None
    is_judged: bool = False
    tries: tuple[FormerTry, ...] = ()

    @property
    def report(self) -> PolicyReport:
        """The report of the content policies so far."""
        return NO_REPORT if self.guard is None else self.guard.report

    def truncated_tokens(self, prompt_tokens: int) -> int | None:
        """The tokens that were cut off its prompts, of which `prompt_tokens` were computed; None: none."""
        given = self.given_tokens
        return None if given is None or given <= prompt_tokens else given - prompt_tokens


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row and its copies that the engine didn't take; times are seconds of the engine's clock. `report`: of the
    content policies.  `tries`: those of the row before."""

    names: tuple[RowName, ...]
    model: str
    error: RowError
    started_at: float
    finished_at: float
    report: PolicyReport = NO_REPORT
    tries: tuple[FormerTry, ...] = ()


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """A row that left the engine, completed or failed.

    Attributes:
        withheld: choices that a content policy refused while they grew; the worker may have cancelled them.
        rejected: why the answer is not accepted: row -> error, for the row itself and its copies.
    """

    prepared: PreparedRow
    completion: Completion
    withheld: frozenset[int] = frozenset()
    rejected: Mapping[int, RowError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields that all results of one attempt at a shard share. `wall` converts seconds of the engine's clock to UTC."""

    job: str
    created_at: datetime
    attempt: int
    wall: Callable[[float], datetime]


def response_id(kind: str, job: str, row: int) -> str:
    """The response id, which is the same each time a row of a job is computed."""
    return f"{kind}-{hashlib.blake2b(f'{job}/{row}'.encode(), digest_size=12).hexdigest()}"


FinishedRow = ComputedRow | RejectedRow
