"""Bodies for scores, rankings and labels: the names of both sides, their sequences, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schemas.requests.errors import RowError
from schemas.requests.limits import Limits
from schemas.requests.parsing import (
    CLASSIFY_URL,
    RERANK_URL,
    SCORE_URL,
    ChatBody,
    ClassifyBody,
    PooledBody,
    dump_body,
    load_body,
    parse_body,
)


def parse(url: str, limits: Limits | None = None, **fields: Any) -> PooledBody:
    body = parse_body(url, {"model": "m", **fields}, limits)
    assert load_body(url, dump_body(body)) == body
    return body  # type: ignore[return-value]


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items")]
)
def test_both_sides_have_several_names(names: tuple[str, str]) -> None:
    one, two = names
    assert parse(SCORE_URL, **{one: "a", two: "b"}).sequences == (("a", "b"),)
    assert parse(SCORE_URL, **{one: "a", two: ["b", "c"]}).sequences == (("a", "b"), ("a", "c"))
    assert parse(SCORE_URL, **{one: ["a", "d"], two: ["b", "c"]}).sequences == (("a", "b"), ("d", "c"))
    assert dump_body(parse(SCORE_URL, **{one: "a", two: "b"})) == b'{"model":"m","queries":["a"],"documents":["b"]}'


def test_documents_of_a_ranking_are_texts_or_objects() -> None:
    body = parse(RERANK_URL, query="q", documents=["a", {"text": "b"}], top_n=1, return_documents=False)
    assert body.sequences == (("q", "a"), ("q", "b"))


def test_inputs_to_classify_are_texts_or_token_ids() -> None:
    assert parse(CLASSIFY_URL, input=["a", [1, 2]], truncate_prompt_tokens=-1).sequences == (("a",), ((1, 2),))


def test_inputs_to_classify_are_pairs_of_texts() -> None:
    body = parse(CLASSIFY_URL, input=[["a", "b"], "c", [1, 2]])
    assert body.sequences == (("a", "b"), ("c",), ((1, 2),))
    assert parse(CLASSIFY_URL, prompt=[["a", "b"]]).sequences == (("a", "b"),)
    assert parse(CLASSIFY_URL, input=["a", "b"]).sequences == (("a",), ("b",))


MESSAGES = [{"role": "user", "content": "hi"}]


def test_choices_go_with_texts_or_a_conversation() -> None:
    body = parse(CLASSIFY_URL, prompt=["a", "b"], choices=["x", "y", "z"], normalize="mean")
    assert (body.num_sequences, body.sequences) == (6, (("a",), ("b",)))
    assert body == parse(CLASSIFY_URL, input=["a", "b"], choices=["x", "y", "z"], normalize="mean")
    chat = parse(CLASSIFY_URL, messages=MESSAGES, choices=["x"], enable_thinking=False, chat_template_kwargs={"a": 1})
    assert isinstance(chat, ClassifyBody)
    prompt = chat.prompt_body
    assert isinstance(prompt, ChatBody)
    assert (prompt.messages, prompt.enable_thinking, prompt.chat_template_kwargs) == (chat.messages, False, {"a": 1})


@pytest.mark.parametrize(
    ("url", "fields", "param", "says"),
    [
        (SCORE_URL, {}, "queries", "is missing; add it"),
        (SCORE_URL, {"text_1": "a"}, "text_2", "is missing; add it"),
        (SCORE_URL, {"items": "a"}, "queries", "is missing; add it"),
        (SCORE_URL, {"text_1": "a", "documents": "b"}, "text_1", "goes with one other: queries and documents"),
        (SCORE_URL, {"queries": "a", "documents": "b", "items": "c"}, "items", "goes with one other"),
        (SCORE_URL, {"queries": ["a", "b"], "documents": ["a"]}, "queries", "holds 2 texts for 1 documents"),
        (SCORE_URL, {"queries": ["a"], "documents": []}, "documents", "is an empty list"),
        (SCORE_URL, {"queries": "a", "documents": ["b", ""]}, "documents", "[1] is empty"),
        (SCORE_URL, {"queries": "a", "documents": [[1]]}, "documents", "must be a string or a list of strings"),
        (SCORE_URL, {"queries": 1, "documents": "b"}, "queries", "must be a string or a list of strings"),
        (SCORE_URL, {"queries": "a", "documents": ["b"] * 4}, "documents", "holds 4 texts, but at most 3 are allowed"),
        (RERANK_URL, {"query": "q"}, "documents", "is missing"),
        (RERANK_URL, {"query": "q", "documents": ["a"], "instruction": ""}, "instruction", "is empty"),
        (SCORE_URL, {"queries": "q", "documents": "a", "instruction": 1}, "instruction", "must be a string"),
        (RERANK_URL, {"query": "", "documents": ["a"]}, "query", "is empty"),
        (RERANK_URL, {"query": ["q"], "documents": ["a"]}, "query", "must be a string"),
        (RERANK_URL, {"query": "q", "documents": "a"}, "documents", "must be a list of strings"),
        (RERANK_URL, {"query": "q", "documents": [{"image": "a"}]}, "documents", "must be a string or a list"),
        (RERANK_URL, {"query": "q", "documents": ["a"], "top_n": -1}, "top_n", "must be 0 or more"),
        (RERANK_URL, {"query": "q", "documents": ["a"], "rank_fields": []}, "rank_fields", "not a parameter known"),
        (CLASSIFY_URL, {"input": ""}, "input", "is empty"),
        (CLASSIFY_URL, {"input": [["a", "b", "c"]]}, "input", "[0] must be a pair of two texts that are not empty"),
        (CLASSIFY_URL, {"input": ["a", ["a", 1]]}, "input", "[1] must be a pair of two texts"),
        (CLASSIFY_URL, {"input": [["a", ""]]}, "input", "[0] must be a pair of two texts"),
        (CLASSIFY_URL, {"input": [["a", "b"]], "choices": ["x"]}, "input", "holds a pair, which can't go with choices"),
        (CLASSIFY_URL, {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "must be -1 or more"),
        (CLASSIFY_URL, {"input": "a", "use_activation": 1}, "use_activation", "must be true or false"),
        (CLASSIFY_URL, {"input": "a", "stream": True}, "stream", "is not supported"),
        (CLASSIFY_URL, {"choices": ["a"]}, "input", "is missing"),
        (CLASSIFY_URL, {"messages": MESSAGES}, "messages", "needs choices"),
        (CLASSIFY_URL, {"input": "a", "messages": MESSAGES, "choices": ["a"]}, "input", "and messages are both set"),
        (CLASSIFY_URL, {"input": "a", "prompt": "b", "choices": ["a"]}, "prompt", "and input are both set"),
        (CLASSIFY_URL, {"input": "a", "normalize": "mean"}, "normalize", "needs choices"),
        (CLASSIFY_URL, {"input": "a", "choices": ["a"], "enable_thinking": True}, "enable_thinking", "needs messages"),
        (CLASSIFY_URL, {"input": "a", "choices": ["a", "a"]}, "choices", "holds a string twice"),
        (CLASSIFY_URL, {"input": "a", "choices": ["a", ""]}, "choices", "holds an empty string"),
        (CLASSIFY_URL, {"input": "a", "choices": list("abcde")}, "choices", "holds 5, but at most 4 are allowed"),
        (CLASSIFY_URL, {"input": "a", "choices": "ab"}, "choices", "must be a list of strings"),
        (CLASSIFY_URL, {"input": ["a", "b"], "choices": ["a", "b"]}, "input", "holds 4 texts, but at most 3"),
        (CLASSIFY_URL, {"input": "a", "choices": ["a"], "use_activation": False}, "use_activation", "can't go with"),
        (CLASSIFY_URL, {"messages": [{"role": "user"}], "choices": ["a"]}, "messages[0].content", "is missing"),
    ],
)
def test_mistakes_are_named(url: str, fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RowError, match=re.escape(says)) as refused:
        parse(url, Limits(max_embedding_inputs=3, max_choices=4), **fields)
    assert refused.value.param == param
