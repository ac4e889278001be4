"""Finds a running row whose block begins with a waiting sequence's next tokens, to copy them.

Whole blocks are shared by the prefix cache. Behind them, choices of one request and continuations of one prompt agree
up to the middle of a block. One of them computes that part; the others borrow its block, and get a copy of their own
before they write to it (`CacheTables.borrow`). A copy can only be made of positions that were computed in an earlier
step. So a sequence that needs those of the step being planned waits with its row for the next one, if most of its
tokens are among them and it is of the same request. (Rows of several requests would run one after the other when steps
fail, and each that fails alone is blamed for it.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.running_batch import RunningBatch
from engine.scheduler.sequence import Sequence
from engine.scheduler.waiting_queue import WaitingQueue

Ints = NDArray[np.int32]

MIN_SHARE = 4
"""Fewer tokens than this fraction (1 / MIN_SHARE) of a block are computed: copying takes longer."""


class Source(NamedTuple):
    """A row to copy from.

    Attributes:
        row, owner: the row, and its sequence.
        tokens: leading positions of its block that hold the sequence's tokens too.
        is_computed: they were computed in earlier steps; else they are in the step being planned.
    """

    row: int
    owner: Sequence
    tokens: int
    is_computed: bool


class BlockSharing:
    """Finds sources among the rows of a running batch."""

    def __init__(self, batch: RunningBatch, waiting: WaitingQueue) -> None:
        self._batch = batch
        self._waiting = waiting
        self._min_tokens = max(1, batch.rows.block_size // MIN_SHARE)

    def find(self, sequence: Sequence, start: int, computed_before: Ints) -> Source | None:
        """Return the source with the most tokens behind `start`, a block border; None: the sequence computes them.

        Args:
            computed_before: int32 [R], known positions of each row that were computed in earlier steps.
        """
        cache = self._batch.cache
        if not (cache.prefix_caching and sequence.reads_prefix_cache) or cache.state_groups:
            return None  # (a state has no first part)
        rows, tokens = self._batch.rows, sequence.token_ids
        # The last token is left to compute, and a block that is copied is always written to.
        longest = min(min(len(tokens), sequence.cache_limit) - 1 - start, rows.block_size - 1)
        if longest < self._min_tokens:
            return None
        known = np.minimum(rows.num_computed, rows.num_known) - start
        near = np.flatnonzero((known >= self._min_tokens) & (rows.token_ids[:, start] == tokens[start]))
        if not near.size:
            return None
        differs = rows.token_ids[near, start : start + longest] != tokens[start : start + longest]
        agreed = np.where(differs.any(axis=1), differs.argmax(axis=1), longest)
        later = np.minimum(agreed, known[near])
        now = np.minimum(later, computed_before[near] - start)
        ready = self._first(sequence, start, near, now, now)
        if int(later.max()) - (0 if ready is None else ready.tokens) >= self._min_tokens:
            awaited = self._first(sequence, start, near, later, now)
            rest = len(tokens) - start - (0 if awaited is None else awaited.tokens)
            if awaited is not None and 2 * rest <= awaited.tokens and _has_same_request(sequence, awaited.owner):
                return awaited
        return ready

    def _first(
        self, sequence: Sequence, start: int, rows: NDArray[np.intp], shared: Ints, computed: Ints
    ) -> Source | None:
        """Return the source with the most `shared` tokens of those that begin as the sequence does."""
        tokens, block = sequence.token_ids, start // self._batch.rows.block_size
        root_key = self._waiting.chain(sequence).root_key
        for i in np.argsort(-shared, kind="stable").tolist():
            row, count = int(rows[i]), int(shared[i])
            if count < self._min_tokens:
                return None
            owner = self._batch.owner(row)
            if self._waiting.chain(owner).root_key != root_key or not self._batch.cache.has_block(row, block):
                continue
            if (self._batch.rows.token_ids[row, :start] == tokens[:start]).all():
                return Source(row, owner, count, count <= computed[i])
        return None


def _has_same_request(one: Sequence, other: Sequence) -> bool:
    """Whether two sequences are choices of one request, or both only score the ends of a prompt, as several do for one
    request (`engine/shared_scores.py`)."""
    scored = one.request.params.prompt_targets and other.request.params.prompt_targets
    return bool(scored) or one.siblings is other.siblings
