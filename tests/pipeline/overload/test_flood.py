"""Floods of a simulated pool: admitted requests are in time, refused ones hear the truth, and steps come and go."""

from __future__ import annotations

import pytest

from schemas.jobs.job import Tier
from schemas.settings.overload import OverloadOptions
from tests.pipeline.overload.flood import MODEL, NAME, Pool, Sent, admitted, share_in_time

SHED = OverloadOptions(shed=True)
FLOOD_SECONDS = 30.0


def flooded(
    options: OverloadOptions, num_gateways: int = 1, times: float = 5.0, seed: int = 0
) -> tuple[Pool, list[Sent]]:
    """A pool that was measured at half its capacity, and then flooded; the requests of the flood."""
    pool = Pool(options, num_gateways, seed=seed)
    pool.run(10, pool.capacity / 2)
    before = len(pool.sent)
    pool.run(FLOOD_SECONDS, times * pool.capacity)
    return pool, pool.sent[before:]


@pytest.mark.parametrize("num_gateways", [1, 3])
@pytest.mark.slow
def test_admitted_requests_of_a_flood_are_in_time_and_the_pool_is_full(num_gateways: int) -> None:
    pool, sent = flooded(SHED, num_gateways)
    assert share_in_time(sent) >= 0.95
    assert len(admitted(sent)) >= 0.95 * pool.capacity * FLOOD_SECONDS


def test_without_shedding_hardly_any_is_in_time() -> None:
    _, sent = flooded(OverloadOptions())
    assert not [one for one in sent if one.refused is not None]
    assert share_in_time(sent) < 0.2


def test_half_the_capacity_is_never_refused() -> None:
    pool = Pool(SHED)
    pool.run(30, pool.capacity / 2)
    assert not [one for one in pool.sent if one.refused is not None]


def test_without_measurements_nothing_is_refused() -> None:
    pool = Pool(SHED)
    for _ in range(500):
        pool.send(pool.gateways[0])
    assert not [one for one in pool.sent if one.refused is not None]


def seconds_until_admission(pool: Pool, tier: Tier = Tier.INTERACTIVE) -> float:
    """How long a client is refused that tries without pause."""
    began = pool.clock.monotonic()
    while pool.send(pool.gateways[0], tier).refused is not None:
        pool.run(0.02)
    return pool.clock.monotonic() - began


@pytest.mark.parametrize("backlog", [60, 80, 200])
@pytest.mark.parametrize(("tier", "spread"), [*((tier, 0.3) for tier in Tier), (Tier.INTERACTIVE, 0.02)])
def test_retry_after_is_the_time_until_a_request_is_admitted(backlog: int, tier: Tier, spread: float) -> None:
    # Given a lane that another gateway has filled, with answers of about the same length or not,
    pool = Pool(SHED, spread=spread)
    pool.run(10, pool.capacity / 2)
    pool.run(3)
    for _ in range(backlog):
        pool.send(None)
    pool.run(0.5)
    # when a request is refused here,
    refused = pool.send(pool.gateways[0], tier).refused
    assert refused is not None
    # then one is admitted after the named time, and none before.
    assert refused == pytest.approx(seconds_until_admission(pool, tier), rel=0.25, abs=0.1)


def test_rows_that_other_gateways_requests_hold_count_before_the_next_report() -> None:
    # Given an idle pool by its last reports, whose rows another gateway's requests have taken since,
    pool = Pool(SHED)
    pool.run(10, pool.capacity / 2)
    pool.run(3)
    for _ in range(36):
        pool.send(None)
    pool.run(0.5)
    # then 20 of them wait for full batches, and not for idle ones.
    refused = pool.send(pool.gateways[0]).refused
    assert refused is not None
    assert refused == pytest.approx(seconds_until_admission(pool), abs=0.25)


def test_a_flood_is_refused_before_the_next_report() -> None:
    # Given a pool whose last reports say that it is idle,
    pool = Pool(SHED)
    pool.run(10, pool.capacity / 2)
    pool.run(3)
    # when hundreds of requests come at once, then only those are admitted that the promise allows.
    sent = [pool.send(pool.gateways[0]) for _ in range(300)]
    assert 16 <= len([one for one in sent if one.refused is None]) <= 30
    pool.run(5)
    assert share_in_time(sent) == 1.0


def test_one_tenants_flood_doesnt_refuse_another_tenant() -> None:
    pool = Pool(SHED)
    pool.run(10, pool.capacity / 2)
    pool.run(3)
    heavy = [pool.send(pool.gateways[0], tenant="heavy") for _ in range(200)]
    assert heavy[-1].refused is not None
    assert pool.send(pool.gateways[0], tenant="light").refused is None


def test_a_request_that_would_end_after_its_timeout_is_refused() -> None:
    pool = Pool(SHED)
    pool.run(10, pool.capacity / 2)
    pool.run(3)
    gateway = pool.gateways[0]
    # An answer takes a second. Without waiting nothing is refused, whatever its timeout;
    assert pool.send(gateway, timeout=0.5).refused is None
    # behind others it depends on the timeout, and on the answer's length.
    pool.run(3, 1.1 * pool.capacity)
    assert pool.send(gateway, timeout=5.0).refused is None
    assert pool.send(gateway, timeout=1.0).refused is not None
    assert pool.send(gateway, timeout=1.0, max_tokens=3).refused is None


STEPS = OverloadOptions(
    shed=True,
    steps=(
        "pause_bulk",
        {"name": "cap_max_tokens", "max_tokens": 8},
        {"name": "route_small", "models": {NAME: "small"}},
    ),  # type: ignore[arg-type]
)


def test_steps_begin_in_order_in_a_flood_and_end_in_reverse_after_it() -> None:
    pool, _ = flooded(STEPS)
    gateway = pool.gateways[0]
    assert all(gateway.steps().values())
    assert pool.board.active(NAME, ("pause_bulk", "drafts_off")) == {"pause_bulk"}
    assert gateway.max_tokens(NAME) == 8
    assert gateway.small_model(NAME) is None  # no worker serves it
    ended: list[str] = []
    for _ in range(60):
        pool.run(1, 0.2 * pool.capacity)
        ended += [step for (_, step), is_active in gateway.steps().items() if not is_active and step not in ended]
    assert ended == ["route_small", "cap_max_tokens", "pause_bulk"]
    assert pool.board.active(NAME, ("pause_bulk",)) == frozenset()
    assert gateway.max_tokens(NAME) is None


def test_a_dead_gateway_leaves_no_step_active() -> None:
    pool, _ = flooded(STEPS)
    assert pool.board.active(NAME, ("pause_bulk",))
    pool.gateways.clear()
    pool.clock.sleep(5.1)
    assert not pool.board.active(NAME, ("pause_bulk",))


def test_bulk_requests_are_refused_while_bulk_work_is_paused() -> None:
    pool, _ = flooded(OverloadOptions(steps=("pause_bulk",)), times=1.2)  # type: ignore[arg-type]
    gateway = pool.gateways[0]
    assert gateway.steps()[NAME, "pause_bulk"]
    assert pool.send(gateway, Tier.BULK).refused is not None
    assert pool.send(gateway, Tier.STANDARD).refused is None


def test_counts_return_to_zero() -> None:
    pool, _ = flooded(SHED, num_gateways=2)
    pool.run(10)
    for gateway in pool.gateways:
        assert not gateway._requests
        assert not gateway._queues[MODEL].waiting
        assert gateway._queues[MODEL].running == {}
