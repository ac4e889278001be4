"""The growth metrics on numbers made by hand, and decoding at a context on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from growth import DECODED, added, decode_at, engine_alone, growth
from machine_peaks import Kernel, MachinePeaks, Read
from roofline import ModelCost, Precision, decoder_of, roofline
from step_record import StepRecorder

from engine import CacheConfig, Engine, EngineConfig, ScheduleConfig


def test_given_rates_when_growth_is_judged_then_the_slowest_larger_size_counts_against_the_smallest() -> None:
    steady = growth({1_000: [100.0, 90.0, 101.0], 10_000: [96.0], 100_000: [130.0]})
    slower = growth({1_000: [100.0], 10_000: [120.0], 100_000: [94.0]})

    assert steady["loss"] == pytest.approx(0.04)
    assert steady["within_allowed"]
    assert slower["loss"] == pytest.approx(0.06)
    assert not slower["within_allowed"]


def test_given_jobs_when_rows_are_added_then_what_every_job_costs_once_is_left_out() -> None:
    jobs = [
        {"rows": 10, "tokens": 100, "wall_seconds": 5.0 + 1.0},
        {"rows": 100, "tokens": 1000, "wall_seconds": 5.0 + 10.0},
        {"rows": 1000, "tokens": 10_000, "wall_seconds": 5.0 + 190.0},
    ]

    assert added(jobs) == {100: pytest.approx(100.0), 1000: pytest.approx(50.0)}


def test_given_the_engine_alone_when_it_runs_then_it_has_a_rate(tiny_model: Callable[[str], Path]) -> None:
    assert engine_alone(tiny_model("llama"), 40) > 0


def test_given_a_context_when_rows_decode_at_it_then_all_its_steps_read_about_so_many_tokens(
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tiny_model("llama")
    config = EngineConfig(
        dtype="float32", threads=1, cache=CacheConfig(num_blocks=64, prefix_caching=False),
        schedule=ScheduleConfig(max_num_seqs=2, max_num_batched_tokens=128),
    )  # fmt: skip
    engine = Engine.load(folder, config)
    recorder = StepRecorder.attach(engine)

    found = decode_at(engine, recorder, context=256, batch=2, name="a")

    steps = found["steps"]
    assert len(steps) >= DECODED - 2
    assert abs(found["context"] - 256) <= 8
    assert all(abs(step.attention[0].read_tokens / 2 - 256) < DECODED for step in steps)
    assert found["step_seconds"] > 0
    peaks = MachinePeaks(1, 1e9, (Kernel("fma", "f32", 1e15, 1.0),), (Read(1 << 20, 1e9),))
    cost = ModelCost.of(decoder_of(folder), Precision.of(config, torch.float32))
    limit = roofline(steps, cost, peaks, 1.0)
    weights = 4 * (cost.layer_parameters + cost.head_parameters)
    keys_and_values = 2 * 4 * 2 * cost.kv_size * 3 * 256
    assert limit.limit_seconds / len(steps) == pytest.approx((weights + keys_and_values) / 1e9, rel=0.05)
