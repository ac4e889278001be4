"""The roofline's arithmetic on steps made by hand, and the recorder on an engine whose steps can be counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machine_peaks import Kernel, MachinePeaks, PeaksError, Read, build, disturbed, measure
from roofline import ModelCost, Precision, decoder_of, roofline
from step_record import StepRecord, StepRecorder, occupancy

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.plan import StepPlan
from engine.scheduler.step_cost import GroupWork, count_group_work

BF16 = Precision(weights="bf16", linears="bf16", kv="bf16", scores="bf16", values="bf16", head="bf16")
PEAKS = MachinePeaks(
    threads=1,
    clock_hz=1e9,
    kernels=(
        Kernel("wide", "bf16", 100.0, 2.0),
        Kernel("wider", "int8", 400.0, 2.0),
        Kernel("fma", "f32", 50.0, 2.0),
    ),
    reads=(Read(100, 40.0), Read(1000, 10.0), Read(10_000, 20.0)),
)


def plan(starts: list[int], counts: list[int]) -> StepPlan:
    """A step of rows 0, 1, … that samples each row's next token."""
    rows = len(starts)
    return StepPlan(
        rows=np.arange(rows, dtype=np.int32),
        starts=np.array(starts, dtype=np.int32),
        counts=np.array(counts, dtype=np.int32),
        num_logits=np.ones(rows, dtype=np.int32),
        samples=np.ones(rows, dtype=np.bool_),
        num_decodes=counts.count(1),
        num_tokens=sum(counts),
    )


def step(begun: float = 0.0, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {"ended": begun + 1, "running": 1, "rows": 1, "tokens": 1, "logits_rows": 1}
    return StepRecord(begun=begun, **{**fields, "attention": (GroupWork(0, 1, 1),), **changes})


def test_given_two_rows_when_a_step_is_read_then_each_sees_its_own_past_and_what_it_computes() -> None:
    table = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)

    work = count_group_work(plan([5, 0], [1, 3]), table, None, block_size=4, seen=np.zeros(8, dtype=np.bool_))

    # Row 0 reads 5 cached tokens and sees 6 keys; row 1 reads none, its 3 tokens see 1 + 2 + 3.
    assert work == GroupWork(read_tokens=5, pairs=6 + 6, logits_pairs=6 + 3)


def test_given_rows_that_share_blocks_when_a_step_is_read_then_these_are_read_once_and_computed_for_each() -> None:
    table = np.array([[1, 2, 3], [1, 2, 4], [1, 5, 6]], dtype=np.int32)
    seen = np.zeros(8, dtype=np.bool_)

    work = count_group_work(plan([9, 10, 8], [1, 1, 1]), table, None, block_size=4, seen=seen)

    assert work == GroupWork(read_tokens=9 + 10 + 8 - 4 - 4 - 4, pairs=10 + 11 + 9, logits_pairs=30)
    assert not seen.any()


def test_given_a_window_when_a_step_is_read_then_nothing_behind_it_counts() -> None:
    table = np.array([[0, 2, 3]], dtype=np.int32)

    # Positions 8 and 9, each sees itself and the two before it: 6 pairs. Cached: 6 and 7.
    work = count_group_work(plan([8], [2]), table, 3, block_size=4, seen=np.zeros(8, dtype=np.bool_))

    assert work == GroupWork(read_tokens=2, pairs=6, logits_pairs=3)
    edge = count_group_work(plan([1], [4]), table, 3, block_size=4, seen=np.zeros(8, dtype=np.bool_))
    assert edge == GroupWork(read_tokens=1, pairs=2 + 3 + 3 + 3, logits_pairs=3)


def test_given_a_model_when_a_step_is_priced_then_bytes_and_operations_are_those_counted_by_hand() -> None:
    cost = ModelCost(10, 3, 4, query_size=6, kv_size=2, group_layers=(3,), last_group=0, precision=BF16)
    record = step(tokens=2, logits_rows=1, attention=(GroupWork(read_tokens=7, pairs=5, logits_pairs=4),))

    assert cost.bytes_moved(record) == (10 + 4) * 2 + 2 * 2 * 3 * (7 + 2) * 2
    # one position of two has no logits: three of the last layer's parameters and a pair are not needed for it
    assert cost.operations(record) == {"bf16": 2 * (10 * 2 - 3 + 4 * 1) + 4 * 6 * (3 * 5 - 1)}


def test_given_no_logits_and_int8_when_a_step_is_priced_then_the_head_is_not_read_and_dtypes_are_apart() -> None:
    int8 = Precision(weights="int8", linears="int8", kv="int8", scores="int8", values="bf16", head="bf16")
    cost = ModelCost(10, 3, 4, query_size=6, kv_size=2, group_layers=(3,), last_group=0, precision=int8)
    record = step(tokens=2, logits_rows=0, attention=(GroupWork(read_tokens=7, pairs=5, logits_pairs=0),))

    assert cost.bytes_moved(record) == 10 + 2 * 2 * 3 * (7 + 2)
    assert cost.operations(record) == {"int8": 2 * (10 * 2 - 3 * 2) + 2 * 6 * 2 * 5, "bf16": 2 * 6 * 2 * 5}


def test_given_steps_bound_by_either_when_a_run_is_summed_then_each_counts_by_its_own_limit() -> None:
    cost = ModelCost(50, 0, 0, 1, 1, group_layers=(1,), last_group=0, precision=BF16)
    reading = step(tokens=1, attention=(GroupWork(0, 0, 0),))  # 104 bytes at 20 a second; 100 operations at 100
    computing = step(begun=1.0, tokens=10, attention=(GroupWork(0, 0, 0),))  # 140 bytes; 1,000 operations at 100

    found = roofline([reading, computing], cost, PEAKS, measured_seconds=30.4)

    assert found.bound_by_bytes == pytest.approx(104 / 20)
    assert found.bound_by_operations == pytest.approx(10.0)
    assert found.share == pytest.approx((5.2 + 10) / 30.4)
    assert found.step_seconds == 2.0
    assert (found.bytes_moved, found.operations) == (244, {"bf16": 1100})


def test_given_sizes_when_bandwidth_is_requested_then_no_larger_pass_was_faster() -> None:
    assert PEAKS.bandwidth(50) == 40
    assert PEAKS.bandwidth(500) == 20, "a larger pass reached 20, so one of 500 bytes can too"
    assert PEAKS.bandwidth(1e6) == 20
    assert PEAKS.operations_per_second("bf16") == 100
    with pytest.raises(PeaksError, match="fp8"):
        PEAKS.operations_per_second("fp8")


def test_given_two_measurements_when_they_are_joined_then_the_higher_rates_stay() -> None:
    other = MachinePeaks(
        1, 2e9, (Kernel("wide", "bf16", 90.0, 1.8), *PEAKS.kernels[1:]), (Read(100, 60.0), *PEAKS.reads[1:])
    )

    best = PEAKS.best_with(other)

    assert (best.clock_hz, best.operations_per_second("bf16"), best.bandwidth(100)) == (2e9, 100.0, 60.0)
    slow = MachinePeaks(2, 1.0e9, best.kernels, best.reads)
    assert disturbed({1: best, 2: slow})
    assert not disturbed({1: best, 2: best})


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.exhaustive  # beside other tests, cycles are counted that others had
def test_given_this_machine_when_it_is_measured_then_instructions_per_cycle_are_plausible() -> None:
    found = measure([1], sizes=[1 << 20, 8 << 20], round_seconds=0.004)[1]

    assert found.clock_hz > 5e8
    assert all(0.05 < kernel.instructions_per_cycle < 8 for kernel in found.kernels)
    assert {"f32", "int8"} <= {kernel.dtype for kernel in found.kernels}
    assert [read.bytes for read in found.reads] == [1 << 20, 8 << 20]
    assert all(1e8 < read.bytes_per_second < 1e13 for read in found.reads)


def test_given_no_compiler_when_the_machine_is_measured_then_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    with pytest.raises(PeaksError, match="no C compiler"):
        build(tmp_path)


def test_given_a_run_when_it_is_recorded_then_steps_hold_what_the_engine_computed(
    tiny_model: Callable[[str], Path],
) -> None:
    config = EngineConfig(
        dtype="float32", threads=1, cache=CacheConfig(block_size=4, num_blocks=64),
        schedule=ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=16),
    )  # fmt: skip
    engine = Engine.load(tiny_model("mistral"), config)
    recorder = StepRecorder.attach(engine)
    requests = [
        Request(
            str(i), as_token_ids([5, 6, 7, 8, 9, i + 20]), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        )
        for i in range(3)
    ]

    completions = list(engine.run(requests))

    steps = recorder.take()
    stats = engine.stats()
    assert len(completions) == 3
    assert len(steps) == stats.steps
    assert sum(record.tokens for record in steps) == stats.computed
    assert sum(record.logits_rows for record in steps) == stats.generated == 12
    assert max(record.running for record in steps) == 3
    assert all(one.ended <= two.begun for one, two in pairwise(steps))
    # Two rows take the first block from the cache; all three compute the rest: pairs don't depend on who computed.
    assert stats.cached == 8
    (window,) = {record.attention[0].pairs for record in steps[-1:]}
    assert window == 3 * 8, "the sliding window holds 8 keys for each of three rows"

    cost = ModelCost.of(decoder_of(tiny_model("mistral")), Precision.of(config, torch.float32))
    assert cost.layer_parameters == 3 * (48 * (64 + 32 + 32) + 64 * 48 + 3 * 48 * 80)
    assert cost.head_parameters == 257 * 48
    assert cost.group_layers == (3,)


def test_given_steps_when_occupancy_is_taken_then_time_counts_and_the_tail_is_what_lies_under_a_quarter() -> None:
    steps = [
        step(begun=0.0, running=1, rows=1),
        step(begun=1.0, running=8, rows=6),
        step(begun=5.0, running=2, rows=2),
        step(begun=7.0, running=1, rows=1),
    ]

    found = occupancy(steps, slots=8, ended=10.0)

    assert found.mean_rows == pytest.approx((1 * 1 + 6 * 4 + 2 * 2 + 1 * 3) / 10)
    assert found.mean_rows_per_step == pytest.approx(10 / 4)
    assert found.tail_share == pytest.approx((1 + 3) / 10), "two of eight is a quarter"
    assert found.tail_at_end == pytest.approx(3 / 10)
