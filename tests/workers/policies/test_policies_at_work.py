"""Content policies in a worker, in rows of shards and on the lane; answers are forced_chat to be a text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai.types.chat
import pytest
from structlog.testing import capture_logs

from engine.config import EngineConfig
from pipeline.lane.memory import MemoryLane
from pipeline.ports import PipelineError
from schemas.jobs.results import RowStatus
from schemas.requests.errors import RowErrorCode
from schemas.workers.lane import ErrorEvent, TokensEvent
from tests.workers.policies.worker_harness import (
    CLOCK,
    CONFIG,
    end_of,
    forced_chat,
    rows_of,
    serving_worker,
    text_of,
)
from workers.lane.routes import no_models
from workers.model.loaded_model import LoadedModel
from workers.policies.policy import ALLOWED, NO_POLICIES, Answer, Policies, PolicyVerdict, Prompt
from workers.policies.rules import Rules

WORD = "falcon"
LEAD = "We went up the hill in the morning, and there we saw a "
TAIL = " circling over the lake" * 15
FORBIDDEN, FINE = f"{LEAD}{WORD}{TAIL}", f"{LEAD}heron{TAIL}"


@pytest.fixture
def birds(tmp_path: Path) -> Policies:
    path = tmp_path / "birds.toml"
    path.write_text(f"[[rule]]\nname = 'birds'\nkeywords = ['{WORD.upper()}']\n", encoding="utf-8")
    return Policies((("rules", Rules(path)),))


class RaisingPolicy:
    """A policy that raises where it finds the word."""

    fingerprint = "1"
    window: int | None = len(WORD)

    def before(self, prompt: Prompt) -> PolicyVerdict:
        if any(WORD in text for text in prompt.texts):
            raise ValueError(prompt.texts[0])
        return ALLOWED

    def after(self, answer: Answer) -> PolicyVerdict:
        if WORD in answer.text:
            raise ValueError(answer.text)
        return ALLOWED


class RaisingAtEndPolicy(RaisingPolicy):
    """The same, at the end of the answer only."""

    window = None


def message_of(row: Any) -> Any:
    """The message of the first choice, checked with the official client's own model."""
    return openai.types.chat.ChatCompletion.model_validate_json(row.response).choices[0].message


def test_a_refused_prompt_fails_its_row_before_anything_is_computed(
    model: LoadedModel, birds: Policies, kit: Any
) -> None:
    spelt = model.tokenizer.encode_batch([f"of a {WORD}"], add_special_tokens=False)[0].tolist()
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"for": "a Falcon"}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": f"the {WORD}s"}]
    question = {"role": "user", "content": "and?"}
    bodies: list[Any] = [
        kit.chat(f"Where is the {WORD}?"),
        0,
        kit.completion(f"The {WORD.title()}"),
        kit.completion(spelt),
        kit.chat("", messages=[{"role": "user", "content": parts}]),
        kit.chat("", messages=[{"role": "system", "content": f"No {WORD}."}, question]),
        kit.chat("", messages=[question, {"role": "assistant", "content": None, "tool_calls": [call]}, question]),
        kit.chat("", messages=[{**question, "name": WORD}]),  # which the template doesn't show
        kit.chat("x", tools=[{"type": "function", "function": {"name": "look", "description": f"for a {WORD}"}}]),
    ]
    before = model.engine.stats()
    with capture_logs() as logs:
        sink = rows_of(kit, model, bodies, birds)
    after = model.engine.stats()
    assert (after.computed, after.generated, after.steps) == (before.computed, before.generated, before.steps)
    assert set(sink.rows) == set(range(len(bodies)))
    for row in sink.rows.values():
        assert (row.status, row.status_code) == (RowStatus.FAILED, 400)
        assert row.error_code is RowErrorCode.CONTENT_FILTER
        assert row.error_message == (
            f"line {row.row + 1} of the input: the prompt is refused by content policy 'rules', rule 'birds'; "
            "change the prompt"
        )
        assert row.text is row.response is None
    refusals = [log for log in logs if log["event"] == "content refused"]
    assert [log["row"] for log in refusals] == [f"job-1/{row}" for row in range(len(bodies)) if row != 1]
    assert WORD not in repr(logs).lower()


def test_other_rows_of_a_shard_with_a_refused_one_are_answered_as_without_policies(
    model: LoadedModel, birds: Policies, kit: Any
) -> None:
    bodies = [kit.chat(f"row {n}", seed=n, max_tokens=20, logprobs=True) for n in range(6)]
    plain = rows_of(kit, model, bodies, NO_POLICIES)
    judged = rows_of(kit, model, [*bodies[:3], kit.chat(WORD), *bodies[3:]], birds)
    texts = [judged.rows[row].text for row in (0, 1, 2, 4, 5, 6)]
    assert texts == [plain.rows[row].text for row in range(6)]
    assert [judged.rows[row].status for row in range(7)].count(RowStatus.FAILED) == 1
    assert judged.reports[1].engine["content_policies"] == f"rules ({birds.fingerprint})"
    assert "content_policies" not in plain.reports[1].engine


@pytest.mark.exhaustive
def test_a_refused_answer_is_withheld_and_its_row_has_succeeded(model: LoadedModel, birds: Policies, kit: Any) -> None:
    sink = rows_of(
        kit,
        model,
        [
            forced_chat(kit, FORBIDDEN, logprobs=True),
            0,
            forced_chat(kit, FINE),
            kit.completion("Once", structured_outputs={"choice": [FORBIDDEN]}, echo=True, logprobs=1, max_tokens=800),
            kit.chat("long", max_tokens=600, ignore_eos=True),  # the others are logged before it ends
        ],
        birds,
        checkpoint_seconds=0.1,
    )
    for row in (sink.rows[0], sink.rows[1]):
        assert (row.status, row.status_code, row.finish_reason) == (RowStatus.SUCCEEDED, 200, "content_filter")
        assert (row.text, row.error_code) == ("", None)
        assert (message_of(row).content, message_of(row).tool_calls) == (None, None)
        assert row.completion_tokens > 100, "what was computed is counted"
    assert sink.rows[2].text == FINE
    assert sink.rows[2].finish_reason == "stop"
    (choice,) = json.loads(sink.rows[3].response)["choices"]
    assert choice == {"index": 0, "text": "", "logprobs": None, "finish_reason": "content_filter"}
    checkpointed = repr([point.finished["response"].to_pylist() for point in sink.checkpoints[1]])
    assert "heron" in checkpointed
    assert WORD not in checkpointed


def test_of_several_choices_those_are_withheld_that_are_refused(model: LoadedModel, birds: Policies, kit: Any) -> None:
    body = forced_chat(kit, f"the {WORD}", "the heron", n=8, temperature=2, seed=3)
    response = json.loads(rows_of(kit, model, [body], NO_POLICIES).rows[0].response)
    said = [choice["message"]["content"] for choice in response["choices"]]
    assert set(said) == {f"the {WORD}", "the heron"}
    judged = json.loads(rows_of(kit, model, [body], birds).rows[0].response)
    for text, choice in zip(said, judged["choices"], strict=True):
        reason, content = ("content_filter", None) if WORD in text else ("stop", text)
        assert (choice["finish_reason"], choice["message"]["content"]) == (reason, content)


def tool_call(kit: Any, text: str, **more: Any) -> dict[str, Any]:
    """A chat whose answer is a call with this text as its argument; the prompt spells it otherwise."""
    argument = {"type": "string", "pattern": f"^{text.replace(WORD, f'[{WORD[0]}]{WORD[1:]}')}$"}
    schema = {"type": "object", "properties": {"t": argument}, "required": ["t"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "say", "parameters": schema}}]
    made: dict[str, Any] = kit.chat(
        "x", tools=tools, tool_choice="required", parallel_tool_calls=False,
        temperature=0, max_tokens=800, **more,
    )  # fmt: skip
    return made


@pytest.mark.slow
def test_the_text_of_a_tool_call_is_judged(model: LoadedModel, birds: Policies, kit: Any) -> None:
    sink = rows_of(kit, model, [tool_call(kit, FORBIDDEN), tool_call(kit, FINE)], birds)
    assert (sink.rows[0].finish_reason, message_of(sink.rows[0]).tool_calls) == ("content_filter", None)
    (call,) = message_of(sink.rows[1]).tool_calls
    assert json.loads(call.function.arguments) == {"t": FINE}


@pytest.mark.parametrize("policy", [RaisingPolicy(), RaisingAtEndPolicy()])
@pytest.mark.slow
def test_a_policy_that_raises_fails_the_row_and_the_worker_continues(
    model: LoadedModel, kit: Any, policy: RaisingPolicy
) -> None:
    with capture_logs() as logs:
        bodies = [kit.chat(f"a {WORD}"), forced_chat(kit, FORBIDDEN), forced_chat(kit, FINE)]
        sink = rows_of(kit, model, bodies, Policies((("mine", policy),)))
    for row, what in ((0, "prompt"), (1, "answer")):
        failed = sink.rows[row]
        assert (failed.status, failed.status_code) == (RowStatus.FAILED, 500)
        assert failed.error_code is RowErrorCode.ENGINE_ERROR
        assert f"content policy 'mine' could not judge the {what} (ValueError)" in failed.error_message
        assert failed.text is failed.response is None
    assert sink.rows[2].text == FINE
    assert [log["row"] for log in logs if log["event"] == "content policy failed"] == ["job-1/0", "job-1/1"]
    assert WORD not in repr(logs)


def test_texts_to_embed_are_judged(embedding_model: Path, birds: Policies, kit: Any) -> None:
    embeds = LoadedModel.load(embedding_model, name="tiny", config=EngineConfig(threads=1))
    ids = embeds.tokenizer.encode_batch([WORD], add_special_tokens=False)[0].tolist()
    assert WORD in embeds.tokenizer.decode(ids)
    bodies = [{"model": "tiny", "input": given} for given in ("a heron", ["a", f"a {WORD}"], [ids])]
    sink = rows_of(kit, embeds, bodies, birds)
    codes = [sink.rows[row].error_code for row in range(3)]
    refused = RowErrorCode.CONTENT_FILTER
    assert codes == [None, refused, refused]


def test_a_verdict_is_in_the_row_and_in_its_response(model: LoadedModel, tmp_path: Path, kit: Any) -> None:
    bodies = [kit.chat(f"an odd {WORD}"), 0, kit.chat("dosage"), kit.chat("fine"), forced_chat(kit, f"a {WORD}")]
    sink = rows_of(kit, model, bodies, acting_rules(tmp_path))
    flagged = {"policy": "rules", "rule": "birds", "action": "flag", "on": "prompt"}
    for row, prompt_tokens in ((sink.rows[0], None), (sink.rows[1], 0)):
        report = json.loads(row.content_policies)
        assert report["verdicts"] == [flagged]
        assert (row.status, json.loads(row.response)["tokenmill"]) == (
            RowStatus.SUCCEEDED,
            {"content_policies": report},
        )
        assert prompt_tokens in (None, report["usage"]["prompt_tokens"])
    routed = sink.rows[2]
    assert (routed.status_code, routed.error_code) == (400, RowErrorCode.CONTENT_FILTER)
    assert "'medical' routes the prompt to model 'big', and rows of a job stay with their model" in routed.error_message
    (verdict,) = json.loads(routed.content_policies)["verdicts"]
    assert (verdict["action"], verdict["model"]) == ("route", "big")
    assert sink.rows[3].content_policies is None
    assert "tokenmill" not in json.loads(sink.rows[3].response)
    assert json.loads(sink.rows[4].content_policies)["verdicts"] == [{**flagged, "on": "answer"}]
    assert message_of(sink.rows[4]).content == f"a {WORD}"


def acting_rules(folder: Path) -> Policies:
    """Rules that flag the word, and send prompts to another model."""
    path = folder / "acting.toml"
    path.write_text(
        f"[[rule]]\nname = 'birds'\naction = 'flag'\nkeywords = ['{WORD}']\n"
        "[[rule]]\nname = 'medical'\naction = 'route'\nmodel = 'big'\nkeywords = ['dosage']\n",
        encoding="utf-8",
    )
    return Policies((("rules", Rules(path)),))


def check_cut(text: str) -> None:
    """All text before the word was emitted, and nothing of the word."""
    assert LEAD.startswith(text)
    assert len(text) > len(LEAD) - 20


@pytest.mark.slow
def test_a_stream_ends_before_the_word_and_nothing_more_is_computed(
    model: LoadedModel, birds: Policies, kit: Any
) -> None:
    with serving_worker(kit, model, NO_POLICIES) as send:
        plain = end_of(send(forced_chat(kit, FORBIDDEN)))
        assert plain.policies is None
    blocks = model.engine.stats().free_blocks
    with serving_worker(kit, model, birds) as send, capture_logs() as logs:
        events = send(forced_chat(kit, FORBIDDEN, logprobs=True, top_logprobs=2))
        end = end_of(events)
        stats = model.engine.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, blocks)
    check_cut(text_of(events))
    (choice,) = end.response["choices"]
    assert choice["finish_reason"] == "content_filter"
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert choice["logprobs"] is None
    assert end.policies == birds.fingerprint
    tokens = [event for event in events if isinstance(event, TokensEvent)]
    spelt = "".join(entry["token"] for event in tokens for entry in (event.logprobs or {"content": []})["content"])
    assert spelt == text_of(events), "log-probabilities spell no more than the text"
    emitted = model.tokenizer.decode([token for event in tokens for token in event.tokens])
    assert emitted == text_of(events)
    used, whole = (one.response["usage"]["completion_tokens"] for one in (end, plain))
    print(f"{used} of {whole} tokens were computed")
    assert used < whole / 2
    assert [log["rule"] for log in logs if log["event"] == "content refused"] == ["birds"]
    assert WORD not in repr(logs).lower()


@pytest.mark.parametrize("stop", [pytest.param(None, marks=pytest.mark.exhaustive), f"{WORD} c", "lake"])
@pytest.mark.slow
def test_allowed_text_is_emitted_as_without_policies(
    model: LoadedModel, birds: Policies, kit: Any, stop: str | None
) -> None:
    # A stop string may hold the word: it is cut off, so it is never emitted.
    body = forced_chat(kit, FINE if stop is None else FORBIDDEN.replace(WORD, "heron") if stop == "lake" else FORBIDDEN)
    body |= {"logprobs": True, "n": 2} | ({} if stop is None else {"stop": [stop]})
    del body["structured_outputs"]["choice"][1:]
    emitted = []
    for policies in (NO_POLICIES, birds):
        with serving_worker(kit, model, policies) as send:
            events = send(body)
        lines = [event.logprobs["content"] for event in events if isinstance(event, TokensEvent) and event.logprobs]
        emitted.append((end_of(events).response["choices"], text_of(events), text_of(events, 1), len(lines) > 0))
    assert emitted[0] == emitted[1]
    assert emitted[0][1] == (FINE if stop is None else LEAD if stop != "lake" else f"{LEAD}heron circling over the ")


@pytest.mark.slow
def test_a_refused_choice_ends_and_the_others_continue(model: LoadedModel, birds: Policies, kit: Any) -> None:
    with serving_worker(kit, model, NO_POLICIES) as send:
        for seed in range(1, 20):
            body = forced_chat(kit, FORBIDDEN, FINE, n=6, temperature=2, seed=seed)
            whole = end_of(send(body)).response
            said = [choice["message"]["content"] for choice in whole["choices"]]
            if set(said) == {FORBIDDEN, FINE}:
                break
        else:
            pytest.fail("no seed gives both")
    with serving_worker(kit, model, birds) as send:
        events = send(body)
    judged = end_of(events).response
    for text, choice in zip(said, judged["choices"], strict=True):
        if text == FORBIDDEN:
            assert (choice["finish_reason"], choice["message"]["content"]) == ("content_filter", None)
            check_cut(text_of(events, choice["index"]))
        else:
            assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", FINE)
            assert text_of(events, choice["index"]) == FINE
    used, before = (response["usage"]["completion_tokens"] for response in (judged, whole))
    assert used < before - 200 * said.count(FORBIDDEN)


def test_a_call_is_emitted_up_to_the_refused_word(model: LoadedModel, birds: Policies, kit: Any) -> None:
    with serving_worker(kit, model, birds) as send:
        events = send(tool_call(kit, FORBIDDEN))
    (choice,) = end_of(events).response["choices"]
    assert (choice["finish_reason"], choice["message"].get("tool_calls")) == ("content_filter", None)
    deltas = [call for event in events if isinstance(event, TokensEvent) for call in event.tool_calls or []]
    arguments = "".join(call["function"].get("arguments", "") for call in deltas)
    check_cut(json.loads(f'{arguments}"}}')["t"])


@pytest.mark.parametrize("first", ["with", pytest.param("without", marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_resumed_attempt_emits_the_rest_and_finds_a_word_that_had_begun(
    model: LoadedModel, birds: Policies, kit: Any, first: str
) -> None:
    for text in (FORBIDDEN, FINE):
        with serving_worker(kit, model, birds if first == "with" else NO_POLICIES) as send:
            begun = [event for event in send(forced_chat(kit, text)) if isinstance(event, TokensEvent)]
        tokens: tuple[int, ...] = tuple(token for event in begun for token in event.tokens)
        if first == "without":  # the first attempt emitted the beginning of the word
            count = next(n for n in range(len(tokens)) if len(model.tokenizer.decode(tokens[:n])) > len(LEAD) + 2)
            tokens = tokens[:count]
        emitted = model.tokenizer.decode(tokens)
        with serving_worker(kit, model, birds) as send:
            more = send(forced_chat(kit, text), attempt=2, tokens=(tokens,))
        if text == FINE:
            assert emitted + text_of(more) == FINE
            assert end_of(more).response["choices"][0]["message"]["content"] == FINE
        else:
            assert text_of(more) == "", "all of it is held back, or was emitted before"
            assert end_of(more).response["choices"][0]["finish_reason"] == "content_filter"


@pytest.mark.slow
def test_a_refused_request_and_one_that_can_t_be_judged_end_with_errors(
    model: LoadedModel, birds: Policies, kit: Any
) -> None:
    steps = model.engine.stats().steps
    with serving_worker(kit, model, birds) as send:
        (refused,) = send(kit.chat(f"a {WORD}"))
    assert isinstance(refused, ErrorEvent)
    assert (refused.code, refused.status) == ("content_filter", 400)
    assert model.engine.stats().steps == steps
    for policy in (RaisingPolicy(), RaisingAtEndPolicy()):
        with serving_worker(kit, model, Policies((("mine", policy),))) as send:
            for body in (kit.chat(f"a {WORD}"), forced_chat(kit, FORBIDDEN)):
                *emitted, last = send(body)
                assert isinstance(last, ErrorEvent)
                assert (last.code, last.status) == ("engine_error", 500)
                assert last.message.startswith("content policy 'mine' could not judge the ")
                assert WORD not in text_of(emitted)
                assert not (emitted and policy.window is None), "emitted before it could be judged"
            assert text_of(send(forced_chat(kit, FINE))) == FINE


@pytest.mark.parametrize("policies_of_big", ["the same", pytest.param("none", marks=pytest.mark.exhaustive)])
def test_a_routed_request_is_answered_by_the_other_model_with_the_verdict(
    model: LoadedModel, tmp_path: Path, kit: Any, policies_of_big: str
) -> None:
    rules, lane = acting_rules(tmp_path), MemoryLane(CLOCK)
    big = LoadedModel.load(Path(model.source), name="big", config=replace(CONFIG, kv_dtype="int8"))
    keys = {"big": big.pin().key, "tiny": model.pin().key}
    assert len(set(keys.values())) == 2
    own = rules if policies_of_big == "the same" else NO_POLICIES
    with (
        serving_worker(kit, model, rules, lane, keys.get) as send,
        serving_worker(kit, big, own, lane, keys.get),
    ):
        end = end_of(send(kit.chat("which dosage?", max_tokens=4)))
        direct = end_of(send(kit.chat("how are you?", max_tokens=4)))
    assert end.response["model"] == "big"
    (verdict,) = end.response["tokenmill"]["content_policies"]["verdicts"]
    assert verdict == {"policy": "rules", "rule": "medical", "action": "route", "on": "prompt", "model": "big"}
    assert direct.response["model"] == "tiny"
    assert "tokenmill" not in direct.response


def test_a_request_that_can_t_be_routed_ends_with_an_error(model: LoadedModel, tmp_path: Path, kit: Any) -> None:
    def broken(name: str) -> str:
        raise PipelineError("the store is away")

    for find_model, what in ((no_models, "'big', which is not served here"), (broken, "the catalog can't be read")):
        with serving_worker(kit, model, acting_rules(tmp_path), find_model=find_model) as send:
            (last,) = send(kit.chat("which dosage?"))
        assert isinstance(last, ErrorEvent)
        assert (last.code, last.status) == ("engine_error", 500)
        assert what in last.message
