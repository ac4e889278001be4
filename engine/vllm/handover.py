"""Which choices vLLM has, and which one it gets next.

vLLM preempts a running row for another running one's memory, but never for a new one. So at most `max_num_seqs` choices
of the classes behind the first are handed over, and rows beyond these are for the first class, the lane. And where a
choice lacks a row or memory, the latest one of a lower class is taken back, and waits again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.vllm.choices import ChoiceState
from engine.vllm.requests import continues

MAX_GROUPS: Final = 1_000
"""Groups of prompts whose last prompt is remembered."""


class Handover:
    """The choices that wait here, and those that vLLM has.

    Args:
        max_rows: of vLLM.  max_num_seqs: of them, those of the classes behind the first.
        step_tokens: prompts are handed over as slowly as fits steps of so many tokens; None: vLLM cuts them itself.
        prefix_caching: vLLM has a prefix cache.
    """

    def __init__(
        self, max_rows: int, max_num_seqs: int, step_tokens: int | None, *, prefix_caching: bool = True
    ) -> None:
        self.handed: dict[str, ChoiceState] = {}  # by vLLM's id
        self._max_rows, self._max_num_seqs, self._step_tokens = max_rows, max_num_seqs, step_tokens
        self._waiting: list[ChoiceState] = []  # a heap; those that have ended meanwhile stay in it
        self._urgent = 0  # of the handed ones, those of the first class
        self._prefix_caching = prefix_caching
        self._starved: int | None = None  # the priority of a choice that vLLM has no memory for
        # by priority: tokens of handed choices without a result that are probably not in the prefix cache
        self._computing: Counter[int] = Counter()
        self._last: dict[tuple[bytes, int], NDArray[np.int32]] = {}  # the last prompt of each group

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.handed)

    @property
    def waiting(self) -> list[ChoiceState]:
        """Choices that vLLM does not have yet."""
        return [choice for choice in self._waiting if choice.reason is None]

    def push(self, choice: ChoiceState) -> None:
        """Let a choice wait."""
        heapq.heappush(self._waiting, choice)

    def pop(self) -> ChoiceState | None:
        """The next choice that vLLM may have now; None: none may."""
        while self._waiting:
            choice = self._waiting[0]
            is_behind = self._starved is not None and choice.priority > self._starved
            if choice.reason is None and (is_behind or self._is_full(choice) or self._must_wait(choice)):
                return None
            heapq.heappop(self._waiting)
            if choice.reason is None:
                return choice
        return None

    def hand(self, choice: ChoiceState, name: str) -> None:
        """vLLM gets the choice under this name."""
        choice.name, choice.has_begun, choice.prompt_logprobs = name, False, []
        choice.known = len(choice.owner.request.prompt_token_ids) + len(choice.tokens)
        choice.computing = self._expected(choice)
        self.handed[name] = choice
        request = choice.owner.request
        if request.prefix_group is not None:
            if len(self._last) >= MAX_GROUPS:
                self._last.clear()
            self._last[request.salt, request.prefix_group] = request.prompt_token_ids
        self._urgent += choice.is_urgent
        self._computing[choice.priority] += choice.computing

    def begin(self, choice: ChoiceState) -> None:
        """vLLM has computed what was known of the choice."""
        self._end_prefill(choice)
        choice.has_begun = True

    def drop(self, choice: ChoiceState) -> None:
        """vLLM has ended the choice, or will be told to."""
        assert choice.name is not None, "vLLM has it"
        del self.handed[choice.name]
        self._urgent -= choice.is_urgent
        self._end_prefill(choice)

    def to_take_back(self, starved: int | None) -> ChoiceState | None:
        """The latest choice of a lower class that makes room for a choice that lacks memory, or a row. While memory is
        short no further one of a lower class is handed over.

        Args:
            starved: the priority of the choice that vLLM has no memory for; None: there is none.
        """
        self._starved = starved
        head = self._waiting[0] if self._waiting else None
        lacks_row = head is not None and head.reason is None and self._is_full(head)
        if starved is not None:
            lower = [one for one in self.handed.values() if one.priority > starved and one.has_begun]
        elif head is not None and lacks_row:
            lower = [one for one in self.handed.values() if one.priority > head.priority]
        else:
            return None
        return max(filter(_can_wait, lower), default=None)

    def _is_full(self, choice: ChoiceState) -> bool:
        count = len(self.handed)
        return count >= self._max_rows or (not choice.is_urgent and count - self._urgent >= self._max_num_seqs)

    def _must_wait(self, choice: ChoiceState) -> bool:
        """Whether a choice waits for prompts that vLLM has not computed yet."""
        if self._step_tokens is None or choice.is_urgent:
            return False
        computing = sum(tokens for priority, tokens in self._computing.items() if priority <= choice.priority)
        return bool(computing) and computing + self._expected(choice) > self._step_tokens - len(self.handed)

    def _expected(self, choice: ChoiceState) -> int:
        """Known tokens of a choice that are probably not in the prefix cache: those behind what it shares with the last
        prompt of its group."""
        request = choice.owner.request
        prompt, known = request.prompt_token_ids, len(request.prompt_token_ids) + len(choice.tokens)
        group = request.prefix_group if self._prefix_caching else None
        last = None if group is None else self._last.get((request.salt, group))
        if last is None:
            return known
        length = min(len(prompt), len(last))
        differs = np.flatnonzero(prompt[:length] != last[:length])
        return known - (int(differs[0]) if len(differs) else length)

    def _end_prefill(self, choice: ChoiceState) -> None:
        self._computing[choice.priority] -= choice.computing
        choice.computing = 0


def _can_wait(choice: ChoiceState) -> bool:
    """Whether the choice can go on behind its tokens when vLLM gets it anew."""
    return not choice.tokens or continues(choice.owner.request)
