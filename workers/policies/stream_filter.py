"""Tokens of a growing answer that may leave the worker: those whose text was judged, and no others.

What is held back stays here as tokens, with their log-probabilities, which would spell them. So whoever is told of the
answer needs to know nothing of policies: text, calls and an attempt that goes on elsewhere all follow from the tokens
that were told.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.request import PartialChoice, TokenLogprobs
from workers.policies.policy import GrowingAnswer, PolicyGuard
from workers.text.detokenizer import IncrementalDetokenizer


class PolicyStreamFilter:
    """One choice.

    Args:
        keep: characters in which a stop string may have begun: they may be cut off, so they aren't judged yet.

    Attributes:
        refused: the answer must not go on.
    """

    def __init__(self, guard: PolicyGuard, detokenizer: IncrementalDetokenizer, keep: int) -> None:
        self._answer = GrowingAnswer(guard)
        self._detokenizer = detokenizer
        self._keep = keep
        self._kept = ""
        self._characters = 0
        self._held: PartialChoice | None = None
        self._ends: list[int] = []  # of the held tokens: characters of the answer up to there

    @property
    def refused(self) -> bool:
        return self._answer.refused

    def replay(self, token_ids: Sequence[int]) -> None:
        """Tokens that were told before. Raises `RowError` when a policy fails."""
        self._read(token_ids)
        self._ends.clear()

    def push(self, new: PartialChoice) -> PartialChoice | None:
        """The tokens that may leave now that these have come; None: none may. Raises `RowError` when a policy fails."""
        self._held = new if self._held is None else _joined(self._held, new)
        self._read(new.token_ids.tolist())
        count = next((at for at, end in enumerate(self._ends) if end > self._answer.cleared), len(self._ends))
        if self.refused or not count:
            return None
        cleared, self._held = part(self._held, 0, count), part(self._held, count)
        del self._ends[:count]
        return cleared

    def _read(self, token_ids: Sequence[int]) -> None:
        text = self._kept
        for token_id in token_ids:
            piece = self._detokenizer.push(token_id)
            text += piece
            self._characters += len(piece)
            self._ends.append(self._characters + len(self._detokenizer.pending))
        certain = max(0, len(text) - self._keep)
        self._kept = text[certain:]
        self._answer.push(text[:certain])


def part(choice: PartialChoice, start: int, end: int | None = None) -> PartialChoice:
    """Some of the tokens of a choice that goes on."""
    logprobs = choice.logprobs
    if logprobs is not None:
        logprobs = TokenLogprobs(logprobs.chosen[start:end], logprobs.top_ids[start:end], logprobs.top[start:end])
    return PartialChoice(choice.index, choice.token_ids[start:end], logprobs)


def _joined(first: PartialChoice, then: PartialChoice) -> PartialChoice:
    logprobs = None
    if (one := first.logprobs) is not None and (two := then.logprobs) is not None:
        chosen = np.concatenate([one.chosen, two.chosen])
        top_ids, top = np.concatenate([one.top_ids, two.top_ids]), np.concatenate([one.top, two.top])
        logprobs = TokenLogprobs(chosen, top_ids, top)
    return PartialChoice(first.index, np.concatenate([first.token_ids, then.token_ids]), logprobs)
