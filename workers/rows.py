"""A shard's rows on their way through the worker: prepared, then finished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from engine.request import Completion, Request
from schemas.requests.errors import RowError
from schemas.requests.requests import Body
from workers.policies.policy import PolicyGuard


class RowName(NamedTuple):
    """Whose result: the input's row index, and the user's name for it."""

    row: int
    custom_id: str


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that the engine can compute, and the rows that take the same answer.

    Attributes:
        names: the row itself first, then its copies.
        guard: judges its answers; None: nobody does.
    """

    names: tuple[RowName, ...]
    body: Body
    request: Request
    guard: PolicyGuard | None = None


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row (with its copies) that never entered the engine; times are the engine clock's, in seconds."""

    names: tuple[RowName, ...]
    model: str
    error: RowError
    started_at: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """A row that the engine is done with, for better or worse. `withheld`: choices that were refused while they grew,
    and perhaps ended for that."""

    prepared: PreparedRow
    completion: Completion
    withheld: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all results of one attempt at a shard share. `wall` turns the engine clock's seconds into UTC."""

    job: str
    created_at: datetime
    attempt: int
    wall: Callable[[float], datetime]


FinishedRow = ComputedRow | RefusedRow
