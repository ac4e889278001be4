"""Response bodies, read back with the official client's own models."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import openai.types
import openai.types.chat
import pytest

from engine.request import Choice, Completion, FinishReason, Request, SamplingParams, TokenLogprobs
from schemas.jobs.results import ResultRow, RowStatus
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatBody, CompletionBody, parse_body
from workers.rows import ComputedRow, PreparedRow, RejectedRow, RowName
from workers.text.logprobs import TokenTexts, completion_logprobs
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import StopWatchers
from workers.translation.responses import Envelope, ResponseBuilder


def ids_of(tokenizer: Tokenizer, text: str) -> Any:
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def logprobs_of(ids: Any, top: int, first: float = -0.5) -> TokenLogprobs:
    """The token that stands there is the second likeliest, behind token 7."""
    chosen = np.full(len(ids), -0.5, np.float32)
    chosen[:1] = first
    top_ids = np.stack([np.full(len(ids), 7), ids, np.full(len(ids), 8)], axis=1)[:, :top].astype(np.int32)
    values = np.tile(np.array([-0.25, -0.5, -np.inf], np.float32), (len(ids), 1))[:, :top]
    return TokenLogprobs(chosen, top_ids, values)


@pytest.fixture
def build(byte_level: Tokenizer, kit: Any) -> Any:
    def build(
        body: dict[str, Any],
        answers: list[str],
        *,
        prompt: str = "Hello",
        reason: FinishReason = FinishReason.STOP,
        copies: int = 0,
        error: str | None = None,
        prompt_logprobs: bool = False,
    ) -> list[ResultRow]:
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        parsed = parse_body(url, body)
        assert isinstance(parsed, ChatBody | CompletionBody)
        prompt_ids = ids_of(byte_level, prompt)
        watchers = StopWatchers(byte_level, prompt_ids, parsed.stop, 0) if parsed.stop else None
        top = (parsed.top_logprobs if isinstance(parsed, ChatBody) else parsed.logprobs) or 0
        wanted = parsed.logprobs if isinstance(parsed, ChatBody) else parsed.logprobs is not None
        choices = []
        for index, text in enumerate(answers):
            ids = ids_of(byte_level, text)
            stop_token = 2 if reason is FinishReason.STOP else None
            if watchers is not None:
                watcher = watchers(index)
                count = next((at for at, token in enumerate(ids.tolist(), 1) if watcher.push(token)), len(ids))
                ids, stop_token = ids[:count], None
            choices.append(Choice(index, ids, reason, stop_token, logprobs_of(ids, top) if wanted else None))
        completion = Completion(
            request_id="r",
            choices=tuple(choices),
            prompt_tokens=len(prompt_ids),
            cached_tokens=3,
            generated_tokens=sum(len(choice.token_ids) + 1 for choice in choices),
            started_at=1.0,
            finished_at=2.5,
            error=error,
            prompt_logprobs=logprobs_of(prompt_ids, top, first=float("nan")) if prompt_logprobs else None,
        )
        names = tuple(RowName(row, f"id-{row}") for row in range(4, 5 + copies))
        request = Request("r", prompt_ids, SamplingParams(n=len(answers)), watcher=watchers)
        row = ComputedRow(PreparedRow(names, parsed, request), completion)
        return ResponseBuilder(byte_level).results([row], envelope(kit.NOON))

    return build


def envelope(noon: datetime) -> Envelope:
    return Envelope("job-1", noon, 1, lambda seconds: noon + timedelta(seconds=seconds))


def test_a_chat_completion_is_one_for_the_official_client(build: Any, kit: Any) -> None:
    (row,) = build(kit.chat(n=2), ["naïve 🎉", "b"])
    response = openai.types.chat.ChatCompletion.model_validate_json(row.response)
    first, second = response.choices
    assert (first.message.content, first.message.role, first.message.refusal) == ("naïve 🎉", "assistant", None)
    assert (first.index, second.index, second.message.content, first.finish_reason) == (0, 1, "b", "stop")
    assert response.object == "chat.completion"
    assert response.id.startswith("chatcmpl-")
    assert response.model == "tiny"
    assert response.created == int(kit.NOON.timestamp()) + 1
    assert response.usage is not None
    assert response.usage.prompt_tokens == row.prompt_tokens
    assert response.usage.completion_tokens == row.completion_tokens
    assert response.usage.total_tokens == row.prompt_tokens + row.completion_tokens
    assert response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == row.cached_tokens == 3
    assert (row.text, row.status, row.status_code, row.finish_reason) == ("naïve 🎉", RowStatus.SUCCEEDED, 200, "stop")
    assert (row.created_at, row.started_at, row.finished_at) == (
        kit.NOON,
        kit.NOON + timedelta(seconds=1),
        kit.NOON + timedelta(seconds=2.5),
    )


def test_chat_logprobs_spell_every_token_in_bytes(build: Any, kit: Any) -> None:
    (row,) = build(kit.chat(logprobs=True, top_logprobs=3), ["The 日"])
    response = openai.types.chat.ChatCompletion.model_validate_json(row.response)
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode() == "The 日"
    for entry in logprobs.content:
        assert entry.logprob == -0.5
        assert [top.logprob for top in entry.top_logprobs] == [-0.25, -0.5, -9999.0]  # JSON has no infinity
        assert entry.top_logprobs[1].token == entry.token


def test_a_text_completion_is_one_for_the_official_client(build: Any, kit: Any) -> None:
    (row,) = build(kit.completion("Hello", logprobs=2), [" wörld"], reason=FinishReason.LENGTH)
    response = openai.types.Completion.model_validate_json(row.response)
    choice = response.choices[0]
    assert (choice.text, choice.finish_reason, row.text) == (" wörld", "length", " wörld")
    assert response.id.startswith("cmpl-")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    whole = [(offset, token) for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)]
    for offset, token in whole:
        if not token.startswith("bytes:"):
            assert choice.text[offset : offset + len(token)] == token
    assert choice.logprobs.token_logprobs == [-0.5] * len(whole)
    assert choice.logprobs.top_logprobs is not None
    assert all(
        -0.25 in tops.values() and token in tops
        for tops, (_, token) in zip(choice.logprobs.top_logprobs, whole, strict=True)
    )


def test_incomplete_characters_are_spelt_as_bytes(byte_level: Tokenizer) -> None:
    # Given tokens that are pieces of a character
    texts = TokenTexts(byte_level)
    ids = ids_of(byte_level, "語\u0fff").tolist()
    spellings = [texts.spelling_of(token_id) for token_id in ids]
    # Then each has its own spelling, as OpenAI's completions have it, and the bytes are right
    assert len(set(spellings)) == len(set(ids))
    assert any(spelling.startswith("bytes:\\x") for spelling in spellings)
    assert b"".join(texts.bytes_of(token_id) for token_id in ids).decode() == "語\u0fff"


def test_sentencepiece_tokens_have_their_bytes_too(sentencepiece: Tokenizer) -> None:
    texts = TokenTexts(sentencepiece)
    ids = ids_of(sentencepiece, "The 語🎉").tolist()
    assert b"".join(texts.bytes_of(token_id) for token_id in ids).decode() == " The 語🎉"


def test_the_likelier_of_two_tokens_with_one_spelling_counts(sentencepiece: Tokenizer) -> None:
    # Given a letter, and the byte that is the same letter and less likely
    texts = TokenTexts(sentencepiece)
    twins = [i for i in range(sentencepiece.size) if texts.spelling_of(i) == "A"]
    assert len(twins) == 2
    top = np.array([[-0.1, -3.0, -9.0]], np.float32)
    logprobs = TokenLogprobs(np.array([-0.1], np.float32), np.array([[twins[1], 300, twins[0]]], np.int32), top)
    # When both are among the likeliest, then the value is the likelier one's
    written = completion_logprobs(texts, [(np.array([twins[1]], np.int32), logprobs)], 3)
    (tops,) = written["top_logprobs"]
    assert tops["A"] == pytest.approx(-0.1)
    assert len(tops) == 2


def test_echo_scores_the_prompt(build: Any, kit: Any) -> None:
    # Given a request that only scores its prompt
    body = kit.completion("Hello", echo=True, max_tokens=0, logprobs=1)
    (row,) = build(body, [""], reason=FinishReason.LENGTH, prompt_logprobs=True)
    # When a program reads the response, it finds the prompt, and null for what stands before everything
    choice = json.loads(row.response)["choices"][0]
    assert choice["text"] == row.text == "Hello"
    assert "".join(choice["logprobs"]["tokens"]) == "Hello"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert set(choice["logprobs"]["token_logprobs"][1:]) == {-0.5}
    assert choice["logprobs"]["text_offset"][0] == 0


def test_echo_goes_before_the_answer(build: Any, kit: Any) -> None:
    (row,) = build(kit.completion("Hello", echo=True, logprobs=0), [" world"], prompt_logprobs=True)
    choice = json.loads(row.response)["choices"][0]
    assert choice["text"] == "Hello world"
    assert "".join(choice["logprobs"]["tokens"]) == "Hello world"
    # and with token ids for a prompt, their text
    (row,) = build(kit.completion([3, 40, 41], echo=True), [" world"], prompt="<turn>Hi")
    assert row.text == "Hi world"


def test_special_tokens_have_no_length_in_the_text(build: Any, kit: Any) -> None:
    (row,) = build(
        kit.completion([3, 40, 41], echo=True, logprobs=0), [" world"], prompt="<turn>Hi", prompt_logprobs=True
    )
    choice = json.loads(row.response)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][0] == "<turn>"
    assert logprobs["text_offset"][:2] == [0, 0]
    for token, offset in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_a_stop_string_cuts_text_and_logprobs_alike(build: Any, kit: Any) -> None:
    (row,) = build(kit.chat(stop="STOP", logprobs=True), ["The quick STOP brown"])
    choice = json.loads(row.response)["choices"][0]
    assert row.text == choice["message"]["content"] == "The quick "
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]).strip() == "The quick"


def test_copies_get_the_answer_under_their_own_name(build: Any, kit: Any) -> None:
    rows = build(kit.chat(), ["x"], copies=2)
    bodies = [json.loads(row.response) for row in rows]
    assert [row.custom_id for row in rows] == ["id-4", "id-5", "id-6"]
    assert len({body["id"] for body in bodies}) == 3
    assert {body["choices"][0]["message"]["content"] for body in bodies} == {"x"}
    # Nothing was computed for a copy: all of its prompt counts as cached
    assert [row.cached_tokens for row in rows] == [3, rows[0].prompt_tokens, rows[0].prompt_tokens]
    assert bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == rows[0].prompt_tokens


def test_the_same_row_has_the_same_response_again(build: Any, kit: Any) -> None:
    assert build(kit.chat(), ["x"])[0].response == build(kit.chat(), ["x"])[0].response


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        (FinishReason.ERROR, RowErrorCode.ENGINE_ERROR, 500),
        (FinishReason.TIMEOUT, RowErrorCode.REQUEST_TIMEOUT, 408),
    ],
)
def test_a_completion_without_an_answer_is_a_failed_row(
    build: Any, kit: Any, reason: Any, code: RowErrorCode, status: int
) -> None:
    error = "logits are not finite" if reason is FinishReason.ERROR else None
    rows = build(kit.chat(), ["half an ans"], reason=reason, copies=1, error=error)
    for row in rows:
        assert (row.status, row.error_code, row.status_code) == (RowStatus.FAILED, code, status)
        assert row.text is None
        assert row.response is None
        assert row.error_message
    assert error is None or rows[0].error_message == f"line {rows[0].row + 1} of the input: {error}"


def test_a_refused_row_has_its_reason(byte_level: Tokenizer, kit: Any) -> None:
    refused = RejectedRow(
        (RowName(1, "a"),), "gpt-9", RowError(RowErrorCode.MODEL_NOT_FOUND, "no such model"), 0.0, 0.0
    )
    (row,) = ResponseBuilder(byte_level).results([refused], envelope(kit.NOON))
    assert (row.error_code, row.status_code, row.model, row.custom_id) == ("model_not_found", 404, "gpt-9", "a")
