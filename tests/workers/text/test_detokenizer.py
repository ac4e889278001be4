"""Stop strings: found across token borders, exactly where reading the whole text after each token would find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from workers.text.detokenizer import IncrementalDetokenizer
from workers.text.stop_strings import StopStringWatcher
from workers.text.tokenizer import NOTHING_SHOWN, TokenIds, Tokenizer

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
@pytest.mark.slow
def test_stops_where_reading_everything_again_would(
    kits: dict[str, Tokenizer], kind: str, pieces: list[str], cut_up: bool, stops: list[str], min_tokens: int
) -> None:
    tokenizer = kits[kind]
    ids = ids_of(tokenizer, pieces, cut_up)
    assert watch(tokenizer, ids, stops, min_tokens) == oracle(tokenizer, ids, stops, min_tokens)


@pytest.fixture(scope="module")
def kits(byte_level: Tokenizer, sentencepiece: Tokenizer, kit: Any) -> dict[str, Tokenizer]:
    return {
        "byte_level": byte_level,
        "sentencepiece": sentencepiece,
        "word_pieces": Tokenizer(kit.word_piece_tokenizer()),
    }


def bytes_of_answer(tokenizer: Tokenizer, prompt: TokenIds, ids: list[int]) -> bytes:
    """The bytes of the answer's tokens, read from the vocabulary's spellings."""
    alphabet = {char: byte for byte, char in bytes_to_unicode().items()}

    def of(token_id: int) -> bytes:
        token = tokenizer.id_to_token(token_id) or ""
        if token_id in tokenizer.special_ids:
            return b""
        if tokenizer.byte_level:
            return bytes(alphabet[char] for char in token)
        return bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("▁", " ").encode()

    raw = b"".join(map(of, ids))
    begins = not tokenizer.byte_level and not any(map(of, prompt[-4:].tolist()))
    return raw.removeprefix(b" ") if begins else raw


TOKENS = st.lists(st.integers(0, 401), max_size=60)  # an id beyond the vocabulary stands for nothing
HARD_BYTES = [0x80, 0xBF, 0xF0, 0x9F, 0x98, 0xE4, 0xB8, 0xAD, 0xED, 0xA0, 0xC3, 0xA9, 0xFF, 0x41, 0x20]


@st.composite
def byte_tokens(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Tokens of one byte each, which are characters, parts of them or none."""
    ids = {}
    for token_id in range(tokenizer.size):
        if token_id not in tokenizer.added_tokens and len(raw := tokenizer.token_bytes[token_id]) == 1:
            ids.setdefault(raw[0], token_id)
    return [ids[byte] for byte in draw(st.lists(st.sampled_from(HARD_BYTES), max_size=30)) if byte in ids]


def test_the_beginning_of_a_surrogate_is_pending_as_it_is_read(kits: dict[str, Tokenizer]) -> None:
    tokenizer = kits["byte_level"]
    ids = [next(i for i in range(4, 400) if tokenizer.token_bytes[i] == bytes([byte])) for byte in b"\xed\xbfA"]
    detokenizer = IncrementalDetokenizer(tokenizer, PROMPT)
    assert [detokenizer.push(token_id) for token_id in ids[:2]] == ["", ""]
    assert detokenizer.pending == tokenizer.decode(ids[:2]) == "\ufffd\ufffd"
    assert detokenizer.push(ids[2]) == tokenizer.decode(ids) == "\ufffd\ufffdA"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "word_pieces"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_the_stream_is_always_a_prefix_of_the_final_text(
    kits: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    # Given any tokens after any prompt, UTF-8 or not
    tokenizer = kits[kind]
    ids = data.draw(TOKENS if kind == "word_pieces" else TOKENS | byte_tokens(tokenizer))
    prompt = np.array(data.draw(st.lists(st.integers(0, 399), max_size=5)), dtype=np.int32)
    (final,) = tokenizer.decode_answers([prompt], [ids])
    # When they come one by one, or several at once, then what was given out begins the final text at every moment
    for detokenizer, cut in ((IncrementalDetokenizer(tokenizer, prompt), size) for size in (1, 3, 100)):
        streamed = ""
        for at in range(0, len(ids), cut):
            streamed += detokenizer.push_all(ids[at : at + cut])
            assert final.startswith(streamed)
        # And with what an incomplete character leaves, it is the final text
        assert streamed + detokenizer.pending == final
    # And the text is that of the tokens' bytes
    if kind != "word_pieces":
        assert final == bytes_of_answer(tokenizer, prompt, ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "left_out", "expected"),
    [
        ("中文字符串", 1, " 中文字符\ufffd"),
        ("🎉🎊", 1, " 🎉\ufffd"),
        ("🎉🎊", 3, " 🎉\ufffd"),
        ("한국어 안녕", 1, " 한국어 안\ufffd"),
        ("한국어 안녕", 3, " 한국어 안"),
    ],
)
def test_a_cut_answer_keeps_its_whole_characters(
    kits: dict[str, Tokenizer], text: str, left_out: int, expected: str
) -> None:
    # Given characters that are runs of byte tokens, when the answer ends within one, then the others are there
    tokenizer = kits["sentencepiece"]
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
    assert tokenizer.decode_answers([PROMPT], [ids[:-left_out]]) == [expected]
    detokenizer = IncrementalDetokenizer(tokenizer, PROMPT)
    assert detokenizer.push_all(ids[:-left_out].tolist()) == expected.removesuffix("\ufffd")


def test_a_character_behind_many_broken_bytes_is_streamed_whole(kits: dict[str, Tokenizer]) -> None:
    tokenizer = kits["byte_level"]
    raw = b"\x80" * 9 + "中".encode() + b"\xbf"
    ids = [next(i for i in range(4, 400) if tokenizer.token_bytes[i] == bytes([byte])) for byte in raw]
    detokenizer = IncrementalDetokenizer(tokenizer, PROMPT)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert pieces == ["\ufffd"] * 9 + ["", "", "中", "\ufffd"]
    assert tokenizer.decode_answers([PROMPT], [ids]) == ["".join(pieces)]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
@pytest.mark.slow
def test_whole_texts_equal_the_tokenizer_librarys(kits: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = kits[kind]
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids.tolist(), skip_special_tokens=True)


def test_the_character_that_stands_for_broken_bytes_can_be_a_stop(kits: dict[str, Tokenizer]) -> None:
    # Given an emoji of four tokens, when it isn't whole yet, then it is not taken for broken bytes
    tokenizer = kits["byte_level"]
    ids = ids_of(tokenizer, ["a", "🦀", "b"], cut_up=True)
    assert len(ids) > 4
    assert watch(tokenizer, ids, ["\ufffd"], 0) is None
    # And an invalid character completes a stop string once it is certain
    assert watch(tokenizer, [*ids[:-2], *ids[-1:], *ids], ["\ufffd"], 0) == (len(ids) - 1, "a")


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
@pytest.mark.slow
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
    """Counts how many tokens were decoded in one call."""

    longest = 0

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        self.longest = max(self.longest, len(ids))
        return super().decode(ids)

    def join_bytes(self, ids: Sequence[int], shown: Mapping[int, str] = NOTHING_SHOWN) -> bytes:
        self.longest = max(self.longest, len(ids))
        return super().join_bytes(ids, shown)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "word_piece"])
def test_the_cost_of_a_token_does_not_grow(kit: Any, kind: str) -> None:
    # Given a long answer with broken bytes, special tokens and text
    tokenizer = MeasuringTokenizer(getattr(kit, f"{kind}_tokenizer")())
    watcher = StopStringWatcher(tokenizer, PROMPT, ["never to be seen"])
    broken = tokenizer.encode_batch(["日"], add_special_tokens=False)[0].tolist()[:1]
    for token_id in broken * 300 + [2] * 300 + list(range(100, 130)) * 10:
        watcher.push(token_id)
    # Then no call decodes more than a few tokens
    assert 0 < tokenizer.longest <= 24


def test_a_watcher_can_be_built_again(byte_level: Tokenizer) -> None:
    # Given a preempted choice whose tokens are pushed into a new watcher, then it ends at the same position
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
def test_tokens_pushed_in_one_call_give_the_same_text_as_one_by_one(
    kits: dict[str, Tokenizer], kind: str, pieces: list[str], cut_up: bool, cuts: list[int]
) -> None:
    ids = ids_of(kits[kind], pieces, cut_up)
    in_one_call, alone = IncrementalDetokenizer(kits[kind], PROMPT), IncrementalDetokenizer(kits[kind], PROMPT)
    for cut in cuts * len(ids):
        some, ids = ids[:cut], ids[cut:]
        assert in_one_call.push_all(some) == "".join(map(alone.push, some))
        assert in_one_call.pending == alone.pending
