"""The life of a block: handed out, shared, freed, found again, evicted; and the chain of names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.block_demand import BlockDemand
from engine.cache.blocks import BlockPool
from engine.cache.prefix import HashChain, PrefixIndex, PrefixNode, chain_digest
from engine.cache.tables import CacheTables
from engine.plan import CacheGroup, RowState


def node_for(index: PrefixIndex, name: bytes, parent: PrefixNode | None = None) -> PrefixNode:
    node = index.extend(parent, chain_digest(parent.digest if parent else b"", name), name)
    assert node is not None
    return node


class TestPool:
    def test_block_0_is_never_handed_out(self) -> None:
        pool = BlockPool(0, 5, PrefixIndex(1))
        assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
        assert pool.num_free == 0

    def test_a_pool_without_a_usable_block_is_refused(self) -> None:
        with pytest.raises(ValueError, match="2 or more"):
            BlockPool(0, 1, PrefixIndex(1))

    def test_clean_blocks_are_taken_before_cached_ones_and_those_in_the_order_they_were_freed(self) -> None:
        # Given three published blocks, freed one after the other, and one clean block,
        index = PrefixIndex(1)
        pool = BlockPool(0, 5, index)
        blocks = pool.allocate(3)
        nodes = [node_for(index, bytes([i])) for i in range(3)]
        for block, node in zip(blocks, nodes, strict=True):
            pool.publish(block, node)
        for i in (1, 0, 2):
            pool.release([blocks[i]])
        assert (pool.num_free, pool.num_cached) == (4, 3)
        # when all are taken, then the clean one comes first, then the longest-freed; each is forgotten as it goes.
        order = [pool.allocate(1)[0] for _ in range(4)]
        assert order[1:] == [blocks[1], blocks[0], blocks[2]]
        assert len(index) == 0

    def test_the_tail_of_a_sequence_without_readers_is_evicted_first(self) -> None:
        index = PrefixIndex(1)
        pool = BlockPool(0, 9, index)
        blocks = pool.allocate(3)
        for i, block in enumerate(blocks):
            pool.publish(block, node_for(index, bytes([i])))
        pool.release(reversed(blocks), readers_known=True)
        assert pool.allocate(2) == [blocks[2], blocks[1]]

    def test_a_hit_takes_a_block_out_of_the_middle_of_the_free_ones(self) -> None:
        index = PrefixIndex(1)
        pool = BlockPool(0, 4, index)
        blocks = pool.allocate(3)
        for i, block in enumerate(blocks):
            pool.publish(block, node_for(index, bytes([i])))
        pool.release(blocks)
        pool.acquire(blocks[1])
        assert pool.allocate(2) == [blocks[0], blocks[2]]
        assert pool.num_free == 0

    def test_a_shared_block_is_free_only_when_the_last_reader_lets_go(self) -> None:
        index = PrefixIndex(1)
        pool = BlockPool(0, 2, index)
        (block,) = pool.allocate(1)
        pool.publish(block, node_for(index, b"n"))
        pool.acquire(block)
        pool.release([block])
        assert pool.num_free == 0
        pool.release([block])
        assert pool.num_free == 1

    def test_releasing_too_often_fails_an_assertion(self) -> None:
        pool = BlockPool(0, 3, PrefixIndex(1))
        (block,) = pool.allocate(1)
        pool.release([block])
        with pytest.raises(AssertionError, match="more often than taken"):
            pool.release([block])

    def test_a_suspect_block_is_reported_to_its_next_owner_once(self) -> None:
        pool = BlockPool(0, 2, PrefixIndex(1))
        (block,) = pool.allocate(1)
        pool.suspect(block)
        pool.release([block])
        assert pool.take_dirty() == []
        assert pool.allocate(1) == [block]
        assert pool.take_dirty() == [block]
        pool.release([block])
        pool.allocate(1)
        assert pool.take_dirty() == []

    def test_the_check_names_the_block_and_both_counts(self) -> None:
        pool = BlockPool(0, 3, PrefixIndex(1))
        (block,) = pool.allocate(1)
        with pytest.raises(AssertionError, match=f"block {block}: 1 references counted, 0 in the tables"):
            pool.check(np.zeros(3, dtype=np.int64))


class PoolMachine(RuleBasedStateMachine):
    """Random lives of blocks against a plain model: references to blocks, and the order in which they are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(1)
        self.pool = BlockPool(0, 9, self.index)
        self.held: list[int] = []
        self.names: dict[int, PrefixNode] = {}
        self.cached: list[int] = []
        self.spent: list[int] = []
        self.clean: list[int] = []
        self.untouched = list(range(1, 9))
        self.shared: set[int] = set()
        self.counter = 0

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        order = self.clean[::-1] + self.spent[::-1] + self.untouched + self.cached
        blocks = self.pool.allocate(count)
        assert blocks == order[:count]
        for group in (self.clean, self.spent, self.untouched, self.cached):
            group[:] = [block for block in group if block not in blocks]
        for block in blocks:
            self.names.pop(block, None)
            self.shared.discard(block)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        readers_known = data.draw(st.booleans())
        self.held.remove(block)
        self.pool.release([block], readers_known)
        if block in self.held:
            return
        if block not in self.names:
            self.clean.append(block)
        elif readers_known and block not in self.shared:
            self.spent.append(block)
        else:
            self.cached.append(block)

    @precondition(lambda self: any(block not in self.names for block in self.held))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for block in self.held if block not in self.names]))
        self.counter += 1
        self.names[block] = node_for(self.index, b"%d" % self.counter)
        self.pool.publish(block, self.names[block])

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.names)))
        self.pool.acquire(block)
        self.held.append(block)
        self.shared.add(block)
        self.forget(block)

    def forget(self, block: int) -> bool:
        """Remove the block from the group of free blocks that holds it; whether one did."""
        for group in (self.cached, self.spent):
            if block in group:
                group.remove(block)
                return True
        return False

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.names)))
        self.pool.withdraw(block)
        del self.names[block]
        self.shared.discard(block)
        if self.forget(block):
            self.clean.append(block)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check(np.bincount(np.array(self.held, dtype=np.int64), minlength=9))
        assert self.pool.num_cached == len(self.cached) + len(self.spent)
        assert dict(self.pool.named()) == self.names
        assert len(self.index) == len(self.names)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class TestPrefixes:
    def test_the_digest_depends_on_every_token_before_it_and_on_the_salt(self) -> None:
        def last(salt: bytes, length: int | None, *blocks: bytes) -> bytes:
            chain = HashChain(salt, length, chain_digest)
            return [chain.of_block(i, tokens) for i, tokens in enumerate(blocks)][-1]

        base = last(b"", None, b"aaaa", b"bbbb")
        assert len(base) == 16
        assert base == last(b"", None, b"aaaa", b"bbbb")
        others = [last(b"", None, b"aaab", b"bbbb"), last(b"s", None, b"aaaa", b"bbbb"), last(b"", 9, b"aaaa", b"bbbb")]
        assert len({base, *others}) == 4

    def test_each_block_is_hashed_once_and_a_fork_copies_the_digests(self) -> None:
        calls = []

        def counting(parent: bytes, tokens: bytes) -> bytes:
            calls.append(tokens)
            return chain_digest(parent, tokens)

        chain = HashChain(b"", None, counting)
        for _ in range(3):
            for i, tokens in enumerate((b"a", b"b", b"c")):
                chain.of_block(i, tokens)
        twin = chain.fork(2)
        assert twin.of_block(1, b"b") == chain.of_block(1, b"b")
        assert twin.of_block(2, b"x") != chain.of_block(2, b"c")
        assert calls == [chain.root_key, b"a", b"b", b"c", b"x"]

    def test_a_node_lives_while_a_longer_prefix_builds_on_it(self) -> None:
        index = PrefixIndex(1)
        root = node_for(index, b"root")
        child = node_for(index, b"child", root)
        index.hold(child)
        assert index.find(root, child.digest, b"child") is child
        index.drop(child)
        assert len(index) == 0

    def test_a_digest_that_belongs_to_another_prefix_finds_nothing(self) -> None:
        index = PrefixIndex(1)
        first, second = node_for(index, b"first"), node_for(index, b"second")
        child = index.extend(first, b"same digest", b"tokens")
        assert child is not None
        assert index.find(second, b"same digest", b"tokens") is None
        assert index.find(first, b"same digest", b"others") is None
        assert index.extend(second, b"same digest", b"tokens") is None


class TestDemand:
    @pytest.mark.parametrize("size", [1, 3, 4, 16])
    @pytest.mark.parametrize("window", [1, 5, 16])
    def test_a_lone_sequence_never_needs_more_than_its_pool_allows(self, size: int, window: int) -> None:
        # Given any pool of a window group, when a chunk is as long as the demand allows,
        for usable in range(1, 20):
            rows = RowState(1, 400, size, 1)
            tables = CacheTables((CacheGroup((0,), window, usable + 1),), rows, prefix_caching=False)
            demand = BlockDemand(tables, 64, 400)
            # then from every start, the blocks that window and chunk touch fit the pool.
            for start in range(min(demand.max_positions, 100)):
                end = min(start + demand.max_chunk, demand.max_positions)
                held = -(-end // size) - max(0, start - window + 1) // size
                assert held <= usable
