"""Prompt lookup: what is found, what is not, and that finding it never means reading the text again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.plan import RowState
from engine.request import Request, SamplingParams, as_token_ids
from engine.speculative.base import DraftRequest
from engine.speculative.proposers.ngram import NgramProposer
from engine.speculative.proposers.ngram_index import AGREEMENT, NgramIndex, agreement
from engine.speculative.proposers.siblings import Siblings


class Rows:
    """A proposer before one row whose text grows."""

    def __init__(self, length: int = 4096) -> None:
        self.state = RowState(2, length, 16, 1)
        self.proposer = NgramProposer(self.state)
        self.epoch = 1

    def draft(self, text: list[int], most: int = 8, salt: bytes = b"") -> tuple[list[int], str]:
        self.state.token_ids[0, : len(text)] = text
        self.state.num_known[0] = len(text)
        request = Request("r", as_token_ids([1]), SamplingParams(), salt=salt)
        [draft] = self.proposer.propose([DraftRequest(0, self.epoch, most, request, 0)])
        return draft.tokens.tolist(), draft.source


def test_given_an_ngram_that_occurred_before_then_the_tokens_behind_it_are_drafted() -> None:
    text = [*range(10, 60), 200, 201, *range(20, 28)]
    assert Rows().draft(text) == (list(range(28, 36)), "ngram")
    assert Rows().draft(text, most=3) == ([28, 29, 30], "ngram")


def test_given_no_earlier_occurrence_then_nothing_is_drafted() -> None:
    assert Rows().draft(list(range(10, 400)))[0] == []


def test_given_two_positions_then_the_one_with_the_longest_agreement_is_copied() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 100, 101, 102, 103, 9, 6, 7, 110, 111, 112, 113, 50, 1, 2, 3, 4, 5, 6, 7]
    assert Rows().draft(text, most=3)[0] == [100, 101, 102]


def test_given_few_agreeing_tokens_then_few_are_drafted() -> None:
    text = [1, 2, 50, 51, 52, 53, 54, 55, 9, 1, 2]
    assert Rows().draft(text)[0] == [50, 51]


def test_given_a_copy_that_differs_in_one_token_then_it_is_followed_behind_it() -> None:
    rows, source = Rows(), list(range(10, 60))
    assert rows.draft([*source, 5, *source[:20]], most=4)[0] == source[20:24]
    # The text took another token than the one that was drafted: the copy may go on behind it.
    assert rows.draft([*source, 5, *source[:20], 99], most=4)[0] == source[21:22]
    assert rows.draft([*source, 5, *source[:20], 99, *source[21:23]], most=4)[0] == source[23:25]


def test_given_a_text_that_goes_round_then_it_is_followed_round() -> None:
    assert Rows().draft([9, *[4, 5, 6] * 4], most=8)[0] == [4, 5, 6, 4, 5, 6, 4, 5]


def test_given_a_new_owner_of_the_row_then_the_old_text_is_forgotten() -> None:
    rows = Rows()
    old = [*range(10, 60), *range(20, 28)]
    assert rows.draft(old)[0]
    rows.epoch += 1
    assert rows.draft([*range(100, 158), *range(20, 28)])[0] == []
    # And its own text is read from the beginning.
    rows.epoch += 1
    assert rows.draft([*range(300, 340), *range(310, 316)])[0] == list(range(316, 322))


def test_given_an_ended_answer_then_its_owner_copies_from_it_and_others_do_not() -> None:
    rows = Rows()
    rows.proposer.learn(Request("a", as_token_ids([1]), SamplingParams(), salt=b"one"), as_token_ids(range(300, 340)))
    text = [*range(10, 40), *range(310, 318)]
    assert rows.draft(text, salt=b"one") == (list(range(318, 326)), "siblings")
    rows.epoch += 1
    assert rows.draft(text, salt=b"two")[0] == []
    rows.epoch += 1
    assert rows.draft(text)[0] == []


def test_given_an_answer_that_ends_then_the_next_one_is_no_part_of_it() -> None:
    siblings = Siblings(4096)
    siblings.add(as_token_ids(range(300, 340)), b"a")
    siblings.add(as_token_ids(range(500, 540)), b"b")
    found = siblings.find(as_token_ids(range(330, 338)), b"a")
    assert found is not None
    agreed, text, position, end = found
    assert (agreed, text[position:end].tolist()) == (8, [338, 339])
    assert siblings.find(as_token_ids(range(332, 340)), b"a") is None


def test_given_more_answers_than_there_is_room_for_then_the_oldest_go_and_the_newest_are_found() -> None:
    siblings, chance = Siblings(4096), random.Random(3)
    answers = [as_token_ids([chance.randrange(1 << 20) for _ in range(150)]) for _ in range(80)]
    for answer in answers:
        siblings.add(answer, b"")
        assert len(siblings) <= 4096
        found = siblings.find(answer[:100], b"")
        assert found is not None
        assert found[1][found[2] : found[3]].tolist() == answer[100:].tolist()
    assert siblings.find(answers[0][:100], b"") is None
    siblings.add(as_token_ids(range(9000)), b"")
    assert len(siblings) <= 4096


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [*(pytest.param(each, marks=pytest.mark.exhaustive) for each in (1, 3)), 40])
def test_given_a_text_read_in_pieces_then_it_is_indexed_as_if_read_at_once(chunks: int) -> None:
    chance = random.Random(chunks)
    text = as_token_ids([chance.randrange(6) for _ in range(700)])
    whole, pieces = NgramIndex((5, 3, 2), capacity=700), NgramIndex((5, 3, 2), capacity=700)
    whole.extend(text, 700)
    for end in [*sorted(chance.randrange(700) for _ in range(chunks)), 700]:
        pieces.extend(text, end)
    right = 0
    for end in range(10, 700):
        positions = [last_before(text, text[end - size : end]) for size in (5, 3, 2)]
        for index in (whole, pieces):
            # N-grams share entries now and then, and a shared one names the position of another.
            right += sum(position in index.positions(text[:end]) for position in positions)
    assert right > 0.9 * 2 * 3 * 690


def last_before(text: np.ndarray, run: np.ndarray) -> int | None:
    size = len(run)
    ends = [end for end in range(size, len(text) + 1) if (text[end - size : end] == run).all()]
    return ends[-1] if ends else None


def test_agreement_is_counted_from_the_end_and_not_further_than_needed() -> None:
    text = as_token_ids([5, 6, 7, 8, 9, 9, 7, 8])
    assert agreement(text, 4, text) == 2
    assert agreement(text, 1, text) == 0
    long = as_token_ids(list(range(100)) * 2)
    assert agreement(long, 100, long) == AGREEMENT


def test_a_step_reads_only_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, text = Rows(), list(range(3, 3000))
    rows.draft(text)
    seen: list[tuple[int, int]] = []
    read = NgramIndex.read

    def watched(self: NgramIndex, text: np.ndarray, done: int, end: int, begin: int, salt: int = 0) -> None:
        seen.append((done, end))
        read(self, text, done, end, begin, salt)

    monkeypatch.setattr(NgramIndex, "read", watched)
    rows.draft([*text, 7, 8, 9])
    assert seen == [(2996, 2999)]


def test_given_a_text_without_repetition_then_the_lookup_interval_grows_until_a_hit() -> None:
    rows, looks, text = Rows(), [], list(range(3, 40))
    for token in range(100, 160):
        text.append(token)
        rows.draft(text)
        looks.append(rows.proposer._rows[0].misses)
    assert 24 < looks[-1] < 40
    # What begins to come again then is found within a few tokens.
    found = []
    for token in range(5, 15):
        text.append(token)
        found.append(len(rows.draft(text)[0]))
    assert 0 < next(at for at, count in enumerate(found) if count) <= 5
    assert all(found[6:])
