"""Unexpected outputs of a model or bodies of a caller fail one request at most: on the lane and in a batch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from engine.models.base import ModelSpec
from engine.plan import CacheGroup, RowState, StepOutput, StepPlan
from engine.runner.null_runner import NullRunner
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.client import CallSettings, answer
from pipeline.lane.memory import MemoryLane
from pipeline.worker_client.ports import BY_URGENCY, ShardWork
from schemas.jobs.job import Tier
from schemas.jobs.results import RowStatus
from schemas.requests.errors import RowErrorCode
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest, TokensEvent
from tests.waiting import HANG_SECONDS
from tests.workers.structured import tool_templates
from workers.lane.server import LaneServer, LaneServing
from workers.model.loaded_model import LoadedModel
from workers.shards.worker import ShardWorker
from workers.structured.constraints import form_of
from workers.structured.grammar import Grammars
from workers.structured.tool_calls import ToolCallReader
from workers.text.chat_options import ChatOptions
from workers.text.tokenizer import Tokenizer
from workers.translation import requests as translate
from workers.translation.requests import ModelLimits

SPEC = ModelSpec(
    architecture="none", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, vocab_size=420,
    max_position=1024, windows=(None,), eos_token_ids=(2,), num_parameters=0, dtype=torch.float32,
)  # fmt: skip
CLOCK = SystemClock()
CALL = CallSettings(silence_timeout_seconds=0.2, poll_interval_seconds=0.02)
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]
CALLED = '[TOOL_CALLS][{"name": "look\\_up", "arguments": {"a": 1}}]'
"""A call whose name is not JSON: markdown's escape."""


class ScriptedRunner:
    """A runner whose model answers prompts that hold `word` with these tokens, and others as the null runner does."""

    def __init__(self, rows: RowState, tokenizer: Tokenizer, word: str, tokens: Sequence[int]) -> None:
        self._rows = rows
        self._null = NullRunner(rows, SPEC.vocab_size)
        self._tokenizer = tokenizer
        self._word = word
        self._tokens = tokens
        self.written = 0
        self.step: Callable[[], None] = lambda: None

    def execute(self, plan: StepPlan) -> StepOutput:
        self.step()
        made = self._null.execute(plan)
        for line, row in enumerate(plan.rows.tolist()):
            prompt_len = int(self._rows.prompt_len[row])
            prompt = self._tokenizer.decode(self._rows.token_ids[row, :prompt_len].tolist())
            at = int(plan.starts[line] + plan.counts[line]) - prompt_len
            if self._word in prompt and plan.samples[line]:
                made.token_ids[line] = self._tokens[at] if at < len(self._tokens) else 2
                self.written += 1
        return made


@pytest.fixture
def tokenizer(kit: Any) -> Tokenizer:
    made = kit.byte_level_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "<turn>"]})
    return Tokenizer(made, ChatOptions(tool_templates.MISTRAL))


def tokens_of(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Tokens that spell the text; its marker is a special one, or is spelt by ordinary ones."""
    parts = [text] if special else ["[TOOL_", text.removeprefix("[TOOL_")]
    encoded = tokenizer.encode_batch(parts, add_special_tokens=False)
    tokens = np.concatenate(encoded).tolist()
    assert (not tokenizer.special_ids.isdisjoint(tokens)) is special
    return tokens


@pytest.fixture
def host(tokenizer: Tokenizer) -> Callable[..., tuple[LoadedModel, ScriptedRunner]]:
    """Makes a model that answers "badly" with this text."""

    def host(text: str = CALLED, *, special: bool = False) -> tuple[LoadedModel, ScriptedRunner]:
        made: list[ScriptedRunner] = []

        def runner(scheduler: Any) -> ScriptedRunner:
            made.append(ScriptedRunner(scheduler.rows, tokenizer, "badly", tokens_of(tokenizer, text, special=special)))
            return made[0]

        config = EngineConfig(cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=8))
        engine = Engine(config, SPEC, (CacheGroup((0,), None, 800),), SPEC.max_position, runner)
        limits = ModelLimits(SPEC.max_position, SPEC.vocab_size, SPEC.eos_token_ids)
        model = LoadedModel("tiny", "tiny", engine, tokenizer, limits, "float32", 8, digest="sha256:1")
        return model, made[0]

    return host


def badly(kit: Any) -> dict[str, Any]:
    made: dict[str, Any] = kit.chat("Write badly.", tools=TOOLS, max_tokens=300)
    return made


def other(kit: Any) -> dict[str, Any]:
    made: dict[str, Any] = kit.chat("Hello", tools=TOOLS, max_tokens=30)
    return made


class EndlessSource:
    """A source without shards that never finishes."""

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        return None

    def finished(self) -> bool:
        return False


SendRequest = Callable[[str, dict[str, Any]], list[LaneEvent]]


@contextmanager
def serving_worker(kit: Any, model: LoadedModel) -> Iterator[SendRequest]:
    """One worker on a lane of its own, which must be alive in the end: gives the events of a body's answer."""
    lane, stop = MemoryLane(CLOCK, LaneSettings(worker_timeout_seconds=0.6)), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        server = LaneServer(
            model, lane.worker("w"), CLOCK, serving=LaneServing(emit_interval_seconds=0.0, grace_seconds=0.1)
        )
        try:
            with server.running(stop) as side_work:
                ShardWorker(model, EndlessSource(), kit.MemorySink(), CLOCK, beside=side_work).run(stop)
        except BaseException as error:  # noqa: BLE001 - checked by the test
            errors.append(error)

    def send(name: str, body: dict[str, Any]) -> list[LaneEvent]:
        deadline = CLOCK.now() + timedelta(seconds=10)
        return list(answer(lane, LaneRequest(name, model.pin().key, body, deadline=deadline), CLOCK, CALL))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield send
    finally:
        stop.set()
        thread.join(HANG_SECONDS)
    assert errors == []
    assert not thread.is_alive()
    assert not model.engine.has_work


def committed_rows(kit: Any, model: LoadedModel, bodies: Sequence[Any]) -> dict[int, Any]:
    """The rows of a shard of these bodies, once it is committed_rows."""
    sink = kit.MemorySink()
    ShardWorker(model, kit.ListSource([kit.make_work(bodies)]), sink, CLOCK, helper=kit.InlineExecutor()).run()
    return sink.parts[1] and sink.rows


def test_a_grammar_for_calls_lets_ordinary_tokens_spell_a_marker_that_is_a_special_one(
    tokenizer: Tokenizer, kit: Any
) -> None:
    source = form_of(kit.parse(badly(kit)), tokenizer)
    assert source is not None
    mask = Grammars(tokenizer, SPEC.vocab_size, (2,)).compile(source)(0)
    for token in tokens_of(tokenizer, CALLED, special=False):
        mask.advance(token)  # raises for one that is not allowed


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", [CALLED, CALLED.replace("\\_", "\n"), CALLED.replace("\\_", "\\ud800")])
@pytest.mark.slow
def test_given_a_call_whose_name_is_not_json_then_the_caller_gets_it_as_content_and_the_worker_continues(
    host: Any, kit: Any, text: str, special: bool
) -> None:
    model, _ = host(text, special=special)
    with serving_worker(kit, model) as send:
        events = send("r1", badly(kit))
        assert isinstance(events[-1], EndEvent), events[-1]
        (choice,) = events[-1].response["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]
        assert "".join(event.text for event in events if isinstance(event, TokensEvent)) == text
        assert isinstance(send("r2", other(kit))[-1], EndEvent)
    rows = committed_rows(kit, model, [other(kit), badly(kit), other(kit)])
    assert [rows[row].status for row in range(3)] == [RowStatus.SUCCEEDED] * 3
    assert rows[1].text == text
    assert json.loads(rows[1].response)["choices"][0]["message"] == choice["message"]


def plant_failure(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, when: Callable[..., bool]) -> None:
    """Make the function raise `KeyError` with its arguments where `when` is true of them."""
    real = getattr(where, name)

    def fails(*arguments: Any, **more: Any) -> Any:
        if when(*arguments):
            raise KeyError(*arguments)
        return real(*arguments, **more)

    monkeypatch.setattr(where, name, fails)


@pytest.mark.slow
def test_given_tokens_that_cant_be_emitted_then_the_request_ends_with_an_error_and_leaves_the_engine(
    host: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, writer = host("[TOOL_" + "x" * 250)
    writer.step = lambda: time.sleep(0.01)
    plant_failure(monkeypatch, ToolCallReader, "push", lambda _, text: "x" in text)
    with capture_logs() as logs, serving_worker(kit, model) as send:
        events = send("r1", badly(kit))
        assert isinstance(events[-1], ErrorEvent), events[-1]
        assert (events[-1].code, events[-1].status) == ("engine_error", 500)
        assert "KeyError" in events[-1].message
        assert isinstance(send("r2", other(kit))[-1], EndEvent)
        assert writer.written < 200, "it was computed to its end"
    (line,) = [line for line in logs if line["event"] == "tokens could not be emitted"]
    assert (line["request"], line["error"], line["log_level"]) == ("r1", "KeyError", "error")
    assert "responses.py" in line["at"]
    assert "xx" not in repr(logs)


@pytest.mark.parametrize(
    ("where", "name", "when", "what"),
    [
        (Tokenizer, "decode_answers", lambda _, prompts, answers: any(ids[0] < 256 for ids in answers), "made"),
        (ToolCallReader, "push", lambda _, text: "look" in text, "made"),
        (Tokenizer, "render_chat", lambda _, messages, *more, **how: "badly" in str(messages), "read"),
        (Tokenizer, "encode_chats", lambda _, texts: any("badly" in text for text in texts), "encoded"),
        (translate, "grammar_of", lambda body, *_: "badly" in str(body), "prepared"),
    ],
)
def test_given_a_row_with_an_unexpected_exception_then_it_fails_and_the_job_continues(
    host: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, when: Any, what: str
) -> None:
    model, _ = host()
    plant_failure(monkeypatch, where, name, when)
    with capture_logs() as logs:
        rows = committed_rows(kit, model, [other(kit), badly(kit), other(kit)])
    assert [rows[row].status for row in range(3)] == [RowStatus.SUCCEEDED, RowStatus.FAILED, RowStatus.SUCCEEDED]
    assert (rows[1].error_code, rows[1].status_code) == (RowErrorCode.ENGINE_ERROR, 500)
    assert "KeyError" in rows[1].error_message
    (line,) = [line for line in logs if line.get("request") == "job-1/1"]
    assert what in line["event"]
    assert "badly" not in repr(logs)


@pytest.mark.slow
def test_given_a_request_with_an_unexpected_exception_then_it_ends_with_an_error_and_the_next_is_answered(
    host: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = host()
    plant_failure(monkeypatch, translate, "grammar_of", lambda body, *_: "badly" in str(body))
    with capture_logs(), serving_worker(kit, model) as send:
        (event,) = send("r1", badly(kit))
        assert isinstance(event, ErrorEvent)
        assert (event.code, event.status) == ("engine_error", 500)
        assert isinstance(send("r2", other(kit))[-1], EndEvent)
