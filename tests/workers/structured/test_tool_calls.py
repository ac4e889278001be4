"""Calls found in the text of an answer: the same ones however the text comes in."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.structured.tool_calls import (
    MAX_HEAD_CHARS,
    AnswerDelta,
    CallIds,
    ToolCallReader,
    split_answer,
    stream_deltas,
)
from workers.structured.tool_formats import BARRED, HERMES, LLAMA, MISTRAL, ToolFormat

IDS = CallIds("job/1", 0, False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(['"', "\\", "}", "{", '\\"']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(st.sampled_from(["look_up", "a-1"]), st.dictionaries(st.text(max_size=4), values, max_size=3)), max_size=3
)


def written(form: ToolFormat, content: str, made: list[tuple[str, dict[str, Any]]], spaced: bool) -> str:
    """An answer as a model of this format writes it."""
    separators = (", ", ": ") if spaced else (",", ":")
    texts = [json.dumps({"name": n, form.arguments: a}, separators=separators) for n, a in made]
    if not texts:
        return content
    if form.listed:
        return f"{content}{form.opening}[{', '.join(texts)}]{form.closing}"
    return content + form.between.join(f"{form.opening}{text}{form.closing}" for text in texts)


def joined(deltas: list[AnswerDelta]) -> tuple[str, dict[int, list[str]]]:
    content, found = "", dict[int, list[str]]()
    for delta in deltas:
        content += delta.content
        if delta.call is not None:
            entry = found.setdefault(delta.call, ["", ""])
            entry[0] += delta.name or ""
            entry[1] += delta.arguments
    return content, found


@given(
    form=st.sampled_from([HERMES, MISTRAL, BARRED, LLAMA]),
    content=st.sampled_from(["", "Let me see.", "a < b <tool", "x  \n", "<|tool [TOOL_"]),
    made=calls,
    spaced=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_a_text_in_pieces_splits_as_the_whole_text(
    form: ToolFormat, content: str, made: list[tuple[str, dict[str, Any]]], spaced: bool, cuts: list[int]
) -> None:
    if form.max_calls == 1:
        made, content = made[:1], "" if made else content
    text = written(form, content, made, spaced)
    reader = ToolCallReader(form)
    deltas: list[AnswerDelta] = []
    edges = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    for start, end in pairwise(edges):
        deltas += reader.push(text[start:end])
    deltas += reader.close()

    content_of_stream, found = joined(deltas)
    assert content_of_stream == (content.rstrip() if made else content)
    assert [(name, json.loads(arguments)) for name, arguments in found.values()] == made
    assert reader.is_whole == bool(made)
    # and the finished answer has the same content and calls as the stream
    split = split_answer(form, text, IDS)
    assert split.content == content_of_stream
    assert [[c["function"]["name"], c["function"]["arguments"]] for c in split.calls] == list(found.values())
    streamed_content, streamed_calls = stream_deltas(deltas, IDS)
    assert streamed_content == content_of_stream
    assert [call["id"] for call in streamed_calls if "id" in call] == [call["id"] for call in split.calls]


@pytest.mark.parametrize("cut", range(1, 60))
def test_an_incomplete_call_has_the_beginning_of_its_arguments(cut: int) -> None:
    whole = '<tool_call>\n{"name": "look_up", "arguments": {"b": [1, "}"]}}\n</tool_call>'
    split = split_answer(HERMES, whole[:-cut], IDS)
    closed = cut <= len("}\n</tool_call>")
    assert split.whole is closed
    if split.calls:
        assert split.calls[0]["function"]["name"] == "look_up"
        assert '{"b": [1, "}"]}'.startswith(split.calls[0]["function"]["arguments"])
    assert split.content == ("" if len(whole) - cut >= len("<tool_call>") else whole[:-cut])


def test_ids_depend_on_the_answer_alone() -> None:
    assert CallIds("a/1", 0, False).of(0) == CallIds("a/1", 0, False).of(0)
    ids = {CallIds(a, c, False).of(n) for a in ("a/1", "a/2") for c in (0, 1) for n in (0, 1)}
    assert len(ids) == 8
    short = CallIds("a/1", 0, True).of(0)
    assert len(short) == 9
    assert short.isalnum()


def test_names_may_be_escaped_and_keys_within_arguments_are_no_calls() -> None:
    text = '<tool_call>\n{"name": "look\\u005fup", "arguments": {"name": "x", "arguments": {}}}\n</tool_call>'
    (call,) = split_answer(HERMES, text, IDS).calls
    assert call["function"] == {"name": "look_up", "arguments": '{"name": "x", "arguments": {}}'}


@pytest.mark.parametrize(
    ("form", "begin", "piece"),
    [
        (HERMES, "Well", " \n" * 32),
        (LLAMA, "", " \n" * 32),
        (HERMES, "<tool_call>", " \n" * 32),
        (HERMES, '<tool_call>\n{"name": "', "a{" * 32),
    ],
    ids=["blanks", "blanks at first", "no brace", "a long name"],
)
def test_text_that_is_held_back_is_not_read_with_each_piece(form: ToolFormat, begin: str, piece: str) -> None:
    """Given an answer that might be a call for long, when it grows, then what is held to be read again is bounded."""
    reader = ToolCallReader(form)
    deltas = reader.push(begin)
    for _ in range(500):
        deltas += reader.push(piece)
        assert len(reader._text) < MAX_HEAD_CHARS
    deltas += reader.close()
    content, found = joined(deltas)
    assert not found
    if piece.strip() or "<" not in begin:
        assert content == begin + piece * 500


@pytest.mark.slow
def test_a_head_of_a_call_is_bounded_however_it_comes() -> None:
    for length, is_call in ((MAX_HEAD_CHARS - 30, True), (MAX_HEAD_CHARS, False)):
        text = '<tool_call>\n{"name": "' + "a" * length + '", "arguments": {"b": 1}}\n</tool_call>'
        reader = ToolCallReader(HERMES)
        deltas = [delta for char in text for delta in reader.push(char)]
        assert (
            joined(deltas + reader.close())[0] == split_answer(HERMES, text, IDS).content == ("" if is_call else text)
        )


KEYS = ["arguments", "parameters"]
PIECES = [
    "[TOOL_CALLS]", "<tool_call>\n", "\n</tool_call>", "<|tool_call|>", "[", "]", "{", "}", ", ", '"', "\\", "\n",
    "\x00", '{"name": "', '", "arguments": {', '", "parameters": {', "look\\_up", "\\u005f", "\\ud800", "\\udc00",
    "é", " ",
]  # fmt: skip
pieces = st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=6).map("".join)
heads = st.builds('{}{{"name": "{}", "{}": {{'.format, st.sampled_from(["", "["]), pieces, st.sampled_from(KEYS))
near_calls = st.lists(st.sampled_from(PIECES) | heads | pieces, max_size=8).map("".join)


@given(
    form=st.sampled_from([HERMES, MISTRAL, BARRED, LLAMA]),
    opened=st.booleans(),
    text=st.text(max_size=30) | near_calls,
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_no_text_is_an_error_and_pieces_split_as_the_whole_text(
    form: ToolFormat, opened: bool, text: str, cuts: list[int]
) -> None:
    text = form.opening + text if opened else text
    reader = ToolCallReader(form)
    deltas: list[AnswerDelta] = []
    edges = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    for start, end in pairwise(edges):
        deltas += reader.push(text[start:end])
    deltas += reader.close()
    split = split_answer(form, text, IDS)
    content, found = joined(deltas)
    assert (content, reader.is_whole) == (split.content, split.whole)
    assert list(found.values()) == [[c["function"]["name"], c["function"]["arguments"]] for c in split.calls]
    orjson.dumps([split.content, split.calls])  # it can be sent


@pytest.mark.parametrize("form", [HERMES, MISTRAL, BARRED, LLAMA], ids=lambda form: form.name)
@pytest.mark.parametrize("name", ["look\\_up", "look\nup", "look\x00up", "\\ud800", "\\u12"])
def test_given_a_call_whose_name_is_not_json_then_it_is_content_as_it_stands(form: ToolFormat, name: str) -> None:
    begin, end = ("[", "]") if form.listed else ("", "")
    call = f'{form.opening}{begin}{{"name": "{name}", "{form.arguments}": {{"a": 1}}}}{end}{form.closing}'
    for text in (call, f"Let me see. \n{call}") if form.opening else (call,):
        assert split_answer(form, text, IDS) == (text, [], False)


def test_given_a_second_call_whose_name_is_not_json_then_the_first_one_stands() -> None:
    good = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "a\\_b", "arguments": {}}\n</tool_call>'
    split = split_answer(HERMES, f"{good}\n{bad}", IDS)
    assert [call["function"]["name"] for call in split.calls] == ["a"]
    assert (split.content, split.whole) == (bad, False)
