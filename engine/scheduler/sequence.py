"""A sequence: one choice of one request on its way through the scheduler.

Its tokens live in `RowState` while it has a row; without one (waiting, or preempted) it carries them itself. There
is one object per choice and none per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import nan
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cache.prefix import HashChain
from engine.request import FinishReason, Request, TokenWatcher

CLASSES: Final = 3
"""Classes that are told apart in what is counted."""


def class_of(priority: int) -> int:
    """The class that requests of this priority are counted to."""
    return min(max(priority, 0), CLASSES - 1)


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class WatchedEnd(NamedTuple):
    """How a watcher ended its choice."""

    reason: FinishReason
    error: str | None


class Sequence:
    """One choice of one request.

    Attributes:
        request, choice: whose answer this is, and which.
        siblings: all choices of the request, this one included; they share the prompt's digests.
        serial: place in arrival order, unique; decides within a class, before and after preemption.
        state: where it stands.  row: its row while running, else -1.
        token_ids: int32 [known], known tokens while it has no row.
        chain: digests of its full blocks; None until its first look into the prefix cache.
        watcher: made with the first sampled token, kept through preemption.
        cached_tokens: prompt tokens hit before any preemption.
        awaited: digests of the blocks that it will read, while it waits.
        put_back_at: endings that had been counted when it was put back last.
        high_water: most positions that were ever computed.
        drafted_tokens, accepted_tokens: guesses at its tokens, and those that were right.
        may_draft: guesses are welcome; not after one left non-finite values in its cache.
        prompt_computed: its whole prompt went through a finished step.
        arrived_at, started_at: `add` and first admission, in seconds.
        last_token_at: when its latest token was sampled, while it has no row; NaN: none was here.
    """

    __slots__ = (
        "accepted_tokens",
        "arrived_at",
        "awaited",
        "cached_tokens",
        "chain",
        "choice",
        "drafted_tokens",
        "high_water",
        "last_token_at",
        "may_draft",
        "preemptions",
        "prompt_computed",
        "put_back_at",
        "request",
        "row",
        "serial",
        "siblings",
        "started_at",
        "state",
        "token_ids",
        "watcher",
    )

    def __init__(self, request: Request, choice: int, serial: int, siblings: list[Sequence], now: float) -> None:
        self.request = request
        self.choice = choice
        self.serial = serial
        self.siblings = siblings
        self.state = SequenceState.WAITING
        self.row = -1
        self.token_ids = request.prompt_token_ids
        self.chain: HashChain | None = None
        self.awaited: list[bytes] = []
        self.put_back_at = 0
        self.watcher: TokenWatcher | None = None
        self.cached_tokens = 0
        self.high_water = 0
        self.preemptions = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.may_draft = True
        self.prompt_computed = False
        self.arrived_at = now
        self.started_at: float | None = None
        self.last_token_at = nan
        for partial in request.partial:
            if partial.index == choice:
                self.token_ids = np.concatenate([request.prompt_token_ids, partial.token_ids])

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def max_known(self) -> int:
        """Prompt tokens + max_tokens."""
        return self.prompt_len + self.request.params.max_tokens

    @property
    def max_positions(self) -> int:
        """Positions computed when it runs to its end: the last sampled token is never computed."""
        return max(self.prompt_len, self.max_known - 1)

    def watch(self, token_id: int, may_stop: bool) -> WatchedEnd | None:
        """Show the next sampled token to the watcher; None to go on.

        A watcher is one request's own code: when it raises, that request ends in `ERROR` and its batch mates go on.
        """
        try:
            stop = self._push(token_id)
        except Exception as error:  # noqa: BLE001 - it becomes this row's result
            return WatchedEnd(FinishReason.ERROR, f"token watcher failed: {type(error).__name__}: {error}")
        return WatchedEnd(FinishReason.STOP, None) if stop and may_stop else None

    def _push(self, token_id: int) -> bool:
        if self.watcher is None:
            assert self.request.watcher is not None
            self.watcher = self.request.watcher(self.choice)
            for partial in self.request.partial:
                if partial.index == self.choice:
                    for known in partial.token_ids.tolist():
                        self.watcher.push(known)
        return self.watcher.push(token_id)

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether blocks computed by others will do: not when every prompt position's output is asked for."""
        return self.request.params.prompt_logprobs is None and self.request.pooling in (None, "last")


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """The end of a sequence; each one gets exactly one.

    Attributes:
        token_ids: int32 [generated], without the stop token.
        stop_token_id: the token that ended it, when one did.
        cached_tokens: prompt tokens taken from the prefix cache before any preemption.
        prompt_computed: the prompt went through the model (false when it ended before that).
        started_at, finished_at: first admission (the end, when it was never admitted) and end, in seconds.
        error: what failed, when the reason is `ERROR`.
        drafted_tokens, accepted_tokens: guesses at its tokens, and those that were right.
    """

    request: Request
    choice: int
    token_ids: NDArray[np.int32]
    finish_reason: FinishReason
    stop_token_id: int | None
    cached_tokens: int
    prompt_computed: bool
    preemptions: int
    started_at: float
    finished_at: float
    error: str | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled, the stop token included."""
        return len(self.token_ids) + (self.stop_token_id is not None)
