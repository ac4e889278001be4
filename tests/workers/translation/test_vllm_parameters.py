"""vLLM's smaller parameters, on a real model: allowed tokens, bad words, token ids, special tokens and stop strings in
the text; in a job's rows as in a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.gateway.inference.chunks import DONE, Chunks
from pipeline.gateway.inference.request_builder import InferenceRequest
from pipeline.gateway.inference.responses import replay
from schemas.jobs.results import RowStatus
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import Limits
from schemas.requests.parsing import CHAT_URL, COMPLETIONS_URL, ChatBody, parse_body
from schemas.workers.lane import LaneRequest, TokensEvent
from tests.workers.structured.test_structured_output import load, results_of, stream_events
from workers.model.loaded_model import LoadedModel
from workers.translation.requests import bad_word_tokens

END = 2  # <end>, the model's end token


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_models: Any, kit: Any) -> LoadedModel:
    folder = tmp_path_factory.mktemp("parameters") / "tiny"
    tiny_models.make_tiny_model("llama", folder, vocab_size=420, max_position_embeddings=1024)
    kit.byte_level_tokenizer().save_pretrained(folder)
    return load(folder)


@pytest.fixture
def choices(model: LoadedModel, kit: Any) -> Any:
    """Computes bodies as rows: the choices of each."""

    def choices(*bodies: dict[str, Any]) -> list[list[Any]]:
        rows = results_of(kit, model, bodies)
        assert all(row.status is RowStatus.SUCCEEDED for row in rows), [row.error_message for row in rows]
        return [json.loads(row.response)["choices"] for row in rows]

    return choices


def ids_of(model: LoadedModel, text: str) -> list[int]:
    return [int(i) for i in model.tokenizer.encode_batch([text], add_special_tokens=False)[0]]


def test_only_allowed_tokens_are_generated(model: LoadedModel, choices: Any, kit: Any) -> None:
    allowed = ids_of(model, "quick fox 0123")
    (found,) = choices(
        kit.chat(allowed_token_ids=allowed, logit_bias={str(allowed[0]): -100}, n=3, seed=1, max_tokens=40)
        | {"return_token_ids": True}
    )
    assert all(choice["finish_reason"] == "length" for choice in found), "no end token is allowed"
    seen = {token for choice in found for token in choice["token_ids"]}
    assert seen <= set(allowed) - {allowed[0]}
    assert len(seen) > 3
    (ended,) = choices(kit.completion(allowed_token_ids=[END], max_tokens=9, return_token_ids=True))
    assert (ended[0]["text"], ended[0]["token_ids"], ended[0]["finish_reason"]) == ("", [END], "stop")


def test_a_grammar_and_allowed_tokens_hold_together(model: LoadedModel, kit: Any, choices: Any) -> None:
    form = {"structured_outputs": {"regex": "[ab]{6}"}, "max_tokens": 20, "seed": 1}
    (a,) = ids_of(model, "a")
    (found,) = choices(kit.chat(allowed_token_ids=[a, END], **form))
    assert found[0]["message"]["content"] == "aaaaaa"
    (row,) = results_of(kit, model, [kit.chat(allowed_token_ids=[a], bad_words=["a"], **form)])
    assert row.error_code is RowErrorCode.ENGINE_ERROR
    assert "bad_words" in row.error_message


def test_bad_words_are_never_generated_as_vllm_spells_them(model: LoadedModel, choices: Any, kit: Any) -> None:
    words = ["fox", "ab", "naïve"]
    few = [*ids_of(model, "abfox"), *ids_of(model, " ab fox"), *ids_of(model, "naïve")]
    common = {"allowed_token_ids": few, "n": 8, "seed": 5, "max_tokens": 60, "return_token_ids": True}
    free, kept = choices(kit.completion(**common), kit.completion(bad_words=words, **common))
    sequences = [ids for word in words for ids in (ids_of(model, word), ids_of(model, f" {word}"))]
    assert any(len(sequence) > 2 for sequence in sequences)

    def count(found: list[Any]) -> int:
        return sum(
            choice["token_ids"][at : at + len(sequence)] == sequence
            for choice in found
            for sequence in sequences
            for at in range(len(choice["token_ids"]))
        )

    assert count(free) > 5
    assert count(kept) == 0


def test_bad_words_are_banned_with_and_without_a_blank_before_them(model: LoadedModel) -> None:
    found = bad_word_tokens(model.tokenizer, ["fox", " fox", "a\ud83d"[:1]])
    assert set(found) == {tuple(ids_of(model, text)) for text in ("fox", " fox", "a", " a")}
    with pytest.raises(RowError, match="bad_words holds half a surrogate pair"):
        bad_word_tokens(model.tokenizer, ["\ud83d"])
    long = [f"{at:04}" * 9 for at in range(1000)]
    with pytest.raises(RowError, match=r"bad_words hold \d+ tokens, but at most 32768 are allowed") as refused:
        bad_word_tokens(model.tokenizer, long)
    assert refused.value.param == "bad_words"
    assert sum(map(len, bad_word_tokens(model.tokenizer, long[:300]))) > 10_000


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [-1]}, r"allowed_token_ids\[0\] is -1"),
        ({"allowed_token_ids": [True]}, r"allowed_token_ids\[0\] is true"),
        ({"bad_words": "fox"}, "bad_words must be a list of strings"),
        ({"bad_words": [" "]}, "bad_words holds an empty string"),
        ({"allowed_token_ids": [7, 8, 9, 6]}, "allowed_token_ids asks for 4, but at most 3"),
        ({"bad_words": ["a", "b", "c"]}, "bad_words asks for 3, but at most 2"),
        ({"bad_words": ["abcdef"]}, "bad_words holds a word of 6 characters, but at most 5"),
        ({"return_token_ids": "yes"}, "return_token_ids is 'yes'"),
        ({"skip_special_tokens": 0}, "skip_special_tokens is 0"),
        ({"spaces_between_special_tokens": "no"}, "spaces_between_special_tokens is not supported"),
    ],
)
def test_bad_values_are_refused_by_name(kit: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RowError, match=says):
        parse_body(CHAT_URL, kit.chat(**fields), Limits(max_bad_words=2, max_bad_word_chars=5, max_allowed_token_ids=3))


def test_an_id_outside_of_the_vocabulary_fails_its_row(model: LoadedModel, kit: Any) -> None:
    rows = results_of(kit, model, [kit.chat(allowed_token_ids=[420]), kit.chat(max_tokens=2)])
    assert (rows[0].error_code, rows[1].status) == (RowErrorCode.INVALID_REQUEST, RowStatus.SUCCEEDED)
    assert "allowed_token_ids holds token 420" in rows[0].error_message


def test_all_special_tokens_are_spelt_where_they_are_not_skipped(model: LoadedModel, choices: Any, kit: Any) -> None:
    a = ids_of(model, "a")
    common = {"allowed_token_ids": [0, 1, 3, *a], "seed": 2, "max_tokens": 30, "return_token_ids": True}
    shown, skipped = choices(
        kit.chat(skip_special_tokens=False, spaces_between_special_tokens=False, **common), kit.chat(**common)
    )
    spelt = {0: "<pad>", 1: "<s>", 3: "<turn>", a[0]: "a"}
    assert shown[0]["token_ids"] == skipped[0]["token_ids"]
    assert shown[0]["message"]["content"] == "".join(spelt[token] for token in shown[0]["token_ids"])
    assert skipped[0]["message"]["content"] == "a" * shown[0]["token_ids"].count(a[0])
    # Their spelling can be a stop string then, and log-probabilities end with the text.
    (cut,) = choices(kit.chat(skip_special_tokens=False, logprobs=True, **common | {"stop": ["<turn>"]}))
    text = shown[0]["message"]["content"]
    assert cut[0]["message"]["content"] == text[: text.index("<turn>")]
    assert "".join(token["token"] for token in cut[0]["logprobs"]["content"]) == cut[0]["message"]["content"]


def test_stop_strings_and_stop_tokens_are_in_the_text_where_they_are_wanted(
    model: LoadedModel, choices: Any, kit: Any
) -> None:
    a, b, c = (ids_of(model, letter)[0] for letter in "abc")
    common = {"allowed_token_ids": [a, b, c], "seed": 3, "max_tokens": 60}
    stop, stop_string = {"stop": ["cb", "b"]}, {"include_stop_str_in_output": True}
    without, with_it, token_without, token_with, end_shown = choices(
        kit.completion(**common, **stop),
        kit.completion(**common, **stop, **stop_string),
        kit.completion(**common, stop_token_ids=[b]),
        kit.completion(**common, stop_token_ids=[b], **stop_string),
        kit.completion(**common | {"allowed_token_ids": [END]}, **stop_string, skip_special_tokens=False),
    )
    assert without[0]["finish_reason"] == with_it[0]["finish_reason"] == "stop"
    assert with_it[0]["text"].startswith(without[0]["text"])
    assert with_it[0]["text"].removeprefix(without[0]["text"]) in ("cb", "b")
    assert token_with[0]["text"] == token_without[0]["text"] + "b"
    assert end_shown[0]["text"] == "<end>"


def bodies_for_streams(kit: Any, model: LoadedModel) -> list[dict[str, Any]]:
    some = [0, 1, 3, *ids_of(model, "abc naïve 日本"), END]
    common = {"allowed_token_ids": some, "seed": 4, "max_tokens": 40, "return_token_ids": True}
    return [
        kit.chat(**common, n=2),
        kit.chat(**common, skip_special_tokens=False),
        kit.completion(**common, stop=["b", "<turn>"], include_stop_str_in_output=True, skip_special_tokens=False),
        kit.completion(**common, stop_token_ids=ids_of(model, "a"), include_stop_str_in_output=True, n=3),
        kit.completion(**common | {"allowed_token_ids": [END]}),
    ]


@pytest.mark.parametrize("every", [1, 7, 1000])
def test_streams_have_the_text_and_the_token_ids_of_the_whole_response(
    model: LoadedModel, kit: Any, every: int
) -> None:
    for body in bodies_for_streams(kit, model):
        url = CHAT_URL if "messages" in body else COMPLETIONS_URL
        request = LaneRequest("r1", "tiny", body, url)
        events = stream_events(model, body, every, url=url)
        response = events[-1].response
        for given in (events, list(replay(request, response))):  # computed now, and from the answer store
            chunks = Chunks(InferenceRequest(request, url, parse_body(url, body), "tiny", "tiny", stream=True), 0)
            sent = [server_event.data for event in given for server_event in chunks.convert(event)]
            made = [json.loads(data) for data in sent if data != DONE]
            assert_streamed(made, response)


def assert_streamed(chunks: Sequence[dict[str, Any]], response: dict[str, Any]) -> None:
    """The chunks' texts and ids, joined, are those of the response; the prompt's ids come once, and first."""
    chat = "message" in response["choices"][0]
    for choice in response["choices"]:
        mine = [(chunk, part) for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [token for _, part in mine for token in part["token_ids"]] == choice["token_ids"]
        text = "".join(part["delta"].get("content", "") if chat else part["text"] for _, part in mine)
        assert text == (choice["message"]["content"] if chat else choice["text"])
        if not chat:
            assert [part.get("prompt_token_ids") for _, part in mine] == [
                choice["prompt_token_ids"] if at == 0 else None for at in range(len(mine))
            ]
    if chat:
        prompts = [chunk.get("prompt_token_ids") for chunk in chunks]
        assert prompts[0] == response["prompt_token_ids"]
        assert not any(prompts[1:])


def test_token_ids_are_the_prompts_and_all_that_was_generated(model: LoadedModel, kit: Any) -> None:
    (row,) = results_of(kit, model, [kit.chat("Hello", max_tokens=50, seed=1, return_token_ids=True)])
    response = json.loads(row.response)
    assert len(response["prompt_token_ids"]) == response["usage"]["prompt_tokens"]
    assert len(response["choices"][0]["token_ids"]) == response["usage"]["completion_tokens"]
    (plain,) = results_of(kit, model, [kit.chat("Hello", max_tokens=50, seed=1)])
    assert "token_ids" not in plain.response


def test_a_resumed_stream_says_the_prompts_ids_again_for_whom_may_have_missed_them(
    model: LoadedModel, kit: Any
) -> None:
    body = bodies_for_streams(kit, model)[1]
    first = [event for event in stream_events(model, body, 3) if isinstance(event, TokensEvent)]
    assert first[0].prompt_token_ids
    rest = stream_events(model, body, 3, tokens=(first[0].tokens,), attempt=2)
    assert rest[0].prompt_token_ids == first[0].prompt_token_ids


def test_a_token_that_is_allowed_again_counts_once(kit: Any) -> None:
    body = parse_body(CHAT_URL, kit.chat(allowed_token_ids=[9, 7, 9, 8, 7] * 10), Limits(max_allowed_token_ids=3))
    assert isinstance(body, ChatBody)
    assert body.allowed_token_ids == (9, 7, 8)
