"""Prompt lookup: what followed the last few tokens when they stood in the text before (Saxena 2023, prompt lookup
decoding; Yang et al. 2023, LLMA).

An index knows for each n-gram where it ended last; it grows with the text, and nothing is read twice. Of the places
that it names, the one whose past agrees longest with the present is taken. A text that copied from some place, and
then went its own way for a token or two, most likely goes on behind the place where it left: that is a candidate, too.
Beside its own text, a row looks into answers of the same owner that have ended (siblings.py).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.plan import RowState
from engine.request import Request
from engine.speculative.base import NO_DRAFT, Draft, DraftRequest
from engine.speculative.proposers.ngram_index import NgramIndex, agreement
from engine.speculative.proposers.siblings import Siblings

Ints = NDArray[np.int32]

SIZES = (5, 3, 2)
"""Lengths of the n-grams that are looked up."""

ASTRAY = 4
"""Tokens of its own after which a text is no longer taken to be copying."""

DRY = 8
"""Looks in vain after which a text is looked at less often: every other step, every third, …"""

RAREST = 4
"""Steps between two looks at most."""

SURE = 5
"""Agreeing tokens from which on siblings aren't asked."""

KINDS = (1, 3, 5, 8, 16)
"""Agreeing tokens from which on a draft is of the next kind: the more agree, the likelier it is that the next does."""

MOST = (1, 2, 4, 6, 8)
"""Drafts of each kind at most; of the last as many as are wanted."""

SIBLINGS = len(KINDS) + 1
"""The kind of what other answers say; and the next one, where it agrees well."""


class _Place(NamedTuple):
    """Where a draft could come from."""

    agreed: int  # tokens before it that are those before the draft
    text: Ints
    start: int
    end: int
    source: str


class _Row:
    """What is kept of a row's present owner.

    Attributes:
        shift: known tokens minus the place in them from which the last draft was copied; 0: nothing was copied.
        agreed_at: known tokens when the two places agreed last.
        vain: looks since the last one that found something.  rests: steps until the next look.
    """

    __slots__ = ("agreed_at", "epoch", "index", "rests", "shift", "vain")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.index = NgramIndex(SIZES)
        self.shift = 0
        self.agreed_at = 0
        self.vain = 0
        self.rests = 0


class NgramProposer:
    """Copies from the row's own text, or from ended answers.

    Args:
        rows: where the tokens are.
    """

    def __init__(self, rows: RowState) -> None:
        self._state = rows
        self._rows: dict[int, _Row] = {}
        self._siblings = Siblings()

    def propose(self, asks: list[DraftRequest]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def learn(self, request: Request, token_ids: Ints) -> None:
        self._siblings.add(token_ids, request.salt)

    def _draft(self, ask: DraftRequest) -> Draft:
        kept = self._rows.get(ask.row)
        if kept is None or kept.epoch != ask.epoch:
            kept = self._rows[ask.row] = _Row(ask.epoch)
        if kept.rests:
            kept.rests -= 1
            return NO_DRAFT
        known = self._state.token_ids[ask.row, : self._state.num_known[ask.row]]
        length = len(known)
        kept.index.extend(known, length - 1)  # not yet the n-gram that is looked up: it would find itself
        best: _Place | None = None
        for start in kept.index.places(known):
            agreed = agreement(known, start, known)
            if agreed >= SIZES[-1] and (best is None or agreed > best.agreed):
                best = _Place(agreed, known, start, length, "ngram")
        if kept.shift and length - kept.agreed_at <= ASTRAY:
            agreed = agreement(known, length - kept.shift, known)
            if best is None or agreed > best.agreed:
                best = _Place(agreed, known, length - kept.shift, length, "ngram")
        if best is None or best.agreed < SURE:
            found = self._siblings.find(known, ask.request.salt)
            if found is not None and (best is None or found[0] > best.agreed):
                best = _Place(*found, "siblings")
        if best is None:
            kept.vain += 1
            kept.rests = min(kept.vain // DRY, RAREST - 1)
            return NO_DRAFT
        kept.vain = 0
        if best.source == "ngram":
            kept.shift = length - best.start
            if best.agreed >= SIZES[-1]:
                kept.agreed_at = length
        kind = bisect_right(KINDS, best.agreed)
        most = ask.max_drafts if kind == len(MOST) else min(ask.max_drafts, MOST[kind])
        # A text that repeats itself with a short period is followed round and round.
        places = best.start + np.arange(most)
        if best.source == "ngram" and kept.shift < most:
            places = best.start + np.arange(most) % kept.shift
        trust = kind if best.source == "ngram" else SIBLINGS + (best.agreed >= SURE)
        return Draft(best.text[places[places < best.end]], best.source, trust)
