"""Eviction with known readers: blocks that will be read stay, those without readers go first, and no shared block is
computed twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.blocks import BlockPool
from engine.config import ScheduleConfig
from engine.plan import NO_BLOCK, CacheGroup
from engine.request import Request, SamplingParams
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import SequenceState
from tests.engine.scheduler.scheduler_harness import Harness

BLOCK = 4


def make_request(name: str, prompt: list[int], max_tokens: int = 4, **more: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return Request(name, np.array(prompt, dtype=np.int32), params, **more)


def tokens(start: int, count: int) -> list[int]:
    """Tokens that differ for each `start`."""
    return [(start * 7 + i * (start % 5 + 1)) % 17 + 3 for i in range(count)]


def harness(*, rows: int = 4, budget: int = 64, blocks: int = 64, chunk: int | None = None, depth: int = 1) -> Harness:
    return Harness(ScheduleConfig(rows, budget, chunk), (CacheGroup((0,), None, blocks + 1),), BLOCK, 128, depth=depth)


def finish(h: Harness) -> None:
    h.run()
    for end in h.finished.values():
        h.check_end(end)
    h.check_empty()


def cached_tokens(h: Harness, name: str) -> int:
    return h.finished[name, 0].cached_tokens


def blocks_ever_used(h: Harness) -> int:
    """The number of blocks that were ever allocated."""
    return h.scheduler._cache.pools[0]._untouched - 1


class TestMemoryTouched:
    @pytest.mark.parametrize(("readers_known", "expected"), [(True, 2 * 6), (False, 8 * 5 + 2)])
    def test_a_planned_job_uses_the_memory_of_finished_rows_again_before_any_other(
        self, readers_known: bool, expected: int
    ) -> None:
        h = harness(rows=2, blocks=200)
        for i in range(8):
            h.scheduler.add(make_request(f"r{i}", tokens(i, 20), readers_known=readers_known), 0.0)
        finish(h)
        assert blocks_ever_used(h) == expected

    def test_what_was_shared_stays_though_its_readers_are_gone(self) -> None:
        # A later part of the job, planned by itself, may begin in the same way.
        h, prompt = harness(rows=2, blocks=200), tokens(1, 16)
        for name in "ab":
            h.scheduler.add(make_request(name, [*prompt, 3, 4, ord(name) % 17], readers_known=True), 0.0)
        h.run()
        for i in range(8):
            h.scheduler.add(make_request(f"other{i}", tokens(i + 3, 24), readers_known=True), 0.0)
        h.run()
        h.scheduler.add(make_request("c", [*prompt, 3, 4, 5], readers_known=True), 0.0)
        finish(h)
        assert cached_tokens(h, "c") == 16

    def test_a_preempted_row_finds_what_it_had(self) -> None:
        h = harness(rows=2, blocks=12)
        for i in range(2):
            h.scheduler.add(make_request(f"r{i}", tokens(i, 16), 16, readers_known=True, expected_tokens=1), 0.0)
        finish(h)
        assert sum(end.preemptions for end in h.finished.values()) > 0
        # It computed 24 tokens before; another row took the blocks of the last 8.
        assert h.scheduler.stats.prefix_hit_tokens == 16


class TestEviction:
    def test_what_a_waiting_sequence_will_read_outlives_what_was_freed_after_it(self) -> None:
        # Given one row, a pool of 14 blocks, and a shared prompt of 4 blocks that was computed first,
        h, prompt = harness(rows=1, blocks=14), tokens(1, 16)
        h.scheduler.add(make_request("first", prompt), 0.0)
        h.run()
        # when two others that need 7 blocks each come before its next reader, which waits behind them,
        h.scheduler.add(make_request("other", tokens(2, 24)), 0.0)
        h.scheduler.add(make_request("another", tokens(3, 24)), 0.0)
        h.scheduler.add(make_request("reader", [*prompt, 3, 4]), 0.0)
        finish(h)
        # then the prompt is still there, though it was freed before all others.
        assert cached_tokens(h, "reader") == 16

    def test_of_a_prefix_whose_reader_left_the_end_is_evicted_first(self) -> None:
        # Given the 4 blocks of a prompt, and a reader that is cancelled before it reads them,
        h, prompt = harness(rows=1, blocks=14), tokens(1, 16)
        h.scheduler.add(make_request("first", prompt), 0.0)
        h.run()
        h.scheduler.add(make_request("leaves", [*prompt, 3, 4]), 0.0)
        assert h.scheduler.cancel("leaves")
        # when another sequence needs 2 of the blocks,
        h.scheduler.add(make_request("other", tokens(2, 44)), 0.0)
        h.run()
        h.scheduler.add(make_request("late", [*prompt, 3, 4]), 0.0)
        finish(h)
        # then the beginning is still there, without which the end hits nothing.
        assert cached_tokens(h, "late") == 8

    def test_the_plans_count_of_readers_keeps_a_prefix_for_those_that_have_not_arrived(self) -> None:
        h, prompt = harness(rows=1, blocks=14), tokens(1, 16)
        for left in (2, 1):  # two are here, and one more will come
            h.scheduler.add(make_request(f"here {left}", [*prompt, left, 5], prefix_group=9, prefix_readers=left), 0.0)
        h.scheduler.add(make_request("other", tokens(2, 24)), 0.0)
        h.scheduler.add(make_request("another", tokens(3, 24)), 0.0)
        while len(h.finished) < 3:
            h.step()
        h.scheduler.add(make_request("late", [*prompt, 7, 8], prefix_group=9), 0.0)
        finish(h)
        assert cached_tokens(h, "late") == 16

    def test_a_prefix_whose_last_reader_is_done_goes_before_one_that_has_readers(self) -> None:
        # Given two prompts of 4 blocks in the cache, the one with a reader to come freed first,
        h, wanted, done = harness(rows=1, blocks=12), tokens(1, 16), tokens(2, 16)
        for name, prompt in (("wanted", wanted), ("done", done)):
            h.scheduler.add(make_request(name, prompt), 0.0)
        h.run()
        h.scheduler.add(make_request("big", tokens(3, 28)), 0.0)  # takes all but 4 blocks
        h.scheduler.add(make_request("reader", [*wanted, 3]), 0.0)
        while len(h.finished) < 3:
            h.step()
        h.scheduler.add(make_request("too late", [*done, 3]), 0.0)
        finish(h)
        assert (cached_tokens(h, "reader"), cached_tokens(h, "too late")) == (16, 0)

    def test_a_cancelled_reader_is_no_longer_expected(self) -> None:
        h, prompt = harness(rows=1), tokens(1, 16)
        h.scheduler.add(make_request("first", prompt), 0.0)
        h.run()
        h.scheduler.add(make_request("running", tokens(2, 8), 20), 0.0)
        h.step()
        h.scheduler.add(make_request("reader", [*prompt, 3], prefix_group=1, prefix_readers=3), 0.0)
        [pool] = h.scheduler._cache.pools
        assert len(pool._awaited) == 4
        h.scheduler.cancel("reader")
        assert len(pool._awaited) == 4, "three are still to come"
        h.scheduler.cancel("running")
        assert len(pool._awaited) == 0, "no work is left: no reader is expected"


class EvictionCheckingPool(BlockPool):
    """Checks each eviction against the prefixes that waiting sequences will read, computed anew without counters."""

    scheduler: Scheduler

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.wrong: list[str] = []

    def allocate(self, count: int) -> list[int]:
        return [self._one() for _ in range(count)]

    def _one(self) -> int:
        wanted = {
            sequence.token_ids[: end * BLOCK].tobytes()
            for siblings in self.scheduler._requests.values()
            for sequence in siblings
            if sequence.state is SequenceState.WAITING
            for end in range(1, (len(sequence.token_ids) - 1) // BLOCK + 1)
        }
        before = {block: self._prefix(block) for block, _ in self.named() if self.is_free(block)}
        clean = self.num_free - len(before)
        [block] = super().allocate(1)
        if block in before:
            if clean:
                self.wrong.append(f"block {block} was evicted while {clean} were clean")
            if before[block] in wanted and not all(prefix in wanted for prefix in before.values()):
                self.wrong.append(f"block {block} will be read, and another will not")
        return block

    def _prefix(self, block: int) -> bytes:
        node, found = self._nodes[block], b""
        while node is not None and node.parent is not None:
            node, found = node.parent, node.token_bytes + found
        return found


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that begin alike here and there: leaves of a small tree."""
    made = []
    for _ in range(draw(st.integers(1, 14))):
        path = draw(st.lists(st.integers(1, 2), max_size=3))
        prompt = [token for depth, branch in enumerate(path) for token in tokens(branch + 3 * depth, 9)]
        made.append(prompt + draw(st.lists(st.integers(2, 20), min_size=1, max_size=5)))
    return made


@pytest.mark.exhaustive
@settings(max_examples=80, deadline=None)
@given(prompts(), st.integers(1, 5), st.integers(12, 40), st.data())
def test_nothing_that_will_be_read_is_evicted_while_there_is_something_else(
    made: list[list[int]], rows: int, blocks: int, data: st.DataObject
) -> None:
    h = harness(rows=rows, blocks=blocks, budget=data.draw(st.sampled_from([5, 16, 64])))
    cache = h.scheduler._cache
    cache.pools[0] = pool = EvictionCheckingPool(0, blocks + 1, cache.index)
    pool.scheduler = h.scheduler
    for number, prompt in enumerate(made):
        h.scheduler.add(make_request(str(number), prompt, data.draw(st.integers(1, 12))), 0.0)
        for _ in range(data.draw(st.integers(0, 4))):
            h.step()
        if data.draw(st.integers(0, 7)) == 0:
            h.scheduler.cancel(str(data.draw(st.integers(0, number))))
    finish(h)
    assert pool.wrong == []


def computed_positions(h: Harness) -> Counter[bytes]:
    """How many positions were computed of each block of prompts that could have been hit, by its whole prefix."""
    found: Counter[bytes] = Counter()
    owner: dict[int, Request] = {}
    for plan in h.plans:
        owner.update((row, request) for row, request, _ in plan.new_rows)
        for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            prompt = owner[row].prompt_token_ids
            for position in range(start, min(start + count, (len(prompt) - 1) // BLOCK * BLOCK)):
                found[prompt[: (position // BLOCK + 1) * BLOCK].tobytes()] += 1
    return found


@pytest.mark.exhaustive
@settings(max_examples=100, deadline=None)
@given(prompts(), st.integers(1, 6), st.data())
def test_each_shared_prefix_is_computed_once_when_the_pool_is_large_enough(
    made: list[list[int]], rows: int, data: st.DataObject
) -> None:
    # Given prompts with nested prefixes, any order, any limits, and several choices here and there,
    budget, chunk = data.draw(st.sampled_from([1, 3, 7, 16, 64])), data.draw(st.sampled_from([None, None, 2, 6, 8]))
    h = harness(rows=rows, budget=budget, chunk=chunk, blocks=600, depth=data.draw(st.integers(1, 2)))
    for number, prompt in enumerate(made):
        request = make_request(str(number), prompt, data.draw(st.integers(1, 6)))
        h.scheduler.add(replace(request, params=replace(request.params, n=data.draw(st.sampled_from([1, 1, 2])))), 0.0)
        for _ in range(data.draw(st.sampled_from([0, 0, 1, 3]))):
            h.step()
    finish(h)
    # then each position of their blocks was computed once or copied, in whatever order they came.
    assert all(count <= BLOCK for count in computed_positions(h).values())


@pytest.mark.parametrize("chunk", [None, 6, 2])
def test_two_simultaneous_requests_that_share_a_prompt_compute_it_once(chunk: int | None) -> None:
    h = harness(budget=21, chunk=chunk)
    for name in "abc":
        h.scheduler.add(make_request(name, [*tokens(1, 40), ord(name) % 9 + 3]), 0.0)
    finish(h)
    assert set(computed_positions(h).values()) == {BLOCK}
    assert NO_BLOCK not in {int(block) for block, _ in h.scheduler._cache.pools[0].named()}
