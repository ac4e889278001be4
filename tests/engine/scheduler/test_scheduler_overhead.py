"""The scheduler's work for one step is bounded by the rows of the step, whatever waits in the queue.

The tests count executed lines of Python, which are the same on every machine; benchmarks measure the time (`tokenmill
bench`)."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config import ScheduleConfig
from engine.plan import CacheGroup
from engine.request import Request, SamplingParams
from engine.scheduler.scheduler import Scheduler
from tests.counting import count_lines

ROWS = 256
STEPS = 8


def lines_of_decode_steps(*, prefix_caching: bool, windows: tuple[int | None, ...], waiting: int) -> list[int]:
    """Lines of schedule + update in steps in which 256 rows decode."""
    groups = tuple(CacheGroup((i,), window, ROWS * 32 + 1) for i, window in enumerate(windows))
    scheduler = Scheduler(
        ScheduleConfig(ROWS, 8192, None), groups, 32, 1024, prefix_caching=prefix_caching, eos_token_ids=(1, 2)
    )
    draw = np.random.default_rng(0)
    for i in range(ROWS + waiting):
        prompt = draw.integers(3, 1000, int(draw.integers(16, 200)), dtype=np.int32)
        scheduler.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=800)), 0.0)
    found: list[int] = []
    while len(found) < STEPS:
        scheduling, plan = count_lines(lambda: scheduler.schedule(0.0))
        assert plan is not None
        tokens, failed = np.full(len(plan.rows), 7, dtype=np.int32), np.zeros(len(plan.rows), dtype=np.bool_)
        updating, _ = count_lines(lambda: scheduler.update(plan, tokens, failed, 0.0))  # noqa: B023 - called at once
        if plan.num_decodes == ROWS:
            found.append(scheduling + updating)
    return found


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("windows", [(None,), (512, None)])
@pytest.mark.slow
def test_a_step_does_not_scan_the_queue(prefix_caching: bool, windows: tuple[int | None, ...]) -> None:
    alone = lines_of_decode_steps(prefix_caching=prefix_caching, windows=windows, waiting=0)
    behind = lines_of_decode_steps(prefix_caching=prefix_caching, windows=windows, waiting=2_000)
    print(f"lines a row: {np.median(alone) / ROWS:.1f} alone, {np.median(behind) / ROWS:.1f} with a queue")
    assert np.median(behind) < np.median(alone) + 500
    assert np.median(alone) < 12 * ROWS
