"""Blocks in host memory: found by their names, bounded, and never overwritten while they are read."""

from __future__ import annotations

import numpy as np
import pytest

from engine.cache.block_tier import BlockKey, TierStats
from engine.cache.host_tier import HostTier
from engine.cache.prefix import HashChain, chain_digest

SIZE = 16


def key(number: int, group: int = 0, salt: bytes = b"one") -> BlockKey:
    tokens = np.full(4, number, dtype=np.int32).tobytes()
    return BlockKey(group, HashChain(salt, None, chain_digest).of_block(0, tokens), tokens)


def make_tier(*slots: int) -> HostTier:
    return HostTier([np.zeros((count, SIZE), dtype=np.uint8) for count in slots or (3,)])


def store(tier: HostTier, name: BlockKey, value: int) -> bool:
    target = tier.allocate(name, is_suspect=False)
    if target is not None:
        target[:] = value
    tier.check_integrity()
    return target is not None


def loaded(tier: HostTier, name: BlockKey) -> int | None:
    """The value of a block's bytes, which is copied at once."""
    data = tier.load(name)
    tier.release()
    return None if data is None else int(data[0])


def test_a_block_is_found_by_its_whole_name_only() -> None:
    tier = make_tier(3, 3)
    store(tier, key(1), 5)
    assert loaded(tier, key(1)) == 5
    assert tier.stats() == TierStats(hits=1, bytes_read=SIZE, bytes_written=SIZE)
    for other in (key(2), key(1, group=1), key(1, salt=b"another")):
        assert not tier.contains(other)
        assert loaded(tier, other) is None
    assert not tier.allocate(key(1), is_suspect=False), "it is stored once"


def test_the_block_that_was_not_used_for_longest_loses_its_slot() -> None:
    tier = make_tier(3, 1)
    for number in range(3):
        store(tier, key(number), number)
    assert loaded(tier, key(0)) == 0
    assert tier.touch(key(1))
    store(tier, key(3), 3)
    store(tier, key(9, group=1), 9)  # each group has slots of its own
    assert [number for number in range(4) if tier.contains(key(number))] == [0, 1, 3]
    assert [loaded(tier, key(number)) for number in (0, 1, 3)] == [0, 1, 3]


def test_a_slot_that_is_being_read_is_not_given_away() -> None:
    tier = make_tier(2)
    store(tier, key(0), 0)
    store(tier, key(1), 1)
    first, second = tier.load(key(0)), tier.load(key(1))
    assert first is not None
    assert second is not None
    assert not store(tier, key(2), 2), "all slots are being read"
    tier.release()
    second = tier.load(key(1))
    assert store(tier, key(2), 2)
    assert second is not None
    assert second[0] == 1
    assert not tier.contains(key(0))


def test_a_discarded_block_is_gone_and_its_slot_is_free() -> None:
    tier = make_tier(1)
    store(tier, key(0), 0)
    tier.discard(key(0))
    tier.discard(key(1))
    assert loaded(tier, key(0)) is None
    assert store(tier, key(2), 2)


@pytest.mark.parametrize("is_suspect", [False, True])
def test_the_mark_of_a_block_is_returned(is_suspect: bool) -> None:
    tier = make_tier()
    tier.allocate(key(0), is_suspect=is_suspect)
    assert tier.is_suspect(key(0)) == is_suspect
    assert not tier.is_suspect(key(1))
