"""Plans one step: the tokens of each row, and the blocks for them. scheduler.py states the rule.

A preemption victim always comes from behind everything that was planned so far, so a planned row is never preempted:
the blocks that it publishes in this step will exist.

Rows are planned by rank. A rank is the class and, in class 0 while several owners have or want rows there, the number
of older rows of the row's owner. So the newest row of the owner with the most rows is the last of its class.
"""

from __future__ import annotations

from collections import Counter
from math import ceil

import numpy as np
from numpy.typing import NDArray

from engine.cache.block_demand import BlockDemand, BlockDemandForecast
from engine.cache.prefix import PrefixNode
from engine.plan import NewRow, StepPlan
from engine.scheduler.block_sharing import BlockSharing, Source
from engine.scheduler.drafting import Drafting
from engine.scheduler.length_estimator import LengthEstimator
from engine.scheduler.running_batch import RunningBatch
from engine.scheduler.sequence import Sequence, SequenceState
from engine.scheduler.slo_control import URGENT, SloController, StepContents
from engine.scheduler.stats import Counters
from engine.scheduler.token_budget import TokenBudget
from engine.scheduler.waiting_queue import WaitingQueue

CLASS_SHIFT = 32
"""A rank is the class, shifted left by this many bits, plus the number of older rows of the same owner."""


class StepPlanner:
    """Plans steps over a running batch and a waiting queue.

    Args:
        budget: tokens of a step.
        slo: limits the tokens of other work in steps with urgent rows; None: no limit.

    Attributes:
        drafting: adds drafts to planned rows; None: no speculation.
        step_contents: contents of the last step, where it had urgent rows and there is a controller.
    """

    def __init__(
        self,
        batch: RunningBatch,
        waiting: WaitingQueue,
        lengths: LengthEstimator,
        demand: BlockDemand,
        *,
        budget: TokenBudget,
        slo: SloController | None = None,
    ) -> None:
        self.counters = Counters()
        self.drafting: Drafting | None = None
        self.step_contents: StepContents | None = None
        self._slo = slo
        self._batch = batch
        self._rows = batch.rows
        self._cache = batch.cache
        self._waiting = waiting
        self._lengths = lengths
        self._demand = demand
        self._token_budget = budget
        self._block_sharing = BlockSharing(batch, waiting)
        self._short_of_blocks = False  # the last head was not admitted for lack of blocks
        self._begin()

    def _begin(self) -> None:
        """Reset the state for a new step. `order[:next]` is planned; `order[next:end]` is not, and victims come off its
        end. `ranks` are those of `order`."""
        self._budget = self._token_budget.tokens
        self._left = self._budget
        self._withheld_tokens = 0  # tokens of the budget that this step may not use
        self._answers_first = False
        self.step_contents = None
        self._order, self._ranks = self._ranked()
        self._next = 0
        self._end = len(self._order)
        self._planned: list[NDArray[np.int32]] = []
        self._counts: list[NDArray[np.int32]] = []
        self._new: list[NewRow] = []
        self._admitted: list[int] = []
        self._computed_before = np.minimum(self._rows.num_computed, self._rows.num_known)  # in earlier steps
        self._forecast: BlockDemandForecast | None = None

    def _ranked(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return occupied rows, int32 [rows], by rank and arrival, and their ranks, int64 [rows]."""
        order = self._batch.order()
        ranks = self._batch.priority[order] << CLASS_SHIFT
        if not self._waiting.shares_rows:
            return order, ranks
        older = Counter[bytes]()
        for i in np.flatnonzero(self._batch.priority[order] == URGENT).tolist():
            owner = self._batch.owner(int(order[i])).request.salt
            ranks[i] += older[owner]
            older[owner] += 1
        by_rank = np.argsort(ranks, kind="stable")
        return order[by_rank], ranks[by_rank]

    def _rank(self, sequence: Sequence) -> int:
        """Return the rank that a waiting sequence would have with a row."""
        return (sequence.request.priority << CLASS_SHIFT) + self._waiting.urgent_rows(sequence)

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step; None when nothing can be computed now."""
        self._begin()
        self._waiting.return_aside()
        if self._waiting.order_is_due:
            self._order_waiting()
        if self._slo is None or not self._urgent():
            self._plan_classes(None, now)
            return self._assemble()
        streams, prompts = self._plan_urgent(self._slo, now)
        before = self._left
        self._plan_classes(None, now)
        plan = self._assemble()
        others = before - self._left
        other_tokens = self._budget - self._withheld_tokens - self._left - streams
        left_out = len(self._batch) > len(plan.rows if plan else ()) or len(self._waiting) > 0
        is_limited = self._withheld_tokens > 0 and left_out
        self.step_contents = StepContents(streams, prompts, other_tokens, others, is_limited)
        return plan

    def _urgent(self) -> bool:
        """Whether a running sequence or the head of the queue is urgent."""
        order, head = self._order, self._waiting.peek()
        running = len(order) > 0 and self._batch.priority[order[0]] == URGENT
        return bool(running) or (head is not None and head.request.priority == URGENT)

    def _plan_urgent(self, slo: SloController, now: float) -> tuple[int, int]:
        """Plan class 0, and reserve the tokens of the budget that other classes may not use. Returns how many rows of
        class 0 are answering, and how many have yet to begin."""
        urgent = self._order[self._batch.priority[self._order] == URGENT]
        answering = self._batch.known(urgent) > self._rows.prompt_len[urgent]
        streams = int(np.count_nonzero(answering))
        if streams:
            self._limit_left(streams + slo.chunk())
        self._answers_first = True
        self._plan_classes(URGENT, now)
        self._answers_first = False
        spent = self._budget - self._withheld_tokens - self._left
        self._left, self._withheld_tokens = self._left + self._withheld_tokens, 0
        head = self._waiting.peek()
        prompts = len(urgent) - streams + (head is not None and head.request.priority == URGENT)
        prompts += sum(self._batch.priority[row] == URGENT for row in self._admitted)
        self._limit_left(slo.others(streams, prompts, max(0, spent - streams)))
        return streams, prompts

    def _limit_left(self, most: int) -> None:
        """Limit the tokens left for this step."""
        self._withheld_tokens = max(0, self._left - most)
        self._left -= self._withheld_tokens

    def _plan_classes(self, last: int | None, now: float) -> None:
        """Plan running rows and admit waiting ones, class by class, up to class `last` (None: all)."""
        while self._left > 0 and (head := self._peek()) is not None:
            if last is not None and head.request.priority > last:
                break
            self._plan_running(self._rank(head))
            head = self._peek() or head  # a sequence preempted just now may precede it
            if self._left <= 0 or not self._admit(head, now):
                break
        self._plan_running(None if last is None else ((last + 1) << CLASS_SHIFT) - 1)

    def _peek(self) -> Sequence | None:
        """Return the head of the queue; sequences before it whose adapter finds no place are set aside."""
        places = self._batch.places
        while (head := self._waiting.peek()) is not None and not places.has_place(
            head.request.adapter, head.request.priority
        ):
            self._waiting.set_aside(head)
        return head

    def _order_waiting(self) -> None:
        """Reorder the queue by the tokens left to sample and the number of concurrent rows."""
        known = self._batch.known(self._order)
        left = int((self._batch.expected_positions(self._order) + 1 - known).sum())
        self._waiting.order(left, len(self._order) if self._short_of_blocks else len(self._batch.owners))

    # -- running rows

    def _plan_running(self, rank: int | None) -> None:
        """Plan the running rows up to `rank` (None: all) that are not planned yet."""
        if self._next >= self._end or self._left <= 0:
            return
        end = self._end
        if rank is not None:
            end = self._next + int(np.searchsorted(self._ranks[self._next : end], rank, side="right"))
            if end == self._next:
                return
        self._forecast = None
        rows = self._order[self._next : end]
        starts = self._rows.num_computed[rows]
        pending = self._batch.known(rows) - starts
        counts = (pending > 0).astype(np.int32)  # negative while drafts are under way
        visit = self._needs_visit(rows, starts, pending).nonzero()[0]
        if visit.size:
            counts[visit] = 0
            before = np.cumsum(counts)
            # Tokens that rows before and behind a chunk need for their answers.
            answers = int(before[-1]) + int((pending[visit] == 1).sum())
            spent, first = 0, self._next
            for i in visit.tolist():
                if first + i >= self._end:
                    break
                left = self._left - int(before[i]) - spent
                if self._answers_first and pending[i] > 1:
                    left = self._left - answers - spent
                if left > 0:
                    counts[i] = count = self._catch_up(int(rows[i]), left)
                    spent += count
        counts = counts[: self._end - (end - len(rows))]
        self._next = min(end, self._end)
        total = np.cumsum(counts)
        if total.size and total[-1] > self._left:
            counts[total > self._left] = 0
        self._take(rows[: len(counts)], counts)

    def _needs_visit(
        self, rows: NDArray[np.int32], starts: NDArray[np.int32], pending: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Return rows that need more than one token in a block they hold: a chunk, a new block, or a block that gets
        full. (Blocks behind the window are released then as well, always before new ones are taken.)"""
        cache, size = self._cache, self._rows.block_size
        visit = (pending > 1) | (starts >= cache.length[rows] * size)
        if cache.prefix_caching:
            visit |= (starts + 1) // size > cache.published[rows]
        if cache.borrowed:
            visit |= np.isin(rows, list(cache.borrowed))
        visit &= pending > 0
        return visit

    def _catch_up(self, row: int, left: int) -> int:
        """Plan up to `left` of a row's pending tokens; 0 when the row itself was preempted."""
        batch, rows, cache = self._batch, self._rows, self._cache
        sequence = batch.owner(row)
        start, known = int(rows.num_computed[row]), int(rows.num_known[row])
        named = known
        chain = self._waiting.chain(sequence)
        confirmed = int(batch.confirmed[row])
        if batch.promises:
            known += int(batch.promised[row])
            cache.publish(row, chain, start)  # a block filled by a promised token has a digest by now
        loads_more = False
        if known - start > rows.block_size and start % rows.block_size == 0 and sequence.reads_prefix_cache:
            tokens = rows.token_ids[row, : min(known, sequence.cache_limit)]
            loads_more = cache.load(chain, tokens, row)
            hits = cache.match(chain, tokens, row)
            if hits:
                cache.take(row, hits, confirmed)
                self._note_hit(sequence, start, len(hits) * rows.block_size)
                start += len(hits) * rows.block_size
                rows.num_computed[row] = start
        cache.release_behind(row, start, confirmed)
        count = self._chunk(sequence, start, known, left, loads_more=loads_more)
        is_new = row in cache.borrowed
        while not cache.grow(row, cache.blocks_for(start + count), chain):
            if self._preempt_last() is sequence:
                return 0
        if is_new:  # it waited for the block that it borrowed
            self._computed_before[row] = start // rows.block_size * rows.block_size
            self._new.append(NewRow(row, sequence.request, sequence.choice))
        cache.publish(row, chain, min(start + count, named))
        self._note_recomputed(sequence, start, count)
        return count

    def _chunk(self, sequence: Sequence, start: int, known: int, left: int, *, loads_more: bool = False) -> int:
        """Return the number of tokens to compute from `start`. A partial chunk ends on a block border where it can:
        only whole blocks can be shared. A row whose prompt is scored stops at the prompt's end once. While a second
        tier has more of its prefix (`loads_more`), it computes no more than a block."""
        size = self._rows.block_size
        count = min(known - start, left, self._demand.max_chunk)
        if loads_more:
            count = min(count, size)
        if count < known - start and (start + count) // size * size > start:
            count = (start + count) // size * size - start
        if sequence.request.params.prompt_logprobs is not None and start < sequence.prompt_len:
            count = min(count, sequence.prompt_len - start)
        return count

    def _preempt_last(self) -> Sequence:
        """Preempt the newest sequence of the highest rank."""
        self._end -= 1
        sequence = self._batch.owner(int(self._order[self._end]))
        self.preempt(sequence)
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a running sequence: it returns to the queue and is computed again."""
        self._batch.vacate(sequence, SequenceState.WAITING)
        sequence.preemptions += 1
        sequence.num_ended_at_preemption = self.counters.ended
        self.counters.preemptions += 1
        self._waiting.requeue(sequence)

    # -- waiting sequences

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Admit the head of the queue: assign a row and plan its first tokens. False: it and all behind it wait."""
        batch, cache = self._batch, self._cache
        below = self._order[self._next : self._end]  # of higher ranks, none of them planned
        elders = len(batch) - len(below)
        if not batch.has_free_row and not len(below):
            return False
        if elders and sequence.preemptions and sequence.num_ended_at_preemption == self.counters.ended:
            return False
        chain = self._waiting.chain(sequence)
        hits: list[PrefixNode] = []
        loads_more = False
        if sequence.reads_prefix_cache:
            tokens = sequence.token_ids[: sequence.cache_limit]
            loads_more = cache.load(chain, tokens)
            hits = cache.match(chain, tokens)
        expected = self._expected(sequence)
        steps = max(expected - 1 - len(sequence.token_ids), 0)
        self._short_of_blocks = bool(elders) and not self._expected_to_fit(sequence, steps, hits, below)
        if self._short_of_blocks:
            return False
        start = len(hits) * cache.block_size
        count = self._chunk(sequence, start, len(sequence.token_ids), self._left, loads_more=loads_more)
        if self._repeats(sequence, start, count):
            return False
        start, count, source = self._shared_start(sequence, start, count)
        num_blocks = len(hits) if source is not None and not count else cache.blocks_for(start + count)
        while not (batch.has_free_row and self._has_room(hits, num_blocks)):
            if self._next >= self._end:
                return False
            self._preempt_last()
        if source is not None and batch.owners[source.row] is not source.owner:
            start, source = len(hits) * cache.block_size, None
            count = self._chunk(sequence, start, len(sequence.token_ids), self._left)
        row = batch.seat(sequence, chain, hits, expected)
        self._waiting.pop(sequence)
        self._computed_before[row] = 0  # blocks that it hits may be computed in this step
        if source is not None:
            cache.borrow(row, source.row, source.tokens)
            self._rows.num_computed[row] = start
        self._enter(sequence, start, count, now)
        if self._forecast is not None:
            known = len(sequence.token_ids)
            self._forecast.add(known, steps, known - start - count, row, len(hits) + (row in cache.borrowed))
        return True

    def _shared_start(self, sequence: Sequence, start: int, count: int) -> tuple[int, int, Source | None]:
        """Return where a sequence starts to compute, which is at `start` if it copies nothing, how many tokens it
        computes in this step (0: it waits for the next one), and the row that it copies from, if any."""
        source = self._block_sharing.find(sequence, start, self._computed_before)
        if source is not None:
            start += source.tokens
            known = len(sequence.token_ids)
            count = self._chunk(sequence, start, known, self._left) if source.is_computed else 0
        return start, count, source

    def _repeats(self, sequence: Sequence, start: int, count: int) -> bool:
        """Whether the chunk lies inside a block that another row completes with its next chunk: then the sequence waits
        for that block. (A chunk with whole blocks continues where the other row stops; the two rows alternate, and each
        hits the blocks of the other.)"""
        end = start + self._rows.block_size
        if count >= end - start or end >= min(len(sequence.token_ids), sequence.cache_limit) or not self._planned:
            return False
        if not (self._cache.prefix_caching and sequence.reads_prefix_cache):
            return False
        planned = np.concatenate(self._planned)
        known, computed = self._rows.num_known[planned], self._rows.num_computed[planned]
        chain = self._waiting.chain(sequence)
        for row in planned[(computed >= start) & (computed < end) & (known >= end)].tolist():
            same = bool((self._rows.token_ids[row, :end] == sequence.token_ids[:end]).all())
            if same and self._waiting.chain(self._batch.owner(row)).root_key == chain.root_key:
                return True
        return False

    def _enter(self, sequence: Sequence, start: int, count: int, now: float) -> None:
        """Record an admitted sequence and add its first tokens to the step."""
        row = sequence.row
        if sequence.started_at is None:
            sequence.started_at = now
        if sequence.reads_prefix_cache and self._cache.prefix_caching:
            self.counters.prefix_queried_tokens += len(sequence.token_ids)
            self._note_hit(sequence, 0, start)
        self._admitted.append(row)
        if not count:
            return  # its first step is the next one
        chain = self._waiting.chain(sequence)
        grown = self._cache.grow(row, self._cache.blocks_for(start + count), chain)
        assert grown, "blocks were counted before the row was taken"
        self._cache.publish(row, chain, start + count)
        self._note_recomputed(sequence, start, count)
        self._new.append(NewRow(row, sequence.request, sequence.choice))
        self._take(np.array([row], dtype=np.int32), np.array([count], dtype=np.int32))

    def _expected(self, sequence: Sequence) -> int:
        """Return the expected number of known tokens at the sequence's end."""
        known = len(sequence.token_ids)
        expected = sequence.prompt_len + self._lengths.expect(sequence.request)
        if expected <= known:
            expected = known + max((known - sequence.prompt_len) // 4, self._cache.block_size)
        return min(expected, sequence.max_known)

    def _expected_to_fit(
        self, sequence: Sequence, steps: int, hits: list[PrefixNode], below: NDArray[np.int32]
    ) -> bool:
        """Whether free blocks, plus those that higher ranks would release, cover the forecast demand at any time: that
        of the running rows up to this rank, and of a sequence that takes `steps` more to its end. The reserve grows
        with the share of tokens that were recomputed because forecasts were wrong."""
        if self._forecast is None:
            rows = np.concatenate([self._order[: self._next], np.array(self._admitted, dtype=np.int32)])
            known, positions = self._batch.known(rows), self._batch.expected_positions(rows)
            pending = known - self._rows.num_computed[rows]
            self._forecast = BlockDemandForecast(self._demand, rows, self._rows.block_tables, known, positions, pending)
        known_tokens, count = len(sequence.token_ids), len(hits)
        pending_tokens = known_tokens - count * self._cache.block_size
        taken = self._cache.free_hits(hits)
        wasted = self.counters.recomputed_tokens / max(1, self.counters.computed_tokens)
        supply = [
            pool.num_free - hit - ceil(wasted * pool.num_blocks)
            for pool, hit in zip(self._cache.pools, taken, strict=True)
        ]
        if len(below):
            given = self._demand.reclaimable(below, self._rows.block_tables)
            supply = [free + more for free, more in zip(supply, given, strict=True)]
        return self._forecast.fits(known_tokens, steps, pending_tokens, self._cache.held_hits(count), supply)

    def _has_room(self, hits: list[PrefixNode], num_blocks: int) -> bool:
        """Whether the pools can now allocate what a sequence of `num_blocks` blocks needs beyond its hits."""
        needs = zip(self._cache.free_hits(hits), self._cache.needed(len(hits), num_blocks), strict=True)
        return all(pool.num_free >= sum(need) for pool, need in zip(self._cache.pools, needs, strict=True))

    # -- bookkeeping

    def _take(self, rows: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Add rows to the step; from here on their tokens count as computed."""
        self._rows.num_computed[rows] += counts
        self._left -= int(counts.sum())
        self._planned.append(rows)
        self._counts.append(counts)

    def _note_hit(self, sequence: Sequence, start: int, tokens: int) -> None:
        self.counters.prefix_hit_tokens += tokens
        if sequence.preemptions == 0:
            sequence.cached_tokens += max(0, min(start + tokens, sequence.prompt_len) - start)
            if sequence.choice == 0:  # others hit its blocks
                self._cache.share(sequence.row, (start + tokens) // self._cache.block_size)

    def _note_recomputed(self, sequence: Sequence, start: int, count: int) -> None:
        self.counters.recomputed_tokens += max(0, min(sequence.high_water, start + count) - start)

    def _assemble(self) -> StepPlan | None:
        """Assemble the plan: rows with one token first, then the chunks, each by adapter, class and arrival."""
        if self._left + self._withheld_tokens == self._budget:
            return None
        rows, counts = np.concatenate(self._planned), np.concatenate(self._counts)
        drafts = None if self.drafting is None else self.drafting.add(rows, counts, self._left)
        if drafts is not None:
            counts = counts + drafts
            self._left -= int(drafts.sum())
        single = counts == 1
        num_decodes = int(np.count_nonzero(single))
        adapters = self._batch.adapter[rows] if self._batch.places.num_used else None
        if num_decodes < len(rows) or adapters is not None:
            order = np.concatenate([np.flatnonzero(single), np.flatnonzero(counts > 1)])
            if adapters is not None:  # neighbours with the same one are computed together
                order = order[np.lexsort((adapters[order], ~single[order]))]
                adapters = adapters[order]
            rows, counts = rows[order], counts[order]
            drafts = None if drafts is None else drafts[order]
        ends = self._rows.num_computed[rows]
        starts = ends - counts
        known = self._batch.known(rows)
        promised = self._batch.promised[rows] > 0 if self._batch.promises else None
        samples = (ends >= known) & (self._batch.stops.max_known[rows] > known)
        num_logits = samples.astype(np.int32) if drafts is None else samples + drafts
        of_prompt = self._rows.prompt_len[rows] - starts
        if of_prompt.max() > 0:
            self.counters.prompt_tokens += int(np.clip(of_prompt, 0, counts).sum())
            first = np.maximum(starts, self._batch.scored_from[rows])  # the next token of this position is scored
            scored = (first < ends) & (of_prompt > 0)
            num_logits[scored] = (ends - first)[scored]
        num_tokens = self._budget - self._withheld_tokens - self._left
        self.counters.steps += 1
        self.counters.step_rows += len(rows)
        self.counters.computed_tokens += num_tokens
        return StepPlan(
            rows=rows,
            starts=starts,
            counts=counts,
            num_logits=num_logits,
            samples=samples,
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            new_rows=tuple(self._new),
            store_blocks=() if self._cache.tiering is None else self._cache.tiering.take_evicted(),
            zero_blocks=self._cache.take_dirty(),
            load_blocks=() if self._cache.tiering is None else self._cache.tiering.take_loads(),
            copy_blocks=self._cache.take_copies(),
            drafts=drafts,
            ahead=promised if promised is not None and promised.any() else None,
            adapters=adapters,
            loaded=tuple(self._batch.places.names),
        )
