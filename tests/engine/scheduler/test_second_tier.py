"""The second tier of the prefix cache: what is stored, what is loaded, and what is computed after a rejection."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.cache.block_tier import BlockKey
from engine.cache.host_tier import HostTier
from engine.cache.prefix import HashChain, chain_digest
from engine.cache.tables import CacheTables
from engine.config import ScheduleConfig
from engine.plan import STATE_WINDOW, CacheGroup, RowState
from engine.request import FinishReason, Request, SamplingParams
from tests.engine.scheduler.scheduler_harness import POISON, DictTier, Harness

BLOCK = 4
PREFIX = [2 + at % 19 for at in range(24)]
GROUPS = {
    "full": (CacheGroup((0,), None, 40),),
    "window": (CacheGroup((0,), None, 40), CacheGroup((1,), 6, 40)),
    "window only": (CacheGroup((0,), 6, 40),),
    "states": (CacheGroup((0,), None, 40), CacheGroup((1,), STATE_WINDOW, 40, snapshot_blocks=2)),
}


def harness(tier: DictTier | None, groups: str = "full", **changes: object) -> Harness:
    options: dict = {"depth": 1, "max_loads": 9} | changes
    return Harness(ScheduleConfig(4, 16), GROUPS[groups], BLOCK, tier=tier, **options)


def request(name: str, end: list[int], **changes: object) -> Request:
    params = SamplingParams(max_tokens=5, ignore_eos=True, seed=int(name, 36))
    return replace(Request(name, np.array([*PREFIX, *end], dtype=np.int32), params), **changes)


def run(harness: Harness, *requests: Request) -> Harness:
    """Run each request to its end before the next one comes."""
    for one in requests:
        harness.scheduler.add(one, 0.0)
        harness.run()
        harness.check_end(harness.finished[one.request_id, 0])
    harness.check_empty()
    return harness


def prefix_computed(harness: Harness, name: str) -> int:
    """Tokens that the request computed, without its own two and the four of its answer that are computed."""
    return harness.computed[name, 0] - 2 - 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_prefix_that_was_hit_once_is_computed_by_no_later_scheduler(groups: str, depth: int) -> None:
    # Given a scheduler in which two requests begin alike,
    tier = DictTier()
    first = run(harness(tier, groups, depth=depth), request("a", [3, 3]), request("b", [4, 4]))
    assert prefix_computed(first, "a") == len(PREFIX)
    assert first.loaded == 0
    # when another one with the same tier gets a request that begins so,
    second = run(harness(tier, groups, depth=depth), request("c", [5, 5]))
    # then it computes nothing of the prefix, and the request reports the hit.
    assert prefix_computed(second, "c") == 0
    assert second.finished["c", 0].cached_tokens == len(PREFIX)
    # of layers that see less, no more than that is loaded
    full = sum(group.window is None for group in GROUPS[groups])
    assert second.loaded == full * len(PREFIX) // BLOCK + {"window": 2, "window only": 2, "states": 1}.get(groups, 0)


def test_a_prefix_that_no_other_request_has_is_not_stored_unless_it_is_retained() -> None:
    tier = DictTier()
    run(harness(tier), request("a", [3, 3], params=SamplingParams(max_tokens=5, n=3, ignore_eos=True)))
    assert not tier.blocks
    run(harness(tier), request("b", [4, 4], retain=((len(PREFIX), 60.0),)))
    assert len(tier.blocks) == len(PREFIX) // BLOCK
    # The outputs of a scored prompt arrive before all of it is computed.
    scored = SamplingParams(max_tokens=5, ignore_eos=True, prompt_logprobs=1)
    run(harness(tier), request("c", [5, 5], retain=((len(PREFIX), 60.0),), params=scored, salt=b"one"))
    assert len(tier.blocks) == 2 * len(PREFIX) // BLOCK


def test_a_prefix_of_another_owner_is_not_found() -> None:
    tier = DictTier()
    run(harness(tier), request("a", [3, 3], salt=b"one"), request("b", [4, 4], salt=b"one"))
    other = run(harness(tier), request("c", [5, 5], salt=b"another"))
    assert prefix_computed(other, "c") == len(PREFIX)
    assert tier.num_loads == 0
    assert prefix_computed(run(harness(tier), request("d", [6, 6], salt=b"one")), "d") == 0


@pytest.mark.parametrize("lost", range(len(PREFIX) // BLOCK))
@pytest.mark.parametrize("groups", GROUPS)
def test_a_rejected_block_is_computed(groups: str, lost: int) -> None:
    tier = DictTier()
    run(harness(tier, groups), request("a", [3, 3]), request("b", [4, 4]))
    tokens = np.array(PREFIX[BLOCK * lost :][:BLOCK], dtype=np.int32).tobytes()

    class Rejecting(DictTier):
        def load(self, key: BlockKey) -> NDArray[np.uint8] | None:
            return None if key.token_bytes == tokens else super().load(key)

    rejecting = Rejecting()
    rejecting.blocks = tier.blocks
    computed = prefix_computed(run(harness(rejecting, groups), request("c", [5, 5])), "c")
    if groups == "full":  # a step computes 16 tokens; behind them the tier's blocks are used again
        assert computed == min(16, len(PREFIX) - lost * BLOCK)
    elif groups != "window only":
        assert computed >= BLOCK
    elif lost < 4:
        assert computed == 0, "the window doesn't see it"


def test_a_long_prefix_is_loaded_in_parts_and_others_go_on_meanwhile() -> None:
    tier = DictTier()
    run(harness(tier), request("a", [3, 3]), request("b", [4, 4]))
    second = harness(tier, max_loads=2)
    second.scheduler.add(request("o", [], prompt_token_ids=np.array([5, 6], dtype=np.int32)), 0.0)
    second.step()
    run(second, request("c", [5, 5]))
    assert [len(plan.load_blocks) for plan in second.plans] == [0, 2, 2, 0, 0, 0, 0, 0]
    # A row computes a block beside what is loaded, so that each step advances.
    assert [plan.num_tokens for plan in second.plans[:4]] == [2, 1 + BLOCK, 1 + BLOCK, 1 + 2]
    assert prefix_computed(second, "c") == 2 * BLOCK


def test_what_led_to_non_finite_values_is_not_stored_and_what_was_stored_is_discarded() -> None:
    tier = DictTier()
    bad = request("a", [3, 3], prompt_token_ids=np.array([*PREFIX[:8], POISON, *PREFIX[8:]], dtype=np.int32))
    both = harness(tier)
    for name in "ab":
        both.scheduler.add(replace(bad, request_id=name), 0.0)
    both.run()
    assert {end.finish_reason for end in both.finished.values()} == {FinishReason.ERROR}
    assert not tier.blocks
    # blocks of a prefix that was good until a row of it fails
    run(both, request("c", [3, 3]), request("d", [4, 4]))
    assert len(tier.blocks) == len(PREFIX) // BLOCK
    both.scheduler.add(request("e", [POISON, 5]), 0.0)
    both.run()
    assert not tier.blocks


class Tables:
    """The tables of one group with a tier that has the prefix, and helpers to fill the pool."""

    def __init__(self, num_blocks: int, prefixes: dict[bytes, list[int]], host: HostTier | None = None) -> None:
        rows = RowState(2, 64, BLOCK, 1)
        self.rows, self.tier = rows, DictTier()
        self.cache = CacheTables((CacheGroup((0,), None, num_blocks + 1),), rows, prefix_caching=True)
        self.cache.use_tiers(host, None, self.tier, max_loads=20)
        for salt, tokens in prefixes.items():
            chain = self.chain(salt)
            for block in range(len(tokens) // BLOCK):
                names = np.array(tokens[BLOCK * block :][:BLOCK], dtype=np.int32).tobytes()
                key = BlockKey(0, chain.of_block(block, names), names)
                self.tier.blocks[key] = np.zeros(BLOCK * 8, dtype=np.uint8)

    def chain(self, salt: bytes) -> HashChain:
        return HashChain(salt, None, chain_digest)

    def compute(self, salt: bytes, tokens: list[int]) -> None:
        """Compute and release these tokens, which are cached then."""
        self.rows.token_ids[0, : len(tokens)] = tokens
        chain = self.chain(salt)
        self.cache.open(0, chain, Request("r", np.array(tokens, dtype=np.int32), SamplingParams()))
        assert self.cache.grow(0, len(tokens) // BLOCK, chain)
        self.cache.publish(0, chain, len(tokens))
        self.cache.release(0, len(tokens))

    def load(self, salt: bytes, tokens: list[int]) -> int:
        """Load a prefix; returns the blocks that it hits then."""
        known = np.array([*tokens, 3], dtype=np.int32)
        self.cache.load(self.chain(salt), known)
        self.cache.check_integrity()
        return len(self.cache.match(self.chain(salt), known))


def test_a_full_pool_evicts_other_blocks_than_those_that_are_hit() -> None:
    tables = Tables(8, {b"": PREFIX})
    tables.compute(b"", PREFIX[:12])  # evicted first, but for the hold
    tables.compute(b"other", list(range(20)))
    assert tables.load(b"", PREFIX) == len(PREFIX) // BLOCK
    assert [load.block for load in tables.cache.tiering.take_loads()] == [8, 7, 6]


def test_a_block_that_is_evicted_before_the_step_is_not_filled() -> None:
    tables = Tables(6, {b"one": PREFIX, b"other": PREFIX})
    assert tables.load(b"one", PREFIX) == len(PREFIX) // BLOCK
    assert tables.load(b"other", PREFIX) == len(PREFIX) // BLOCK
    loads = tables.cache.tiering.take_loads()
    assert sorted(load.block for load in loads) == [1, 2, 3, 4, 5, 6]


def test_a_block_that_is_evicted_before_it_is_filled_is_not_stored_in_host_memory() -> None:
    host = HostTier([np.zeros((9, BLOCK * 8), dtype=np.uint8)])
    tables = Tables(6, {b"one": PREFIX, b"other": PREFIX}, host)
    tables.compute(b"third", list(range(24)))
    assert tables.load(b"one", PREFIX) == len(PREFIX) // BLOCK
    assert tables.load(b"other", PREFIX) == len(PREFIX) // BLOCK
    assert tables.cache.tiering is not None
    names = [store.key.token_bytes for store in tables.cache.tiering.take_evicted()]
    assert sorted(names) == sorted(np.arange(at, at + BLOCK, dtype=np.int32).tobytes() for at in range(0, 24, BLOCK))


def test_a_pool_without_room_loads_nothing() -> None:
    tables = Tables(5, {b"": PREFIX})
    assert tables.load(b"", PREFIX) == 0
    assert tables.tier.num_loads == 0


def test_a_step_that_fails_leaves_no_block_that_was_to_be_loaded() -> None:
    tier = DictTier()
    run(harness(tier), request("a", [3, 3]), request("b", [4, 4]))
    second = harness(tier)
    second.scheduler.add(request("c", [5, 5]), 0.0)
    plan = second.scheduler.schedule(0.0)
    assert plan is not None
    assert len(plan.load_blocks) == len(PREFIX) // BLOCK
    assert second.scheduler.retract(plan, 0.0)
    second.scheduler.check_integrity()
    second.run()
    second.check_end(second.finished["c", 0])
    assert second.loaded == len(PREFIX) // BLOCK  # again
