"""Filters the tokens of a growing answer: a token passes only after its text was judged.

Tokens are held back together with their log-probabilities, which would spell them. The rest of the lane needs no
knowledge of policies: text, calls and the resumption on another worker all follow from the tokens that passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.request import PartialChoice, TokenLogprobs
from workers.policies.policy import PolicyGuard
from workers.text.detokenizer import IncrementalDetokenizer


class GrowingAnswer:
    """Judges an answer whose text grows: which characters may be emitted, and whether it may continue.

        | discarded   |  context  |  held back: a window  |  future text
        |------- cleared ---------|
                      |-------------- text ---------------|
                                start

    A refused text is at most a window long, so it is found while all of it is held back.

    Attributes:
        cleared: characters from the answer's beginning that may be emitted.
        refused: the answer must not continue, and no more of it may be emitted.
    """

    __slots__ = ("_guard", "_start", "_text", "cleared", "refused")

    def __init__(self, guard: PolicyGuard) -> None:
        self._guard = guard
        self._text = ""
        self._start = 0
        self.cleared = 0
        self.refused = False

    def push(self, text: str) -> None:
        """Add text. Raises `RowError` when a policy fails."""
        if not text or self.refused:
            return
        window = self._guard.window
        self._text += text
        self.refused = self._guard.refuses_growing(self._text, self._start)
        if self.refused:
            return
        end = max(self._start, len(self._text) - window)
        if not self._guard.holds_all:
            self.cleared += end - self._start
        context = max(0, end - max(1, window))  # shows a pattern whether a word begins at `start`
        self._text, self._start = self._text[context:], end - context


class PolicyStreamFilter:
    """The filter of one choice.

    Args:
        holdback: characters at the end in which a stop string may have begun: they may be cut off, so they aren't
            judged yet.

    Attributes:
        refused: the answer must not continue.
    """

    def __init__(self, guard: PolicyGuard, detokenizer: IncrementalDetokenizer, holdback: int) -> None:
        self._answer = GrowingAnswer(guard)
        self._detokenizer = detokenizer
        self._holdback = holdback
        self._unjudged = ""
        self._characters = 0
        self._held: deque[PartialChoice] = deque()
        self._ends: deque[int] = deque()  # for each held token: the answer's characters up to its end

    @property
    def refused(self) -> bool:
        return self._answer.refused

    def replay(self, token_ids: Sequence[int]) -> None:
        """Judge tokens that were emitted before. Raises `RowError` when a policy fails."""
        self._read(token_ids)
        self._ends.clear()

    def push(self, new: PartialChoice) -> PartialChoice | None:
        """Add tokens; returns the tokens that pass now, or None. Raises `RowError` when a policy fails."""
        self._held.append(new)
        self._read(new.token_ids.tolist())
        if self.refused:
            return None
        count = 0
        while self._ends and self._ends[0] <= self._answer.cleared:
            self._ends.popleft()
            count += 1
        return self._take(count) if count else None

    def _take(self, count: int) -> PartialChoice:
        """Remove the first held tokens. They are joined only here: a token may be held for long."""
        taken: list[PartialChoice] = []
        while count:
            piece = self._held.popleft()
            if len(piece.token_ids) > count:
                self._held.appendleft(slice_choice(piece, count))
                piece = slice_choice(piece, 0, count)
            taken.append(piece)
            count -= len(piece.token_ids)
        return _join(taken)

    def _read(self, token_ids: Sequence[int]) -> None:
        text = self._unjudged
        for token_id in token_ids:
            piece = self._detokenizer.push(token_id)
            text += piece
            self._characters += len(piece)
            self._ends.append(self._characters + len(self._detokenizer.pending))
        certain = max(0, len(text) - self._holdback)
        self._unjudged = text[certain:]
        self._answer.push(text[:certain])


def slice_choice(choice: PartialChoice, start: int, end: int | None = None) -> PartialChoice:
    """A slice of the tokens of an unfinished choice."""
    logprobs = choice.logprobs
    if logprobs is not None:
        logprobs = TokenLogprobs(logprobs.chosen[start:end], logprobs.top_ids[start:end], logprobs.top[start:end])
    return PartialChoice(choice.index, choice.token_ids[start:end], logprobs)


def _join(pieces: Sequence[PartialChoice]) -> PartialChoice:
    logprobs = None
    given = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    if len(given) == len(pieces):
        chosen = np.concatenate([each.chosen for each in given])
        top_ids, top = np.concatenate([each.top_ids for each in given]), np.concatenate([each.top for each in given])
        logprobs = TokenLogprobs(chosen, top_ids, top)
    return PartialChoice(pieces[0].index, np.concatenate([piece.token_ids for piece in pieces]), logprobs)
