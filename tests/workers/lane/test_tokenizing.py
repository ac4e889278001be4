"""/tokenize, /detokenize and Anthropic's `count_tokens` over HTTP, answered by a real worker: the ids are those that a
generation's prompt has."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.inference import request_builder
from pipeline.models.catalog import Catalog
from schemas.models import CatalogEntry
from schemas.requests.errors import RowError
from schemas.requests.limits import Limits
from schemas.requests.tokenizing import COUNT_TOKENS_URL, TOKENIZE_URL, counted_chat, parse_tokenizing
from schemas.workers.lane import LaneRequest
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.workers.lane.test_server import LaneWorker
from workers.lane.tokenizing import tokenizer_response
from workers.model.loaded_model import LoadedModel
from workers.text import tokenizer as tokenizer_module
from workers.text.chat_options import ChatOptions
from workers.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hello <end> naïve 日本"}, {"role": "assistant", "content": "Hi", "refusal": None}]


@dataclass
class Served:
    """A gateway, and the model of its worker."""

    harness: HttpHarness
    model: LoadedModel

    def post(self, path: str, **body: Any) -> Any:
        """The response's JSON, which must be no error."""
        response = self.refused(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, key: str | None = None, **body: Any) -> Any:
        with self.harness.http(key) as http:
            return http.post(path, json={"model": "tiny", **body})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, kit: Any) -> Iterator[Served]:
    model = LoadedModel.load(model_folder, name="tiny")
    with run_http_harness(tmp_path_factory.mktemp("gateway")) as harness:
        entry = CatalogEntry(
            pin=model.pin(),
            max_model_len=model.limits.max_model_len,
            published_at=harness.world.clock.now() + timedelta(seconds=1),
        )
        Catalog(harness.world.store).publish(entry)
        worker = LaneWorker(kit, model, harness.worker.lane, "real", ())  # type: ignore[arg-type]
        yield Served(harness, model)
        worker.end()
        assert worker.error is None, worker.error


@pytest.mark.slow
def test_a_prompts_tokens_are_those_that_the_model_gets(served: Served) -> None:
    prompt = "Hello <turn> naïve"
    found = served.post("/tokenize", prompt=prompt, return_token_strs=True)
    generated = served.post("/v1/completions", prompt=prompt, max_tokens=1, return_token_ids=True)
    assert found["tokens"] == generated["choices"][0]["prompt_token_ids"]
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), served.model.limits.max_model_len)
    assert "<turn>" in found["token_strs"]
    assert len(found["token_strs"]) == found["count"]
    plain = served.post("/tokenize", prompt=prompt, add_special_tokens=False)
    assert plain["token_strs"] is None
    assert plain["tokens"] == found["tokens"][-plain["count"] :]
    assert served.post("/tokenize", prompt="", add_special_tokens=False)["tokens"] == []
    as_absent: dict[str, Any] = {"tools": [], "continue_final_message": False, "add_generation_prompt": None}
    assert served.post("/tokenize", prompt=prompt, **as_absent)["tokens"] == found["tokens"]


@pytest.mark.parametrize(
    "fields", [{}, {"add_generation_prompt": False}, {"continue_final_message": True, "add_generation_prompt": False}]
)
@pytest.mark.slow
def test_a_conversations_tokens_are_those_that_the_model_gets(served: Served, fields: dict[str, Any]) -> None:
    found = served.post("/tokenize", messages=CHAT, **fields)
    generated = served.post("/v1/chat/completions", messages=CHAT, max_tokens=1, return_token_ids=True, **fields)
    assert found["tokens"] == generated["prompt_token_ids"]
    # What a user spells is no special token, so there are just those of the template.
    text = served.post("/detokenize", tokens=found["tokens"])["prompt"]
    assert text.startswith("<s><turn>user\nHello <end> naïve 日本<end>\n<turn>assistant\nHi")
    assert found["tokens"].count(2) == (1 if "continue_final_message" in fields else 2)


def test_tokens_become_the_text_again(served: Served) -> None:
    for text in ("", "a quick fox\n", "  two blanks", "🎉 naïve", "<s><end>x"):
        tokens = served.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
        assert served.post("/detokenize", tokens=tokens) == {"prompt": text}


def test_a_count_is_that_of_the_same_message_and_is_made_off_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(body: Any, limits: Limits) -> Any:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return counted_chat(body, limits)

    monkeypatch.setattr(request_builder, "counted_chat", counted)
    given = {"messages": CHAT[:1], "system": "Be brief."}
    count = served.post("/v1/messages/count_tokens", **given)
    usage = served.post("/v1/messages", max_tokens=1, **given)["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_thinking_is_switched_under_the_name_that_the_template_has(model_folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking %}<think>{% else %}</think>{% endif %}"
    model = LoadedModel.load(model_folder, name="tiny", chat=ChatOptions(template))

    def text(**fields: Any) -> str:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        found = tokenizer_response(LaneRequest("r", "tiny", body, "/tokenize"), model, Limits())
        return model.tokenizer.decode(found["tokens"])

    assert (text(enable_thinking=True), text(enable_thinking=False)) == ("hi<think>", "hi</think>")
    with pytest.raises(RowError, match="enable_thinking goes with messages; remove it"):
        parse_tokenizing("/tokenize", {"model": "tiny", "prompt": "hi", "enable_thinking": False})


def test_a_counts_effort_is_what_the_template_has_or_refused_as_in_a_message(
    served: Served, model_folder: Path
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ' very' if reasoning_effort == 'high' }}"
    model = LoadedModel.load(model_folder, name="tiny", chat=ChatOptions(template))

    def count(**fields: Any) -> int:
        _, body = counted_chat({"model": "tiny", "messages": CHAT[:1], **fields})
        counted: int = tokenizer_response(LaneRequest("r", "tiny", body, COUNT_TOKENS_URL), model, Limits())[
            "input_tokens"
        ]
        return counted

    assert count(output_config={"effort": "high"}) > count(output_config={"effort": "low"}) == count()
    given = {"messages": CHAT[:1], "output_config": {"effort": "low"}}
    errors = [
        served.refused(path, **given, **more).json()["error"]["message"]
        for path, more in (("/v1/messages", {"max_tokens": 1}), ("/v1/messages/count_tokens", {}))
    ]
    assert errors[0] == errors[1]
    assert errors[0].startswith("output_config.effort is not supported: the model's chat template does not read it")


def test_they_are_no_answers_in_the_metrics(served: Served) -> None:
    before = served.harness.bridge.metrics.answers()
    served.post("/tokenize", prompt="a")
    assert served.refused("/detokenize", tokens=[400]).status_code == 400
    assert served.harness.bridge.metrics.answers() == before


def test_a_prompt_may_be_longer_than_the_context(served: Served) -> None:
    found = served.post("/tokenize", prompt="0 " * 3_000)
    assert found["count"] > found["max_model_len"]


@pytest.mark.parametrize("url", [TOKENIZE_URL, COUNT_TOKENS_URL])
@pytest.mark.parametrize(("text", "bound"), [("0 " * 40, ""), ("0123456789" * 1_000, "at least ")])
def test_more_tokens_than_prompts_may_have_are_refused(model_folder: Path, url: str, text: str, bound: str) -> None:
    model = LoadedModel.load(model_folder, name="tiny")
    given = {"prompt": text} if url == TOKENIZE_URL else {"messages": [{"role": "user", "content": text}]}
    request = LaneRequest("r", "tiny", {"model": "tiny", **given}, url)
    tokenizer_response(request, model, Limits(max_prompt_tokens=20_000))
    with pytest.raises(RowError, match=rf"^(prompt|messages) holds {bound}\d+ tokens, but at most 50 are allowed"):
        tokenizer_response(request, model, Limits(max_prompt_tokens=50))


def test_a_text_of_too_many_tokens_is_not_encoded(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel.load(model_folder, name="tiny")
    monkeypatch.delattr(type(model.tokenizer), "encode_batch")
    request = LaneRequest("r", "tiny", {"model": "tiny", "prompt": "0123456789" * 1_000}, TOKENIZE_URL)
    with pytest.raises(RowError, match="prompt holds at least"):
        tokenizer_response(request, model, Limits(max_prompt_tokens=50))


def test_a_text_whose_tokens_are_unforeseen_is_not_encoded_as_a_whole(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LoadedModel.load(model_folder, name="tiny")
    encoded: list[int] = []
    encode = type(model.tokenizer).encode_batch

    def recorded(tokenizer: Tokenizer, texts: Sequence[str], **options: bool) -> Any:
        encoded.extend(map(len, texts))
        return encode(tokenizer, texts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(model.tokenizer), "count_min_tokens", lambda *_: 0)
    monkeypatch.setattr(type(model.tokenizer), "encode_batch", recorded)
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 100)
    for given in ({"prompt": "0123456789" * 1_000}, {"messages": [{"role": "user", "content": "0123456789" * 1_000}]}):
        encoded.clear()
        with pytest.raises(RowError, match="holds at least 51 tokens, but at most 50 are allowed; shorten it"):
            tokenizer_response(
                LaneRequest("r", "tiny", {"model": "tiny", **given}, TOKENIZE_URL), model, Limits(max_prompt_tokens=50)
            )
        assert sum(encoded) <= 500


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "prompt is missing; give a prompt, or messages"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt and messages are both set"),
        ("/tokenize", {"prompt": ["a"]}, "prompt is a list, but must be a string"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools goes with"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt goes with messages"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens goes with a prompt"),
        ("/tokenize", {"messages": []}, "messages is empty"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\].tool_call_id is missing"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x is not supported"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature is not a parameter known here"),
        ("/detokenize", {"tokens": [400]}, "tokens holds token 400, but the model's ids end at 399"),
        ("/detokenize", {"tokens": [-1]}, r"tokens\[0\] is -1"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model 'other' is not served here"),
    ],
)
def test_wrong_bodies_are_refused_by_name(served: Served, path: str, body: dict[str, Any], says: str) -> None:
    response = served.refused(path, **body)
    assert response.status_code in (400, 404)
    message = response.json()["error"]["message"]
    assert re.search(says, message), message


@pytest.mark.slow
def test_a_key_for_inference_is_needed_and_a_batch_line_can_not_name_them(served: Served, tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        _, files_only = harness.keys.create("acme", (Scope.FILES,))
        with harness.http(files_only) as http:
            assert http.post("/tokenize", json={"model": "tiny", "prompt": "a"}).status_code == 403
        with harness.http("sk-wrong") as http:
            assert http.post("/detokenize", json={"model": "tiny", "tokens": [1]}).status_code == 401
    line = served.refused("/v1/batches", input_file_id="file-x", endpoint="/tokenize", completion_window="24h")
    assert line.status_code == 400
