"""The scheduler decides what each step computes, and when a sequence ends. `step_planner.py` has the code of the rules.

Prefill and decode are one phase. Every sequence has known tokens and computed tokens. Each step advances the computed
tokens towards the known ones, for as many sequences as one token budget allows (the rule is vLLM v1's):

    a chunk of a prompt, a prefix hit, the next token of an answer, the return after preemption
    are all   num_computed += count,   count <= num_known - num_computed

    0           hit            num_computed     num_known           max_known
    |- in the cache -|- computed ---|- pending -----|- to be sampled ---|

Draft tokens are computed behind the known ones. Rejected drafts lower `num_computed` again (scheduler/drafting.py).

`num_computed` advances when a step is planned, `num_known` when the step's tokens arrive. So a second step can be
planned while the first one computes. A row that samples in the first step is part of the second one when its token is
promised (`promise`): the step is planned as if the token were known, and only the device has its value. A row that ends
with that token has computed one position in vain. Its results are discarded, as those of any row whose owner has left
(`RunningBatch.epoch`). Blocks that the step will fill are published when it is planned: keys are written before they
are read, so a sequence admitted later in the same step already hits them. A block that contains a promised token has no
digest before that token is known; it is published with the row's next step.

Behind the last whole block that a sequence hits, it copies the beginning of a block from a running row that has the
same tokens there. If that row computes them in this very step, the sequence may get a row now, and begin with the next
step (block_sharing.py).

One step runs from the highest class down. Within a class the order is arrival, or the waiting queue's dispatch order,
which rotates over owners in class 0 (waiting_queue.py):
1. Running sequences take their pending tokens. If a sequence needs a block and none is free, the newest sequence of the
   lowest class is preempted, in class 0 that of the owner with the most rows: its blocks are freed, its known tokens
   are retained, and it waits again in arrival order.
2. The head of the waiting queue is then admitted, while rows, budget and expected blocks allow. Two amounts must be
   free, counting what lower classes, and in class 0 owners with more rows, would release: what the running sequences of
   its class and above are expected to take at any time until their ends, and its own need. Those others are preempted
   only when rows or blocks are needed now.
3. The running sequences of the next class follow, and so on. The first head that can't be admitted ends admission.

A preempted sequence gets no row before another sequence has ended, so there is no thrashing.
The oldest sequence of the highest class can take every block from all others, and alone fits the pool (`add` refuses
a sequence that doesn't), so it always advances: there is no deadlock and, within a class, no starvation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from engine.adapters.places import AdapterPlaces
from engine.cache.block_demand import BlockDemand
from engine.cache.block_tier import BlockKey, BlockTier
from engine.cache.host_tier import HostTier
from engine.cache.imported_blocks import ImportedBlocks
from engine.cache.prefix import Digest, HashChain, chain_digest
from engine.cache.tables import CacheTables
from engine.config import ScheduleConfig
from engine.errors import ContextLengthExceeded, EngineError, RequestRefused
from engine.plan import BlockStore, CacheGroup, RowState, StepPlan
from engine.request import FinishReason, Request, check_request
from engine.scheduler.drafting import Drafting
from engine.scheduler.latency import ClassStats, Latencies
from engine.scheduler.length_estimator import LazyHeap, LengthEstimator
from engine.scheduler.resume import check_partial, end_of
from engine.scheduler.running_batch import RunningBatch
from engine.scheduler.sequence import FinishedSequence, Sequence, SequenceState
from engine.scheduler.slo_control import URGENT, SloController, SloTerms, StepContents
from engine.scheduler.stats import SchedulerStats
from engine.scheduler.step_planner import StepPlanner
from engine.scheduler.stop_tokens import StopTable
from engine.scheduler.token_budget import TokenBudget
from engine.scheduler.waiting_queue import WaitingQueue
from engine.speculative.base import Proposer
from engine.speculative.draft_lengths import DraftLengths
from engine.speculative.stats import SpeculationStats
from engine.speculative.trial_budget import TrialBudget

Ints = NDArray[np.int32]
Flags = NDArray[np.bool_]
NEVER = -1
"""`Sequence.num_ended_at_preemption` of a sequence that may be admitted again at once."""

Ended = dict[int, FinishedSequence]
"""Sequences that end with a step, by their index in the plan."""


class Scheduler:
    """Decides, step by step, what the model computes. Not thread-safe: one loop owns it.

    Args:
        groups: the model's cache groups.
        block_size: tokens a block holds.
        max_model_len: most tokens of one sequence, prompt and answer.
        prefix_caching: share blocks between sequences with the same leading tokens and salt.
        eos_token_ids: end tokens of the model.
        rope_original_max: the model's rotary frequencies depend on a sequence's length beyond this.
        digest: hashes prefixes; only tests replace it.
        places: of adapters; None: there are none.

    Attributes:
        rows: row-indexed state; only the scheduler writes it, the runner reads it.
        places: of adapters.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        groups: tuple[CacheGroup, ...],
        block_size: int,
        max_model_len: int,
        *,
        prefix_caching: bool,
        eos_token_ids: tuple[int, ...],
        rope_original_max: int | None = None,
        digest: Digest = chain_digest,
        places: AdapterPlaces | None = None,
    ) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_chunk_tokens"):
            value = getattr(config, name)
            if value is not None and value < 1:
                raise ValueError(f"ScheduleConfig.{name} is {value}, but must be 1 or more")
        budget = config.tokens
        self.rows = RowState(config.rows, max_model_len, block_size, len(groups))
        self._max_model_len = max_model_len
        self._cache = CacheTables(groups, self.rows, prefix_caching=prefix_caching, digest=digest)
        self._stops = StopTable(config.rows, eos_token_ids)
        self.places = places or AdapterPlaces()
        self._batch = RunningBatch(self.rows, self._cache, self._stops, self.places)
        self._lengths = LengthEstimator()
        self._demand = BlockDemand(self._cache, min(budget, config.max_chunk_tokens or budget), max_model_len)
        self._waiting = WaitingQueue(self._cache, self._lengths, rope_original_max, config.rows, self.places)
        self._latencies = Latencies(self._batch)
        self._slo = None if config.slo is None else SloController(config.slo, self._batch, budget)
        self._budget = TokenBudget(budget)
        self._planner = StepPlanner(
            self._batch, self._waiting, self._lengths, self._demand, budget=self._budget, slo=self._slo
        )
        self._promised = False
        self._drafting: Drafting | None = None
        self._requests: dict[str, list[Sequence]] = {}
        self._deadlines = LazyHeap[list[Sequence], float](_unfinished)
        self._in_flight: deque[tuple[StepPlan, NDArray[np.int64], StepContents | None]] = deque()
        self._finished: list[FinishedSequence] = []
        self._next_serial = 0
        self._now = 0.0  # the latest time passed in; `cancel` takes none

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits, runs, or has ended and was not taken yet."""
        return bool(self._requests or self._finished)

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The model's cache groups."""
        return self._cache.groups

    @property
    def stats(self) -> SchedulerStats:
        counters, pools = self._planner.counters, self._cache.pools
        head = self._waiting.peek()
        return SchedulerStats(
            running=len(self._batch),
            waiting=len(self._waiting),
            steps=counters.steps,
            step_rows=counters.step_rows,
            computed_tokens=counters.computed_tokens,
            prompt_tokens=counters.prompt_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            prefix_queried_tokens=counters.prefix_queried_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            preemptions=counters.preemptions,
            finished=counters.ended,
            free_blocks=tuple(pool.num_free for pool in pools),
            cached_blocks=tuple(pool.num_cached for pool in pools),
            total_blocks=tuple(pool.num_blocks - 1 for pool in pools),
            oldest_waiting=None if head is None else head.arrived_at,
            generated_tokens=counters.generated_tokens,
            speculation=SpeculationStats() if self._drafting is None else self._drafting.stats,
            slo=None if self._slo is None else self._slo.stats,
        )

    @property
    def classes(self) -> tuple[ClassStats, ...]:
        """Latency statistics of each class, the most urgent first."""
        return self._latencies.stats(self._waiting.by_class)

    def add(self, request: Request, now: float) -> None:
        """Queue a request: one sequence per choice. `now` in seconds.

        Raises:
            ContextLengthExceeded: prompt + max_tokens fit neither the context nor the whole pool.
            RequestRefused: the id is in use, the prompt is empty or not int32 [tokens], there is no such adapter,
                pooling is combined with an answer, or `partial` can't be the beginning of one.
        """
        self._now = now
        prompt, params = request.prompt_token_ids, request.params
        if request.request_id in self._requests:
            raise RequestRefused(f"request {request.request_id!r} is already running; use another request_id")
        check_request(request)
        self.places.check(request.adapter)
        if request.pooling == "classify":
            raise RequestRefused("only an encoder has a head for labels; choose another pooling")
        siblings: list[Sequence] = []
        for choice in range(params.n):
            siblings.append(Sequence(request, choice, self._next_serial + choice, siblings, now))
        last_sampled = int(params.max_tokens > 0)  # known, but never computed
        limit = min(self._max_model_len, self._demand.max_positions + last_sampled)
        if siblings[0].max_known > limit:
            raise ContextLengthExceeded(len(prompt), params.max_tokens, limit)
        check_partial(request)
        self._next_serial += params.n
        self._requests[request.request_id] = siblings
        for sequence in siblings:
            self._waiting.add(sequence)
        if request.deadline is not None:
            self._deadlines.push(request.deadline, siblings[0].serial, siblings)
        for partial in request.partial:
            if (reason := end_of(request, partial)) is not None:
                ended = self._finish(siblings[partial.index], reason, stop_token_id=partial.stop_token_id)
                self._finished.append(ended)

    def speculate(self, proposer: Proposer, lengths: DraftLengths, budget: TrialBudget | None = None) -> None:
        """Enable speculation from the next step on: `proposer` drafts tokens, `lengths` says how many, `budget` bounds
        the cost of trials."""
        self._drafting = Drafting(self._batch, proposer, lengths, self._demand.max_chunk, budget)
        self._planner.drafting = self._drafting

    def set_drafting(self, *, enabled: bool) -> None:
        """Turn speculation off or on again, from the next step on."""
        self._planner.drafting = self._drafting if enabled else None

    def use_tiers(
        self, host: HostTier | None, imported: ImportedBlocks | None, disk: BlockTier | None, max_loads: int
    ) -> None:
        """Use second tiers of the prefix cache from the next step on. `max_loads`: blocks of a full-attention group
        that one step may load."""
        self._cache.use_tiers(host, imported, disk, max_loads)

    def num_cached(self, chain: HashChain, tokens: NDArray[np.int32]) -> int:
        """Return how many leading blocks of a new sequence are in the prefix cache, second tiers aside. Any thread may
        call it; they may be evicted at once."""
        return self._cache.num_cached(chain, tokens)

    def blocks_to_export(self, request_id: str) -> list[tuple[BlockKey, int, int]]:
        """Return the names and blocks of a running request's prompt, each with its index in the prompt, the beginning
        first, as far as it led to finite values. They must be read before the next step is submitted. Empty: no choice
        of it is running, or none of its blocks is published."""
        for sequence in self._requests.get(request_id, ()):
            if sequence.state is SequenceState.RUNNING:
                confirmed = int(self._batch.confirmed[sequence.row])
                return self._cache.blocks_to_export(sequence.row, min(confirmed, sequence.prompt_len))
        return []

    def cached_tokens(self, request_id: str) -> int:
        """Return the prompt tokens that an open request took from the prefix cache (`Completion.cached_tokens`)."""
        return self._requests[request_id][0].cached_tokens

    def take_stores(self, max_blocks: int) -> list[BlockStore]:
        """Take up to so many blocks that the second tier on disk is to have. They must be read before the next step is
        submitted."""
        return [] if self._cache.tiering is None else self._cache.tiering.take_stores(max_blocks)

    def settle(self, *, more_to_come: bool) -> None:
        """Set whether more requests may be added. If none will, the end of the run is predictable, and answers that
        would outlast it are started early (`WaitingQueue`)."""
        self._waiting.settled = not more_to_come

    def growing(self) -> dict[str, list[int]]:
        """Return the requests that have choices in the running batch, or preempted ones, and these choices."""
        found: dict[str, list[int]] = {}
        for sequence in (*self._batch.owners, *self._waiting.preempted):
            if sequence is not None:
                found.setdefault(sequence.request.request_id, []).append(sequence.choice)
        return found

    def sampled(self, request_id: str, only: Collection[int] | None = None) -> list[tuple[int, NDArray[np.int32]]]:
        """Return the unfinished choices of a request (`only` these), each with its sampled tokens so far (int32
        [tokens], a view that the next step may change)."""
        found = []
        siblings = self._requests.get(request_id, [])
        if only is not None:
            siblings = [siblings[choice] for choice in sorted(only) if choice < len(siblings)]
        for sequence in siblings:
            if sequence.state is SequenceState.RUNNING:
                known = self.rows.token_ids[sequence.row, : self.rows.num_known[sequence.row]]
                found.append((sequence.choice, known[sequence.prompt_len :]))
            elif sequence.state is SequenceState.WAITING:
                found.append((sequence.choice, sequence.token_ids[sequence.prompt_len :]))
        return found

    def set_slo_weights(self, weights: SloTerms) -> bool:
        """Set the weights of the SLO controller's objective from the next step on. False: class 0 has no SLO."""
        if self._slo is not None:
            self._slo.weigh(weights)
        return self._slo is not None

    def cancel(self, request_id: str, choice: int | None = None) -> bool:
        """End all unfinished choices (or this one alone) and free their rows and blocks; False when there are none."""
        return self._end_request(request_id, FinishReason.CANCELLED, choice)

    def take_finished(self) -> list[FinishedSequence]:
        """Take the sequences that ended without a step since the last call: cancelled ones, those past their
        deadline."""
        finished, self._finished = self._finished, []
        return finished

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None when nothing can be computed now. Requests past their deadline end first.

        Every plan must be passed to `update`, in order; the next one may be planned before that.
        """
        self._now = now
        self._cache.set_time(now)
        while (deadline := self._deadlines.first_order()) is not None and deadline <= now:
            siblings = self._deadlines.pop()
            self._end_request(siblings[0].request.request_id, FinishReason.TIMEOUT)
            if self._slo is not None and siblings[0].request.priority == URGENT:
                self._slo.record_missed_deadline()
        plan = self._planner.plan(now)
        if plan is not None:
            self._in_flight.append((plan, self._batch.epoch[plan.rows], self._planner.step_contents))
        return plan

    def promise(self) -> bool:
        """Promise the tokens of the step in flight, so that the next one can be planned before they arrive. False: its
        results are needed first, because a row of it is `awaited`, it holds drafts, or the next one may."""
        ((plan, epochs, _),) = self._in_flight
        drafting = self._planner.drafting
        if plan.drafts is not None or (drafting is not None and not drafting.idle):
            return False
        batch = self._batch
        if batch.awaited[plan.rows].any():
            return False
        rows = plan.rows[plan.samples & (batch.epoch[plan.rows] == epochs)]
        # A row whose max_tokens ends with this token needs no next position; stop tokens are not known yet.
        batch.promised[rows[self.rows.num_known[rows] + 1 < self._stops.max_known[rows]]] = 1
        batch.promises = self._promised = True
        return True

    def update(
        self,
        plan: StepPlan,
        token_ids: NDArray[np.int32],
        failed: NDArray[np.bool_],
        now: float,
        reasons: Mapping[int, str] | None = None,
        accepted: NDArray[np.int32] | None = None,
        tainted: frozenset[int] = frozenset(),
    ) -> list[FinishedSequence]:
        """Process a step's results.

        Args:
            plan: the oldest plan not yet updated.
            token_ids: int32 [B], the sampled tokens where `plan.samples`, each behind its row's accepted drafts.
            failed: bool [B], rows whose sequences end in `ERROR`, behind their accepted drafts.
            reasons: row -> why it failed; of a failed row without one, non-finite values are the cause.
            accepted, tainted: as in `StepOutput`; the outcome of `plan.drafts`.

        Returns:
            The sequences that ended with this step, in the plan's order.
        """
        self._now = now
        expected_plan, epochs, contents = self._in_flight.popleft()
        assert expected_plan is plan, "plans must be updated in the order they were made"
        self._clear_promises()
        self._budget.record_success()
        good = self._batch.epoch[plan.rows] == epochs  # else the owner has left since: cancelled or preempted
        if self._slo is not None and contents is not None:
            self._slo.record(plan, good & plan.samples & ~failed, contents, now)
        ended: Ended = {}
        ends = plan.starts + plan.counts
        if plan.drafts is not None and self._drafting is not None:
            assert accepted is not None, "the results of a plan with drafts include `accepted`"
            ends = ends - plan.drafts + accepted
            self._latencies.record_tokens(plan.rows[good & plan.samples & (~failed | (accepted > 0))], now)
            # Behind a draft that failed its row, all others of the row did as well.
            self._drafting.settle(plan, accepted, good, tainted.union(plan.rows[failed].tolist()))
            self._accept(plan, accepted, good, ended)
            good = self._batch.epoch[plan.rows] == epochs
        bad = good & failed
        good &= ~failed
        for i in bad.nonzero()[0].tolist():
            position = int(ends[i]) - 1
            own = (reasons or {}).get(row := int(plan.rows[i]))
            why = own or f"non-finite values at or before position {position}"
            ended[i] = self._finish(self._batch.owner(row), FinishReason.ERROR, error=why, poisoned=own is None)
        self._end_scored(plan, ends, good, ended)
        chosen = (good & plan.samples).nonzero()[0]
        if chosen.size:
            rows = plan.rows[chosen]
            if plan.drafts is None:  # else some may have ended by now, and all are recorded above
                self._latencies.record_tokens(rows, now)
            self._append(rows, token_ids[chosen], chosen, ended)
        for i in np.flatnonzero(self._batch.epoch[plan.rows] == epochs).tolist() if tainted else ():
            if (row := int(plan.rows[i])) in tainted:
                self._batch.owner(row).may_draft = False
                self._planner.preempt(self._batch.owner(row))
        return [ended[i] for i in sorted(ended)]

    def fail(self, plan: StepPlan, reason: str, now: float) -> None:
        """Discard a step that could not be computed: its sequences end in `ERROR` (see `take_finished`).

        Steps planned after it depend on it, so they are discarded as well. The content of the blocks is undefined, so
        the prefix cache is cleared.
        """
        self._now = now
        assert self._in_flight[0][0] is plan, "plans come back in the order they were made"
        for lost, epochs, _ in self._in_flight:
            for row in lost.rows[self._batch.epoch[lost.rows] == epochs].tolist():
                sequence = self._batch.owner(row)
                self._finished.append(self._finish(sequence, FinishReason.ERROR, error=reason, poisoned=True))
        self._drop_in_flight()

    def retract(self, plan: StepPlan, now: float) -> bool:
        """Discard a step that the device had no memory for, and plan smaller ones from now on. Its sequences, and those
        of steps planned after it, are preempted and retain their known tokens. Their published blocks were not
        computed, so the prefix cache is cleared.

        Returns:
            False: steps have the minimum size already, and nothing was done.
        """
        self._now = now
        assert self._in_flight[0][0] is plan, "plans come back in the order they were made"
        if not self._budget.shrink():
            return False
        for lost, epochs, _ in self._in_flight:
            for row in lost.rows[self._batch.epoch[lost.rows] == epochs].tolist():
                sequence = self._batch.owner(row)
                self._preempt_for_now(sequence)
        self._drop_in_flight()
        return True

    def _preempt_for_now(self, sequence: Sequence) -> None:
        """Preempt a sequence that need not wait for another one's end: smaller steps prevent a repetition."""
        self._planner.preempt(sequence)
        sequence.num_ended_at_preemption = NEVER

    def _drop_in_flight(self) -> None:
        """Discard the steps in flight and the content of all blocks, which rows that borrow one may have waited for.
        Host memory has copies of blocks that a step in flight was to fill."""
        if self._cache.tiering is not None:
            self._cache.tiering.drop_evicted(store for plan, _, _ in self._in_flight for store in plan.store_blocks)
        for row in list(self._cache.borrowed):
            self._preempt_for_now(self._batch.owner(row))
        self._in_flight.clear()
        self._clear_promises()
        self._cache.forget()

    @property
    def step_tokens(self) -> int:
        """Current token budget of a step."""
        return self._budget.tokens

    def _clear_promises(self) -> None:
        """Clear all promises: the tokens have arrived, or never will."""
        if self._promised:
            self._batch.promised[:] = 0
            self._promised = False

    def record_step_time(self, plan: StepPlan, seconds: float, accepted: int = 0) -> None:
        """Record how long a step took, from before it was planned until after its update, and how many of its drafts
        were accepted."""
        if self._drafting is not None:
            drafted = 0 if plan.drafts is None else int(plan.drafts.sum())
            self._drafting.record_step(len(plan.rows), plan.num_tokens, drafted, accepted, seconds)

    def _accept(self, plan: StepPlan, accepted: Ints, good: Flags, ended: Ended) -> None:
        """Append accepted drafts one after the other: each may end its row, as any token may."""
        for offset in range(int(accepted[good].max(initial=0))):
            open_rows = [i for i in np.flatnonzero(good & (accepted > offset)).tolist() if i not in ended]
            if open_rows:
                chosen = np.array(open_rows, dtype=np.intp)
                rows = plan.rows[chosen]
                self._append(rows, self.rows.token_ids[rows, self.rows.num_known[rows]], chosen, ended)

    def _end_scored(self, plan: StepPlan, ends: Ints, good: Flags, ended: Ended) -> None:
        """Confirm positions that led to finite values, and end the rows that had only a prompt to compute."""
        seen = good & (plan.num_logits > 0)
        self._batch.confirmed[plan.rows[seen]] = ends[seen]
        if self._cache.tiering is not None and self._cache.tiering.shared:
            for row in plan.rows[seen].tolist():
                self._cache.confirm(row, int(self._batch.confirmed[row]))
        for i in (good & ~plan.samples).nonzero()[0].tolist():
            row = int(plan.rows[i])
            if ends[i] != self._stops.max_known[row]:
                continue
            sequence = self._batch.owner(row)
            if sequence.request.pooling is not None:
                self._batch.confirmed[row] = ends[i]
                self._cache.confirm(row, int(ends[i]))
            sequence.prompt_computed = True
            ended[i] = self._finish(sequence, FinishReason.LENGTH)

    def _append(self, rows: Ints, tokens: Ints, indices: NDArray[np.intp], ended: Ended) -> None:
        """Append the sampled tokens and end the rows for which they are the last."""
        if tokens.min() < 0:
            row = int(rows[np.argmax(tokens < 0)])
            raise EngineError(f"row {row}: the step gave no token and did not fail; the runner must mark it as failed")
        self._planner.counters.generated_tokens += len(rows)
        known = self.rows.num_known[rows]
        stopped, full = self._stops.check(rows, tokens, known)
        done = stopped | full
        grown = ~stopped
        growing = rows[grown]
        self.rows.token_ids[growing, known[grown]] = tokens[grown]
        self.rows.num_known[growing] += 1
        for i in (grown & self._batch.watched[rows]).nonzero()[0].tolist():
            sequence = self._batch.owner(int(rows[i]))
            may_stop = bool(known[i] + 1 >= self._stops.min_known[rows[i]])
            if (end := sequence.watch(int(tokens[i]), may_stop)) is not None:
                ended[int(indices[i])] = self._finish(sequence, end.reason, error=end.error)
                done[i] = False
        for i in done.nonzero()[0].tolist():
            sequence = self._batch.owner(int(rows[i]))
            stop = int(tokens[i]) if stopped[i] else None
            reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
            ended[int(indices[i])] = self._finish(sequence, reason, stop_token_id=stop)

    def _end_request(self, request_id: str, reason: FinishReason, choice: int | None = None) -> bool:
        siblings = [s for s in self._requests.get(request_id, ()) if s.state is not SequenceState.FINISHED]
        siblings = [s for s in siblings if choice is None or s.choice == choice]
        for sequence in siblings:
            self._finished.append(self._finish(sequence, reason))
        return bool(siblings)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        poisoned: bool = False,
    ) -> FinishedSequence:
        """End a sequence in any state and free its row and blocks at once (`poisoned`: see `vacate`)."""
        if sequence.state is SequenceState.RUNNING:
            self._batch.vacate(sequence, SequenceState.FINISHED, poisoned=poisoned)
            self._waiting.release_row(sequence)
        else:
            sequence.state = SequenceState.FINISHED
            self._waiting.discard(sequence)
        self._planner.counters.ended += 1
        request, answer = sequence.request, sequence.token_ids[sequence.prompt_len :].copy()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lengths.observe(request, len(answer))
            if self._drafting is not None:
                self._drafting.learn(request, answer)
        if all(sibling.state is SequenceState.FINISHED for sibling in sequence.siblings):
            del self._requests[request.request_id]
            if request.deadline is not None and reason is not FinishReason.TIMEOUT:
                self._deadlines.discard()
            if not self._requests:
                self._waiting.forget_groups()
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._latencies.record_answer(sequence, self._now)
        return FinishedSequence(
            request=request,
            choice=sequence.choice,
            token_ids=answer,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            cached_tokens=sequence.cached_tokens,
            prompt_computed=sequence.prompt_computed,
            preemptions=sequence.preemptions,
            started_at=self._now if sequence.started_at is None else sequence.started_at,
            finished_at=self._now,
            error=error,
            drafted_tokens=sequence.drafted_tokens,
            accepted_tokens=sequence.accepted_tokens,
            retained_tokens=self._cache.retained_tokens(request) if sequence.prompt_computed else 0,
        )

    def check_integrity(self) -> None:
        """Check the sums of block references, rows and queues; raises AssertionError with the arithmetic."""
        self._batch.check_integrity()
        states = [sequence.state for siblings in self._requests.values() for sequence in siblings]
        running, waiting = states.count(SequenceState.RUNNING), states.count(SequenceState.WAITING)
        if (running, waiting, waiting) != (len(self._batch), len(self._waiting), sum(self._waiting.by_class)):
            raise AssertionError(
                f"{running} running and {waiting} waiting sequences, but {len(self._batch)} rows are taken and "
                f"{len(self._waiting)} are queued, {self._waiting.by_class} by class"
            )
        self._waiting.check_rows(sequence for siblings in self._requests.values() for sequence in siblings)


def _unfinished(siblings: list[Sequence]) -> bool:
    return any(sequence.state is not SequenceState.FINISHED for sequence in siblings)
