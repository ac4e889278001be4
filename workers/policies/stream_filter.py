"""Filters the tokens of a growing answer: a token passes only after its text was judged.

Tokens are held back together with their log-probabilities, which would spell them. The rest of the lane needs no
knowledge of policies: text, calls and the resumption on another worker all follow from the tokens that passed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.request import PartialChoice, TokenLogprobs
from workers.policies.policy import GrowingAnswer, PolicyGuard
from workers.text.detokenizer import IncrementalDetokenizer


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
        self._held: PartialChoice | None = None
        self._ends: list[int] = []  # for each held token: the answer's characters up to its end

    @property
    def refused(self) -> bool:
        return self._answer.refused

    def replay(self, token_ids: Sequence[int]) -> None:
        """Judge tokens that were emitted before. Raises `RowError` when a policy fails."""
        self._read(token_ids)
        self._ends.clear()

    def push(self, new: PartialChoice) -> PartialChoice | None:
        """Add tokens; returns the tokens that pass now, or None. Raises `RowError` when a policy fails."""
        self._held = new if self._held is None else _join(self._held, new)
        self._read(new.token_ids.tolist())
        count = next((at for at, end in enumerate(self._ends) if end > self._answer.cleared), len(self._ends))
        if self.refused or not count:
            return None
        cleared, self._held = slice_choice(self._held, 0, count), slice_choice(self._held, count)
        del self._ends[:count]
        return cleared

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


def _join(first: PartialChoice, then: PartialChoice) -> PartialChoice:
    logprobs = None
    if (one := first.logprobs) is not None and (two := then.logprobs) is not None:
        chosen = np.concatenate([one.chosen, two.chosen])
        top_ids, top = np.concatenate([one.top_ids, two.top_ids]), np.concatenate([one.top, two.top])
        logprobs = TokenLogprobs(chosen, top_ids, top)
    return PartialChoice(first.index, np.concatenate([first.token_ids, then.token_ids]), logprobs)
