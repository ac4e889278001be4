"""Slots of layers with states: which blocks of a row get one, and what a prefix hits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.config import ScheduleConfig
from engine.plan import NO_BLOCK, STATE_WINDOW, CacheGroup
from engine.request import Request, SamplingParams
from engine.states import state_segments
from tests.engine.scheduler.scheduler_harness import Harness

BLOCK = 4
FAR = 100
"""Blocks between snapshots that no test's sequence is as long as."""


def make_request(name: str, prompt: list[int], max_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return Request(name, np.array(prompt, dtype=np.int32), params)


def tokens(start: int, count: int) -> list[int]:
    """Tokens that differ for each `start`."""
    return [(start * 7 + i * (start % 5 + 1)) % 17 + 3 for i in range(count)]


def harness(*, rows: int = 4, budget: int = 64, every: int = FAR, slots: int = 20, max_drafts: int = 0) -> Harness:
    groups = CacheGroup((0,), None, 64), CacheGroup((1,), STATE_WINDOW, slots + 1, snapshot_blocks=every)
    return Harness(ScheduleConfig(rows, budget), groups, BLOCK, 128, max_drafts=max_drafts)


def run(h: Harness, *requests: Request) -> None:
    """Run the requests; the harness computes each key from the stored state before it."""
    for request in requests:
        h.scheduler.add(request, 0.0)
    h.run()
    for end in h.finished.values():
        h.check_end(end)
    h.check_empty()


def slots_in_use(h: Harness) -> int:
    return int(np.count_nonzero(h.scheduler.rows.block_tables[1]))


def test_a_row_has_two_slots_at_most_however_long_it_grows() -> None:
    h = harness(every=1)
    h.scheduler.add(make_request("a", tokens(1, 3), 100), 0.0)
    held = []
    while h.scheduler.has_work:
        h.step()
        held.append(slots_in_use(h))
    h.check_end(h.finished["a", 0])
    assert max(held) <= 2


def test_a_chunk_takes_slots_for_its_last_two_blocks_and_for_snapshots() -> None:
    h = harness(every=3)
    h.scheduler.add(make_request("a", tokens(1, 9 * BLOCK + 1)), 0.0)
    h.step()
    assert np.flatnonzero(h.scheduler.rows.block_tables[1][0]).tolist() == [2, 5, 8, 9]


def test_a_prompt_that_comes_again_hits_its_last_full_block() -> None:
    h = harness()
    prompt = tokens(1, 5 * BLOCK + 2)
    run(h, make_request("a", prompt))
    run(h, make_request("b", prompt))
    assert h.finished["b", 0].cached_tokens == 5 * BLOCK


@pytest.mark.parametrize("common", [2, 5])
def test_prompts_that_part_inside_a_chunk_hit_what_they_have_in_common(common: int) -> None:
    # Given prompts of which all but the first wait for a row, and a chunk that covers the first one,
    h = harness(rows=1)
    requests = [make_request(str(i), tokens(1, common * BLOCK) + tokens(2 + i, 6 * BLOCK), 1) for i in range(3)]
    run(h, *requests)
    # then the first one leaves a snapshot where they part.
    assert [h.finished[str(i), 0].cached_tokens for i in range(3)] == [0, common * BLOCK, common * BLOCK]


def test_prompts_that_come_one_by_one_leave_a_snapshot_where_the_second_one_parts_from_the_first() -> None:
    h = harness()
    for i in range(3):
        run(h, make_request(str(i), tokens(1, 5 * BLOCK) + tokens(2 + i, 6 * BLOCK), 1))
    assert [h.finished[str(i), 0].cached_tokens for i in range(3)] == [0, 0, 5 * BLOCK]


def test_a_prefix_that_is_retained_has_a_snapshot_at_its_end() -> None:
    h = harness()
    prefix = tokens(1, 5 * BLOCK)
    run(h, replace(make_request("a", prefix + tokens(2, 6 * BLOCK), 1), retain=((len(prefix), 60.0),)))
    assert h.finished["a", 0].retained_tokens == len(prefix)
    run(h, make_request("b", prefix + tokens(3, 6 * BLOCK), 1))
    assert h.finished["b", 0].cached_tokens == len(prefix)


def test_long_answers_leave_the_snapshots_of_prompts() -> None:
    h = harness(slots=8)
    prompt = tokens(1, 5 * BLOCK + 2)
    run(h, make_request("a", prompt))
    run(h, make_request("b", tokens(2, 3), 100))
    run(h, make_request("c", prompt))
    assert h.finished["c", 0].cached_tokens == 5 * BLOCK


def test_a_conversation_hits_the_answer_before() -> None:
    h = harness()
    prompt = tokens(1, 3)
    run(h, make_request("a", prompt, 30))
    said = prompt + h.finished["a", 0].token_ids.tolist()
    run(h, make_request("b", said + tokens(2, 5)))
    assert h.finished["b", 0].cached_tokens == (len(said) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("max_drafts", [1, 3, 9])
def test_drafts_may_reach_over_several_blocks(max_drafts: int) -> None:
    h = harness(max_drafts=max_drafts)
    run(h, *(make_request(str(i), tokens(i, 7 + i), 40) for i in range(4)))
    assert any(plan.drafts is not None for plan in h.plans)


def test_segments_end_at_blocks_with_a_slot_and_before_drafts() -> None:
    table = np.array([[7, NO_BLOCK, 8, 9], [5, NO_BLOCK, NO_BLOCK, NO_BLOCK]], dtype=np.int32)
    starts, counts, first = (np.array(numbers) for numbers in ([2, 1], [13, 1], [1, 0]))
    segments = state_segments(table, BLOCK, starts, counts, first, np.array([2, 0]))
    assert segments.num_single == 1
    assert segments.first.tolist() == [0, 1, 3, 11, 12]
    assert segments.count.tolist() == [1, 2, 8, 1, 2]
    assert segments.read.tolist() == [5, 7, 7, 8, 9]
    assert segments.write.tolist() == [5, 7, 8, 9, NO_BLOCK]


def test_a_state_that_is_written_in_this_step_is_read_after_it() -> None:
    # The first row continues behind the block that the second one fills, the third behind the first one's.
    table = np.array([[1, 2, 3], [1, 0, 0], [1, 2, 4]], dtype=np.int32)
    starts, counts, first = (np.array(numbers) for numbers in ([4, 0, 8], [4, 4, 1], [0, 4, 8]))
    segments = state_segments(table, BLOCK, starts, counts, first)
    assert segments.num_single == 0
    assert segments.first.tolist() == [4, 0, 8]
