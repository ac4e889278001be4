"""The fewest tokens that a text can have: a true bound for every tokenizer that has one, and none for the others."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Regex as RustRegex
from tokenizers import Tokenizer as RustTokenizer

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatMessage, CompletionBody
from tests.workers.conftest import byte_level_tokenizer, sentencepiece_tokenizer
from workers.text import tokenizer as tokenizer_module
from workers.text.prompt_bounds import JOINED_BY_COMPOSITION, bound_of
from workers.text.tokenizer import SPELT, Tokenizer
from workers.translation.requests import JobRules, ModelLimits, Translator


def byte_level(normalizer: Any = None, drop: str = "", **added: Any) -> RustTokenizer:
    """Trained, with another normalizer, without these characters of its alphabet, and with one more added token."""
    rust: RustTokenizer = byte_level_tokenizer().backend_tokenizer
    state = json.loads(rust.to_str())
    vocabulary = {text: at for text, at in state["model"]["vocab"].items() if not set(text) & set(drop)}
    state["model"]["vocab"] = vocabulary
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if not set("".join(pair)) & set(drop)]
    made = RustTokenizer.from_str(json.dumps(state))
    if normalizer is not None:
        made.normalizer = normalizer
    if added:
        made.add_special_tokens([AddedToken("<wide>", **added)])
    return made


def sentencepiece() -> RustTokenizer:
    made: RustTokenizer = sentencepiece_tokenizer().backend_tokenizer
    return made


BOUNDED: dict[str, Callable[[], RustTokenizer]] = {
    "byte level": byte_level,
    "without control characters": lambda: byte_level(drop="ĀāĂ"),
    "NFC": lambda: byte_level(normalizers.NFC()),
    "NFKC, lower case": lambda: byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "replaces three by one": lambda: byte_level(normalizers.Replace("ooo", "o")),
    "token that takes blanks": lambda: byte_level(lstrip=True, rstrip=True),
    "sentencepiece": sentencepiece,
}
TEXTS = st.one_of(
    st.text(max_size=300),
    st.text(alphabet=" ao\x00\t\n<wide>é\u0301\u1100\u1161\u11a8", max_size=300),
    st.builds(lambda piece, times: piece * times, st.text(min_size=1, max_size=8), st.integers(1, 400)),
)


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_the_bound(name: str) -> None:
    rust = BOUNDED[name]()
    bound = bound_of(rust)
    assert bound is not None

    @given(TEXTS)
    def holds(text: str) -> None:
        assert bound.count_min_tokens(text) <= len(rust.encode(text, add_special_tokens=False).ids)

    holds()
    assert bound.count_min_tokens("word " * 100_000) > 1_000, "it refuses something"


UNBOUNDED: dict[str, Callable[[], RustTokenizer]] = {
    "strips": lambda: byte_level(normalizers.Strip()),
    "removes a character": lambda: byte_level(normalizers.Replace("a", "")),
    "replaces a pattern": lambda: byte_level(normalizers.Replace(RustRegex("a+"), "a")),
    "strips accents": lambda: byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "NFC, bytes without a token": lambda: byte_level(normalizers.NFC(), drop="Ā"),
    "word pieces": lambda: RustTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "words": lambda: RustTokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    "unigram": lambda: RustTokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    "unknown characters": lambda: RustTokenizer(models.BPE({"a": 0}, [])),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_may_drop_any_amount_of_text_has_no_bound(name: str) -> None:
    assert bound_of(UNBOUNDED[name]()) is None


def test_blanks_that_a_pre_tokenizer_drops_leave_no_bound() -> None:
    rust = byte_level()
    rust.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    assert bound_of(rust) is None


def test_composition_joins_at_most_the_bounds_number_of_characters() -> None:
    characters = list(map(chr, range(sys.maxunicode + 1)))
    assert max(len(unicodedata.normalize("NFD", one)) for one in characters) == JOINED_BY_COMPOSITION
    assert all(unicodedata.normalize("NFKD", one) and one.lower() for one in characters)


def test_spelt_special_tokens_are_counted_as_they_are_encoded(byte_level: Tokenizer) -> None:
    text = byte_level.render_chat([ChatMessage(role="user", content="<end><turn>" * 200)])
    assert byte_level.count_min_tokens(text) <= len(byte_level.encode_chats([text])[0])


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.sampled_from(["0", "the ", " quick", "日", "🎉", "  ", "<end>", f"<{SPELT}end>"]), max_size=200),
    limit=st.integers(0, 200),
    piece=st.integers(60, 200),
)
def test_what_exceeds_a_limit_does_however_the_text_is_cut_in_pieces(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch, words: list[str], limit: int, piece: int
) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", piece)
    text = "".join(words)
    tokens = len(byte_level.encode_chats([text])[0])
    excess = byte_level.count_excess(text, limit)
    assert excess == 0 or limit < excess <= tokens


def test_a_prompt_beyond_the_context_is_refused_without_being_tokenized(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = Translator(byte_level, ModelLimits(512, 400, (2,)), JobRules())
    monkeypatch.setattr(Tokenizer, "encode_batch", None)
    body = CompletionBody(model="m", prompt="some words " * 100_000)
    with pytest.raises(RowError, match=r"prompt of at least \d+ tokens, but the context holds 512") as refused:
        translator.prompts_of(body)
    assert refused.value.code is RowErrorCode.CONTEXT_LENGTH_EXCEEDED
    short = CompletionBody(model="m", prompt="some words")
    assert translator.prompts_of(short) == ["some words"]
