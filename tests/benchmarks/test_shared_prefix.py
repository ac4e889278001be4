"""The best possible number of prefix hits, on cases small enough to count by hand."""

from __future__ import annotations

import random

import pytest
from shared_prefix import best_hits


def test_given_prompts_that_share_nothing_when_hits_are_counted_then_there_are_none() -> None:
    assert best_hits([[1, 2, 3, 4, 5], [2, 2, 3, 4, 5], [1]], block_size=2) == 0


def test_given_three_that_share_two_blocks_when_hits_are_counted_then_two_of_them_take_both() -> None:
    head = [1, 2, 3, 4]

    assert best_hits([[*head, 7], [*head, 8], [*head, 9, 9]], block_size=2) == 2 * 4


def test_given_a_prefix_inside_another_when_hits_are_counted_then_each_level_counts_once() -> None:
    outer, inner = [1, 2], [1, 2, 3, 4]

    # The outer block: four hold it, three take it. The inner one: two hold it, one takes it.
    assert best_hits([[*outer, 5], [*outer, 6], [*inner, 7], [*inner, 8]], block_size=2) == 3 * 2 + 2


def test_given_equal_tokens_after_different_ones_when_hits_are_counted_then_they_are_not_shared() -> None:
    assert best_hits([[1, 2, 3, 4, 9], [5, 2, 3, 4, 9]], block_size=2) == 0


def test_given_prompts_that_end_with_the_block_when_hits_are_counted_then_they_compute_it_themselves() -> None:
    assert best_hits([[1, 2], [1, 2]], block_size=2) == 0
    assert best_hits([[1, 2], [1, 2, 3]], block_size=2) == 2, "the longer one takes what the shorter one computed"
    assert best_hits([[1, 2], [1, 2, 3], [1, 2, 4]], block_size=2) == 4


def test_given_blocks_of_one_token_when_hits_are_counted_then_no_shared_token_is_lost_to_a_border() -> None:
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5]]

    assert best_hits(prompts, block_size=2) == 2
    assert best_hits(prompts, block_size=1) == 3


@pytest.mark.parametrize("seed", range(5))
def test_given_random_prompts_when_they_are_shuffled_then_the_best_stays_and_equals_a_plain_count(seed: int) -> None:
    chance = random.Random(seed)
    prompts = [[chance.randrange(2) for _ in range(chance.randrange(1, 12))] for _ in range(30)]
    size = chance.choice([1, 2, 3])

    best = best_hits(prompts, size)

    shuffled = chance.sample(prompts, len(prompts))
    assert best_hits(shuffled, size) == best
    nodes: dict[tuple[int, ...], list[bool]] = {}
    for prompt in prompts:
        for end in range(size, len(prompt) + 1, size):
            nodes.setdefault(tuple(prompt[:end]), []).append(end < len(prompt))
    assert best == size * sum(min(sum(takes), len(takes) - 1) for takes in nodes.values())
