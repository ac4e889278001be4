"""Drafts in the schedule: they get the rest of the budget, and rejected ones leave nothing in the prefix cache."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config import ScheduleConfig
from engine.plan import CacheGroup
from engine.request import FinishReason, Request, SamplingParams
from tests.engine.scheduler.scheduler_harness import Harness


def harness(blocks: int, max_drafts: int, *, block_size: int = 4, rows: int = 4, budget: int = 64) -> Harness:
    groups = (CacheGroup((0,), None, blocks + 1),)
    return Harness(ScheduleConfig(rows, budget), groups, block_size=block_size, max_drafts=max_drafts)


def requests(count: int, max_tokens: int = 24) -> list[Request]:
    """Prompts of four tokens and a number; with their seeds the model never generates the poisonous token."""
    return [
        Request(
            f"r{i}",
            np.array([3, 4, 5, 6, 7 + i % 9], dtype=np.int32),
            SamplingParams(max_tokens=max_tokens, seed=5 * i + 1, ignore_eos=True),
        )
        for i in range(count)
    ]


def run(h: Harness, made: list[Request]) -> None:
    for request in made:
        h.scheduler.add(request, 0.0)
    h.run()
    for end in h.finished.values():
        h.check_end(end)
    h.check_empty()


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_given_rejected_drafts_that_fill_blocks_then_no_block_is_published_under_them(block_size: int) -> None:
    # Given a cache whose named blocks are compared with their names after each step (see the harness),
    h = harness(1000, 9, block_size=block_size)
    run(h, requests(24))
    stats = h.scheduler.stats.speculation
    # then accepted and rejected drafts have crossed borders of blocks, and answers are right.
    assert stats.accepted > 100
    assert stats.drafted - stats.accepted > 100
    # What was accepted is found again by the next one with the same beginning.
    again = Request("again", np.array([3, 4, 5, 6, 7, *h.finished["r0", 0].token_ids[:20]], dtype=np.int32))
    h.scheduler.add(again, 0.0)
    h.run()
    assert h.finished["again", 0].cached_tokens >= 24 // block_size * block_size


def test_given_a_small_budget_then_drafts_use_only_unused_tokens() -> None:
    h = harness(400, 9, budget=6)
    run(h, requests(12))
    drafted = [plan for plan in h.plans if plan.drafts is not None]
    assert drafted
    for plan in h.plans:
        # Drafts take no token of the budget from another row.
        assert plan.num_tokens <= 6
        if plan.drafts is not None:
            assert (plan.counts - plan.drafts >= 1).all()
    widest = max(len(plan.rows) for plan in h.plans)
    assert widest == 4


def test_given_a_full_pool_then_no_sequence_is_preempted_for_a_draft() -> None:
    # Given room for just what two sequences hold at their ends,
    made = requests(2, max_tokens=23)
    h = harness(14, 9, rows=2)
    h.poison = False  # after which a row would be preempted, and counted
    run(h, made)
    assert h.scheduler.stats.speculation.accepted > 3
    assert h.scheduler.stats.preemptions == 0


@pytest.mark.slow
def test_given_steps_planned_ahead_then_a_row_with_drafts_under_way_waits_for_what_comes_of_them() -> None:
    # Given so small a budget that not all rows fit a step, and others are planned while some wait
    h = harness(400, 5, budget=8)
    h.depth = 3
    for request in requests(24):
        h.scheduler.add(request, 0.0)
    waits = 0
    while h.scheduler.has_work or h.in_flight:
        drafting = {row for plan in h.in_flight if plan.drafts is not None for row in plan.rows[plan.drafts > 0]}
        if (plan := h.step()) is not None:
            assert drafting.isdisjoint(plan.rows)
            waits += bool(drafting)
    for end in h.finished.values():
        h.check_end(end)
    h.check_empty()
    assert waits > 10
    assert h.scheduler.stats.speculation.accepted > 50


def test_given_no_room_behind_the_last_token_then_nothing_is_drafted_there() -> None:
    h = harness(400, 9)
    run(h, requests(6, max_tokens=2))
    # Of two tokens the first comes with the prompt, and behind the second there is none to draft.
    assert h.scheduler.stats.speculation.drafted == 0


@pytest.mark.slow
def test_given_rows_that_fail_at_an_accepted_draft_then_no_later_draft_of_theirs_reaches_other_rows() -> None:
    """Here the model itself generates the poisonous token, so a draft of it is accepted: the drafts behind it are
    poisonous as well, in blocks that other rows get in the next step."""
    failures = 0
    for first, second in np.ndindex(8, 21):
        h = harness(7, 9, block_size=2, rows=2, budget=16)
        params = SamplingParams(max_tokens=8, seed=0, ignore_eos=True)
        prompts = [np.array([2 + first, 2 + second, last], dtype=np.int32) for last in range(2, 6)]
        run(h, [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)])
        failures += sum(end.finish_reason is FinishReason.ERROR for end in h.finished.values())
    assert failures > 30
