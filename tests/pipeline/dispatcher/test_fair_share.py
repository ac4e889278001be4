"""Fair shares: tenants get tokens by weight, save no credit, and never starve."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pipeline.dispatcher.fair_share import FairShares
from pipeline.worker_client.bulk_reserve import BulkReserve
from schemas.jobs.job import Tier


def dispatch(shares: FairShares, tenants: list[str], tokens: int, seed: int = 0) -> Counter[str]:
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
def test_tokens_are_shared_by_weight(weights: dict[str, float]) -> None:
    got = dispatch(FairShares(weights), ["a", "b", "c"], 3_000_000)
    total = sum(weights.get(tenant, 1.0) for tenant in "abc")
    for tenant in "abc":
        assert got[tenant] / got.total() == pytest.approx(weights.get(tenant, 1.0) / total, rel=0.03)


def test_an_idle_tenant_saves_nothing_up() -> None:
    shares = FairShares()
    dispatch(shares, ["a", "b"], 100_000)
    dispatch(shares, ["a"], 1_000_000)
    got = dispatch(shares, ["a", "b"], 1_000_000)
    assert got["a"] / got.total() == pytest.approx(0.5, rel=0.05)


def test_a_tenant_that_leaves_ahead_does_not_return_even() -> None:
    shares = FairShares()
    shares.set_active(["a", "b"])
    shares.charge("a", 50_000)
    dispatch(shares, ["b"], 10_000)
    shares.set_active(["a", "b"])
    assert shares.next(["a", "b"]) == "b"


def test_an_estimate_that_was_too_high_is_refunded() -> None:
    shares = FairShares()
    shares.set_active(["a", "b"])
    shares.charge("a", 1_000)
    shares.charge("b", 800)
    shares.charge("a", -900)
    assert shares.next(["a", "b"]) == "a"


def test_a_weight_of_zero_is_refused() -> None:
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
