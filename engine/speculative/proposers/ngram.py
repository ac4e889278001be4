"""Prompt lookup: copies the tokens that followed the last n-gram at its earlier occurrence in the text (Saxena 2023,
prompt lookup decoding; Yang et al. 2023, LLMA).

An index maps each n-gram to its last end position; it grows with the text, and nothing is read twice. Of the positions
found, the one with the longest agreement with the text's end is used. A text that copied from a position, and then
diverged for a token or two, most likely continues behind the position where it diverged: that is a candidate, too.
In addition to its own text, a row searches ended answers of the same owner (siblings.py).
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

MAX_DIVERGED_TOKENS = 4
"""Diverging tokens after which a text no longer counts as copying."""

MISSES_PER_SKIP = 8
"""Lookups without result after which the lookup interval grows: every other step, every third, …"""

MAX_LOOKUP_INTERVAL = 4
"""Maximum number of steps between two lookups."""

SURE_AGREEMENT = 5
"""Agreeing tokens from which on sibling answers are not searched."""

KINDS = (1, 3, 5, 8, 16)
"""Agreeing tokens from which on a draft is of the next kind: the more agree, the more probable is acceptance."""

MAX_DRAFTS = (1, 2, 4, 6, 8)
"""Maximum drafts of each kind; the last kind has no limit of its own."""

SIBLINGS = len(KINDS) + 1
"""The kind of drafts from sibling answers; the next kind is that of those with long agreement."""


class _Source(NamedTuple):
    """A candidate source of a draft."""

    agreed: int  # tokens before it that equal those before the draft
    text: Ints
    start: int
    end: int
    source: str


class _RowState:
    """State of a row's present owner.

    Attributes:
        shift: known tokens minus the position in them from which the last draft was copied; 0: nothing was copied.
        agreed_at: known tokens when the two positions agreed last.
        misses: lookups since the last hit.  steps_to_skip: steps until the next lookup.
    """

    __slots__ = ("agreed_at", "epoch", "index", "misses", "shift", "steps_to_skip")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.index = NgramIndex(SIZES)
        self.shift = 0
        self.agreed_at = 0
        self.misses = 0
        self.steps_to_skip = 0


class NgramProposer:
    """Copies from the row's own text, or from ended answers.

    Args:
        rows: holds the tokens.
    """

    def __init__(self, rows: RowState) -> None:
        self._state = rows
        self._rows: dict[int, _RowState] = {}
        self._siblings = Siblings()

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def learn(self, request: Request, token_ids: Ints) -> None:
        self._siblings.add(token_ids, request.salt)

    def _draft(self, request: DraftRequest) -> Draft:
        state = self._rows.get(request.row)
        if state is None or state.epoch != request.epoch:
            state = self._rows[request.row] = _RowState(request.epoch)
        if state.steps_to_skip:
            state.steps_to_skip -= 1
            return NO_DRAFT
        known = self._state.token_ids[request.row, : self._state.num_known[request.row]]
        length = len(known)
        state.index.extend(known, length - 1)  # excludes the n-gram that is looked up: it would find itself
        best: _Source | None = None
        for start in state.index.positions(known):
            agreed = agreement(known, start, known)
            if agreed >= SIZES[-1] and (best is None or agreed > best.agreed):
                best = _Source(agreed, known, start, length, "ngram")
        if state.shift and length - state.agreed_at <= MAX_DIVERGED_TOKENS:
            agreed = agreement(known, length - state.shift, known)
            if best is None or agreed > best.agreed:
                best = _Source(agreed, known, length - state.shift, length, "ngram")
        if best is None or best.agreed < SURE_AGREEMENT:
            found = self._siblings.find(known, request.request.salt)
            if found is not None and (best is None or found[0] > best.agreed):
                best = _Source(*found, "siblings")
        if best is None:
            state.misses += 1
            state.steps_to_skip = min(state.misses // MISSES_PER_SKIP, MAX_LOOKUP_INTERVAL - 1)
            return NO_DRAFT
        state.misses = 0
        if best.source == "ngram":
            state.shift = length - best.start
            if best.agreed >= SIZES[-1]:
                state.agreed_at = length
        kind = bisect_right(KINDS, best.agreed)
        max_drafts = request.max_drafts if kind == len(MAX_DRAFTS) else min(request.max_drafts, MAX_DRAFTS[kind])
        # A text with a short period is copied cyclically.
        positions = best.start + np.arange(max_drafts)
        if best.source == "ngram" and state.shift < max_drafts:
            positions = best.start + np.arange(max_drafts) % state.shift
        trust = kind if best.source == "ngram" else SIBLINGS + (best.agreed >= SURE_AGREEMENT)
        return Draft(best.text[positions[positions < best.end]], best.source, trust)
