"""Whether one more sequence fits: the answer is that of a simulation, step by step, until all have ended."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.block_demand import BlockDemand, BlockDemandForecast
from engine.cache.tables import CacheTables
from engine.config import ScheduleConfig
from engine.plan import CacheGroup, RowState
from engine.request import Request, SamplingParams
from tests.engine.scheduler.scheduler_harness import Harness

SIZE = 4
Row = tuple[int, int]
"""Tokens known, and steps to the end."""


def blocks(positions: int) -> int:
    return -(-positions // SIZE)


def blocks_needed(running: list[Row], newcomer: Row) -> int:
    """The free blocks that suffice at every step: rows hold the blocks of their known tokens, and release all after
    their last step; the newcomer holds none yet."""
    wanted_at = []
    for step in range(max(steps for _, steps in [*running, newcomer]) + 1):
        wanted = sum(blocks(known + step) if step <= steps else 0 for known, steps in [*running, newcomer])
        wanted_at.append(wanted - sum(blocks(known) for known, _ in running))
    return max(wanted_at)


row = st.tuples(st.integers(1, 40), st.integers(0, 30))


@settings(max_examples=150, deadline=None)
@given(st.lists(row, min_size=1, max_size=12), row, st.integers(0, 3))
def test_one_more_fits_exactly_when_the_blocks_suffice_at_every_step(
    running: list[Row], newcomer: Row, admitted: int
) -> None:
    # Given rows that have computed all they know, the last ones admitted in this very step,
    state = RowState(len(running), 128, SIZE, 1)
    tables = CacheTables((CacheGroup((0,), None, 400),), state, prefix_caching=False)
    for number, (known, _) in enumerate(running):
        assert tables.grow(number, tables.blocks_for(known))
    old = max(1, len(running) - admitted)
    known, steps = np.array(running[:old], dtype=np.int32).T
    demand, numbers = BlockDemand(tables, 64, 128), np.arange(old, dtype=np.int32)
    forecast = BlockDemandForecast(demand, numbers, state.block_tables, known, known + steps, np.zeros_like(known))
    for number in range(old, len(running)):
        forecast.add(*running[number], 0, number, 0)
    # when one more comes, then it needs what the simulation says, and not one block less.
    need = blocks_needed(running, newcomer)
    assert forecast.fits(*newcomer, newcomer[0], [0], [need])
    assert not forecast.fits(*newcomer, newcomer[0], [0], [need - 1])


def test_answers_of_mixed_lengths_share_a_pool_that_their_sum_would_not_fit() -> None:
    # Given a pool of 40 blocks, long answers (11 blocks at their end), short ones (3 blocks), exact length estimates,
    h = Harness(ScheduleConfig(16, 64), (CacheGroup((0,), None, 41),), SIZE, prefix_caching=False)
    lengths = [40 if number % 4 == 0 else 8 for number in range(24)]
    for number, length in enumerate(lengths):
        params = SamplingParams(max_tokens=length, ignore_eos=True, seed=1)
        prompt = np.array([3, 4, number % 17 + 3, 5], dtype=np.int32)
        h.scheduler.add(Request(str(number), prompt, params, expected_tokens=length), 0.0)
    h.run()
    # when they run, then none is preempted, and more run at once than if all came to their ends together.
    assert h.scheduler.stats.preemptions == 0
    assert max(len(plan.rows) for plan in h.plans) > 8
    for end in h.finished.values():
        h.check_end(end)
