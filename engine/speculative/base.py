"""The interface between the scheduler and a proposer of draft tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.request import Request


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for drafts of one row.

    Attributes:
        row: index into `RowState`; its known tokens are all computed but the last one.
        epoch: number of the row's owner; state stored for another epoch is another sequence's.
        max_drafts: bound of the draft's length. Block tables reach that far behind the known tokens.
        request, choice: of the row's sequence.
    """

    row: int
    epoch: int
    max_drafts: int
    request: Request
    choice: int


TRUSTS = 8
"""Number of kinds of drafts whose acceptance rates are tracked separately."""


class Draft(NamedTuple):
    """Draft tokens of one row."""

    tokens: NDArray[np.int32]  # int32 [at most `DraftRequest.max_drafts`], perhaps none
    source: str  # of the tokens, for the counters
    trust: int = 0  # the kind, below `TRUSTS`, assigned by the proposer; each kind's acceptance rate is measured


class Proposer(Protocol):
    """Proposes draft tokens.

    It may store state for a row under the row's epoch: a preempted, cancelled or ended sequence never returns under
    it. Accepted drafts are part of the row's known tokens.
    """

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order."""
        ...

    def learn(self, request: Request, token_ids: NDArray[np.int32]) -> None:
        """Observe an answer that has come to its natural end; token_ids: int32 [tokens]."""
        ...


NO_DRAFT = Draft(np.zeros(0, dtype=np.int32), "")
