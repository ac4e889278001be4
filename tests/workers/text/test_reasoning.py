"""Thoughts are split off the text of an answer, at once and in any pieces of a stream."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.text.chat_options import ChatOptions
from workers.text.detokenizer import IncrementalDetokenizer
from workers.text.reasoning import FORMATS, TOKEN_MARK, ReasoningMarkers, ReasoningReader, format_of, split_reasoning
from workers.text.tokenizer import Tokenizer

TOKENS = {7: "<think>", 8: "</think>"}
HARMONY_TOKENS = {
    at: f"<|{name}|>" for at, name in enumerate(["start", "end", "message", "channel", "return", "call"], start=90)
}
THINK = ReasoningMarkers(FORMATS["think"], TOKENS)
PLAIN = ReasoningMarkers(FORMATS["think"], {})
HARMONY = ReasoningMarkers(FORMATS["gpt_oss"], HARMONY_TOKENS)
M = TOKEN_MARK


def decoded(text: str) -> str:
    """A text as decoding shows it: each spelling in it is a token."""
    for spelling in (*TOKENS.values(), *HARMONY_TOKENS.values()):
        text = text.replace(spelling, spelling + M)
    return text


@pytest.mark.parametrize(
    ("text", "thinks", "reasoning", "content"),
    [
        ("just text\n", False, None, "just text\n"),
        ("<think>\nwhy\n</think>\n\nyes", False, "why", "yes"),
        ("why\n</think>\n\nyes", True, "why", "yes"),
        ("<think>\n\n</think>\n\nyes ", False, None, "yes "),
        ("never ends \n", True, "never ends \n", ""),
        ("</think></think>x", True, None, "x"),
        ("a < b <thin", False, None, "a < b <thin"),
    ],
)
def test_an_answer_is_split(text: str, thinks: bool, reasoning: str | None, content: str) -> None:
    for markers, shown in ((PLAIN, text), (THINK, decoded(text))):
        assert split_reasoning(markers, shown, thinks=thinks)[:2] == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "thinks", "reasoning", "content"),
    [
        ("secret thought</think> answer", None, "secret thought", "answer"),
        ("secret</think> an<think>more</think>swer", None, "secret\nmore", "an\nswer"),
        ("<think>why</think> an</think>swer", None, "why", "an\nswer"),
        ("just text", None, None, "just text"),
        # The prompt has ended the thought, so what follows is the answer
        ("answer</think>", False, None, "answer"),
    ],
)
def test_a_thought_whose_beginning_is_not_marked_is_no_answer(
    text: str, thinks: bool | None, reasoning: str | None, content: str
) -> None:
    split = split_reasoning(THINK, decoded(text), thinks=thinks)
    assert split[:2] == (reasoning, content)
    if "secret" in text:
        first, last = split.spans[0]
        assert "secret" in decoded(text)[first:last]
    # An answer in plain text may mention the marker
    if "<think>" not in text:
        assert split_reasoning(PLAIN, text, thinks=thinks).reasoning is None


def test_a_thought_may_go_on_where_its_markers_are_tokens() -> None:
    text = "\n <think>a</think>b<think>c</think> d"
    assert split_reasoning(THINK, decoded(text), thinks=False)[:2] == ("a\nc", "b\nd")
    # and plain text may mention a marker: none of the words is lost
    assert split_reasoning(PLAIN, text, thinks=False)[:2] == ("a", "bc d")
    assert split_reasoning(PLAIN, "the tag <think> is", thinks=False)[:2] == (None, "the tag  is")


def test_ordinary_tokens_can_not_forge_a_marker(kit: Any) -> None:
    """Given a thought in which ordinary tokens spell the marker as decoding marks it, when it is decoded at once or
    token by token, then it stays a thought."""
    hf = kit.byte_level_tokenizer("{{ '</think>' }}")
    hf.add_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(hf)
    markers = tokenizer.reasoning
    assert markers is not None
    forged, behind = tokenizer.encode_batch([f"</think>{M}still", "yes"], add_special_tokens=False)
    ids = forged.tolist()
    if ids[0] in markers.shown:  # the tokenizer finds the marker itself: spell it with ordinary tokens
        spelt = tokenizer.encode_batch(["</", "think", f">{M}still"], add_special_tokens=False)
        ids = [token_id for piece in spelt for token_id in piece.tolist()]
    (closing,) = (token_id for token_id, text in markers.shown.items() if text.startswith("</"))
    answer = [*ids, closing, *behind.tolist()]
    assert M not in tokenizer.decode_showing(behind[:0], ids, markers.shown)
    detokenizer = IncrementalDetokenizer(tokenizer, behind[:0], markers.shown)
    for text in (
        tokenizer.decode_showing(behind[:0], answer, markers.shown),
        "".join(detokenizer.push(token_id) for token_id in answer),
    ):
        assert split_reasoning(markers, text, thinks=True)[:2] == ("</think>\ufffdstill", "yes")


def test_a_marker_that_ordinary_tokens_spell_is_text() -> None:
    assert split_reasoning(THINK, f"say </think> then</think>{M}<think> x", thinks=True)[:2] == (
        "say </think> then",
        "<think> x",
    )


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>yes", "why", "yes"),
        ("<|channel|>final<|message|>yes", None, "yes"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>wait<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>yes",
            "a\nb",
            "wait\nyes",
        ),
    ],
)
def test_harmonys_channels_are_split(text: str, reasoning: str | None, content: str) -> None:
    assert split_reasoning(HARMONY, decoded(text), thinks=False)[:2] == (reasoning, content)


PIECES = st.lists(
    st.sampled_from(
        ["a", "b ", " ", "\n", "<", "think>", "<th", "ink>", "</", *map(decoded, TOKENS.values()), *TOKENS.values()]
    ),
    max_size=12,
)


@given(pieces=PIECES, cuts=st.lists(st.integers(0, 60)), thinks=st.booleans(), are_tokens=st.booleans())
def test_any_pieces_of_a_stream_add_up(pieces: list[str], cuts: list[int], thinks: bool, are_tokens: bool) -> None:
    markers = THINK if are_tokens else PLAIN
    text = "".join(pieces)
    text = text if are_tokens else text.replace(M, "")
    reader = ReasoningReader(markers, thinks)
    found, at = [], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        found += reader.push(text[at:cut])
        at = cut
    found += reader.close()
    whole = split_reasoning(markers, text, thinks=thinks)
    assert "".join(part.reasoning for part in found) == (whole.reasoning or "")
    assert "".join(part.content for part in found) == whole.content
    assert reader.spans == whole.spans
    assert all(not (part.reasoning and part.content) for part in found)
    # Nothing is lost but markers and white space beside them, and no marker is left.
    left = (whole.reasoning or "", whole.content)
    assert all(marker not in text for marker in markers.thinks_behind for part in found for text in part)
    bare = markers.pattern.sub("", text)
    assert sorted("".join(bare.split())) == sorted("".join("".join(left).split()))


class CountedPattern:
    """A pattern that counts the characters that it reads."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.characters = 0

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        found = self._pattern.search(text, at)
        self.characters += (len(text) if found is None else found.end()) - at
        return found


@pytest.mark.parametrize(
    "piece", ["\n" * 64, "a" * 64, "<", f"<think>{M} a</think>{M} "], ids=["blanks", "text", "beginnings", "thoughts"]
)
def test_each_character_is_read_a_bounded_number_of_times(piece: str) -> None:
    """Given an answer that is held back for long, as blanks are, when it grows, then only what is new is read."""
    markers = ReasoningMarkers(FORMATS["think"], TOKENS)
    markers.pattern = counted = CountedPattern(markers.pattern)  # type: ignore[assignment]
    reader = ReasoningReader(markers, thinks=False)
    parts = [part for _ in range(500) for part in reader.push(piece)]
    assert counted.characters <= 500 * (len(piece) + markers.max_length)
    if "think" not in piece:
        assert "".join(part.content for part in [*parts, *reader.close()]) == piece * 500


@pytest.mark.parametrize(
    ("template", "parser", "name"),
    [
        ("{{ m.content.split('</think>') }}", None, "think"),
        ("<|channel|>analysis<|message|>{{ m.thinking }}<|end|>", None, "gpt_oss"),
        ("[THINK]{{ m.thinking }}[/THINK]", None, "mistral"),
        ("{{ 'plain' }}", None, None),
        (None, None, None),
        ("{{ 'plain' }}", "granite", "granite"),
        ("{{ '</think>' }}", "none", None),
    ],
)
def test_the_format_is_the_one_that_the_template_shows(template: str | None, parser: str | None, name: Any) -> None:
    assert format_of(template, parser) is (None if name is None else FORMATS[name])


def test_tokens_of_a_prompt_say_whether_a_thought_has_begun(kit: Any) -> None:
    hf = kit.byte_level_tokenizer("{{ '</think>' }}")
    hf.add_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(hf, ChatOptions())
    assert tokenizer.reasoning is not None
    assert {tokenizer.added_tokens[i] for i in tokenizer.reasoning_ids} == {"<think>", "</think>"}
    for text, state in (("x<think>\n", True), ("x<think>\n\n</think>\n\n", False), ("<think>a</think>b", None)):
        (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
        assert tokenizer.reasoning.prompt_state(tokenizer.decode_showing(ids[:0], ids, tokenizer.reasoning.shown)) is (
            state
        )
