"""Runs plans of the scheduler on a simulated paged cache, and computes the expected answers.

The "model" is a hash: the key of a position is a hash of everything that a real key depends on (all tokens up to it,
and the rotary length), and the next token is a hash of the key that comes last. The simulated cache holds keys in
blocks. A step first writes its keys, then checks that each query finds, through its row's block table, exactly the
keys of its own sequence at every position that it sees. `POISON` is a token whose key is NaN; as in a padded page of
a real kernel, a NaN anywhere in a block that is read makes the reader's logits non-finite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.places import AdapterPlaces
from engine.cache.block_tier import BlockKey, TierStats
from engine.cache.host_tier import HostTier
from engine.config import ScheduleConfig
from engine.plan import NO_BLOCK, NO_TOKEN, CacheGroup, StepOutput, StepPlan
from engine.request import FinishReason, Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import FinishedSequence
from engine.speculative.base import Draft, DraftRequest
from engine.speculative.draft_lengths import FixedLengths
from engine.states import NO_SLOT, Segments, StateShape, StateStep, StateStorage

VOCAB = 23
EOS = (1,)
POISON = 0
NAN = -1
FIRST_KEY = 7
ADAPTERS = {name: name.encode() * 16 for name in "abcd"}
"""Names and digests of the adapters: keys depend on them from the first one on."""
_MASK = (1 << 61) - 1


def next_key(previous: int, token: int, rope_length: int) -> int:
    """Key of a position: NaN from the first poisoned token on."""
    if previous == NAN or token == POISON:
        return NAN
    return hash((previous, token, rope_length)) & _MASK


def first_key(adapter: str | None) -> int:
    """The key before the first position."""
    return FIRST_KEY if adapter is None else hash((FIRST_KEY, ord(adapter))) & _MASK


def hash_states(states: tuple[Tensor, ...], segments: Segments, tokens: Tensor, lengths: Tensor) -> Tensor:
    """A `StateOperator` whose state is a sequence's last key, and whose results are the tokens' keys."""
    (slots,) = states
    keys = torch.zeros_like(tokens)
    columns = (segments.first, segments.count, segments.read, segments.write)
    parts = list(zip(*(column.tolist() for column in columns), strict=True))
    assert all(count == 1 for _, count, _, _ in parts[: segments.num_single])
    at_once = [(int(slots[read]) if read != NO_SLOT else FIRST_KEY) for _, _, read, _ in parts[: segments.num_single]]
    for i, (first, count, read, write) in enumerate(parts):
        key = at_once[i] if i < len(at_once) else (int(slots[read]) if read != NO_SLOT else FIRST_KEY)
        for at in range(first, first + count):
            keys[at] = key = next_key(key, int(tokens[at]), int(lengths[at]))
        if write != NO_SLOT:
            slots[write] = key
    return keys


@dataclass
class Script:
    """The expected result of one choice: tokens, and the key of every position."""

    tokens: list[int]
    keys: list[int]
    finish_reason: FinishReason
    stop_token_id: int | None


def next_token(key: int, request: Request, choice: int) -> int:
    params = request.params
    token = hash((key, params.seed, choice, 11)) % VOCAB
    return token if token != POISON or params.seed % 5 == 0 else 2


def script(request: Request, choice: int, rope_original_max: int | None = None) -> Script:
    """The answer, computed one token at a time without any batching."""
    prompt = request.prompt_token_ids.tolist()
    params, known, keys = request.params, list(prompt), []
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
    while True:
        for position in range(len(keys), len(known)):
            length = max(len(prompt), position + 1, rope_original_max) if rope_original_max else 0
            keys.append(next_key(keys[-1] if keys else first_key(request.adapter), known[position], length))
        if params.max_tokens == 0:
            read = keys if params.scored_from is not None or request.pooling is not None else []
            read = read[max(0, (params.scored_from or 0) - 1) :]
            reason = FinishReason.ERROR if NAN in read else FinishReason.LENGTH
            return Script([], keys, reason, None)
        generated = len(known) - len(prompt)
        if keys[-1] == NAN:
            return Script(known[len(prompt) :], keys, FinishReason.ERROR, None)
        token = next_token(keys[-1], request, choice)
        if token in ends and generated >= params.min_tokens:
            return Script(known[len(prompt) :], keys, FinishReason.STOP, token)
        known.append(token)
        watched = request.watcher(choice) if request.watcher is not None else None
        if watched is not None:
            stops = [watched.push(t) for t in known[len(prompt) :]]
            if stops[-1] and generated + 1 >= params.min_tokens:
                return Script(known[len(prompt) :], keys, FinishReason.STOP, None)
        if generated + 1 == params.max_tokens:
            return Script(known[len(prompt) :], keys, FinishReason.LENGTH, None)


@dataclass
class Harness:
    """A scheduler, its simulated cache, and a log of what happened.

    Attributes:
        depth: steps that may be planned before the results of the first one are processed (1: synchronous).
        computed: tokens computed, by (request_id, choice).  copied: tokens copied instead.
        max_drafts: maximum drafts of a row; `NoisyProposer` makes them.  poison: with the poisonous token among them.
        tier: the second tier of the prefix cache on a disk.  host_slots: slots of each group of the one in host memory;
            None: there is none.  max_loads: blocks that a step loads.
        max_loras: places of adapters.
        host: the tier in host memory.  loaded: blocks loaded.
    """

    config: ScheduleConfig
    groups: tuple[CacheGroup, ...]
    block_size: int = 4
    max_model_len: int = 64
    prefix_caching: bool = True
    rope_original_max: int | None = None
    depth: int = 1
    options: dict = field(default_factory=dict)
    max_drafts: int = 0
    poison: bool = True
    tier: DictTier | None = None
    host_slots: int | None = None
    max_loads: int = 3
    max_loras: int = 1

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.config,
            self.groups,
            self.block_size,
            self.max_model_len,
            prefix_caching=self.prefix_caching,
            eos_token_ids=EOS,
            rope_original_max=self.rope_original_max,
            places=AdapterPlaces(ADAPTERS, self.max_loras),
            **self.options,
        )
        self.kv = [
            np.zeros((group.num_blocks, self.block_size), dtype=np.int64)
            for group in self.groups
            if group.snapshot_blocks is None
        ]
        self.states = None
        if len(self.kv) < len(self.groups):
            shapes = [()] * len(self.kv) + [(StateShape((), torch.int64),)]
            self.states = StateStorage(self.groups, shapes, torch.device("cpu"))
        self.finished: dict[tuple[str, int], FinishedSequence] = {}
        self.computed: dict[tuple[str, int], int] = {}
        self.copied = self.loaded = 0
        self.host: HostTier | None = None
        if self.host_slots is not None:
            sizes = [8 * self.block_size] * len(self.kv) + [8] * (len(self.groups) - len(self.kv))
            self.host = HostTier([np.zeros((self.host_slots, size), dtype=np.uint8) for size in sizes])
        if self.tier is not None or self.host is not None:
            self.scheduler.use_tiers(self.host, None, self.tier, self.max_loads)
        self.plans: list[StepPlan] = []
        if self.max_drafts:
            self.scheduler.speculate(NoisyProposer(self), FixedLengths(self.max_drafts))
        self._scripts: dict[tuple[str, int], Script] = {}
        self._owner: dict[int, tuple[Request, int]] = {}
        self._reached: dict[int, int] = {}
        self._in_flight: deque[tuple[StepPlan, StepOutput]] = deque()

    def script(self, request: Request, choice: int) -> Script:
        key = (request.request_id, choice)
        if key not in self._scripts:
            self._scripts[key] = script(request, choice, self.rope_original_max)
        return self._scripts[key]

    @property
    def in_flight(self) -> list[StepPlan]:
        """Planned steps whose results the scheduler has not taken yet."""
        return [plan for plan, _ in self._in_flight]

    def step(self, now: float = 0.0) -> StepPlan | None:
        """Plan and compute one step, and take the results of the oldest one when `depth` are under way."""
        plan = self.scheduler.schedule(now)
        self.scheduler.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            self._in_flight.append(self._compute(plan))
            if self.max_drafts and self.rope_original_max is None:
                self.check_published()
        if self._in_flight and (plan is None or len(self._in_flight) >= self.depth):
            done, out = self._in_flight.popleft()
            ended = self.scheduler.update(
                done, out.token_ids, out.failed, now, accepted=out.accepted, tainted=out.tainted
            )
            self._note(ended)
            self._store()
        self._note(self.scheduler.take_finished())
        self.scheduler.check_integrity()
        return plan

    def run(self, now: float = 0.0, limit: int = 5000) -> None:
        """Step until all work is done; a step that does nothing while there is work is a deadlock."""
        for _ in range(limit):
            if not self.scheduler.has_work and not self._in_flight:
                return
            in_flight, done = len(self._in_flight), len(self.finished)
            plan = self.step(now)
            assert plan is not None or in_flight or len(self.finished) > done, "nothing moves: deadlock"
        raise AssertionError(f"not done after {limit} steps")

    def _note(self, finished: list[FinishedSequence]) -> None:
        for end in finished:
            key = (end.request.request_id, end.choice)
            assert key not in self.finished, f"{key} ended twice"
            self.finished[key] = end

    def _store(self) -> None:
        """Store the blocks that the tier is to have, except that the one in a step that is too many waits."""
        while stores := self.scheduler.take_stores(3):
            for block, key, _ in stores:
                content = self._content(key.group, block)
                assert NAN not in content, "a block that led to non-finite values is stored"
                data = content.view(np.uint8).copy()
                self.tier.store(key, len(data), lambda data=data: data)
            if self.scheduler.has_work:
                break

    def _store_evicted(self, plan: StepPlan) -> None:
        """Copy the blocks that this step evicts to host memory."""
        for block, key, is_suspect in plan.store_blocks:
            content = self._content(key.group, block)
            assert is_suspect or key.group >= len(self.kv) or NAN not in content, "a block with a NaN has no mark"
            if (slot := self.host.allocate(key, is_suspect=is_suspect)) is not None:
                slot[:] = content.view(np.uint8)

    def _content(self, group: int, block: int) -> NDArray[np.int64]:
        """The keys of a block, or the state of a slot, int64."""
        if group < len(self.kv):
            return self.kv[group][block]
        (states,) = self.states.states[group]
        return states[block : block + 1].numpy()

    def check_end(self, end: FinishedSequence) -> None:
        """Check the answer against the model's, whole or up to its end by cancellation."""
        due = self.script(end.request, end.choice)
        got = end.token_ids.tolist()
        if end.finish_reason in (FinishReason.CANCELLED, FinishReason.TIMEOUT):
            assert got == due.tokens[: len(got)]
        else:
            assert (got, end.finish_reason, end.stop_token_id) == (due.tokens, due.finish_reason, due.stop_token_id)

    def check_published(self) -> None:
        """Check that published blocks hold the keys of their prefix's tokens, and of no draft."""
        for group, pool in enumerate(self.scheduler._cache.pools):
            for block, node in pool.named():
                names, at = [], node
                while at.parent is not None:
                    names.append(np.frombuffer(at.token_bytes, dtype=np.int32))
                    at = at.parent
                of_adapter = {digest: name for name, digest in ADAPTERS.items()}
                _, slash, salted = at.token_bytes.partition(b"/")
                keys = [first_key(of_adapter[salted[:16]] if slash else None)]
                for token in np.concatenate(names[::-1]).tolist():
                    keys.append(next_key(keys[-1], token, 0))
                if group < len(self.kv):
                    assert self.kv[group][block].tolist() == keys[-self.block_size :], "a block is not what it is named"
                else:
                    (states,) = self.states.states[group]
                    assert int(states[block]) == keys[-1], "a state is not what it is named"

    def suited(self, request: Request) -> Request:
        """The request, as this model takes it: with layers that have states, without an adapter."""
        return request if self.states is None else replace(request, adapter=None)

    def check_empty(self) -> None:
        """Check that all blocks and rows are released."""
        stats = self.scheduler.stats
        assert stats.free_blocks == stats.total_blocks
        assert (stats.running, stats.waiting) == (0, 0)
        assert not self.scheduler.has_work

    # -- the simulated model

    def keys_of(self, row: int, end: int) -> list[int]:
        """The row's keys up to position `end`, those of drafts included."""
        request, choice = self._owner[row]
        rows, due = self.scheduler.rows, self.script(request, choice).keys
        keys = due[: min(end, int(rows.num_known[row]))]
        for position in range(len(keys), end):
            limit = self.rope_original_max
            length = max(len(request.prompt_token_ids), position + 1, limit) if limit else 0
            keys.append(next_key(keys[-1], int(rows.token_ids[row, position]), length))
        return keys

    def _compute(self, plan: StepPlan) -> tuple[StepPlan, StepOutput]:
        self._check_shape(plan)
        self._store_evicted(plan)
        for ref in plan.zero_blocks:
            self.kv[ref.group][ref.block] = 0
        assert len({load[:2] for load in plan.load_blocks}) == len(plan.load_blocks), "two loads fill one block"
        for load in plan.load_blocks:
            self._content(load.group, load.block)[:] = load.data.view(np.int64)
        self.loaded += len(plan.load_blocks)
        if self.host is not None:
            self.host.release()
            self.host.check_integrity()
        self._copy(plan)
        for row, request, choice in plan.new_rows:
            self._owner[row] = (request, choice)
            self._reached[row] = 0
        for i in range(len(plan.rows)):
            self._check_row(plan, i)
        self._write(plan)
        scan = None if self.states is None else self._scan(plan)
        tokens = np.full(len(plan.rows), NO_TOKEN, dtype=np.int32)
        failed = np.zeros(len(plan.rows), dtype=np.bool_)
        accepted = np.zeros(len(plan.rows), dtype=np.int32)
        tainted = set()
        for i, row in enumerate(plan.rows.tolist()):
            request, choice = self._owner[row]
            drafts = 0 if plan.drafts is None else int(plan.drafts[i])
            end = int(plan.starts[i] + plan.counts[i])
            self._read(plan, i)
            keys = self.keys_of(row, end)
            while accepted[i] < drafts and (key := keys[end - drafts + accepted[i] - 1]) != NAN:
                if next_token(key, request, choice) != self.scheduler.rows.token_ids[row, end - drafts + accepted[i]]:
                    break
                accepted[i] += 1
            end += int(accepted[i]) - drafts
            self._reached[row] = end
            pooled = request.pooling is not None and end == len(request.prompt_token_ids)
            if (plan.num_logits[i] or pooled) and NAN in keys[:end]:
                failed[i] = True
            elif plan.samples[i]:
                tokens[i] = next_token(keys[end - 1], request, choice)
                if NAN in keys[end:]:
                    tainted.add(row)
        if scan is not None and plan.drafts is not None:
            scan.accept(accepted)
        return plan, StepOutput(tokens, failed, {}, {}, {}, {}, accepted, frozenset(tainted))

    def _scan(self, plan: StepPlan) -> StateStep:
        """Compute each key from the state before it, and check that it is the row's own."""
        keys, tokens, lengths = [], [], []
        for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            request, limit = self._owner[row][0], self.rope_original_max
            keys += self.keys_of(row, start + count)[start:]
            tokens += self.scheduler.rows.token_ids[row, start : start + count].tolist()
            prompt = len(request.prompt_token_ids)
            lengths += [max(prompt, at + 1, limit) if limit else 0 for at in range(start, start + count)]
        step = self.states.step(plan, self.scheduler.rows)
        out = step.scan(len(self.kv), hash_states, torch.tensor(tokens), torch.tensor(lengths))
        assert out.tolist() == keys, "a state of another sequence, or of another position"
        return step

    def _copy(self, plan: StepPlan) -> None:
        sources = {(copy.group, copy.source) for copy in plan.copy_blocks}
        targets = [(copy.group, copy.target) for copy in plan.copy_blocks]
        assert len(set(targets)) == len(targets), "two copies write to one block"
        assert sources.isdisjoint(targets), "a copy of a copy"
        assert sources.isdisjoint((ref.group, ref.block) for ref in plan.zero_blocks), "a source is zeroed before"
        for copy in plan.copy_blocks:
            self.kv[copy.group][copy.target, : copy.tokens] = self.kv[copy.group][copy.source, : copy.tokens]
            self.copied += copy.tokens if copy.group == 0 else 0

    def _check_shape(self, plan: StepPlan) -> None:
        assert plan.counts.sum() == plan.num_tokens <= self.config.max_num_batched_tokens
        assert plan.counts.max() <= (self.config.max_chunk_tokens or self.config.max_num_batched_tokens)
        assert (plan.counts[: plan.num_decodes] == 1).all()
        assert (plan.counts[plan.num_decodes :] > 1).all()
        assert len(set(plan.rows.tolist())) == len(plan.rows)
        assert {new.row for new in plan.new_rows} <= set(plan.rows.tolist())
        for part in (slice(plan.num_decodes), slice(plan.num_decodes, None)) if plan.adapters is not None else ():
            assert (np.diff(plan.adapters[part]) >= 0).all(), "rows with one adapter are not neighbours"
        for array in (plan.rows, plan.starts, plan.counts, plan.num_logits):
            assert array.dtype == np.int32

    def _check_row(self, plan: StepPlan, i: int) -> None:
        """Positions go on where the row stopped (or after a hit); logits are requested where they are due."""
        row, start, count = int(plan.rows[i]), int(plan.starts[i]), int(plan.counts[i])
        request, choice = self._owner[row]
        rows, params = self.scheduler.rows, request.params
        prompt, end = len(request.prompt_token_ids), start + count
        skipped = start - self._reached[row]
        assert skipped >= 0, "a position is computed twice without a preemption"
        if skipped:
            block, rest = divmod(start, self.block_size)
            if rest:  # behind whole blocks, a part of one is copied in all groups
                own = [(group, int(table[row, block])) for group, table in enumerate(rows.block_tables)]
                assert {(c.group, c.target) for c in plan.copy_blocks if c.tokens == rest} >= set(own)
            assert self.prefix_caching
            assert params.prompt_logprobs is None or start < params.prompt_logprobs_start
            assert request.pooling != "mean"
        place = -1 if plan.adapters is None else int(plan.adapters[i])
        assert (None if place < 0 else plan.loaded[place]) == request.adapter, "a row is computed with another adapter"
        self._reached[row] = end
        key = (request.request_id, choice)
        self.computed[key] = self.computed.get(key, 0) + count
        known = int(rows.num_known[row])
        due = request.prompt_token_ids.tolist() + self.script(request, choice).tokens
        assert rows.token_ids[row, :known].tolist() == due[:known]
        drafts = 0 if plan.drafts is None else int(plan.drafts[i])
        assert drafts == rows.num_drafts[row]
        assert drafts == 0 or (count == drafts + 1 and start >= prompt)
        samples = end - drafts == known and params.max_tokens > 0
        scored = params.scored_from is not None and start < prompt
        read = end - max(start, (params.scored_from or 0) - 1) if scored else 0
        assert bool(plan.samples[i]) == samples
        assert int(plan.num_logits[i]) == (read if read > 0 else int(samples) + drafts)
        assert not scored or end <= prompt

    def _write(self, plan: StepPlan) -> None:
        written: set[tuple[int, int, int]] = set()
        for i, row in enumerate(plan.rows.tolist()):
            keys = self.keys_of(row, int(plan.starts[i] + plan.counts[i]))
            for group, table in enumerate(self.scheduler.rows.block_tables[: len(self.kv)]):
                for position in range(int(plan.starts[i]), int(plan.starts[i] + plan.counts[i])):
                    block, offset = int(table[row, position // self.block_size]), position % self.block_size
                    assert block != NO_BLOCK, f"row {row} has no block for position {position}"
                    assert (group, block, offset) not in written, "two rows write to one slot"
                    written.add((group, block, offset))
                    self.kv[group][block, offset] = keys[position]

    def _read(self, plan: StepPlan, i: int) -> None:
        """Check that the row's queries see the row's own keys, and no NaN of others in the blocks that are read."""
        row, start, end = int(plan.rows[i]), int(plan.starts[i]), int(plan.starts[i] + plan.counts[i])
        keys = self.keys_of(row, end)
        finite = True
        for group, table in enumerate(self.scheduler.rows.block_tables[: len(self.kv)]):
            window = self.groups[group].window
            first = 0 if window is None else max(0, start - window + 1)
            blocks = table[row, first // self.block_size : -(-end // self.block_size)]
            assert (blocks != NO_BLOCK).all(), f"group {group} row {row}: a hole in {blocks} within the window"
            content = self.kv[group][blocks].ravel()
            offset = first // self.block_size * self.block_size
            assert content[first - offset : end - offset].tolist() == keys[first:end], "keys of another sequence"
            finite &= bool((content != NAN).all()) or NAN in keys[:end]
        assert finite, "a NaN that another sequence, or a draft, left behind reaches a healthy row"


class DictTier:
    """A tier in a dictionary. Every so many loads find a damaged block."""

    is_busy = False

    def __init__(self, damage_every: int = 0) -> None:
        self.blocks: dict[BlockKey, NDArray[np.uint8]] = {}
        self.num_loads = 0
        self._damage_every = damage_every

    def contains(self, key: BlockKey) -> bool:
        return key in self.blocks

    def load(self, key: BlockKey) -> NDArray[np.uint8] | None:
        self.num_loads += 1
        if self._damage_every and self.num_loads % self._damage_every == 0:
            del self.blocks[key]
        return self.blocks.get(key)

    def store(self, key: BlockKey, num_bytes: int, content: Callable[[], NDArray[np.uint8]]) -> None:
        self.blocks[key] = content()

    def discard(self, key: BlockKey) -> None:
        self.blocks.pop(key, None)

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        pass


class NoisyProposer:
    """Drafts the model's next tokens, with occasional errors, and now and then the poisonous token."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [Draft(np.array(self._draft_tokens(request), dtype=np.int32), "noisy") for request in requests]

    def learn(self, request: Request, token_ids: NDArray[np.int32]) -> None:
        pass

    def _draft_tokens(self, request: DraftRequest) -> list[int]:
        rows = self._harness.scheduler.rows
        known = int(rows.num_known[request.row])
        keys = self._harness.script(request.request, request.choice).keys
        key, tokens = keys[known - 1], []
        for position in range(known, known + hash((keys[known - 1], 3)) % (request.max_drafts + 1)):
            limit = self._harness.rope_original_max
            length = max(len(request.request.prompt_token_ids), position + 1, limit) if limit else 0
            token = next_token(key, request.request, request.choice)
            chance = hash((key, position, 5)) % 16
            tokens.append(
                POISON if chance == 0 and self._harness.poison else (token + 1) % VOCAB if chance < 4 else token
            )
            key = next_key(key, tokens[-1], length)
        return tokens
