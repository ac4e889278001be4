"""`tokenmill.generate` without Celery: many tasks wait at once, and each gets its own end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from pipeline.adapters.system_clock import SystemClock
from pipeline.ingest.celery.generate_task import GenerateCalls, GenerateSettings
from pipeline.ingest.celery.tasks import TryLater
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import LaneQueue
from pipeline.models.catalog import Catalog
from pipeline.models.virtual_models import ModelResolver, VirtualModels
from schemas.jobs.job import Tier
from schemas.models import CatalogEntry, ModelPin
from schemas.requests.parsing import BODIES
from schemas.requests.sampling_defaults import SamplingDefaults
from schemas.settings.lane import LaneSettings
from schemas.virtual_models import Conditions, Rule, VirtualModel
from schemas.workers.lane import EndEvent, ErrorEvent, LaneRequest
from tests.pipeline.made_jobs import PIN
from tests.pipeline.simulation import MemoryStore
from tests.waiting import HANG_SECONDS

BODY = {"model": PIN.name, "messages": [{"role": "user", "content": "hello"}]}
CLOCK = SystemClock()


class WaitingTask:
    """A waiting task, as Celery ingest has it."""

    def __init__(self) -> None:
        self.body: Mapping[str, Any] | None = None
        self.is_revoked = self.was_cancelled = self.was_sent_again = False
        self.failures = 0

    def revoked(self) -> bool:
        return self.is_revoked

    def done(self, body: Mapping[str, Any]) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the backend is away")
        assert self.body is None, "answered once"
        self.body = body

    def cancelled(self) -> None:
        self.was_cancelled = True

    def send_again(self) -> None:
        self.was_sent_again = True


class GenerateHarness:
    def __init__(
        self, settings: GenerateSettings, lane_settings: LaneSettings | None = None, pin: ModelPin = PIN
    ) -> None:
        store = MemoryStore()
        for name in (pin.name, "large"):  # of the same weights, so that one worker answers for both
            named = pin.model_copy(update={"name": name})
            Catalog(store).publish(CatalogEntry(pin=named, max_model_len=2_048))
        rules = (Rule(model="large", when=Conditions(tenants=("default",))), Rule(model=pin.name))
        VirtualModels(store).publish(VirtualModel(name="auto", rules=rules))
        self.lane = MemoryLane(CLOCK, lane_settings)
        self.calls = GenerateCalls(self.lane, ModelResolver(store, CLOCK), CLOCK, settings)
        self.worker = self.lane.worker("w")
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.calls.run, args=(self.stop,))
        self.thread.start()

    def start(
        self, task_id: str, body: Any = BODY, *args: Any, waiter: WaitingTask | None = None, **kwargs: Any
    ) -> WaitingTask:
        task = waiter or WaitingTask()
        at_once = self.calls.start("default", task_id, (body, *args), kwargs, task)
        if at_once is not None:
            task.done(at_once)
        return task

    def taken(self, most: int = 1) -> list[LaneRequest]:
        return self.worker.take([LaneQueue(PIN.key)], most, 2.0)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(HANG_SECONDS)
        assert not self.thread.is_alive()


@pytest.fixture
def make_harness() -> Iterator[Callable[..., GenerateHarness]]:
    harnesses: list[GenerateHarness] = []

    def make(lane_settings: LaneSettings | None = None, pin: ModelPin = PIN, **settings: Any) -> GenerateHarness:
        harnesses.append(GenerateHarness(GenerateSettings(**settings), lane_settings, pin))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.end()


def eventually(there: Callable[[], Any]) -> None:
    until = time.monotonic() + HANG_SECONDS
    while not there():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_thousand_wait_at_once_and_each_gets_its_own_answer(make_harness: Any) -> None:
    harness = make_harness()
    waiting = [harness.start(f"t{n}", {**BODY, "seed": n}) for n in range(1_000)]
    taken = [one for _ in range(10) for one in harness.taken(100)]
    assert len({one.id for one in taken}) == 1_000
    assert {(one.tier, one.tenant, one.url) for one in taken} == {(Tier.STANDARD, "default", "/v1/chat/completions")}
    harness.worker.emit([EndEvent(one.id, 1, 0, {"seed": one.body["seed"]}) for one in reversed(taken)])
    eventually(lambda: all(task.body is not None for task in waiting))
    assert [task.body for task in waiting] == [{"seed": n} for n in range(1_000)]


def test_a_virtual_models_answer_says_who_gave_it(make_harness: Any) -> None:
    harness = make_harness()
    task = harness.start("t1", {**BODY, "model": "auto"})
    (taken,) = harness.taken()
    assert taken.body["model"] == "large", "by the tenant's rule"
    harness.worker.emit([EndEvent(taken.id, 1, 0, {"model": "large", "choices": []})])
    eventually(lambda: task.body is not None)
    assert task.body == {"model": "auto", "choices": [], "tokenmill": {"model": "large"}}


def test_a_task_that_is_delivered_again_is_one_request_also_if_the_rules_now_choose_another_model(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness()
    harness.start("t1", {**BODY, "model": "auto"})
    entry = CatalogEntry(pin=PIN, max_model_len=2_048)
    monkeypatch.setattr(harness.calls._models, "choose", lambda virtual, request: entry)
    harness.start("t1", {**BODY, "model": "auto"})
    assert [one.body["model"] for one in harness.taken(9)] == ["large"]


def test_beyond_its_limit_a_task_is_to_be_tried_later(make_harness: Any) -> None:
    harness = make_harness(max_waiting=2)
    harness.start("t1")
    harness.start("t2")
    harness.start("t1")  # delivered again: it waits already
    with pytest.raises(TryLater, match="no_room: 2 requests wait already"):
        harness.start("t3")
    assert len(harness.taken(9)) == 2
    full = make_harness(lane_settings=LaneSettings(max_waiting=0))
    with pytest.raises(TryLater, match="no_room"):
        full.start("t1")


@pytest.mark.parametrize(
    ("args", "kwargs", "code", "message"),
    [
        (({**BODY, "model": "gpt-9"},), {}, "model_not_found", "model 'gpt-9' is not served here (large, tiny, auto)"),
        (({**BODY, "audio": {}},), {}, "unsupported_parameter", "audio is not supported"),
        (({**BODY, "tools": [{}]},), {}, "invalid_request", "tools"),
        (({**BODY, "max_tokens": -1},), {}, "invalid_request", "max_tokens is -1"),
        (({**BODY, "stream": True},), {}, "unsupported_parameter", "stream is not supported"),
        (
            ({"model": "tiny", "text": "x"},),
            {},
            "invalid_request",
            "body has none of choices, messages, prompt, input, query, queries, text_1, data_1; give one of them, or "
            "name the url",
        ),
        (({"model": "tiny", "input": ""},), {}, "invalid_request", "input is empty"),
        (({**BODY, "user": "\ud800"},), {}, "invalid_request", "body holds half a character"),
        (("x",), {}, "invalid_request", "body must be an object"),
        ((), {}, "invalid_request", "body must be an object"),
        ((BODY, "fast"), {}, "invalid_request", "tier must be one of interactive, standard, bulk"),
        ((BODY,), {"timeout": 0}, "invalid_request", "timeout must be above 0 and at most 600 seconds"),
        ((BODY,), {"timeout": float("nan")}, "invalid_request", "timeout must be above 0"),
        ((BODY, "bulk", 3, 4, 5), {}, "invalid_request", "arguments are 5"),
        ((BODY,), {"url": "/v1/images"}, "unsupported_url", "url is '/v1/images', but must be /v1/chat/completions, "),
        ((BODY,), {"url": ["/v1/responses"]}, "invalid_request", "url must be a string such as"),
        ((BODY,), {"url": "/v1/messages"}, "invalid_request", "max_tokens is missing"),
        ((BODY,), {"url": "/v1/completions"}, "invalid_request", "prompt is missing; add it"),
        ((BODY,), {"body": BODY}, "invalid_request", "body is no argument, or is given twice"),
        ((BODY,), {"colour": 1}, "invalid_request", "colour is no argument"),
    ],
)
def test_an_invalid_request_is_answered_at_once_in_openais_shape(
    make_harness: Any, args: Any, kwargs: Any, code: str, message: str
) -> None:
    answer = make_harness().calls.start("default", "t", args, kwargs, WaitingTask())
    assert answer["error"]["code"] == code
    assert answer["error"]["message"].startswith(message)
    assert answer["error"]["type"] == "invalid_request_error"
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_an_error_of_the_worker_comes_in_the_same_shape(make_harness: Any) -> None:
    harness = make_harness(default_model="tiny")
    task = harness.start("t", {"prompt": "x"})
    (one,) = harness.taken()
    assert (one.url, one.body["model"]) == ("/v1/completions", "tiny")
    harness.worker.emit([ErrorEvent(one.id, 1, 0, "context_length_exceeded", "too long", 400, "prompt")])
    eventually(lambda: task.body is not None)
    error = {"message": "too long", "type": "invalid_request_error", "param": "prompt"}
    assert task.body == {"error": {**error, "code": "context_length_exceeded"}}


CLASSIFY = {"model": PIN.name, "input": "hello"}
RESPOND = {"model": PIN.name, "input": "hello", "max_output_tokens": 5}
MESSAGE = {"model": PIN.name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
USAGE = {
    "prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}
}  # fmt: skip
SAID = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 5, "model": PIN.name, "usage": USAGE,
    "choices": [{
        "index": 0, "message": {"role": "assistant", "content": "hi"}, "logprobs": None, "finish_reason": "stop",
    }],
}  # fmt: skip


@pytest.mark.parametrize(
    ("url", "body", "sent_to", "kind"),
    [
        ("/v1/classify", CLASSIFY, "/v1/classify", "chat.completion"),
        ("/v1/embeddings", CLASSIFY, "/v1/embeddings", "chat.completion"),
        ("/v1/responses", RESPOND, "/v1/chat/completions", "response"),
        ("/v1/messages", MESSAGE, "/v1/chat/completions", None),
    ],
)
def test_a_named_url_decides_what_body_and_response_are(
    make_harness: Any, url: str, body: Any, sent_to: str, kind: str | None
) -> None:
    harness = make_harness()
    task = harness.start("t", body, url=url)
    (one,) = harness.taken()
    assert one.url == sent_to
    harness.worker.emit([EndEvent(one.id, 1, 0, SAID)])
    eventually(lambda: task.body is not None)
    assert task.body is not None
    assert task.body.get("object") == kind
    assert (url == "/v1/messages") is (task.body.get("content") == [{"type": "text", "text": "hi"}])


def test_all_urls_of_batch_lines_can_be_named(make_harness: Any) -> None:
    harness = make_harness()
    for url in BODIES:
        error = harness.calls.start("default", "t", ({"model": PIN.name},), {"url": url}, WaitingTask())
        assert error["error"]["message"].endswith("is missing; add it"), "the url's own body is parsed"


def test_a_workers_error_has_the_names_of_the_url(make_harness: Any) -> None:
    harness = make_harness()
    task = harness.start("t", RESPOND, url="/v1/responses")
    (one,) = harness.taken()
    named = "max_tokens", ("max_tokens", "max_tokens")
    harness.worker.emit([ErrorEvent(one.id, 1, 0, "invalid_request", "max_tokens is 5; lower max_tokens", 400, *named)])
    eventually(lambda: task.body is not None)
    assert task.body is not None
    assert (task.body["error"]["param"], task.body["error"]["message"]) == (
        "max_output_tokens", "max_output_tokens is 5; lower max_output_tokens"
    )  # fmt: skip


@pytest.mark.slow
def test_a_revoked_task_is_cancelled_on_the_lane(make_harness: Any) -> None:
    harness = make_harness()
    task = harness.start("t")
    (one,) = harness.taken()
    task.is_revoked = True
    eventually(lambda: task.was_cancelled)
    assert harness.worker.hold([one.id]) == {one.id}
    assert task.body is None


@pytest.mark.slow
def test_without_an_answer_in_time_the_task_ends_with_a_timeout_error(make_harness: Any) -> None:
    task = make_harness().start("t", timeout=0.3)
    eventually(lambda: task.body is not None)
    assert task.body is not None
    assert task.body["error"]["code"] == "request_timeout"


@pytest.mark.slow
def test_an_answer_that_cant_be_stored_is_retried_until_it_can(make_harness: Any) -> None:
    harness = make_harness()
    task = WaitingTask()
    task.failures = 3
    harness.start("t", waiter=task)
    (one,) = harness.taken()
    harness.worker.emit([EndEvent(one.id, 1, 0, {"id": "x"})])
    eventually(lambda: task.body is not None)
    assert task.body == {"id": "x"}


@pytest.mark.slow
def test_at_the_end_waiting_tasks_are_sent_to_another_ingest_worker_and_find_the_same_answer(make_harness: Any) -> None:
    harness = make_harness()
    task = harness.start("t")
    (one,) = harness.taken()
    harness.end()
    assert task.was_sent_again
    assert harness.worker.hold([one.id]) == frozenset(), "it is still wanted"
    harness.worker.emit([EndEvent(one.id, 1, 0, {"id": "x"})])
    other = GenerateCalls(harness.lane, harness.calls._models, CLOCK)
    stop, again = threading.Event(), WaitingTask()
    assert other.start("default", "t", (BODY,), {}, again) is None
    thread = threading.Thread(target=other.run, args=(stop,))
    thread.start()
    eventually(lambda: again.body is not None)
    stop.set()
    thread.join(HANG_SECONDS)
    assert again.body == {"id": "x"}
    # The same id with another prompt, or of another tenant, is another request.
    sent: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("a", BODY, {}), ("b", BODY, {}), ("a", {**BODY, "seed": 1}, {}), ("a", BODY, {"max_tokens": 5}),
    ]  # fmt: skip
    names = {other._call(tenant, "t", ({**body, **more},), {}, again).request.id for tenant, body, more in sent}
    names.add(other._call("a", "t", ({**BODY, "max_tokens": 5},), {"url": "/v1/messages"}, again).request.id)
    assert len(names | {one.id}) == 6


def test_a_task_gets_the_models_sampling_defaults_where_it_sets_none(make_harness: Any) -> None:
    defaults = SamplingDefaults(temperature=0.3, top_k=9)
    harness = make_harness(pin=PIN.model_copy(update={"sampling_defaults": defaults}))
    harness.start("unset", BODY)
    harness.start("set", {**BODY, "temperature": 1.0})
    bodies = {request.body.get("temperature"): request.body["top_k"] for request in harness.taken(2)}
    assert bodies == {0.3: 9, None: 9}
