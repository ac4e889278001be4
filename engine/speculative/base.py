"""The seam between the scheduler and whatever guesses tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.request import Request


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A row for which drafts are wanted.

    Attributes:
        row: where its tokens are (`RowState`); its known tokens are all computed but the last one.
        epoch: counts the row's owners; what was kept for another epoch is another sequence's.
        max_drafts: bound of the draft's length. Block tables reach that far behind the known tokens.
        request, choice: whose row it is.
    """

    row: int
    epoch: int
    max_drafts: int
    request: Request
    choice: int


TRUSTS = 8
"""Kinds of drafts that are told apart by how often they stay."""


class Draft(NamedTuple):
    """Guesses at a row's next tokens."""

    tokens: NDArray[np.int32]  # int32 [at most `DraftRequest.max_drafts`], perhaps none
    source: str  # who guessed, for the counters
    trust: int = 0  # the kind, below `TRUSTS`, as the proposer sorts them; what each is worth is measured


class Proposer(Protocol):
    """Guesses what comes next.

    It may keep what it likes for a row, under the row's epoch: a preempted, cancelled or ended sequence never comes
    back under it. What was accepted shows in the row's known tokens.
    """

    def propose(self, asks: list[DraftRequest]) -> list[Draft]:
        """One draft for each row asked for, in order."""
        ...

    def learn(self, request: Request, token_ids: NDArray[np.int32]) -> None:
        """An answer has come to its natural end; token_ids: int32 [tokens]."""
        ...


NO_DRAFT = Draft(np.zeros(0, dtype=np.int32), "")
