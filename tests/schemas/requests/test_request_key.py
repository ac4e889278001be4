"""The key of a request: all that enters its answer, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from schemas.models import ModelPin
from schemas.requests.parsing import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL, parse_body
from schemas.requests.request_key import AnswerContext, request_key

CONTEXT = AnswerContext("weights", 10, "policies", 7, "left")
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def key(context: AnswerContext = CONTEXT, **fields: Any) -> bytes:
    return request_key(CHAT_URL, parse_body(CHAT_URL, HELLO | fields), context)


def test_given_another_notation_when_keys_are_made_then_they_are_equal() -> None:
    for same in (
        {"model": "another name"}, {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k"}, {"top_p": 1.0},
        {"temperature": 1},
    ):  # fmt: skip
        assert key(**same) == key()
    assert key(max_tokens=5) == key(max_completion_tokens=5)
    assert key(temperature=0) == key(temperature=0, seed=3, top_k=4)
    assert key(logit_bias={"1": 2, "3": 4}) == key(logit_bias={"3": 4, "1": 2})


def test_given_anything_else_that_enters_the_answer_when_keys_are_made_then_they_differ() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"messages": [{"role": "user", "content": "hello "}]}, {"temperature": 0}, {"temperature": 0.5},
        {"max_tokens": 9}, {"seed": 1}, {"top_p": 0.5}, {"stop": "x"}, {"n": 2}, {"logprobs": True},
        {"structured_outputs": {"choice": ["a", "b"]}}, {"structured_outputs": {"choice": ["b", "a"]}},
        {"reasoning_effort": "low"},
        {"messages": [{"role": "system", "content": "s"}, *HELLO["messages"]]},
    ]  # fmt: skip
    keys = [key(**change) for change in changes]
    contexts = [
        replace(CONTEXT, model="others"), replace(CONTEXT, policies=None), replace(CONTEXT, default_max_tokens=11),
        replace(CONTEXT, seed=8), replace(CONTEXT, truncate_prompt=None),
    ]  # fmt: skip
    keys += [key(context) for context in contexts]
    text = parse_body(COMPLETIONS_URL, {"model": "m", "prompt": "hello"})
    keys.append(request_key(COMPLETIONS_URL, text, CONTEXT))
    assert len(set(keys)) == len(changes) + len(contexts) + 1


def test_given_settings_that_a_request_replaces_when_keys_are_made_then_they_are_equal() -> None:
    other = replace(CONTEXT, default_max_tokens=11, seed=8)
    assert key(max_tokens=5, temperature=0) == key(other, max_tokens=5, temperature=0)
    assert key(max_tokens=5, seed=1) == key(other, max_tokens=5, seed=1)
    body = parse_body(EMBEDDINGS_URL, {"model": "m", "input": "a"})
    assert request_key(EMBEDDINGS_URL, body, CONTEXT) == request_key(EMBEDDINGS_URL, body, other)


def test_given_pins_when_their_keys_are_made_then_weights_and_arithmetic_count_and_names_do_not() -> None:
    pin = ModelPin(name="a", source="a", digest="sha256:1", dtype="float32")
    assert pin.model_copy(update={"name": "b", "source": "b"}).key == pin.key
    changes = [{"digest": "sha256:2"}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_dtype": "int8"}]
    changes += [{"engine": "vllm"}]
    assert len({pin.key, *(pin.model_copy(update=change).key for change in changes)}) == len(changes) + 1


def test_given_a_merged_adapter_then_only_float32_shares_the_key_with_the_one_beside_the_model() -> None:
    base = ModelPin(name="base", source="b", digest="sha256:1", dtype="float32")
    for dtype, is_shared in (("float32", True), ("bfloat16", False), ("float16", False)):
        pin = base.model_copy(update={"dtype": dtype})
        beside, merged = (pin.with_adapter("a", "/a", "ab", merged=merged) for merged in (False, True))
        assert (beside.key == merged.key) is is_shared
        assert beside.without_adapter == merged.without_adapter == pin
        # Workers with the base answer for the one beside it; for the merged one only those that merged it.
        assert (beside.base_key, beside.loaded_name) == (pin.key, "base")
        assert (merged.base_key, merged.loaded_name) == (merged.key, "a")
