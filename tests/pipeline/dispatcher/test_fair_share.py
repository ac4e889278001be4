"""Who shares gets tokens by weight, saves nothing up, and is never shut out."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pipeline.dispatcher.fair_share import FairShares
from pipeline.worker_client.bulk_reserve import BulkReserve
from schemas.jobs.job import Tier


def hand_out(shares: FairShares, tenants: list[str], tokens: int, seed: int = 0) -> Counter[str]:
    """Hand out about so many tokens in shards of mixed sizes to tenants who always want more."""
    chance, got = random.Random(seed), Counter[str]()
    while got.total() < tokens:
        shares.set_active(tenants)
        tenant = shares.next(tenants)
        size = chance.randint(100, 10_000)
        shares.charge(tenant, size)
        got[tenant] += size
    return got


@pytest.mark.parametrize("weights", [{}, {"a": 3.0}, {"a": 1.0, "b": 10.0}, {"a": 0.5, "c": 2.5}])
def test_tokens_go_by_weight(weights: dict[str, float]) -> None:
    got = hand_out(FairShares(weights), ["a", "b", "c"], 3_000_000)
    total = sum(weights.get(tenant, 1.0) for tenant in "abc")
    for tenant in "abc":
        assert got[tenant] / got.total() == pytest.approx(weights.get(tenant, 1.0) / total, rel=0.03)


def test_who_had_no_work_for_long_has_saved_nothing_up() -> None:
    shares = FairShares()
    hand_out(shares, ["a", "b"], 100_000)
    hand_out(shares, ["a"], 1_000_000)
    got = hand_out(shares, ["a", "b"], 1_000_000)
    assert got["a"] / got.total() == pytest.approx(0.5, rel=0.05)


def test_who_leaves_with_more_than_its_share_does_not_come_back_even() -> None:
    shares = FairShares()
    shares.set_active(["a", "b"])
    shares.charge("a", 50_000)
    hand_out(shares, ["b"], 10_000)
    shares.set_active(["a", "b"])
    assert shares.next(["a", "b"]) == "b"


def test_what_was_estimated_too_high_is_given_back() -> None:
    shares = FairShares()
    shares.set_active(["a", "b"])
    shares.charge("a", 1_000)
    shares.charge("b", 800)
    shares.charge("a", -900)
    assert shares.next(["a", "b"]) == "a"


def test_a_weight_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="weight of tenant 'a' is 0"):
        FairShares({"a": 0})


def test_bulk_gets_a_twentieth_while_both_wait() -> None:
    floor, got, chance = BulkReserve(), Counter[Tier](), random.Random(1)
    for _ in range(20_000):
        tier = Tier.BULK if floor.due else Tier.STANDARD
        size = chance.randint(100, 5_000)
        floor.took(tier, size)
        got[tier] += size
    assert got[Tier.BULK] / got.total() == pytest.approx(0.05, rel=0.05)


def test_bulk_that_was_not_there_is_owed_one_shard_at_most() -> None:
    floor = BulkReserve()
    for _ in range(10_000):
        floor.took(Tier.STANDARD, 1_000)
    assert floor.due
    floor.took(Tier.BULK, 1_000)
    assert not floor.due
