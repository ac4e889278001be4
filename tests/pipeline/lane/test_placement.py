"""Where a request is computed follows from its size and the pools' load, and better conditions never speak against."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.lane.placement import (
    DecodeLoad,
    LatencyTargets,
    Placement,
    PrefillLoad,
    RequestSize,
    TransferCost,
    estimate_prompt_tokens,
    forecast,
    place,
)

# An 8B model in 16 bits on H100s.
PREFILL = PrefillLoad(
    workers=2, waiting_tokens=0, tokens_per_second=40_000.0, min_step_seconds=0.007, row_step_seconds=0.05
)
DECODE = DecodeLoad(
    workers=2, running_rows=80, waiting_rows=0, waiting_tokens=0, kv_tokens=800_000, kv_tokens_used=200_000,
    answer_tokens=200.0, step_seconds=0.012, tokens_per_second=40_000.0, step_tokens=8_192, free_step_tokens=250.0,
)  # fmt: skip
TRANSFER = TransferCost(kv_bytes_per_token=131_072.0, bytes_per_second=12.5e9, latency_seconds=0.005)
TARGETS = LatencyTargets(ttft_seconds=1.0, itl_seconds=0.05)
LONG = RequestSize(prompt_tokens=8_000, cached_tokens=0, answer_tokens=200)
SHORT = RequestSize(prompt_tokens=150, cached_tokens=0, answer_tokens=200)


def placement(
    request: RequestSize,
    prefill: PrefillLoad = PREFILL,
    decode: DecodeLoad = DECODE,
    transfer: TransferCost = TRANSFER,
    targets: LatencyTargets = TARGETS,
) -> Placement:
    return place(request, prefill, decode, transfer, targets).placement


def test_given_a_long_prompt_then_it_is_split() -> None:
    assert placement(LONG) is Placement.SPLIT


def test_given_a_prompt_that_fits_beside_the_weights_reading_then_it_stays_whole() -> None:
    assert placement(SHORT) is Placement.WHOLE_ON_DECODE
    assert placement(replace(LONG, cached_tokens=7_900)) is Placement.WHOLE_ON_DECODE, "most of it is cached"


def test_given_many_prompts_before_it_then_the_decode_workers_are_sooner() -> None:
    waiting = replace(PREFILL, waiting_tokens=2 * 40_000.0)
    assert placement(LONG, waiting) is Placement.WHOLE_ON_DECODE
    # Where nobody decodes, a chunk delays nobody, and fewer waiting prompts are enough.
    idle = replace(DECODE, running_rows=0, kv_tokens_used=0)
    assert placement(LONG, replace(PREFILL, waiting_tokens=16_000.0), idle) is Placement.WHOLE_ON_DECODE


def test_given_all_would_be_late_then_the_least_late_is_chosen() -> None:
    waiting, busy = replace(PREFILL, waiting_tokens=5 * 80_000.0), replace(DECODE, waiting_tokens=80_000.0)
    assert placement(LONG, waiting, busy) is Placement.WHOLE_ON_DECODE
    assert (
        placement(LONG, replace(PREFILL, waiting_tokens=80_000.0), replace(busy, waiting_tokens=8e5)) is Placement.SPLIT
    )


def test_given_a_slow_link_then_its_keys_and_values_stay_where_they_are() -> None:
    assert placement(LONG, transfer=replace(TRANSFER, bytes_per_second=0.1e9)) is not Placement.SPLIT
    assert placement(LONG, transfer=replace(TRANSFER, waiting_bytes=200e9)) is not Placement.SPLIT


def test_given_one_token_of_answer_then_there_is_nothing_to_hand_over() -> None:
    assert placement(replace(LONG, answer_tokens=1)) is Placement.WHOLE_ON_PREFILL


def test_given_full_caches_of_the_decode_workers_then_the_prefill_worker_answers() -> None:
    full = replace(DECODE, kv_tokens_used=DECODE.kv_tokens, waiting_rows=400)
    assert placement(LONG, decode=full) is Placement.WHOLE_ON_PREFILL


def test_given_rows_that_are_late_already_then_no_prompt_joins_them() -> None:
    slow = replace(DECODE, step_seconds=0.049)
    (beside,) = (
        one for one in forecast(LONG, PREFILL, slow, TRANSFER, TARGETS) if one.placement is Placement.WHOLE_ON_DECODE
    )
    assert beside.ttft_seconds > 1.0, "chunks are small"
    assert placement(LONG, replace(PREFILL, waiting_tokens=40_000.0), slow) is not Placement.WHOLE_ON_DECODE


def test_given_one_pool_only_then_requests_are_whole_there() -> None:
    for request in (LONG, SHORT):
        assert placement(request, replace(PREFILL, workers=0)) is Placement.WHOLE_ON_DECODE
        assert placement(request, decode=replace(DECODE, workers=0)) is Placement.WHOLE_ON_PREFILL
    with pytest.raises(ValueError, match="no worker"):
        placement(LONG, replace(PREFILL, workers=0), replace(DECODE, workers=0))


def test_given_sizes_that_cannot_be_then_they_are_refused() -> None:
    for sizes in ((0, 0, 1), (5, 5, 1), (5, -1, 1), (5, 0, 0)):
        with pytest.raises(ValueError, match="at least one token"):
            RequestSize(*sizes)
    assert [estimate_prompt_tokens(number) for number in (0, 4, 4_000)] == [1, 1, 1_000]


requests = st.builds(
    lambda prompt, cached, answer: RequestSize(prompt, int(cached * prompt), answer),
    st.integers(1, 200_000), st.floats(0, 0.99), st.integers(1, 5_000),
)  # fmt: skip
prefills = st.builds(
    PrefillLoad, st.integers(0, 20), st.floats(0, 1e7), st.floats(100, 1e6), st.floats(0, 0.1), st.floats(0.001, 1.0)
)  # fmt: skip
decodes = st.builds(
    DecodeLoad, st.integers(1, 20), st.integers(0, 5_000), st.integers(0, 500), st.floats(0, 1e7),
    st.integers(100_000, 10**7), st.integers(1, 100_000), st.floats(1, 5_000), st.floats(0.001, 0.2),
    st.floats(100, 1e6), st.integers(2_048, 16_384), st.floats(1, 1_000),
)  # fmt: skip
transfers = st.builds(TransferCost, st.floats(1e3, 1e6), st.floats(1e8, 1e12), st.floats(0, 1), st.floats(0, 1e12))


@given(requests, prefills, decodes, transfers, st.floats(1.1, 1_000))
def test_a_faster_link_never_speaks_against_splitting(
    request: RequestSize, prefill: PrefillLoad, decode: DecodeLoad, transfer: TransferCost, factor: float
) -> None:
    if placement(request, prefill, decode, transfer) is Placement.SPLIT:
        faster = replace(transfer, bytes_per_second=factor * transfer.bytes_per_second)
        assert placement(request, prefill, decode, faster) is Placement.SPLIT


@given(requests, prefills, decodes, transfers, st.floats(0, 1e7))
def test_a_longer_queue_never_speaks_for_the_prefill_workers(
    request: RequestSize, prefill: PrefillLoad, decode: DecodeLoad, transfer: TransferCost, more: float
) -> None:
    if placement(request, prefill, decode, transfer) is Placement.WHOLE_ON_DECODE:
        longer = replace(prefill, waiting_tokens=prefill.waiting_tokens + more)
        assert placement(request, longer, decode, transfer) is Placement.WHOLE_ON_DECODE


@given(requests, prefills, decodes, transfers)
def test_a_placement_in_time_is_never_passed_over_for_one_that_is_late(
    request: RequestSize, prefill: PrefillLoad, decode: DecodeLoad, transfer: TransferCost
) -> None:
    chosen = place(request, prefill, decode, transfer, TARGETS)
    others = forecast(request, prefill, decode, transfer, TARGETS)
    assert chosen in others
    assert chosen.is_in_time(TARGETS) or not any(one.is_in_time(TARGETS) for one in others)
    if chosen.is_in_time(TARGETS):
        assert chosen.delay_seconds == min(one.delay_seconds for one in others if one.is_in_time(TARGETS))
    else:
        assert chosen.lateness(TARGETS) == min(one.lateness(TARGETS) for one in others)
