"""Stop strings: found across token borders, exactly where reading the whole text after each token would find them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.detokenizer import IncrementalDetokenizer, StopStringWatcher
from workers.tokenizer import TokenIds, Tokenizer

PROMPT = np.array([1, 50, 60, 70, 80], dtype=np.int32)
PIECES = ["a", "b", " ", "\n", "STOP", "ST", "OP", "日本", "語", "🎉", "é", "<end>", "The quick", "##", "#", "\n\nQ:"]
STOPS = ["STOP", "\n\n", "#", "###", "日本語", "🎉", " a", "ab", "b S", "é", "P", "OPS", "Q:"]


def ids_of(tokenizer: Tokenizer, pieces: list[str], cut_up: bool) -> list[int]:
    """Tokens of the pieces; cut up, each character (or byte of it) is a token of its own."""
    texts = list("".join(pieces)) if cut_up else pieces
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [int(token) for ids in encoded for token in ids]


def oracle(tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int) -> tuple[int, str] | None:
    """Reads the whole text after each token: (tokens until a stop string counted, the text before it)."""
    free = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode_answers([PROMPT], [ids[:count]])[0].rstrip("\ufffd")
        if count <= min_tokens:
            free = len(text)
            continue
        starts = [text.find(stop, max(0, free - len(stop) + 1)) for stop in stops]
        if any(start >= 0 for start in starts):
            return count, text[: min(start for start in starts if start >= 0)]
    return None


def watch(tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int) -> tuple[int, str] | None:
    watcher = StopStringWatcher(tokenizer, PROMPT, stops, min_tokens)
    for count, token_id in enumerate(ids, start=1):
        if watcher.push(token_id):
            assert watcher.text is not None
            return count, watcher.text
    assert watcher.text is None
    return None


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    cut_up=st.booleans(),
    stops=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
    min_tokens=st.integers(0, 8),
)
def test_stops_where_reading_everything_again_would(
    kits: dict[str, Tokenizer], kind: str, pieces: list[str], cut_up: bool, stops: list[str], min_tokens: int
) -> None:
    tokenizer = kits[kind]
    ids = ids_of(tokenizer, pieces, cut_up)
    assert watch(tokenizer, ids, stops, min_tokens) == oracle(tokenizer, ids, stops, min_tokens)


@pytest.fixture(scope="module")
def kits(byte_level: Tokenizer, sentencepiece: Tokenizer) -> dict[str, Tokenizer]:
    return {"byte_level": byte_level, "sentencepiece": sentencepiece}


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=60))
def test_any_tokens_stop_only_where_the_text_has_the_stop(
    kits: dict[str, Tokenizer], kind: str, ids: list[int]
) -> None:
    # Given tokens that need not be text at all, when a stop is found, then the answer's text really has it there
    tokenizer = kits[kind]
    stops = ["e", "qu"]
    found = watch(tokenizer, ids, stops, 0)
    if found is not None:
        count, text = found
        whole = tokenizer.decode_answers([PROMPT], [ids[:count]])[0]
        assert whole.startswith((text + "e", text + "qu"))
        assert not any(stop in text for stop in stops)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_the_pieces_are_the_text(kits: dict[str, Tokenizer], text: str) -> None:
    # Given any text, when it is taken token by token, then the pieces never end within a character and are the text
    tokenizer = kits["byte_level"]
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, PROMPT)
    pieces = [detokenizer.push(token_id) for token_id in ids.tolist()]
    assert "".join(pieces) + detokenizer.pending == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


class MeasuringTokenizer(Tokenizer):
    """Knows how many tokens were ever decoded in one call."""

    longest = 0

    def decode(self, ids: list[int] | TokenIds) -> str:
        self.longest = max(self.longest, len(ids))
        return super().decode(ids)


def test_the_cost_of_a_token_does_not_grow(kit: Any) -> None:
    # Given a long answer with broken bytes, special tokens and text
    tokenizer = MeasuringTokenizer(kit.byte_level_tokenizer())
    watcher = StopStringWatcher(tokenizer, PROMPT, ["never to be seen"])
    broken = tokenizer.encode_batch(["日"], add_special_tokens=False)[0].tolist()[:1]
    for token_id in broken * 300 + [2] * 300 + list(range(100, 130)) * 10:
        watcher.push(token_id)
    # Then no call decodes more than a few tokens
    assert 0 < tokenizer.longest <= 24


def test_a_watcher_can_be_built_again(byte_level: Tokenizer) -> None:
    # Given a preempted choice whose tokens are pushed into a new watcher, then it ends at the same place
    ids = ids_of(byte_level, ["The quick", "ST", "OP", "b"], cut_up=False)
    first = StopStringWatcher(byte_level, PROMPT, ["STOP"])
    for token_id in ids[:3]:
        first.push(token_id)
    again = StopStringWatcher(byte_level, PROMPT, ["STOP"])
    results = [again.push(token_id) for token_id in ids]
    assert True in results
    assert again.text == "The quick"


def test_a_blank_before_the_first_word_can_be_a_stop(kits: dict[str, Tokenizer], kit: Any) -> None:
    # Given SentencePiece, whose decoder drops the first blank of whatever it is given
    tokenizer = kits["sentencepiece"]
    (ids,) = tokenizer.encode_batch(["a"], add_special_tokens=False)
    assert watch(tokenizer, ids.tolist(), [" a"], 0) == (len(ids), "")


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    cut_up=st.booleans(),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=9),
)
def test_tokens_that_come_together_give_the_text_that_they_give_one_by_one(
    kits: dict[str, Tokenizer], kind: str, pieces: list[str], cut_up: bool, cuts: list[int]
) -> None:
    ids = ids_of(kits[kind], pieces, cut_up)
    together, alone = IncrementalDetokenizer(kits[kind], PROMPT), IncrementalDetokenizer(kits[kind], PROMPT)
    for cut in cuts * len(ids):
        some, ids = ids[:cut], ids[cut:]
        assert together.push_all(some) == "".join(map(alone.push, some))
        assert together.pending == alone.pending
