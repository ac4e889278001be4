"""What counts as set: a model's defaults never replace what a request says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.requests.parsing import CHAT_URL, EMBEDDINGS_URL, ChatBody, dump_body, load_body, parse_body
from schemas.requests.request_key import AnswerContext, request_key
from schemas.requests.sampling_defaults import FILLED_IN, SamplingDefaults, answer_limit, fill_in

DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05)
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
OF_API = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def filled(**fields: Any) -> ChatBody:
    body = fill_in(parse_body(CHAT_URL, HELLO | fields), DEFAULTS)
    assert isinstance(body, ChatBody)
    return body


@given(st.dictionaries(st.sampled_from(FILLED_IN), st.sampled_from(["null", "api", "other"])))
def test_only_what_a_request_leaves_out_is_filled_in_and_survives_the_dump(kinds: dict[str, str]) -> None:
    values = {"null": lambda name: None, "api": OF_API.get, "other": lambda name: 1 if name == "top_k" else 0.5}
    given_fields = {name: values[kind](name) for name, kind in kinds.items()}
    body = filled(**given_fields)
    for name in FILLED_IN:
        value = given_fields.get(name)
        assert getattr(body, name) == (getattr(DEFAULTS, name) if value is None else value)
    assert load_body(CHAT_URL, dump_body(body)).model_dump() == body.model_dump()


def test_equal_requests_share_an_answer_by_what_is_computed() -> None:
    def found(**fields: Any) -> bytes:
        return request_key(CHAT_URL, filled(**fields), AnswerContext("weights", 10))

    assert found() == found(temperature=0.6) == found(temperature=None, top_k=20)
    assert found() != found(temperature=1.0)
    assert found(temperature=0) == found(temperature=0, top_k=3), "greedy: filters change nothing"
    assert found(temperature=0) != found(temperature=0, repetition_penalty=1.0)
    greedy = fill_in(parse_body(CHAT_URL, HELLO), SamplingDefaults(temperature=0))
    assert isinstance(greedy, ChatBody)
    assert greedy.is_deterministic
    assert not filled().is_deterministic


def test_embeddings_and_models_without_defaults_stay_as_they_are() -> None:
    body = parse_body(EMBEDDINGS_URL, {"model": "m", "input": "a"})
    assert fill_in(body, DEFAULTS) is body
    chat = parse_body(CHAT_URL, HELLO)
    assert fill_in(chat, None) is chat


@pytest.mark.parametrize(("own", "limit"), [(None, 4096), (512, 512), (8192, 4096)])
def test_the_smaller_limit_of_an_answer_applies(own: int | None, limit: int) -> None:
    assert answer_limit(SamplingDefaults(max_new_tokens=own), 4096) == limit
    assert answer_limit(None, 4096) == 4096
