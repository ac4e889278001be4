"""Answers of models that think, from models of random weights: budgets are kept, markers never leak, and a form binds
behind the thought."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai.types.chat
import pytest

from engine.config import CacheConfig, SpeculationConfig
from schemas.jobs.results import RowStatus
from schemas.requests.errors import RowErrorCode
from schemas.workers.lane import EndEvent, TokensEvent
from tests.workers.structured import thinking_templates, tool_templates
from tests.workers.structured.test_structured_output import CONFIG, FORMAT, SCHEMA, TOOLS, results_of, stream_events
from workers.errors import TokenizerError
from workers.model.loaded_model import LoadedModel
from workers.structured.constraints import grammar_of, shown_tokens
from workers.structured.grammar import Grammars, GrammarSource, GrammarTooComplex
from workers.text.chat_options import ChatOptions
from workers.text.reasoning import FORMATS, split_reasoning
from workers.text.tokenizer import Tokenizer

BUDGETS = (0, 1, 2, 7, 31, 64)
THINK, END = "<think>", "</think>"


def save_model(folder: Path, kit: Any, tiny_models: Any, template: str, added: Sequence[str]) -> Path:
    tiny_models.make_tiny_model("qwen3", folder, vocab_size=420, max_position_embeddings=1024)
    tokenizer = kit.byte_level_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<turn>"]})
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, kit: Any, tiny_models: Any) -> dict[str, Path]:
    """A tiny Qwen 3 whose markers are tokens and whose template leaves the thought to the model; and one whose template
    opens the thought, with markers in plain text."""
    root = tmp_path_factory.mktemp("thinking")
    return {
        "tokens": save_model(root / "tokens", kit, tiny_models, thinking_templates.QWEN3, (THINK, END)),
        "text": save_model(root / "text", kit, tiny_models, thinking_templates.OPENED, ()),
    }


def load(folder: Path, config: Any = CONFIG, chat: ChatOptions | None = None) -> LoadedModel:
    return LoadedModel.load(folder, name="tiny", config=config, chat=chat or ChatOptions())


@pytest.fixture(scope="module", params=["tokens", "text"])
def model(request: Any, folders: dict[str, Path]) -> LoadedModel:
    return load(folders[request.param])


def check(model: LoadedModel, body: dict[str, Any], response: str) -> list[Any]:
    """The choices of a response: no marker leaks, the parts add up, the budget is kept."""
    parsed = openai.types.chat.ChatCompletion.model_validate_json(response)
    assert parsed.usage is not None
    details = parsed.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens is not None
    budget = body.get("thinking_token_budget")
    if budget is not None:
        assert details.reasoning_tokens <= budget * len(parsed.choices)
    for choice in parsed.choices:
        for part in (choice.message.content, choice.message.reasoning_content):  # type: ignore[attr-defined]
            assert THINK not in (part or "")
            assert END not in (part or "")
            assert "\ufdd1" not in (part or "")
    return parsed.choices


def bodies_of(kit: Any, budgets: Sequence[int] = BUDGETS, **fields: Any) -> list[dict[str, Any]]:
    """A body for each budget, sampled, with the opening marker favoured where the model writes it (its token, 405)."""
    return [
        kit.chat(f"row {at}", seed=at, max_tokens=140, thinking_token_budget=budget, **fields)
        for at, budget in enumerate(budgets)
    ]


def favoured(model: LoadedModel) -> dict[str, Any]:
    """Makes the model open its thought, where it opens it itself."""
    opening = [token_id for token_id, text in model.tokenizer.added_tokens.items() if text == THINK]
    return {"logit_bias": {str(token_id): 100 for token_id in opening}}


def test_any_budget_is_kept_and_the_answer_follows(model: LoadedModel, kit: Any) -> None:
    bodies = bodies_of(kit, range(0, 65, 4), **favoured(model))
    thoughts = 0
    for body, row in zip(bodies, results_of(kit, model, bodies), strict=True):
        assert row.status is RowStatus.SUCCEEDED, row.error_message
        (choice,) = check(model, body, row.response)
        assert (row.text, row.reasoning) == (choice.message.content, choice.message.reasoning_content)
        usage = json.loads(row.response)["usage"]
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        thoughts += thought
        if usage["completion_tokens"] - thought > 12 and choice.finish_reason == "length":
            assert row.text  # the end was forced, and the rest is the answer
    assert thoughts > 150


def test_the_parts_and_the_markers_are_the_answer(model: LoadedModel, kit: Any) -> None:
    """Given one choice's tokens, when they are decoded whole, then thought, marker and text are all of them."""
    body = bodies_of(kit, [20], logprobs=True, **favoured(model))[0]
    (row,) = results_of(kit, model, [body])
    (choice,) = check(model, body, row.response)
    raw = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content).decode("utf-8", "replace")
    raw = raw.removesuffix("<end>").strip()
    head, _, text = raw.removeprefix(THINK).partition(END)
    assert (head.strip(), text.strip()) == ((row.reasoning or "").strip(), row.text.strip())


@pytest.mark.parametrize("budget", [None, 12])
@pytest.mark.parametrize("before", ["well, ", "I think>", "so <", "</thin", ""])
def test_a_thought_in_plain_text_ends_wherever_its_marker_does(
    folders: dict[str, Path], kit: Any, before: str, budget: int | None
) -> None:
    """Given a marker of several tokens, which may share some with the text before it, when the model writes it, then
    the form binds behind it."""
    tokenizer = Tokenizer.load(folders["text"])
    fields: dict[str, Any] = {"structured_outputs": {"choice": ["yes"]}, "thinking_token_budget": budget}
    body = kit.parse(kit.chat("x", **{name: value for name, value in fields.items() if value is not None}))
    (prompt,) = tokenizer.encode_chats([tokenizer.render_chat(body.messages)])
    source = grammar_of(body, prompt, tokenizer)
    assert source is not None
    grammars = Grammars(tokenizer, tokenizer.size, (2,))
    for text, end in ((before + END + "\n\nyes", True), (before + "x" * 30, False)):
        mask = grammars.compile(source)(0)
        (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
        if end:
            assert accepted(mask, ids.tolist(), tokenizer.size) == len(ids)
            assert accepted(mask, [2], tokenizer.size) == 1
        else:
            assert accepted(mask, ids.tolist(), tokenizer.size) == (len(ids) if budget is None else budget)


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_each_familys_markers_bound_and_split_a_thought(kit: Any, name: str, are_tokens: bool) -> None:
    """Given a family's markers, when an answer is written as it writes one, then its grammar takes it, and the thought
    is split off."""
    form = FORMATS[name]
    hf = kit.byte_level_tokenizer()
    whole = form.opening + "why" + form.closing + "yes"
    tags = re.findall(r"<[^<>]+>|\[/?THINK\]|◁/?think▷", whole + "".join(form.others))
    if are_tokens:
        hf.add_tokens(sorted(set(tags)))
    tokenizer = Tokenizer(hf, ChatOptions(reasoning_parser=name))
    grammars = Grammars(tokenizer, tokenizer.size, (2,))
    (ids,) = tokenizer.encode_batch([whole], add_special_tokens=False)
    for budget in (None, 3, 40):
        fields = {} if budget is None else {"thinking_token_budget": budget}
        body = kit.parse(kit.chat("x", structured_outputs={"choice": ["yes"]}, **fields))
        (prompt,) = tokenizer.encode_chats([tokenizer.render_chat(body.messages)])
        source = grammar_of(body, prompt, tokenizer)
        assert source is not None
        assert accepted(grammars.compile(source)(0), [*ids.tolist(), 2], tokenizer.size) == len(ids) + 1
        text = tokenizer.decode_showing(ids[:0], ids, shown_tokens(body, tokenizer))
        assert tokenizer.reasoning is not None
        assert split_reasoning(tokenizer.reasoning, text, thinks=False)[:2] == ("why", "yes")


def accepted(mask: Any, ids: Sequence[int], size: int) -> int:
    """How many of these tokens the mask allows, one after the other."""
    for at, token_id in enumerate(ids):
        words = np.zeros(-(-size // 32), dtype=np.int32)
        mask.fill(words)
        if not np.unpackbits(words.view(np.uint8), bitorder="little")[token_id]:
            return at
        mask.advance(token_id)
    return len(ids)


def test_a_grammar_whose_compiled_form_the_library_broke_is_compiled_again(folders: dict[str, Path], kit: Any) -> None:
    """Given a grammar at which the library panics, when another answer follows the same grammar, then it begins with a
    form of its own."""
    tokenizer = Tokenizer.load(folders["text"])
    grammars = Grammars(tokenizer, tokenizer.size, (2,))
    source = GrammarSource('start: text "stop" "x"\ntext[stop="stop"]: /(?s:.)*/\n', "structured_outputs")
    (ids,) = tokenizer.encode_batch(["a st op stop"], add_special_tokens=False)
    with pytest.raises(GrammarTooComplex, match="panic"):
        accepted(grammars.compile(source)(0), ids.tolist(), tokenizer.size)
    again = grammars.compile(source)(0)
    assert accepted(again, ids[:2].tolist(), tokenizer.size) == 2


@pytest.mark.slow
def test_a_form_binds_behind_the_thought(model: LoadedModel, kit: Any) -> None:
    bodies = bodies_of(kit, [at % 20 for at in range(50)], response_format=FORMAT, **favoured(model))
    bodies += [kit.chat(f"free {at}", seed=at, max_tokens=200, response_format=FORMAT) for at in range(50)]
    ended = thought = 0
    for body, row in zip(bodies, results_of(kit, model, bodies), strict=True):
        assert row.status is RowStatus.SUCCEEDED, row.error_message
        (choice,) = check(model, body, row.response)
        thought += bool(row.reasoning)
        if choice.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(row.text), SCHEMA)
    assert ended > 30
    assert thought > 30


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "(ab|cd){2}"}, r"(ab|cd){2}"),
        ({"choice": ["yes", "no"]}, r"yes|no"),
        ({"grammar": 'start: thought "}"\nthought: "{" /[0-9]+/\n'}, r"\{[0-9]+\}"),
    ],
)
def test_each_kind_of_form_binds_behind_the_thought(model: LoadedModel, kit: Any, form: Any, pattern: str) -> None:
    bodies = bodies_of(kit, [3] * 8, structured_outputs=form, **favoured(model))
    for row in results_of(kit, model, bodies):
        assert row.status is RowStatus.SUCCEEDED, row.error_message
        assert row.finish_reason == "length" or re.fullmatch(pattern, row.text), row.text


def test_calls_follow_the_thought(folders: dict[str, Path], kit: Any) -> None:
    tokens = load(folders["tokens"])
    bodies = bodies_of(kit, [5] * 6, tools=TOOLS[:2], tool_choice="required", **favoured(tokens))
    for body, row in zip(bodies, results_of(kit, tokens, bodies), strict=True):
        (choice,) = check(tokens, body, row.response)
        assert row.reasoning
        if choice.finish_reason == "tool_calls":
            assert choice.message.tool_calls[0].function.name in ("tag_it", "count-it")
            return
    pytest.fail("no answer ended with a call")


@pytest.mark.slow
def test_a_switched_off_thought_is_none(folders: dict[str, Path], kit: Any) -> None:
    tokens = load(folders["tokens"])
    bodies = bodies_of(kit, [9] * 4, enable_thinking=False, **favoured(tokens))
    bodies += [kit.chat("x", seed=1, max_tokens=120, enable_thinking=False, response_format=FORMAT)]
    for row in results_of(kit, tokens, bodies):
        assert row.status is RowStatus.SUCCEEDED, row.error_message
        assert row.reasoning is None
        assert json.loads(row.response)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_continued_thought_goes_on(model: LoadedModel, kit: Any) -> None:
    """Given a last message that breaks off within its thought, when the answer goes on with it, then it ends the
    thought within its budget."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": f"{THINK}well, I"}]
    body = {"model": "tiny", "messages": messages, "continue_final_message": True, "thinking_token_budget": 4}
    (row,) = results_of(kit, model, [body | {"max_tokens": 60, "seed": 2}])
    assert row.status is RowStatus.SUCCEEDED, row.error_message
    assert row.reasoning
    assert row.text


@pytest.mark.slow
@pytest.mark.exhaustive
def test_drafts_preemptions_and_choices_keep_the_thought(model: LoadedModel, kit: Any) -> None:
    bodies = bodies_of(kit, n=2, **favoured(model))
    bodies += bodies_of(kit, response_format=FORMAT, temperature=0, **favoured(model))
    plain = [json.loads(row.response)["choices"] for row in results_of(kit, model, bodies)]
    folder = Path(model.source)
    drafting = load(folder, replace(CONFIG, speculation=SpeculationConfig("ngram")))
    tight = load(folder, replace(CONFIG, cache=CacheConfig(block_size=16, num_blocks=30)))
    for other in (drafting, tight):
        rows = results_of(kit, other, bodies)
        assert [json.loads(row.response)["choices"] for row in rows] == plain
        for body, row in zip(bodies, rows, strict=True):
            check(other, body, row.response)
    assert drafting.engine.stats().speculation.sources  # type: ignore[attr-defined]
    assert tight.engine.stats().preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3, 50])
def test_a_stream_emits_the_thought_apart(model: LoadedModel, kit: Any, every: int) -> None:
    (body,) = bodies_of(kit, [11], n=2, **favoured(model))
    events = stream_events(model, body, every)
    assert isinstance(events[-1], EndEvent)
    for choice in events[-1].response["choices"]:
        mine = [event for event in events if isinstance(event, TokensEvent) and event.choice == choice["index"]]
        assert "".join(event.text for event in mine) == choice["message"]["content"]
        assert "".join(event.reasoning for event in mine) == (choice["message"]["reasoning_content"] or "")
    # and an attempt that resumes within the thought, or behind it, emits the rest
    known = [t for event in events[:-1] if event.choice == 0 for t in event.tokens]
    head = [e for e in stream_events(model, body, 1) if isinstance(e, TokensEvent) and e.choice == 0]
    for count in (4, 30):
        more = stream_events(model, body, every, (tuple(known[:count]),), 2)
        assert more[-1].response["choices"] == events[-1].response["choices"]
        first, emitted = 0, ""
        for event in head:
            if first < count:
                emitted += event.reasoning + event.text
            first += len(event.tokens)
        rest = "".join(e.reasoning + e.text for e in more if isinstance(e, TokensEvent) and e.choice == 0)
        whole = events[-1].response["choices"][0]["message"]
        assert emitted + rest == (whole["reasoning_content"] or "") + whole["content"]


def test_a_default_budget_and_a_request_without_bound(folders: dict[str, Path], kit: Any) -> None:
    bounded = load(folders["text"], chat=ChatOptions(thinking_token_budget=3))
    bodies = [kit.chat("x", seed=1, max_tokens=60), kit.chat("x", seed=1, max_tokens=60, thinking_token_budget=-1)]
    counts = [
        json.loads(row.response)["usage"]["completion_tokens_details"]["reasoning_tokens"]
        for row in results_of(kit, bounded, bodies)
    ]
    assert counts[0] <= 3 < counts[1]


def test_a_model_without_thoughts_refuses_a_budget(folders: dict[str, Path], kit: Any) -> None:
    plain = ChatOptions(tool_templates.HERMES)
    (row,) = results_of(kit, load(folders["text"], chat=plain), [kit.chat("x", thinking_token_budget=4)])
    assert row.error_code is RowErrorCode.UNSUPPORTED_PARAMETER
    assert "shows no thought" in row.error_message
    with pytest.raises(TokenizerError, match="--reasoning-parser"):
        Tokenizer.load(folders["text"], replace(plain, thinking_token_budget=4))
    named = load(folders["text"], chat=replace(plain, reasoning_parser="think"))
    (row,) = results_of(kit, named, [kit.chat("x", seed=1, max_tokens=20, thinking_token_budget=4)])
    assert row.status is RowStatus.SUCCEEDED
