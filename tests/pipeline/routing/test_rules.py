"""Which model answers: conditions on the request, on the models' load, and on a classification model's labels."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import LaneQueue
from pipeline.ports import WorkerState
from pipeline.routing.lane_classifier import MAX_CONCURRENT, LaneClassifier
from pipeline.routing.loads import LoadReader, ModelLoad, model_loads
from pipeline.routing.requests import RoutedRequest, estimate_prompt_tokens
from pipeline.routing.rules import MAX_TEXTS, RuleRouter
from pipeline.runtime.availability import ServiceUnavailable
from schemas.jobs.job import Tier
from schemas.requests.parsing import CHAT_URL, CLASSIFY_URL, COMPLETIONS_URL, parse_body
from schemas.virtual_models import VirtualModel
from schemas.workers.lane import EndEvent
from schemas.workers.metrics import TierMetrics, WorkerMetrics
from tests.pipeline.made_jobs import PIN
from tests.pipeline.simulation import SeededRandomness, SimulatedClock
from tests.waiting import wait_for

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEYS = {"large": "large-key", "small": "small-key"}


def asked(text: str = "hello", **body: Any) -> RoutedRequest:
    parsed = parse_body(CHAT_URL, {"model": "auto", "messages": [{"role": "user", "content": text}], **body})
    return RoutedRequest(parsed, estimate_prompt_tokens(parsed), "acme", Tier.STANDARD, NOON)


def when(**conditions: Any) -> VirtualModel:
    rules = [{"model": "large", "when": conditions}, {"model": "small"}]
    return VirtualModel.model_validate({"name": "auto", "rules": rules})


def chosen(virtual: VirtualModel, *requests: RoutedRequest, router: RuleRouter | None = None) -> list[str]:
    return (router or RuleRouter()).choose(virtual, KEYS, requests)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
GERMAN = "Wie komme ich von der Stadt zu dem See, und ist das weit?"


@pytest.mark.parametrize(
    ("conditions", "holds", "does_not"),
    [
        ({"prompt_tokens": {"min": 100}}, asked("word " * 100), asked()),
        ({"prompt_tokens": {"max": 100}}, asked(), asked("word " * 100)),
        ({"tools": True}, asked(tools=[TOOL]), asked(tools=[TOOL], tool_choice="none")),
        ({"tools": False}, asked(), asked(tools=[TOOL])),
        ({"response_schema": True}, asked(response_format=SCHEMA), asked()),
        ({"languages": ["de", "fr"]}, asked(GERMAN), asked("What is the way to the lake, and is it far?")),
        ({"tenants": ["acme"]}, asked(), replace(asked(), tenant="other")),
        ({"tiers": ["standard", "bulk"]}, asked(), replace(asked(), tier=Tier.INTERACTIVE)),
        ({"hours": "10:00-14:00"}, asked(), replace(asked(), at=NOON.replace(hour=14))),
        ({"complexity": {"min": 20}}, asked("```python\nprint(1)\n```"), asked()),
        ({"tools": True, "tenants": ["acme"]}, asked(tools=[TOOL]), asked()),
    ],
)
def test_a_rule_applies_where_all_of_its_conditions_hold(
    conditions: dict[str, Any], holds: RoutedRequest, does_not: RoutedRequest
) -> None:
    assert chosen(when(**conditions), holds, does_not) == ["large", "small"]


def test_the_first_rule_that_holds_decides_and_the_last_is_the_default() -> None:
    rules = [
        {"model": "first", "when": {"tools": True}},
        {"model": "second", "when": {"prompt_tokens": {"max": 50}}},
        {"model": "last"},
    ]
    virtual = VirtualModel.model_validate({"name": "auto", "rules": rules})
    router = RuleRouter()
    requests = asked(tools=[TOOL]), asked(), asked("word " * 200)
    assert chosen(virtual, *requests, router=router) == ["first", "second", "last"]
    assert router.counts.chosen() == {("auto", "first"): 1, ("auto", "second"): 1, ("auto", "last"): 1}


def test_other_bodies_than_chats_have_a_prompt_too() -> None:
    text = parse_body(COMPLETIONS_URL, {"model": "auto", "prompt": ["a", [5] * 300]})
    request = RoutedRequest(text, estimate_prompt_tokens(text), "acme", Tier.BULK, NOON)
    assert (request.prompt_tokens, request.last_text) == (300, "a")
    assert chosen(when(prompt_tokens={"min": 300}), request) == ["large"]


@pytest.mark.parametrize(
    ("load", "conditions", "model"),
    [
        (ModelLoad(3.0, 500.0, 2.0), {"max_waiting_requests": 3}, "large"),
        (ModelLoad(3.1, 500.0, 2.0), {"max_waiting_requests": 3}, "small"),
        (ModelLoad(3.0, 500.0, 2.0), {"max_waiting_tokens": 499}, "small"),
        (ModelLoad(3.0, 500.0, 2.0), {"max_price_per_million_tokens": 2}, "large"),
        (ModelLoad(3.0, 500.0, 2.5), {"max_price_per_million_tokens": 2}, "small"),
        (ModelLoad(3.0, 500.0, None), {"max_price_per_million_tokens": 2}, "small"),
        (None, {"max_waiting_requests": 1e9}, "small"),
    ],
)
def test_load_and_price_are_those_of_the_rules_model(
    load: ModelLoad | None, conditions: dict[str, Any], model: str
) -> None:
    loads = {"small-key": ModelLoad(0.0, 0.0, 0.0)} | ({} if load is None else {"large-key": load})
    assert chosen(when(**conditions), asked(), router=RuleRouter(lambda: loads)) == [model]


def test_loads_are_the_means_of_a_models_live_workers() -> None:
    workers = [
        WorkerState("a", frozenset({"k"}), waiting_tokens=100, tokens_per_second=50.0, price_per_hour=1.0),
        WorkerState("b", frozenset({"k"}), waiting_tokens=300, tokens_per_second=150.0, price_per_hour=3.0),
        WorkerState("c", frozenset({"k"}), waiting_tokens=900, draining=True),
    ]
    metrics = {"a": WorkerMetrics(model="m", tiers={Tier.BULK: TierMetrics(waiting=5)}, lane_waiting=1)}
    assert model_loads(workers, metrics) == {"k": ModelLoad(3.0, 200.0, 1e6 * 4.0 / (3_600 * 200.0))}


def test_heartbeats_that_can_not_be_read_let_no_condition_on_load_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedClock()
    beats = MemoryHeartbeats(clock, 60.0)
    beats.send_heartbeat(WorkerState("a", frozenset({"large-key"})))
    router = RuleRouter(LoadReader(beats, clock).read)
    virtual = when(max_waiting_tokens=10)
    assert chosen(virtual, asked(), router=router) == ["large"]

    def unavailable() -> list[WorkerState]:
        raise ServiceUnavailable("Redis is away")

    monkeypatch.setattr(beats, "workers", unavailable)
    clock.sleep(3.0)
    assert chosen(virtual, asked(), router=router) == ["small"]


# -- labels

HARD: dict[str, Any] = {"label": {"model": "difficulty", "labels": ["hard"], "min_score": 0.6}}


class FixedLabels:
    """A classifier that labels a text by its first word; None: it is away."""

    def __init__(self, *, is_away: bool = False) -> None:
        self.is_away = is_away
        self.texts: list[str] = []

    def classify(
        self, model: str, texts: Sequence[str], timeout_seconds: float, tenant: str
    ) -> list[tuple[str, float]] | None:
        assert len(texts) <= MAX_TEXTS
        self.texts += texts
        return None if self.is_away else [(text.split()[0], 0.5 if "perhaps" in text else 0.9) for text in texts]


def test_a_label_decides_for_all_rows_of_a_batch_at_once_and_is_asked_last() -> None:
    labels = FixedLabels()
    virtual = when(**HARD, prompt_tokens={"max": 50})
    requests = asked("hard one"), asked("easy one"), asked("hard perhaps"), asked("hard " * 300)
    assert chosen(virtual, *requests, router=RuleRouter(classifier=labels)) == ["large", "small", "small", "small"]
    assert labels.texts == ["hard one", "easy one", "hard perhaps"], "the long one isn't asked for"


def test_a_text_is_labelled_once_for_all_rules_and_rows() -> None:
    labels = FixedLabels()
    rules = [
        {"model": "large", "when": {"label": {"model": "difficulty", "labels": [label]}}} for label in ("hard", "odd")
    ]
    virtual = VirtualModel.model_validate({"name": "auto", "rules": [*rules, {"model": "small"}]})
    requests = [asked(text) for text in [f"odd {number % 100}" for number in range(300)]]
    assert chosen(virtual, *requests, router=RuleRouter(classifier=labels)) == ["large"] * 300
    assert len(labels.texts) == 100


def test_after_a_failure_no_more_labels_are_asked_for() -> None:
    labels = FixedLabels(is_away=True)
    router = RuleRouter(classifier=labels)
    requests = [asked(f"hard {number}") for number in range(3 * MAX_TEXTS)]
    assert chosen(when(**HARD), *requests, router=router) == ["small"] * len(requests)
    assert (len(labels.texts), router.counts.failures()) == (MAX_TEXTS, {"difficulty": len(requests)})


def test_requests_for_labels_occupy_few_threads() -> None:
    lane = MemoryLane(SystemClock())
    classifier = LaneClassifier(lane, {"c": PIN}.get, SystemClock(), SeededRandomness(1), Tier.STANDARD)
    with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
        waiting = [threads.submit(classifier.classify, "c", ["a"], 600.0, "acme") for _ in range(MAX_CONCURRENT)]
        wait_for(lambda: lane.waiting([PIN.key])[PIN.key] == MAX_CONCURRENT)
        assert classifier.classify("c", ["a"], 600.0, "acme") is None, "at once"
        worker = lane.worker("w")
        for request in worker.take([LaneQueue(PIN.key)], 100, 0.0):
            worker.emit([EndEvent(request.id, 1, 0, {"data": [{"label": "x", "probs": [1.0]}]})])
        assert [one.result() for one in waiting] == [[("x", 1.0)]] * MAX_CONCURRENT


def test_without_a_label_the_last_rule_applies_and_that_is_counted() -> None:
    rules = [{"model": "large", "when": HARD}, {"model": "middle", "when": {"tenants": ["acme"]}}, {"model": "small"}]
    virtual = VirtualModel.model_validate({"name": "auto", "rules": rules})
    for router in (RuleRouter(classifier=FixedLabels(is_away=True)), RuleRouter()):
        assert chosen(virtual, asked("hard a"), asked("hard b"), router=router) == ["small", "small"]
        assert router.counts.failures() == {"difficulty": 2}


def test_labels_come_over_the_lane_from_the_workers_of_the_classification_model() -> None:
    clock = SystemClock()
    lane = MemoryLane(clock)
    worker = lane.worker("w")
    data: list[Any] = [{"label": "hard", "probs": [0.1, 0.9]}, {"label": "easy", "probs": [0.7, 0.3]}]

    def answer_from_worker(response: dict[str, Any]) -> None:
        for request in worker.take([LaneQueue(PIN.key)], 10, 0.0):
            assert (request.url, request.body["input"], request.tenant) == (CLASSIFY_URL, ["a", "b"], "acme")
            assert request.body["truncate_prompt_tokens"] == -1, "a long text would be refused with all others"
            worker.emit([EndEvent(request.id, request.attempt, 0, response)])

    sent = lane.send
    classifier = LaneClassifier(lane, {"c": PIN}.get, clock, SeededRandomness(1), Tier.STANDARD)
    for response, wanted in (
        ({"data": data}, [("hard", 0.9), ("easy", 0.7)]),
        ({"data": data[:1]}, None),
        ({"data": [{"label": 7}, {}]}, None),
        ({"data": [None, "x"]}, None),
        ({"data": [{"label": "hard", "probs": ["x"]}] * 2}, None),
    ):

        def send(request: Any, response: dict[str, Any] = response) -> None:
            sent(request)
            answer_from_worker(response)

        lane.send = send  # type: ignore[method-assign]
        assert classifier.classify("c", ["a", "b"], 1.0, "acme") == wanted
    lane.send = sent  # type: ignore[method-assign]
    assert classifier.classify("c", ["a", "b"], 0.05, "acme") is None, "no worker answers in time"
    assert classifier.classify("unknown", ["a"], 1.0, "acme") is None
