"""A body's parameters are used, or refused by name; none is ignored in silence."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import Limits
from schemas.requests.parsing import (
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    NO_CHANGE,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    dump_body,
    load_body,
    parse_body,
    parse_line,
)

MESSAGES = [{"role": "user", "content": "hi"}]
INVALID, UNSUPPORTED = RowErrorCode.INVALID_REQUEST, RowErrorCode.UNSUPPORTED_PARAMETER


def chat(**fields: Any) -> ChatBody:
    body = parse_body(CHAT_URL, {"model": "demo", "messages": MESSAGES, **fields})
    assert isinstance(body, ChatBody)
    return body


def completion(**fields: Any) -> CompletionBody:
    body = parse_body(COMPLETIONS_URL, {"model": "demo", "prompt": "hi", **fields})
    assert isinstance(body, CompletionBody)
    return body


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("fields", "code", "param", "message"),
    [
        ({"temperature": -1}, INVALID, "temperature", "temperature is -1, but must be 0 or more"),
        ({"temperature": 2.5}, INVALID, "temperature", "must be 2 or less"),
        ({"temperature": True}, INVALID, "temperature", "is true, but must be a number"),
        ({"temperature": "1"}, INVALID, "temperature", "must be a number"),
        ({"temperature": float("nan")}, INVALID, "temperature", "finite"),
        ({"top_p": 0}, INVALID, "top_p", "must be above 0"),
        ({"top_k": -2}, INVALID, "top_k", "must be -1 or more"),
        ({"min_p": 1.1}, INVALID, "min_p", "must be 1 or less"),
        ({"n": True}, INVALID, "n", "n is true, but must be an integer"),
        ({"n": 0}, INVALID, "n", "must be 1 or more"),
        ({"n": 129}, INVALID, "n", "asks for 129, but at most 128"),
        ({"max_tokens": 0}, INVALID, "max_tokens", "max_tokens is 0, but must be 1 or more"),
        ({"max_tokens": 5.0}, INVALID, "max_tokens", "must be an integer"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, INVALID, "max_tokens", "both set; remove max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, INVALID, "min_tokens", "lower min_tokens"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, INVALID, "min_tokens", "lower min_tokens"),
        ({"seed": 2**63}, INVALID, "seed", "too large"),
        ({"seed": 1.0}, INVALID, "seed", "must be an integer"),
        ({"frequency_penalty": 3}, INVALID, "frequency_penalty", "must be 2 or less"),
        ({"repetition_penalty": 0}, INVALID, "repetition_penalty", "must be above 0"),
        ({"stop": ["a"] * 17}, INVALID, "stop", "asks for 17, but at most 16"),
        ({"stop": ["a", ""]}, INVALID, "stop", "empty string"),
        ({"stop": 5}, INVALID, "stop", "must be a string or a list of strings"),
        ({"stop_token_ids": [True]}, INVALID, "stop_token_ids[0]", "must be an integer"),
        ({"stop_token_ids": [-1]}, INVALID, "stop_token_ids[0]", "must be 0 or more"),
        ({"logit_bias": {"5": 101}}, INVALID, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"five": 1}}, INVALID, "logit_bias", "token ids such as"),
        ({"logit_bias": {"05": 1}}, INVALID, "logit_bias", "token ids such as"),
        ({"logit_bias": {"\u0665": 1}}, INVALID, "logit_bias", "token ids such as"),
        ({"logit_bias": {"5": True}}, INVALID, "logit_bias", "from -100 to 100"),
        ({"logprobs": 1}, INVALID, "logprobs", "must be true or false"),
        ({"top_logprobs": 3}, INVALID, "top_logprobs", "set logprobs to true"),
        ({"logprobs": True, "top_logprobs": 21}, INVALID, "top_logprobs", "must be 20 or less"),
        ({"messages": []}, INVALID, "messages", "messages is empty"),
        ({"messages": "hi"}, INVALID, "messages", "must be a list"),
        ({"messages": ["hi"]}, INVALID, "messages[0]", "must be an object"),
        ({"messages": [{"role": "robot", "content": "x"}]}, INVALID, "messages[0].role", "'robot', but must be"),
        ({"messages": [{"role": "user"}]}, INVALID, "messages[0].content", "is missing"),
        ({"messages": user(None)}, INVALID, "messages[0].content", "must be a string or a list of text parts"),
        ({"messages": user([])}, INVALID, "messages[0].content", "empty list"),
        ({"messages": user([{"type": "text"}])}, INVALID, "messages[0].content", "part 0 must be"),
        (
            {"messages": user([{"type": {}, "text": ""}])},
            INVALID,
            "messages[0].content",
            'part 0 must be {"type": "text"',
        ),
        ({"messages": user([{"type": "image_url"}])}, UNSUPPORTED, "messages[0].content", "only text parts"),
        ({"messages": user([{"type": "input_audio"}])}, UNSUPPORTED, "messages[0].content", "input_audio"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, UNSUPPORTED, "messages[0].mood", "remove it"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            INVALID,
            "messages[0].tool_calls[0].type",
            "is missing",
        ),
        ({"tempreature": 1}, UNSUPPORTED, "tempreature", "not a parameter known here"),
        ({"stream": True}, UNSUPPORTED, "stream", "a batch has no stream"),
        ({"modalities": ["text", "audio"]}, UNSUPPORTED, "modalities", "not supported"),
        ({"service_tier": "flex"}, UNSUPPORTED, "service_tier", "in a batch the job's tier applies"),
        ({"best_of": 2}, UNSUPPORTED, "best_of", "not supported"),
        ({"prompt": "x"}, UNSUPPORTED, "prompt", "not a parameter known here"),
        ({"model": ""}, INVALID, "model", "is empty"),
        ({"metadata": {"a": 1}}, INVALID, "metadata.a", "must be a string"),
    ],
)
def test_a_chat_body_that_cannot_be_honoured_is_refused_by_name(
    fields: dict[str, Any], code: RowErrorCode, param: str, message: str
) -> None:
    with pytest.raises(RowError, match=re.escape(message)) as refused:
        chat(**fields)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert refused.value.message.startswith(re.split(r"[.\[]", param)[0])
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"prompt": ""}, INVALID, "prompt is empty"),
        ({"prompt": []}, INVALID, "prompt is empty"),
        ({"prompt": [1, True]}, INVALID, "list of token ids"),
        ({"prompt": [1, -1]}, INVALID, "list of token ids"),
        ({"truncate_prompt_tokens": 0}, INVALID, "truncate_prompt_tokens is 0, but must be 1 or more, or -1"),
        ({"truncate_prompt_tokens": -2}, INVALID, "truncate_prompt_tokens is -2, but must be -1 or more"),
        ({"truncate_prompt_tokens": -1}, INVALID, "but max_tokens is not set; set it"),
        ({"prompt": ["a", ""]}, INVALID, "prompt[1] is empty"),
        ({"prompt": [[1], []]}, INVALID, "prompt[1] is empty"),
        ({"prompt": [[1], 2, "x"]}, INVALID, "prompt[1] must be a string or a list"),
        ({"prompt": [[1], [-2]]}, INVALID, "prompt[1] must be a string or a list"),
        ({"prompt": [["a"], ["b"]]}, INVALID, "prompt[0] must be a string or a list"),
        ({"prompt": ["a"] * 2049}, INVALID, "prompt holds 2049, but at most 2048 are allowed"),
        ({"prompt": ["a"] * 21, "n": 100}, INVALID, "prompt holds 21, 100 times each, but at most 2048 are allowed"),
        ({"logprobs": True}, INVALID, "must be an integer"),
        ({"logprobs": 21}, INVALID, "must be 20 or less"),
        ({"max_tokens": -1}, INVALID, "must be 0 or more"),
        ({"echo": 1}, INVALID, "must be true or false"),
        ({"suffix": "end"}, UNSUPPORTED, "not supported"),
        ({"messages": MESSAGES}, UNSUPPORTED, "not a parameter known here"),
    ],
)
def test_a_completion_body_that_cannot_be_honoured_is_refused(
    fields: dict[str, Any], code: RowErrorCode, message: str
) -> None:
    with pytest.raises(RowError, match=re.escape(message)) as refused:
        completion(**fields)
    assert refused.value.code is code


@pytest.mark.parametrize("name", sorted(NO_CHANGE))
def test_known_but_unsupported_parameters_pass_only_with_values_that_change_nothing(name: str) -> None:
    """Given each parameter that is not honoured, null and the neutral values pass, anything else is refused."""
    for neutral in (None, *NO_CHANGE[name]):
        assert chat(**{name: neutral}) == chat()
    with pytest.raises(RowError, match=f"{name} is not supported") as refused:
        chat(**{name: "something else"})
    assert refused.value.code is UNSUPPORTED


def test_a_number_is_not_taken_for_a_bool_nor_a_bool_for_a_number() -> None:
    with pytest.raises(RowError, match="stream is not supported"):
        chat(stream=0)
    with pytest.raises(RowError, match="best_of is not supported"):
        chat(best_of=True)


def test_null_means_default_and_fields_without_effect_are_accepted() -> None:
    nulls = ("temperature", "top_p", "n", "seed", "stop", "logit_bias", "logprobs", "max_tokens", "user", "min_tokens")
    assert chat(**dict.fromkeys(nulls)) == chat()
    body = chat(user="me", metadata={"run": "7"}, store=True, stream=False, tools=[], response_format={"type": "text"})
    assert body.user == "me"
    assert body.temperature == 1.0


def test_text_parts_are_joined() -> None:
    body = chat(messages=user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))
    assert body.messages[0].text == "a\nb"
    assert load_body(CHAT_URL, dump_body(body)) == body


def test_scoring_only_is_for_completions() -> None:
    body = completion(max_tokens=0, echo=True, logprobs=5)
    assert (body.output_limit, body.echo, body.logprobs) == (0, True, 5)


def test_a_list_of_one_prompt_is_that_prompt() -> None:
    assert completion(prompt=["hi"]).prompt == "hi"
    assert completion(prompt=[[1, 2]]).prompt == (1, 2)


@pytest.mark.parametrize("given", [["a", "b"], [[1, 2], [3]], ["a", [3]], ["a"] * 2048])
def test_several_prompts_are_one_request(given: list[Any]) -> None:
    body = completion(prompt=given)
    assert body.prompts == tuple(tuple(prompt) if isinstance(prompt, list) else prompt for prompt in given)
    assert body.num_prompts == len(given)
    assert load_body(COMPLETIONS_URL, dump_body(body)) == body
    with pytest.raises(RowError, match=f"prompt holds {len(given)}, but at most 1 are"):
        parse_body(COMPLETIONS_URL, {"model": "demo", "prompt": given}, Limits(max_prompts=1))
    assert completion(prompt="alone", n=100, model="demo").prompts == ("alone",)


def test_limits_are_settings() -> None:
    body = {"model": "demo", "messages": MESSAGES, "stop": ["a", "b"]}
    with pytest.raises(RowError, match="at most 1"):
        parse_body(CHAT_URL, body, Limits(max_stop_sequences=1))


def embedding(given: Any, limits: Limits | None = None, **more: Any) -> EmbeddingBody:
    body = parse_body(EMBEDDINGS_URL, {"model": "demo", "input": given, **more}, limits)
    assert isinstance(body, EmbeddingBody)
    return body


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("hi", ("hi",)),
        (["hi"], ("hi",)),
        (["hi", "there"], ("hi", "there")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["hi", [3]], ("hi", (3,))),
    ],
)
def test_embedding_inputs_are_always_a_list(given: Any, inputs: Any) -> None:
    body = embedding(given)
    assert body.input == inputs
    # and survives being stored
    assert load_body(EMBEDDINGS_URL, dump_body(body)) == body


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "input is empty"),
        ([], "input is empty"),
        (["hi", ""], r"input \[1\] is empty"),
        ([[1], []], r"input \[1\] is empty"),
        ([1, "hi"], r"input \[0\] must be a string or a list of token ids"),
        ([1, -2], "input must be a string or a list of token ids"),
        ([True], "must be a string or a list"),
        (7, "must be a string or a list"),
        ({"text": "hi"}, "must be a string or a list"),
    ],
)
def test_texts_that_can_not_be_embedded_are_named(given: Any, message: str) -> None:
    with pytest.raises(RowError, match=message) as refused:
        embedding(given)
    assert (refused.value.code, refused.value.param) == (RowErrorCode.INVALID_REQUEST, "input")


def test_texts_of_one_request_have_a_limit() -> None:
    assert len(embedding(["x"] * 3, Limits(max_embedding_inputs=3)).input) == 3
    with pytest.raises(RowError, match="input holds 4 texts, but at most 3"):
        embedding(["x"] * 4, Limits(max_embedding_inputs=3))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"prompt_name": ""}, "prompt_name"),
    ],
)
def test_other_fields_of_an_embedding_are_checked(more: dict[str, Any], param: str) -> None:
    with pytest.raises(RowError) as refused:
        embedding("x", **more)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ([], RowErrorCode.INVALID_JSON, "holds a list, but must hold a JSON object"),
        ("text", RowErrorCode.INVALID_JSON, "must hold a JSON object"),
        ({}, INVALID, "custom_id is missing"),
        ({"custom_id": 7}, INVALID, "custom_id is 7, but must be a string"),
        ({"custom_id": ""}, INVALID, "custom_id is empty"),
        ({"custom_id": "x" * 513}, INVALID, "has 513 characters, but at most 512"),
        ({"method": "GET"}, INVALID, "method is 'GET', but must be 'POST'"),
        ({"url": "/v1/images"}, RowErrorCode.UNSUPPORTED_URL, "url is '/v1/images', but must be"),
        ({"body": []}, INVALID, "body is a list, but must be an object"),
        ({"extra": 1}, UNSUPPORTED, "extra is not a parameter known here"),
    ],
)
def test_a_line_of_the_wrong_shape_is_refused(line: Any, code: RowErrorCode, message: str) -> None:
    whole: Any = line
    if isinstance(line, dict) and line:
        whole = {"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": {}} | line
    with pytest.raises(RowError, match=re.escape(message)) as refused:
        parse_line(whole)
    assert refused.value.code is code


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*ChatBody.model_fields, *CompletionBody.model_fields, *NO_CHANGE, "nonsense"]


@given(st.sampled_from([CHAT_URL, COMPLETIONS_URL]), st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
@pytest.mark.slow
def test_any_body_is_accepted_or_refused_in_one_line_and_accepted_ones_survive_storing(
    url: str, fields: dict[str, Any]
) -> None:
    base = {"model": "demo", "messages": MESSAGES} if url == CHAT_URL else {"model": "demo", "prompt": "hi"}
    try:
        body = parse_body(url, base | fields)
    except RowError as error:
        refused = error
    else:
        stored = dump_body(body)
        assert load_body(url, stored) == body
        assert orjson.loads(stored)["model"] == body.model
        return
    assert refused.code in (INVALID, UNSUPPORTED)
    assert refused.param
    assert len(refused.message) < 500
