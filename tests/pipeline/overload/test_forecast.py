"""The forecast, and when a request is refused because of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.overload.forecast import (
    PROMISE_SHARE,
    PoolLoad,
    Promises,
    excess_seconds,
    forecast,
    requests_ahead,
)
from schemas.jobs.job import Tier

LOAD = PoolLoad(slots=10, running=10, answer_tokens=21, token_seconds=0.05, first_token_seconds=0.2)
"""Ten rows, each held for 1.2 s."""
PROMISES = Promises({Tier.INTERACTIVE: 1.0, Tier.STANDARD: 10.0})


def test_a_free_row_is_no_wait() -> None:
    idle = forecast(replace(LOAD, running=4), ahead=5, answer_tokens=11)
    assert (idle.wait_seconds, idle.ttft_seconds) == (0, 0.2)
    assert idle.end_seconds == pytest.approx(0.7)


def test_full_batches_free_rows_one_after_the_other() -> None:
    assert forecast(LOAD, ahead=0, answer_tokens=1).wait_seconds == pytest.approx(0.12)
    assert forecast(LOAD, ahead=49, answer_tokens=1).wait_seconds == pytest.approx(6.0)


def test_after_a_burst_no_row_is_free_before_its_answers_end() -> None:
    fresh = replace(LOAD, ages=(0.1,) * 10)
    assert forecast(fresh, ahead=0, answer_tokens=1).wait_seconds == pytest.approx(1.1)
    assert forecast(fresh, ahead=10, answer_tokens=1).wait_seconds == pytest.approx(2.3)
    # Free rows are taken by the requests ahead, and then held as long.
    assert forecast(replace(LOAD, running=0), ahead=10, answer_tokens=1).wait_seconds == pytest.approx(1.2)
    # Rows of unknown age may end at any time.
    mixed = replace(LOAD, ages=(0.1,) * 4)
    assert forecast(mixed, ahead=0, answer_tokens=1).wait_seconds == pytest.approx(0.12)


def test_accepted_drafts_shorten_answers() -> None:
    assert replace(LOAD, gap_tokens=2.0).decode_seconds(21) == pytest.approx(0.05 * 9.5)


def test_the_rate_that_is_seen_corrects_what_workers_report() -> None:
    assert LOAD.corrected(10 / 1.2) == LOAD
    assert LOAD.corrected(4.0).slot_seconds == pytest.approx(2.5 / 1.33)
    assert LOAD.corrected(20.0).slot_seconds == pytest.approx(0.5 * 1.33)
    assert LOAD.corrected(0.0) == LOAD


def test_tenants_take_turns() -> None:
    assert requests_ahead({"heavy": 100}, 100, "light") == 1
    assert requests_ahead({"heavy": 100, "light": 3}, 103, "light") == 7
    assert requests_ahead({"heavy": 100, "light": 3}, 103, "heavy") == 103
    # Requests of other gateways count as if their tenants were distributed alike; without any knowledge all count.
    assert requests_ahead({"heavy": 100}, 300, "light") == pytest.approx(3)
    assert requests_ahead({}, 70, "light") == 70


def excess(ahead: float, tier: Tier = Tier.INTERACTIVE, timeout: float = 600.0, load: PoolLoad = LOAD) -> float:
    return excess_seconds(forecast(load, ahead, load.answer_tokens), load, ahead, PROMISES, tier, timeout)


def test_refusals_name_the_time_until_the_promise_holds_again() -> None:
    allowed = PROMISE_SHARE * 1.0 - 0.2  # of waiting
    assert excess(3) == 0
    assert excess(9) == pytest.approx(1.2 - allowed)
    # After that time as many requests fewer are ahead.
    assert excess(9 - excess(9) / 0.12) == pytest.approx(0)


def test_after_a_burst_a_retry_waits_for_whole_rounds_of_answers() -> None:
    # The rows of running answers are free after 0.7, 1.9 and 3.1 s, the one for a request behind 20 others at last.
    fresh = replace(LOAD, ages=(0.5,) * 10)
    assert fresh.seconds_until_wait(20, wait_seconds=1.1) == pytest.approx(2.0)
    assert fresh.seconds_until_wait(20, wait_seconds=3.2) == 0
    # So many ends must have come that the others' mean intervals keep the promise, too.
    assert fresh.seconds_until_wait(10, wait_seconds=1.1) == pytest.approx(0.8)
    assert fresh.seconds_until_wait(9, wait_seconds=1.1) == pytest.approx(0.7)
    assert replace(LOAD, slots=0).seconds_until_wait(20, wait_seconds=1.0) == 0


def test_bulk_is_refused_before_standard_and_standard_before_interactive() -> None:
    refused_from = {tier: next(n for n in range(1_000) if excess(n, tier) > 0) for tier in Tier}
    assert refused_from[Tier.BULK] < refused_from[Tier.STANDARD] < refused_from[Tier.INTERACTIVE]


def test_a_tiers_own_promise_may_be_stricter() -> None:
    strict = Promises({**PROMISES.ttft_seconds, Tier.BULK: 0.3})
    one = forecast(LOAD, 0, 1)
    assert excess_seconds(one, LOAD, 0, PROMISES, Tier.BULK, 600) == 0
    assert excess_seconds(one, LOAD, 0, strict, Tier.BULK, 600) == pytest.approx(0.12)


def test_what_is_late_without_waiting_is_not_refused() -> None:
    slow = replace(LOAD, running=0, first_token_seconds=5.0)
    assert excess(0, load=slow) == 0
    assert excess(0, timeout=0.5, load=slow) == 0
    # With requests ahead only the waiting counts.
    full = replace(slow, running=10)
    assert 0 < excess(9, load=full) <= forecast(full, 9, 1).wait_seconds


def test_a_request_that_would_pass_its_timeout_is_refused() -> None:
    assert excess(0, timeout=2.0) == 0
    assert excess(0, timeout=1.25) == pytest.approx(0.12)  # until a row is free
