"""The scheduler's part of speculative decoding: which rows get drafts in a step, and how accepted ones are applied.

Drafts come last. They use tokens of the budget and blocks of the pool that no other work of this step needs; no
sequence is preempted for a draft. While a step is in flight a row's drafts are stored behind its known tokens:

    0                    num_known - 1   num_known       num_known + num_drafts
    |- computed before -----|- pending -----|- drafts -------|
                            |- computed by this step --------|

When the results arrive, accepted drafts become known tokens, `num_computed` is lowered past the rejected ones, and
blocks beyond it are released. The prefix cache hashes known tokens only, so it never contains a draft.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.plan import StepPlan
from engine.request import Request
from engine.scheduler.running_batch import RunningBatch
from engine.speculative.base import Draft, DraftRequest, Proposer
from engine.speculative.draft_lengths import DraftLengths
from engine.speculative.gain import Gain
from engine.speculative.stats import DraftCounter, SpeculationStats
from engine.speculative.trial_budget import TrialBudget

Ints = NDArray[np.int32]


class Drafting:
    """Adds drafts to steps, and rolls back rejected ones.

    Args:
        batch: rows and their owners.
        proposer: drafts tokens.
        lengths: chooses how many drafts are worth their time.
        max_chunk: maximum tokens of a row in a step.
        budget: of the time that drafts may lose; None: no limit.

    Attributes:
        idle: the last step took no drafts, so the proposer was not called.
    """

    def __init__(
        self,
        batch: RunningBatch,
        proposer: Proposer,
        lengths: DraftLengths,
        max_chunk: int,
        budget: TrialBudget | None = None,
    ) -> None:
        self.lengths = lengths
        self.idle = False
        self._counter = DraftCounter()
        self._gain = Gain()
        self._batch = batch
        self._proposer = proposer
        self._max_chunk = max_chunk
        self._budget = budget
        self._in_flight: dict[int, tuple[str, int]] = {}  # row with drafts in flight -> source and trust

    def add(self, rows: Ints, counts: Ints, left: int) -> Ints | None:
        """Add drafts to rows of the step being planned, whose positions count as computed already.

        Args:
            rows, counts: int32 [B], planned so far.
            left: unused tokens of the budget.

        Returns:
            int32 [B], drafts added behind each row's known tokens; None: no row has any.
        """
        if left <= 0:
            return None
        self.idle = not (self._may_lose(rows, counts) and self.lengths.is_worthwhile(rows, counts))
        if self.idle:
            return None
        state, batch = self._batch.rows, self._batch
        known = state.num_known[rows]
        # The last token of a sequence is sampled from the logits behind its last draft.
        room = np.minimum(batch.stops.max_known[rows] - known - 1, self._max_chunk - 1)
        can_draft = (counts == 1) & (state.num_computed[rows] == known) & (known > state.prompt_len[rows]) & (room > 0)
        indices = np.flatnonzero(can_draft)
        if not indices.size:
            return None
        max_drafts = np.minimum(room[indices], min(self.lengths.max_drafts, left // len(indices)))
        requests = [
            DraftRequest(row, int(batch.epoch[row]), held, batch.owner(row).request, batch.owner(row).choice)
            for row, wanted in zip(rows[indices].tolist(), max_drafts.tolist(), strict=True)
            if wanted > 0 and batch.owner(row).may_draft and (held := self._reserve(row, wanted)) > 0
        ]
        if not requests:
            return None
        return self._write_drafts(rows, requests, self._proposer.propose(requests))

    def _may_lose(self, rows: Ints, counts: Ints) -> bool:
        """Whether the trial budget allows drafts in this step: at worst they cost their time."""
        if self._budget is None:
            return True
        decoding = rows[counts == 1]
        if not decoding.size:
            return False
        left = int((self._batch.stops.max_known[decoding] - self._batch.rows.num_known[decoding]).sum())
        return self._budget.allows(len(decoding), left) and self._gain.can_compare(len(decoding))

    def _reserve(self, row: int, wanted: int) -> int:
        """Reserve blocks for drafts behind the row's known tokens; returns how many drafts have room."""
        cache, state = self._batch.cache, self._batch.rows
        known = int(state.num_known[row])
        if cache.blocks_for(known + wanted) > cache.length[row]:
            cache.release_behind(row, known - 1, int(self._batch.confirmed[row]))
            while not cache.grow(row, cache.blocks_for(known + wanted)):
                wanted -= 1
        return wanted

    def _write_drafts(self, rows: Ints, requests: list[DraftRequest], drafts: list[Draft]) -> Ints | None:
        """Write the drafts behind the known tokens."""
        state, cache = self._batch.rows, self._batch.cache
        of_row = np.zeros(len(state.num_known), dtype=np.int32)
        for request, draft in zip(requests, drafts, strict=True):
            row, count = request.row, min(len(draft.tokens), request.max_drafts)
            if count:
                count = self.lengths.trim(row, request.epoch, draft.trust, count)
            known = int(state.num_known[row])
            # Nothing was written to the blocks that are released, so none of them is suspect.
            cache.shrink(row, cache.blocks_for(known + count), known + request.max_drafts)
            if count:
                state.token_ids[row, known : known + count] = draft.tokens[:count]
                state.num_drafts[row] = of_row[row] = count
                self._in_flight[row] = draft.source, draft.trust
        added = of_row[rows]
        state.num_computed[rows] += added
        return added if added.any() else None

    def settle(self, plan: StepPlan, accepted: Ints, good: NDArray[np.bool_], tainted: frozenset[int]) -> None:
        """Lower the counters of a step's rows past their rejected drafts.

        Args:
            accepted: int32 [B], accepted leading drafts.
            good: bool [B], rows that still belong to the sequences that drafted.
            tainted: rows in whose cache rejected drafts left non-finite values.
        """
        assert plan.drafts is not None
        batch, state, cache = self._batch, self._batch.rows, self._batch.cache
        for i in np.flatnonzero(good & (plan.drafts > 0)).tolist():
            row, drafted, num_accepted = int(plan.rows[i]), int(plan.drafts[i]), int(accepted[i])
            end = int(plan.starts[i] + plan.counts[i])
            state.num_drafts[row] = 0
            state.num_computed[row] = end - drafted + num_accepted
            cache.shrink(row, cache.blocks_for(end - drafted + num_accepted), 0 if row in tainted else end)
            owner = batch.owner(row)
            assert owner.chain is not None, "a sequence with a row has one"
            # Published now, else the window may pass a block before it has a digest.
            cache.publish(row, owner.chain, end - drafted + num_accepted)
            owner.drafted_tokens += drafted
            owner.accepted_tokens += num_accepted
            source, trust = self._in_flight[row]
            self._counter.record(source, drafted, num_accepted)
            self.lengths.record(row, int(batch.epoch[row]), trust, drafted, num_accepted)

    def record_step(self, rows: int, positions: int, drafted: int, accepted: int, seconds: float) -> None:
        """Record a finished step: its rows, computed positions, drafts among them, accepted drafts and time."""
        self.lengths.record_step(rows, positions, drafted, seconds)
        if rows and positions - drafted == rows:  # no row computed a prompt in it
            gained = self._gain.record(rows, drafted, accepted, seconds)
            if self._budget is not None:
                self._budget.record(rows, drafted, gained)

    @property
    def stats(self) -> SpeculationStats:
        """Counts of drafts since the start, and their gain."""
        return SpeculationStats(self._counter.sources, self._gain.tokens, self._gain.seconds)

    def learn(self, request: Request, token_ids: Ints) -> None:
        """See `Proposer.learn`."""
        self._proposer.learn(request, token_ids)
