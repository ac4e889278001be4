"""Blocks of a retained prefix: others are evicted before, until their seconds are over; no request waits for them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.blocks import BlockPool
from engine.cache.prefix import PrefixIndex, PrefixNode, chain_digest
from engine.config import ScheduleConfig
from engine.errors import RequestRefused
from engine.plan import CacheGroup
from engine.request import Request, SamplingParams
from tests.engine.scheduler.scheduler_harness import Harness

BLOCK = 4


def make_request(name: str, prompt: list[int], **more: object) -> Request:
    params = SamplingParams(max_tokens=2, ignore_eos=True, seed=1)
    return Request(name, np.array(prompt, dtype=np.int32), params, **more)


def tokens(start: int, count: int) -> list[int]:
    """Tokens that differ for each `start`."""
    return [(start * 7 + i * (start % 5 + 1)) % 17 + 3 for i in range(count)]


def harness(blocks: int, windows: tuple[int | None, ...] = (None,)) -> Harness:
    groups = tuple(CacheGroup((i,), window, blocks + 1) for i, window in enumerate(windows))
    return Harness(ScheduleConfig(2, 64, None), groups, BLOCK, 64)


def run(h: Harness, request: Request, now: float) -> int:
    """Compute a request; returns its cached tokens."""
    h.scheduler.add(request, now)
    h.run(now)
    end = h.finished[request.request_id, 0]
    h.check_end(end)
    return end.cached_tokens


def press(h: Harness, now: float) -> None:
    """Compute other requests, with more blocks than there are."""
    for i in range(6):
        run(h, make_request(f"other{i} at {now}", tokens(i + 3, 24)), now)


class TestRequests:
    @pytest.mark.parametrize("windows", [(None,), (None, 6)])
    def test_a_retained_prefix_outlives_others_until_its_time_is_over(self, windows: tuple[int | None, ...]) -> None:
        h, prompt = harness(16, windows), tokens(1, 16)
        assert run(h, make_request("first", [*prompt, 3, 4], retain=((16, 300.0),)), 0.0) == 0
        assert h.finished["first", 0].retained_tokens == 16
        press(h, 10.0)
        assert run(h, make_request("within", [*prompt, 5, 6], retain=((16, 300.0),)), 290.0) == 16
        press(h, 580.0)  # it was used at 290
        assert run(h, make_request("after", [*prompt, 7, 8]), 589.0) == 16
        press(h, 900.0)
        assert run(h, make_request("too late", [*prompt, 9, 9]), 900.0) == 0
        h.check_empty()

    def test_only_the_prefix_is_retained(self) -> None:
        h, prompt = harness(12), tokens(1, 17)
        run(h, make_request("first", prompt, retain=((10, 300.0),)), 0.0)
        assert h.finished["first", 0].retained_tokens == 8
        press(h, 1.0)
        assert run(h, make_request("again", prompt), 2.0) == 8

    def test_another_tenant_does_not_read_it(self) -> None:
        h, prompt = harness(16), tokens(1, 17)
        run(h, make_request("first", prompt, retain=((16, 300.0),), salt=b"one"), 0.0)
        assert run(h, make_request("other", prompt, salt=b"two"), 1.0) == 0

    def test_a_prefix_that_was_cached_without_a_mark_is_retained_by_its_next_reader(self) -> None:
        h, prompt = harness(16), tokens(1, 17)
        run(h, make_request("first", prompt), 0.0)
        assert run(h, make_request("second", prompt, retain=((16, 300.0),)), 0.0) == 16
        press(h, 1.0)
        assert run(h, make_request("third", prompt), 2.0) == 16

    def test_a_pool_full_of_retained_blocks_admits_a_request_as_large_as_the_pool(self) -> None:
        h = harness(8)
        for i in range(2):
            run(h, make_request(f"r{i}", tokens(i, 16), retain=((16, 3600.0),)), float(i))
        assert h.scheduler._cache.pools[0].num_retained == 4
        run(h, make_request("large", tokens(5, 30)), 2.0)
        assert h.scheduler.stats.preemptions == 0
        assert h.scheduler.stats.free_blocks == (8,)

    def test_marks_of_one_tenant_do_not_evict_what_another_retains(self) -> None:
        h, prompt = harness(16), tokens(1, 17)
        run(h, make_request("first", prompt, retain=((16, 300.0),), salt=b"one"), 0.0)
        for i in range(20):  # each takes half of the pool, for longer, and is read again
            for again in range(2):
                hostile = make_request(f"{i} {again}", tokens(i + 3, 29), retain=((28, 3600.0),), salt=b"two")
                run(h, hostile, 1.0 + i)
        press(h, 30.0)
        assert run(h, make_request("again", prompt, salt=b"one"), 31.0) == 16

    def test_marks_leave_half_of_the_pool_to_prefixes_without_any(self) -> None:
        h, prompt = harness(24), tokens(1, 25)
        for i in range(6):
            run(h, make_request(f"hostile{i}", tokens(i + 3, 17), retain=((16, 3600.0),), salt=b"two"), float(i))
        assert h.scheduler._cache.pools[0].num_retained == 12
        run(h, make_request("first", prompt, salt=b"one"), 10.0)
        run(h, make_request("between", tokens(20, 16), salt=b"two"), 11.0)
        assert run(h, make_request("again", prompt, salt=b"one"), 12.0) == 24

    @pytest.mark.parametrize("retain", [((5, 300.0),), ((4, 0.0),), ((-1, 1.0),), ((4, float("inf")),)])
    def test_a_prefix_that_is_none_is_refused(self, retain: tuple[tuple[int, float], ...]) -> None:
        with pytest.raises(RequestRefused, match=r"retain is .* but must be prefixes of the 4 tokens"):
            harness(8).scheduler.add(make_request("r", tokens(1, 4), retain=retain), 0.0)


class TestPool:
    def test_the_earliest_deadline_is_evicted_first_and_behind_everything_else(self) -> None:
        index = PrefixIndex(1)
        pool = BlockPool(0, 6, index)
        blocks = pool.allocate(4)
        for i, block in enumerate(blocks):
            node = index.extend(None, chain_digest(b"", bytes([i])), bytes([i]))
            assert node is not None
            pool.publish(block, node)
        long, short, awaited, cached = blocks
        index.expect(chain_digest(b"", bytes([2])))
        pool.retain(long, 100.0, b"")
        pool.retain(short, 10.0, b"")
        for pool.now, block in enumerate([long, short, awaited, cached]):
            pool.release([block])
        assert (pool.num_retained, pool.num_free) == (2, 5)
        assert pool.allocate(5)[1:] == [cached, awaited, short, long]

    def test_after_its_deadline_a_block_is_evicted_like_one_that_was_just_freed(self) -> None:
        index = PrefixIndex(1)
        pool = BlockPool(0, 4, index)
        blocks = pool.allocate(3)
        for i, block in enumerate(blocks):
            node = index.extend(None, chain_digest(b"", bytes([i])), bytes([i]))
            assert node is not None
            pool.publish(block, node)
        pool.retain(blocks[0], 10.0, b"")
        pool.release(blocks[:2])
        pool.now = 10.0
        assert pool.allocate(1) == [blocks[1]]  # here the deadline is seen to be over
        pool.release([blocks[2]])
        assert pool.allocate(2) == [blocks[0], blocks[2]]


NUM_BLOCKS = 12
OWNERS = st.sampled_from([b"a", b"a", b"b", b"c"])


class RetainingPool(RuleBasedStateMachine):
    """A pool beside a model of it: which free blocks are retained, until when, and for which owner."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(1)
        self.pool = BlockPool(0, NUM_BLOCKS, self.index)
        self.held: list[int] = []
        self.seconds: dict[int, float] = {}
        self.deadlines: dict[int, float] = {}
        self.nodes: dict[int, PrefixNode] = {}
        self.owners: dict[int, bytes] = {}
        self.expected: list[bytes] = []
        self.made = 0

    def live(self) -> dict[int, float]:
        return {block: until for block, until in self.deadlines.items() if until > self.pool.now}

    def lose(self, block: int, live: dict[int, float]) -> None:
        """Remove a block of `live` that was given up, if it was the right one."""
        counts = Counter(self.owners[one] for one in live)
        owner, until = self.owners[block], live.pop(block)
        assert counts[owner] == max(counts.values()), f"{owner!r} lost a block, but of {counts} another has more"
        assert until <= min((live[one] for one in live if self.owners[one] == owner), default=until)
        for known in (self.seconds, self.deadlines):
            known.pop(block)

    def put(self, block: int) -> None:
        """A free block is retained now: with one too many, one was given up."""
        self.deadlines[block] = self.pool.now + self.seconds[block]
        live = self.live()
        lost = [one for one in live if one not in self.pool._retained]
        assert len(lost) == (len(live) > self.pool.max_retained)
        for one in lost:
            self.lose(one, live)

    @rule(seconds=st.sampled_from([0.5, 1, 2, 3]))
    def wait(self, seconds: float) -> None:
        self.pool.now += seconds

    @precondition(lambda self: self.pool.num_free)
    @rule(count=st.integers(1, NUM_BLOCKS - 1))
    def allocate(self, count: int) -> None:
        self.take(count)

    @precondition(lambda self: self.pool.num_free)
    @rule(count=st.integers(1, 4), owner=OWNERS, seconds=st.sampled_from([1.0, 4.0]))
    def answer(self, count: int, owner: bytes, seconds: float) -> None:
        """A request that retains its blocks comes and ends."""
        for block in self.take(count):
            self.publish_one(block, owner)
            self.pool.retain(block, seconds, owner)
            self.seconds[block] = seconds
            self.held.remove(block)
            self.pool.release([block])
            self.put(block)

    def take(self, count: int) -> list[int]:
        count = min(count, self.pool.num_free)
        live = self.live()
        num_others = self.pool.num_free - len(live)
        taken = self.pool.allocate(count)
        lost = [block for block in taken if block in live]
        assert len(lost) == max(0, count - num_others), "a retained block went while there was another"
        for block in lost:
            self.lose(block, live)
        for block in taken:
            for known in (self.seconds, self.deadlines, self.nodes, self.owners):
                known.pop(block, None)
        self.held += taken
        return taken

    @precondition(lambda self: any(block not in self.nodes for block in self.held))
    @rule(awaited=st.booleans(), owner=OWNERS)
    def publish(self, awaited: bool, owner: bytes) -> None:
        block = next(block for block in self.held if block not in self.nodes)
        node = self.publish_one(block, owner)
        if awaited:
            self.index.expect(node.digest)
            self.expected.append(node.digest)

    def publish_one(self, block: int, owner: bytes) -> PrefixNode:
        name = b"%d" % self.made
        self.made += 1
        node = self.index.extend(None, chain_digest(b"", name), name)
        assert node is not None
        self.nodes[block], self.owners[block] = node, owner
        self.pool.publish(block, node)
        return node

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), seconds=st.sampled_from([1.0, 4.0]))
    def retain(self, data: st.DataObject, seconds: float) -> None:
        block = data.draw(st.sampled_from(sorted(self.nodes)))
        if self.deadlines.get(block, np.inf) <= self.pool.now:
            return  # it may have been expired or not: no request can tell
        self.pool.retain(block, seconds, self.owners[block])
        self.seconds[block] = max(seconds, self.seconds.get(block, 0.0))
        if block not in self.held:
            self.put(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), known=st.booleans())
    def release(self, data: st.DataObject, known: bool) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release([block], known)
        if block in self.seconds and block not in self.held:
            self.put(block)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.nodes)))
        if self.deadlines.get(block, np.inf) <= self.pool.now:
            return
        self.pool.acquire(block)
        self.held.append(block)
        self.deadlines.pop(block, None)

    @precondition(lambda self: self.expected)
    @rule()
    def dismiss(self) -> None:
        node = self.index.dismiss(self.expected.pop())
        if node is not None:
            self.pool.requeue(node.blocks[0])

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.nodes)))
        self.pool.withdraw(block)
        for known in (self.seconds, self.deadlines, self.nodes, self.owners):
            known.pop(block, None)

    @invariant()
    def the_references_add_up(self) -> None:
        self.pool.check(np.bincount(self.held, minlength=NUM_BLOCKS).astype(np.int64))
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(set(self.held))


TestRetainingPool = RetainingPool.TestCase
TestRetainingPool.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
