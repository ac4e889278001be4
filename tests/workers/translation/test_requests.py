"""Bodies become engine requests: defaults, limits, seeds, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.request import Request
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatBody, CompletionBody, parse_body
from workers.text import tokenizer as tokenizer_module
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import JobRules, ModelLimits, RowHints, StopWatchers, Translator, row_seed

LIMITS = ModelLimits(max_model_len=64, vocab_size=400, end_token_ids=(9,))


@pytest.fixture
def make(byte_level: Tokenizer, kit: Any) -> Any:
    def make(
        body: dict[str, Any], *, prompt_tokens: int = 10, rules: JobRules | None = None, hints: RowHints | None = None
    ) -> Request:
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        parsed = parse_body(url, body)
        assert isinstance(parsed, ChatBody | CompletionBody)
        translator = Translator(byte_level, LIMITS, rules or JobRules(default_max_tokens=40))
        translator.prompts_of(parsed)
        prompt = np.arange(prompt_tokens, dtype=np.int32)
        return translator.request("r", parsed, [prompt], hints or RowHints(7))

    return make


def test_defaults_are_openais(make: Any, kit: Any) -> None:
    params = make(kit.chat()).params
    assert (params.temperature, params.top_p, params.n, params.logprobs) == (1.0, 1.0, 1, None)
    assert params.max_tokens == 40
    # and of a long prompt, only what is left of the context
    assert make(kit.chat(), prompt_tokens=50).params.max_tokens == 14


def test_all_request_options_arrive(make: Any, kit: Any) -> None:
    body = kit.chat(
        max_completion_tokens=5, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, n=3, seed=-4, min_tokens=2,
        frequency_penalty=0.1, presence_penalty=0.2, repetition_penalty=1.3, logit_bias={"17": -100},
        stop_token_ids=[33], logprobs=True, top_logprobs=4, stop=["x", "y"],
    )  # fmt: skip
    hints = RowHints(7, prefix_group=3, expected_tokens=1_000)
    request = make(body, rules=JobRules(priority=1, salt=b"tenant"), hints=hints)
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (5, 0.5, 0.9, 0, 0.1)
    assert (params.n, params.seed, params.min_tokens, params.logprobs) == (3, -4, 2, 4)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.1, 0.2, 1.3)
    assert params.logit_bias == {17: -100.0}
    # The tokenizer's end token (2) ends an answer too, where the engine doesn't know it already
    assert params.stop_token_ids == (33, 2)
    assert (request.priority, request.salt, request.prefix_group, request.expected_tokens) == (1, b"tenant", 3, 5)
    assert isinstance(request.watcher, StopWatchers)
    assert request.watcher.stops == ("x", "y")


@pytest.mark.parametrize("name", ["chat", "completion"])
def test_a_text_of_far_too_many_tokens_is_not_encoded_as_a_whole(
    make: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Given a tokenizer whose longest token says little of most texts
    encoded: list[int] = []
    encode = Tokenizer.encode_batch

    def recorded(tokenizer: Tokenizer, texts: Sequence[str], **options: bool) -> Any:
        encoded.extend(map(len, texts))
        return encode(tokenizer, texts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Tokenizer, "count_min_tokens", lambda *_: 0)
    monkeypatch.setattr(Tokenizer, "encode_batch", recorded)
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 30)
    # when a text has many tokens, then it is refused by its first pieces.
    with pytest.raises(RowError, match="prompt of at least 64 tokens, but the context holds 64") as refused:
        make(getattr(kit, name)("0123456789" * 1_000))
    assert refused.value.code is RowErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert 128 < sum(encoded) < 1_000


def test_ignoring_the_end_means_the_tokenizers_too(make: Any, kit: Any) -> None:
    params = make(kit.chat(ignore_eos=True, stop_token_ids=[33])).params
    assert params.ignore_eos
    assert params.stop_token_ids == (33,)


def test_a_row_without_seed_gets_its_own_and_keeps_it(make: Any, kit: Any) -> None:
    # Given two rows without a seed, when the job is run again, then each has its seed again, and not its neighbour's
    seeds = [make(kit.chat(), rules=JobRules(seed=5), hints=RowHints(row)).params.seed for row in (1, 2, 1)]
    assert seeds[0] == seeds[2] != seeds[1]
    assert make(kit.chat(), rules=JobRules(seed=6), hints=RowHints(1)).params.seed != seeds[0]
    assert make(kit.chat(seed=0)).params.seed == 0
    # The value itself is part of the promise that a rerun gives the same answers
    assert row_seed(5, 1) == 2014649224381430719


def test_scoring_asks_for_the_prompts_logprobs(make: Any, kit: Any) -> None:
    params = make(kit.completion(echo=True, max_tokens=0, logprobs=3)).params
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (0, 3, 3)
    assert make(kit.completion(logprobs=3)).params.prompt_logprobs is None
    assert make(kit.chat(logprobs=True)).params.logprobs == 0


@pytest.mark.parametrize(
    ("body", "prompt_tokens", "code", "message"),
    [
        ({"max_tokens": 60}, 10, RowErrorCode.CONTEXT_LENGTH_EXCEEDED, "10 tokens.*max_tokens 60.*70.*holds 64"),
        ({}, 64, RowErrorCode.CONTEXT_LENGTH_EXCEEDED, "64 tokens.*holds 64"),
        ({"max_tokens": 500}, 10, RowErrorCode.INVALID_REQUEST, "max_tokens is 500.*at most 100"),
        ({"min_tokens": 55}, 10, RowErrorCode.INVALID_REQUEST, "min_tokens is 55, but at most 40"),
        ({"logit_bias": {"400": 1}}, 10, RowErrorCode.INVALID_REQUEST, "logit_bias holds token 400.*end at 399"),
        ({"stop_token_ids": [999]}, 10, RowErrorCode.INVALID_REQUEST, "stop_token_ids holds token 999"),
        ({"prompt": [1, 400]}, 10, RowErrorCode.INVALID_REQUEST, "prompt holds token 400"),
        ({"prompt": "a\ud800b"}, 10, RowErrorCode.INVALID_REQUEST, "surrogate"),
        ({}, 0, RowErrorCode.INVALID_REQUEST, "no tokens"),
    ],
)
def test_an_invalid_request_fails_its_row(
    make: Any, kit: Any, body: dict[str, Any], prompt_tokens: int, code: RowErrorCode, message: str
) -> None:
    rules = JobRules(default_max_tokens=40, max_output_tokens=100)
    with pytest.raises(RowError, match=message) as caught:
        make(kit.completion(**{"prompt": "x", **body}), prompt_tokens=prompt_tokens, rules=rules)
    assert caught.value.code is code
    assert caught.value.message.count("max_tokens") == caught.value.fields.count("max_tokens")
