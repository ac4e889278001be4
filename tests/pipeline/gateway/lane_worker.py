"""A lane worker without a model: it answers with numbered words, at a configurable speed."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from pipeline.lane.ports import LaneQueue, OpenLane
from schemas.requests.parsing import CLASSIFY_URL, EMBEDDINGS_URL, RERANK_URL, SCORE_URL
from schemas.requests.policy_report import NO_REPORT, PolicyReport, add_report
from schemas.requests.tokenizing import COUNT_TOKENS_URL, DETOKENIZE_URL, TOKENIZE_URL
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest, TokensEvent
from tests.pipeline.made_jobs import PIN


def words(count: int, choice: int = 0) -> str:
    """The text of a choice of `count` tokens."""
    return "".join(f"{choice}.{n} " for n in range(count))


@dataclass
class _Running:
    request: LaneRequest
    said: int = 0
    sequence: int = 0


@dataclass
class LaneWorker:
    """Answers `max_tokens` tokens to each choice; the prompt or last message may say what goes wrong.

    Attributes:
        model: key of the model whose requests it takes.
        pause: seconds between two tokens of a request.
        requests: all that were received, by id.  unwanted: when each request was dropped that is no longer wanted.
        hold: take nothing while it is set.
        policies: the fingerprint of the content policies that it reports.  report: their verdicts.
    """

    lane: OpenLane
    pause: float = 0.0
    model: str = PIN.key
    text: str | None = None
    requests: dict[str, LaneRequest] = field(default_factory=dict)
    unwanted: dict[str, float] = field(default_factory=dict)
    hold: threading.Event = field(default_factory=threading.Event)
    policies: str | None = None
    report: PolicyReport = NO_REPORT
    polls: int = 0

    def stop_taking(self) -> None:
        """Leave new requests waiting."""
        self.hold.set()
        before = self.polls
        while self.polls < before + 2:  # a poll that was under way may still take a request
            time.sleep(0.001)

    def run(self, stop: threading.Event) -> None:
        side = self.lane.worker(f"w-{self.model}")
        running: dict[str, _Running] = {}
        while not stop.is_set():
            self.polls += 1
            if not self.hold.is_set():
                for request in side.take([LaneQueue(self.model)], 2_000, 0.0 if running else 0.01):
                    self.requests[request.id] = request
                    running[request.id] = _Running(request)
            events: list[LaneEvent] = []
            for name, one in list(running.items()):
                events += self._step(one)
                if isinstance(events[-1], EndEvent | ErrorEvent):
                    del running[name]
            dropped = set(side.emit(events)) | set(side.hold(list(running)))
            for name in dropped & running.keys():
                self.unwanted[name] = time.monotonic()
                del running[name]
            if self.hold.is_set() or (running and self.pause):
                time.sleep(self.pause or 0.001)
        side.close()

    def _step(self, one: _Running) -> list[LaneEvent]:
        """Emit the next token of each choice, and the end after the last one."""
        request, body = one.request, one.request.body
        if request.url in NUMBERS:
            numbers = add_report(NUMBERS[request.url](body), self.report)
            return [EndEvent(request.id, request.attempt, self._next(one), numbers)]
        chat = "messages" in body
        prompt = body["messages"][-1].get("content") if chat else body.get("prompt", "")
        if prompt == "refuse" or (prompt == "break" and one.said == 2):
            refused = prompt == "refuse"
            code, status = ("context_length_exceeded", 400) if refused else ("engine_error", 500)
            return [ErrorEvent(request.id, request.attempt, self._next(one), code, "it broke", status)]
        most, choices = body.get("max_tokens") or body.get("max_completion_tokens") or 5, body.get("n", 1)
        events: list[LaneEvent] = []
        if one.said < most:
            for choice in range(choices):
                text = self.text or f"{choice}.{one.said} "
                token = {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}
                logprobs = {"content": [token], "refusal": None}
                events.append(
                    TokensEvent(
                        request.id, request.attempt, self._next(one), choice, (one.said,), text,
                        logprobs if body.get("logprobs") and chat else None,
                    )
                )  # fmt: skip
            one.said += 1
        if one.said == most:
            response = add_report(self._response(body, chat, most, choices), self.report)
            events.append(EndEvent(request.id, request.attempt, self._next(one), response, self.policies))
        return events

    def _next(self, one: _Running) -> int:
        one.sequence += 1
        return one.sequence - 1

    def _response(self, body: dict[str, Any], chat: bool, most: int, choices: int) -> dict[str, Any]:
        shown = []
        for index in range(choices):
            text = words(most, index) if self.text is None else self.text * most
            message = {"role": "assistant", "content": text, "refusal": None}
            what: dict[str, Any] = {"message": message} if chat else {"text": text}
            shown.append({"index": index, "finish_reason": "length", "logprobs": None, **what})
        usage = {
            "prompt_tokens": 3,
            "completion_tokens": most * choices,
            "total_tokens": 3 + most * choices,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        return {
            "id": "from-the-worker",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": body["model"],
            "choices": shown,
            "usage": usage,
        }


def _vectors(body: dict[str, Any]) -> dict[str, Any]:
    count = len(body["input"]) if isinstance(body["input"], list) else 1
    data = [{"object": "embedding", "index": index, "embedding": [0.5, -0.5]} for index in range(count)]
    usage = {"prompt_tokens": 3 * count, "total_tokens": 3 * count}
    return {"object": "list", "data": data, "model": body["model"], "usage": usage}


def _scores(body: dict[str, Any]) -> dict[str, Any]:
    data = [{"object": "score", "index": index, "score": 0.5} for index in range(len(body["documents"]))]
    return {**_LIST, "data": data, "model": body["model"]}


def _ranking(body: dict[str, Any]) -> dict[str, Any]:
    results = [
        {"index": index, "document": {"text": text}, "relevance_score": 0.5}
        for index, text in enumerate(body["documents"])
    ]
    return {"id": "rerank-x", "created": 1, "usage": _LIST["usage"], "results": results, "model": body["model"]}


def _labels(body: dict[str, Any]) -> dict[str, Any]:
    count = len(body.get("input", ["conversation"]))
    data = [{"index": index, "label": "a", "probs": [0.5, 0.5], "num_classes": 2} for index in range(count)]
    return {**_LIST, "data": data, "model": body["model"]}


_LIST: dict[str, Any] = {
    "id": "score-x", "object": "list", "created": 1, "usage": {"prompt_tokens": 3, "total_tokens": 3},
}  # fmt: skip


def _tokens(body: dict[str, Any]) -> dict[str, Any]:
    return {"count": 2, "max_model_len": 2_048, "tokens": [1, 2], "token_strs": None}


NUMBERS = {
    EMBEDDINGS_URL: _vectors, SCORE_URL: _scores, RERANK_URL: _ranking, CLASSIFY_URL: _labels,
    TOKENIZE_URL: _tokens, DETOKENIZE_URL: lambda body: {"prompt": "a"},
    COUNT_TOKENS_URL: lambda body: {"input_tokens": 2},
}  # fmt: skip
