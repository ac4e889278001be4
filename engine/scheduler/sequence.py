"""A sequence: one choice of one request in the scheduler.

`RowState` holds its tokens while it has a row; without one (waiting, or preempted) the sequence holds them itself.
There is one object per choice and none per token.
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
"""Number of classes that statistics distinguish."""


def class_of(priority: int) -> int:
    """Return the class that requests of this priority are counted in."""
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
        request, choice: the request, and the index of its choice.
        siblings: all choices of the request, this one included; they share the prompt's digests.
        serial: number in arrival order, unique; the order within a class, before and after preemption.
        state: waiting, running or finished.  row: its row while running, else -1.
        token_ids: int32 [known], known tokens while it has no row.
        chain: digests of its full blocks; None until its first lookup in the prefix cache.
        watcher: created with the first sampled token, retained through preemption.
        cached_tokens: prompt tokens hit before any preemption.
        digests_to_read: digests of the blocks that it will read, while it waits.
        num_ended_at_preemption: number of ended sequences at its latest preemption.
        high_water: highest number of positions that were ever computed.
        drafted_tokens, accepted_tokens: drafts of its tokens, and the accepted ones.
        may_draft: it may have drafts; false after one left non-finite values in its cache.
        prompt_computed: its whole prompt was computed in finished steps.
        arrived_at, started_at: `add` and first admission, in seconds.
        last_token_at: time of its latest token, while it has no row; of its arrival, if it came with tokens; NaN: it
            has none yet.
    """

    __slots__ = (
        "accepted_tokens",
        "arrived_at",
        "cached_tokens",
        "chain",
        "choice",
        "digests_to_read",
        "drafted_tokens",
        "high_water",
        "last_token_at",
        "may_draft",
        "num_ended_at_preemption",
        "preemptions",
        "prompt_computed",
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
        self.digests_to_read: list[bytes] = []
        self.num_ended_at_preemption = 0
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
                if len(partial.token_ids):  # its first token was sampled before
                    self.last_token_at = now

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def max_known(self) -> int:
        """Prompt tokens + max_tokens."""
        return self.prompt_len + self.request.params.max_tokens

    @property
    def max_positions(self) -> int:
        """Positions that a complete run computes: the last sampled token is never computed."""
        return max(self.prompt_len, self.max_known - 1)

    def watch(self, token_id: int, may_stop: bool) -> WatchedEnd | None:
        """Pass the next sampled token to the watcher; None to continue.

        A watcher is one request's own code: when it raises, that request ends in `ERROR`, and other rows are not
        affected.
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
        """Whether it may use cached blocks: false when the output of every prompt position is requested."""
        return self.cache_limit > 1

    @property
    def cache_limit(self) -> int:
        """Number of first tokens of which all but the last one may be cached: the output of the others is
        requested."""
        params = self.request.params
        if self.request.pooling not in (None, "last"):
            return 0
        return self.max_known if params.scored_from is None else params.scored_from


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """The result of a sequence; each one has exactly one.

    Attributes:
        token_ids: int32 [generated], without the stop token.
        stop_token_id: the token that ended it, when one did.
        cached_tokens: prompt tokens taken from the prefix cache before any preemption.
        retained_tokens: prompt tokens in blocks that its request retains.
        prompt_computed: the model computed the whole prompt (false when it ended before that).
        started_at, finished_at: first admission (the end, when it was never admitted) and end, in seconds.
        error: the failure, when the reason is `ERROR`.
        drafted_tokens, accepted_tokens: drafts of its tokens, and the accepted ones.
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
    retained_tokens: int = 0

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled, the stop token included."""
        return len(self.token_ids) + (self.stop_token_id is not None)
