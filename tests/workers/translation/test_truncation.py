"""Jobs that cut prompts which are too long: what each way keeps, and that the row says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from pipeline.adapters.system_clock import SystemClock
from schemas.jobs.results import ResultRow, RowStatus
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatBody, CompletionBody
from schemas.requests.truncation import TruncatePrompt, limit_prompt_tokens
from workers.model.loaded_model import LoadedModel
from workers.shards.worker import ShardWorker
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import JobRules, ModelLimits, RowHints, Translator

CONTEXT = 128
CONFIG = EngineConfig(
    dtype="float32", threads=1, max_model_len=CONTEXT, cache=CacheConfig(block_size=16, num_blocks=100),
    schedule=ScheduleConfig(max_num_seqs=8),
)  # fmt: skip
LINES = "".join(f"line {number} of the user\n" for number in range(40))
WORDS = "naïve 日本語 🎉 words " * 40
SYSTEM = {"role": "system", "content": "Be brief."}
BEGIN, HEADER = "system\nBe brief.\nuser\n", "\nassistant\n"  # without the special tokens


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> LoadedModel:
    return LoadedModel.load(model_folder, name="tiny", config=CONFIG)


def compute(kit: Any, model: LoadedModel, side: str | None, bodies: list[Any]) -> list[ResultRow]:
    sink = kit.MemorySink()
    work = kit.make_work(bodies, job=kit.make_job(truncate_prompt=side))
    ShardWorker(model, kit.ListSource([work]), sink, SystemClock()).run()
    return list(sink.parts[1])


def asked(body: dict[str, Any]) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 8, "return_token_ids": True} | body


def talk(text: str, *others: dict[str, Any]) -> dict[str, Any]:
    user = {"role": "user", "content": text}
    return asked({"model": "tiny", "messages": [SYSTEM, user, *others]})


def kept_tokens(row: ResultRow) -> list[int]:
    assert row.response is not None, row.error_message
    response = json.loads(row.response)
    ids: list[int] = response.get("prompt_token_ids") or response["choices"][0]["prompt_token_ids"]
    assert row.prompt_tokens == len(ids)
    return ids


@pytest.mark.parametrize("side", ["left", "right", "newline"])
def test_a_completion_keeps_the_right_part_and_says_what_it_lost(loaded: LoadedModel, kit: Any, side: str) -> None:
    (ids,) = loaded.tokenizer.encode_batch([LINES], add_special_tokens=True)
    given_ids = ids.tolist()
    bodies = [asked(kit.completion(prompt)) for prompt in (LINES, given_ids, "short", given_ids[:120])]
    *cut, short, whole = compute(kit, loaded, side, bodies)
    for row in cut:
        kept = kept_tokens(row)
        expected = given_ids[-120:] if side == "left" else given_ids[:120]
        if side == "newline":
            text = loaded.tokenizer.decode(expected)
            assert len(kept) < 120
            assert loaded.tokenizer.decode(kept) == text[: text.rindex("\n") + 1]
        else:
            assert kept == expected
        assert row.truncated_tokens == len(given_ids) - len(kept)
        usage = json.loads(row.response or "")["usage"]
        assert usage["prompt_tokens_details"]["truncated_tokens"] == row.truncated_tokens
    for row, tokens in ((short, None), (whole, given_ids[:120])):
        assert row.truncated_tokens is None
        assert "truncated_tokens" not in json.loads(row.response or "")["usage"]["prompt_tokens_details"]
        assert tokens in (None, kept_tokens(row))


@pytest.mark.parametrize("side", ["right", "newline"])
@pytest.mark.parametrize("text", [LINES, WORDS + "\n", LINES + "<end><turn>" * 40])
def test_a_chat_loses_the_end_of_its_last_user_message(loaded: LoadedModel, kit: Any, side: str, text: str) -> None:
    answered = {"role": "assistant", "content": "Yes?"}
    rows = compute(kit, loaded, side, [talk(text), talk(text, answered)])
    if side == "newline" and text.startswith(WORDS):
        assert [row.error_code for row in rows] == [RowErrorCode.CONTEXT_LENGTH_EXCEEDED] * 2
        assert "no whole line fits" in (rows[0].error_message or "")
        return
    for row, rest in zip(rows, ("", "assistant\nYes?\n"), strict=True):
        kept = kept_tokens(row)
        assert len(kept) <= 120
        if side == "right":
            assert len(kept) > 112  # as much as fits, but for pieces of characters and words
        shown = loaded.tokenizer.decode(kept)
        end = f"\n{rest}assistant\n"
        assert shown.startswith(BEGIN)
        assert shown.endswith(end)
        own = shown.removeprefix(BEGIN).removesuffix(end)
        assert own
        assert text.startswith(own)
        assert "\ufffd" not in own
        if side == "newline":
            assert own.endswith("\n")
            assert len(own) == text.rindex("\n", 0, len(own)) + 1
        assert (row.truncated_tokens or 0) > 100


def test_left_drops_the_beginning_of_a_chats_tokens(loaded: LoadedModel, kit: Any) -> None:
    (cut, own) = compute(kit, loaded, "left", [talk(LINES), talk(LINES) | {"truncate_prompt_tokens": 50}])
    text = loaded.tokenizer.render_chat(ChatBody.model_validate(talk(LINES)).messages)
    (ids,) = loaded.tokenizer.encode_chats([text])
    assert kept_tokens(cut) == ids[-120:].tolist()
    assert kept_tokens(own) == ids[-50:].tolist(), "a row's own limit comes first"


def test_only_the_last_user_message_is_cut(loaded: LoadedModel, kit: Any) -> None:
    user = {"role": "user", "content": "?"}
    body = asked({"model": "tiny", "messages": [SYSTEM | {"content": LINES}, user]})
    rows = compute(kit, loaded, "right", [body, body | {"messages": body["messages"][:1]}])
    assert [row.error_code for row in rows] == [RowErrorCode.CONTEXT_LENGTH_EXCEEDED] * 2
    for row in rows:
        assert "nothing of its last user message fits; shorten the other messages" in (row.error_message or "")


def test_without_max_tokens_a_quarter_of_the_context_is_left_to_the_answer(loaded: LoadedModel, kit: Any) -> None:
    ids = [5 + at % 90 for at in range(300)]
    long, fits, echoed = compute(
        kit,
        loaded,
        "right",
        [
            kit.completion(ids, temperature=0, ignore_eos=True),
            kit.completion(ids[:125], temperature=0, ignore_eos=True),
            kit.completion(ids, echo=True, max_tokens=0, return_token_ids=True),
        ],
    )
    assert (long.prompt_tokens, long.completion_tokens, long.truncated_tokens) == (96, 32, 204)
    assert (fits.prompt_tokens, fits.completion_tokens, fits.truncated_tokens) == (125, 3, None)
    assert (echoed.prompt_tokens, echoed.text) == (128, loaded.tokenizer.decode(ids[:128]))


def test_a_row_that_can_never_fit_and_a_job_that_cuts_nothing_are_refused(loaded: LoadedModel, kit: Any) -> None:
    for side, body in (("right", {"max_tokens": CONTEXT}), (None, {})):
        (row,) = compute(kit, loaded, side, [asked(kit.completion(LINES)) | body])
        assert (row.status, row.error_code) == (RowStatus.FAILED, RowErrorCode.CONTEXT_LENGTH_EXCEEDED)


def test_several_prompts_are_cut_by_themselves(loaded: LoadedModel, kit: Any) -> None:
    ids = [5 + at % 90 for at in range(300)]
    row, refused = compute(
        kit,
        loaded,
        "newline",
        [asked(kit.completion([LINES, "short", LINES[:60]])), asked(kit.completion(["short", [9] * 200]))],
    )
    assert row.truncated_tokens is not None, row.error_message
    kept = [choice["prompt_token_ids"] for choice in json.loads(row.response or "")["choices"]]
    assert [loaded.tokenizer.decode(ids) for ids in kept[1:]] == ["short", LINES[:60]]
    assert len(kept[0]) <= 120 < len(ids)
    assert "prompt[1] of 200 tokens is to be cut to 120, but no whole line fits" in (refused.error_message or "")


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "prompt", "kept"),
    [
        (None, 0, 99, 99), (None, 0, 100, 75), (None, 40, 61, 60), (None, 10, 90, 90), (30, 0, 70, 70), (30, 0, 71, 70),
        (100, 0, 71, 71), (99, 0, 71, 1), (0, 0, 101, 100),
    ],
)  # fmt: skip
def test_the_room_that_an_answer_gets(max_tokens: int | None, min_tokens: int, prompt: int, kept: int) -> None:
    body = CompletionBody(model="m", prompt="x", max_tokens=max_tokens, min_tokens=min_tokens)
    assert limit_prompt_tokens(body, prompt, 100, 50) == kept


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@pytest.mark.slow
def test_any_text_is_cut_at_a_character_and_fits(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    piece = st.sampled_from(["naïve", " ", "\n", "日本語", "🎉", "<end>", "<turn>", "the quick", "e\u0301", "\r\n"])
    side = st.sampled_from([TruncatePrompt.RIGHT, TruncatePrompt.NEWLINE])

    @settings(max_examples=60, deadline=None)
    @given(st.lists(piece, min_size=60, max_size=120).map("".join), side, st.booleans())
    def check(text: str, side: TruncatePrompt, chat: bool) -> None:
        limits = ModelLimits(60, tokenizer.size, (2,))
        translator = Translator(tokenizer, limits, JobRules(truncate_prompt=side))
        if chat:
            body: Any = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": text}]})
            prompts = tokenizer.encode_chats([str(translator.prompts_of(body)[0])])
        else:
            body = CompletionBody(model="m", prompt=text)
            prompts = tokenizer.encode_batch([text], add_special_tokens=True)
        try:
            made = translator.request("r", body, prompts, RowHints(0))
        except RowError as error:
            if side is TruncatePrompt.RIGHT:
                raise
            assert "no whole line fits" in error.message  # noqa: PT017
            return
        kept = made.prompt_token_ids
        assert len(kept) <= 59
        if len(kept) == len(prompts[0]):
            return
        if chat:
            header = tokenizer.encode_chats(["<end>\n<turn>assistant\n"])[0].tolist()
            assert kept[-len(header) :].tolist() == header
        if side is TruncatePrompt.NEWLINE and not chat:
            assert tokenizer.decode(kept).endswith("\n")

    check()
