"""The lane server: its answers equal those of the same rows in a shard, and each request ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from engine.models.base import ModelSpec
from engine.plan import CacheGroup, RowState, StepOutput, StepPlan
from engine.request import Choice, Completion, FinishReason, PartialChoice, TokenLogprobs
from engine.runner.null_runner import NullRunner
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.client import CallSettings, answer
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import START, LaneQueue
from pipeline.worker_client.ports import BY_URGENCY, ShardWork
from schemas.jobs.job import Tier
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import EndEvent, ErrorEvent, HandBackEvent, LaneEvent, LaneRequest, TokensEvent
from tests.waiting import HANG_SECONDS
from workers.errors import BrokenEngineError
from workers.lane.requests import LaneReader, LaneRules
from workers.lane.responses import LaneAnswer
from workers.lane.server import LaneServer, LaneServing
from workers.model.loaded_model import LoadedModel
from workers.shards.worker import ShardWorker, WorkerSettings
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import ModelLimits
from workers.translation.responses import Envelope, ResponseBuilder

SPEC = ModelSpec(
    architecture="none", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, vocab_size=400,
    max_position=512, windows=(None,), eos_token_ids=(2,), num_parameters=0, dtype=torch.float32,
)  # fmt: skip
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL = CallSettings(silence_timeout_seconds=0.2, poll_interval_seconds=0.02)
CLOCK = SystemClock()


class SlowRunner:
    """The null runner with steps of a given duration, which fail while `fails` returns true."""

    def __init__(self, rows: RowState, step_seconds: float) -> None:
        self._null = NullRunner(rows, SPEC.vocab_size)
        self._rows = rows
        self.step_seconds = step_seconds
        self.steps = 0
        self.fails: Callable[[Sequence[Sequence[int]]], bool] = lambda prompts: False

    def execute(self, plan: StepPlan) -> StepOutput:
        self.steps += 1
        time.sleep(self.step_seconds)
        prompts = [self._rows.token_ids[row, : self._rows.prompt_len[row]].tolist() for row in plan.rows.tolist()]
        if self.fails(prompts):
            raise RuntimeError("the device said no")
        return self._null.execute(plan)


@pytest.fixture
def host(byte_level: Tokenizer) -> Any:
    """Makes a model whose steps only take time: (model, runner)."""

    def host(max_num_seqs: int = 8, step_seconds: float = 0.001) -> tuple[LoadedModel, SlowRunner]:
        made: list[SlowRunner] = []

        def runner(scheduler: Any) -> SlowRunner:
            made.append(SlowRunner(scheduler.rows, step_seconds))
            return made[0]

        config = EngineConfig(cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=max_num_seqs))
        engine = Engine(config, SPEC, (CacheGroup((0,), None, 800),), SPEC.max_position, runner)
        limits = ModelLimits(SPEC.max_position, SPEC.vocab_size, SPEC.eos_token_ids)
        model = LoadedModel("tiny", "tiny", engine, byte_level, limits, "float32", max_num_seqs, digest="sha256:1")
        return model, made[0]

    return host


class EndlessSource:
    """A source with these shards that never finishes."""

    def __init__(self, shards: Sequence[ShardWork] = ()) -> None:
        self.left = list(shards)

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        return self.left.pop(0) if self.left else None

    def finished(self) -> bool:
        return False


class LaneWorker:
    """A worker with a lane server on threads."""

    def __init__(
        self, kit: Any, model: LoadedModel, lane: MemoryLane, name: str, shards: Sequence[ShardWork], **serving: Any
    ) -> None:
        self.sink = kit.MemorySink()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        rules, of_lane = LaneRules(caps={Tier.STANDARD: 300}), serving.pop("of_lane", LANE_SETTINGS)
        server = LaneServer(
            model, lane.worker(name), CLOCK, rules, LaneServing(**{"emit_interval_seconds": 0.01} | serving), of_lane
        )

        def run() -> None:
            try:
                with server.running(self.stop) as side_work:
                    ShardWorker(
                        model,
                        EndlessSource(shards),
                        self.sink,
                        CLOCK,
                        WorkerSettings(checkpoint_seconds=0.05),
                        beside=side_work,
                    ).run(self.stop)
            except BaseException as error:  # noqa: BLE001 - checked by the test
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def end(self) -> None:
        self.stop.set()
        self.thread.join(HANG_SECONDS)
        assert not self.thread.is_alive()


LANE_SETTINGS = LaneSettings(worker_timeout_seconds=0.6)


@pytest.fixture
def lane() -> MemoryLane:
    return MemoryLane(CLOCK, LANE_SETTINGS)


@pytest.fixture
def work(kit: Any, lane: MemoryLane) -> Iterator[Callable[..., LaneWorker]]:
    """Starts a worker with this model: (model, name, shards)."""
    workers: list[LaneWorker] = []

    def work(
        model: LoadedModel,
        name: str = "w1",
        shards: Sequence[ShardWork] = (),
        on: MemoryLane | None = None,
        **serving: Any,
    ) -> LaneWorker:
        workers.append(LaneWorker(kit, model, on or lane, name, shards, **serving))
        return workers[-1]

    yield work
    for worker in workers:
        worker.end()
    for worker in workers:
        assert worker.error is None, worker.error


def request(model: LoadedModel, body: dict[str, Any], name: str = "r1", **more: Any) -> LaneRequest:
    url = COMPLETIONS if "prompt" in body else CHAT
    return LaneRequest(name, model.pin().key, body, **{"url": url, "tier": Tier.STANDARD, **more})


def events_of(lane: MemoryLane, request: LaneRequest) -> list[LaneEvent]:
    return list(answer(lane, request, CLOCK, CALL))


def response(events: Sequence[LaneEvent]) -> dict[str, Any]:
    assert isinstance(events[-1], EndEvent), events[-1]
    return events[-1].response


def text_of(events: Sequence[LaneEvent], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TokensEvent) and event.choice == choice)


def as_rows(kit: Any, model: LoadedModel, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The responses of a shard with these bodies."""
    sink = kit.MemorySink()
    ShardWorker(model, kit.ListSource([kit.make_work(bodies)]), sink, CLOCK).run()
    return [json.loads(row.response) for row in sink.parts[1]]


def alike(body: dict[str, Any]) -> dict[str, Any]:
    """The response without ids and times."""
    usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"object": body["object"], "model": body["model"], "choices": body["choices"], "usage": usage}


def bodies(kit: Any) -> list[dict[str, Any]]:
    greedy = {"temperature": 0, "max_tokens": 40}
    return [
        kit.chat("Hello", **greedy),
        kit.completion("The quick", **greedy),
        kit.chat("dice", n=3, seed=5, temperature=1.2, max_tokens=25),
        kit.chat("naïve 日本語", logprobs=True, top_logprobs=2, **greedy),
        kit.completion("scored", logprobs=2, echo=True, max_tokens=0),
        kit.completion("again", echo=True, **greedy),
        kit.chat("stops", stop=["e", "ab"], n=2, seed=9, max_tokens=40),
        kit.completion(["one", [5, 6, 7], "naïve 日本語"], **greedy),
        kit.completion(["a", "b c d"], stop=["e", "ab"], n=2, seed=9, max_tokens=40, logprobs=1),
        kit.completion(["scored", "this too"], logprobs=1, echo=True, max_tokens=0),
    ]


def choices_of(body: dict[str, Any]) -> range:
    """The choices that a body asks for."""
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    return range(prompts * body.get("n", 1))


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> LoadedModel:
    """A real model with sampling, stop strings and log-probabilities."""
    config = EngineConfig(
        dtype="float32", threads=1, cache=CacheConfig(block_size=16, num_blocks=200),
        schedule=ScheduleConfig(max_num_seqs=8),
    )  # fmt: skip
    return LoadedModel.load(model_folder, name="tiny", config=config)


@pytest.mark.slow
def test_answers_are_those_of_the_same_rows_and_the_text_comes_in_pieces(
    loaded: LoadedModel, kit: Any, lane: MemoryLane, work: Any
) -> None:
    requested = bodies(kit)
    rows = as_rows(kit, loaded, requested)
    work(loaded)
    for number, (body, row) in enumerate(zip(requested, rows, strict=True)):
        events = events_of(lane, request(loaded, body, f"r{number}"))
        assert alike(response(events)) == alike(row), body
        for choice in row["choices"]:
            whole = choice["message"]["content"] if "message" in choice else choice["text"]
            assert text_of(events, choice["index"]) == whole.removeprefix("again" if body.get("echo") else "") or (
                body.get("max_tokens") == 0
            )
        ids = [event.sequence for event in events]
        assert ids == list(range(len(ids)))
        tokens = [event for event in events if isinstance(event, TokensEvent)]
        assert sum(len(event.tokens) for event in tokens) <= row["usage"]["completion_tokens"]
        if body.get("logprobs") is True:
            streamed_logprobs = [entry for event in tokens if event.logprobs for entry in event.logprobs["content"]]
            assert streamed_logprobs == row["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize("number", range(10))
@pytest.mark.slow
def test_an_attempt_resumes_after_the_tokens_of_another(
    loaded: LoadedModel, kit: Any, lane: MemoryLane, work: Any, number: int
) -> None:
    work(loaded)
    body = bodies(kit)[number]
    first = events_of(lane, request(loaded, body, f"a{number}"))
    streamed_tokens: dict[int, list[int]] = {}
    text: dict[int, str] = {}
    for event in first:
        if isinstance(event, TokensEvent):
            streamed_tokens.setdefault(event.choice, []).extend(event.tokens)
    # Given that the caller has some of the tokens of each choice, or all of them, when it resumes on another worker,
    for part in (1, 2, 7, 10**6):
        known = tuple(tuple(streamed_tokens.get(choice, ())[:part]) for choice in choices_of(body))
        again = events_of(lane, request(loaded, body, f"b{number}-{part}", attempt=2, tokens=known))
        # then it gets the others, and the same response.
        seeded = body.get("seed") is not None or body.get("temperature") == 0
        if seeded:
            assert alike(response(again)) == alike(response(first))
        for choice in choices_of(body):
            more = [t for e in again if isinstance(e, TokensEvent) and e.choice == choice for t in e.tokens]
            assert [*known[choice], *more] == streamed_tokens.get(choice, [])
            text[choice] = text_of(again, choice)
            assert text_of(first, choice).endswith(text[choice])


@pytest.mark.slow
def test_a_copy_without_a_seed_is_sampled_as_its_original(
    loaded: LoadedModel, kit: Any, lane: MemoryLane, work: Any
) -> None:
    work(loaded)
    body = kit.completion("dice", temperature=1.5, max_tokens=30, ignore_eos=True)
    first = response(events_of(lane, request(loaded, body, "original")))
    copy = response(events_of(lane, request(loaded, body, "copy", sampled_as="original")))
    other = response(events_of(lane, request(loaded, body, "other")))
    assert alike(copy) == alike(first)
    assert alike(other) != alike(first)


@pytest.mark.parametrize(
    ("body", "url", "code", "status"),
    [
        ({"prompt": "x", "max_tokens": 301}, COMPLETIONS, "invalid_request", 400),
        ({"prompt": "x", "max_tokens": 299, "stop_token_ids": [4_000]}, COMPLETIONS, "invalid_request", 400),
        ({"prompt": "x " * 600, "max_tokens": 5}, COMPLETIONS, "context_length_exceeded", 400),
        ({"prompt": "x", "tools": [{}]}, COMPLETIONS, "unsupported_parameter", 400),
        ({"prompt": "x", "stream": True}, COMPLETIONS, "unsupported_parameter", 400),
        ({"messages": [{"role": "tool", "content": "x"}]}, CHAT, "invalid_request", 400),
        ({"input": "x"}, "/v1/embeddings", "unsupported_url", 400),
        ({"prompt": [399, 400]}, COMPLETIONS, "invalid_request", 400),
    ],
)
@pytest.mark.slow
def test_a_request_is_refused_as_a_row_would_be(
    host: Any, lane: MemoryLane, work: Any, body: dict[str, Any], url: str, code: str, status: int
) -> None:
    model, _ = host()
    work(model)
    (last,) = events_of(lane, request(model, {"model": "tiny", **body}, url=url))
    assert isinstance(last, ErrorEvent)
    assert (last.code, last.status) == (code, status), last.message


@pytest.mark.slow
def test_tokens_that_no_model_has_are_refused(host: Any, kit: Any, lane: MemoryLane, work: Any) -> None:
    model, _ = host()
    work(model)
    (last,) = events_of(lane, request(model, kit.chat(), attempt=2, tokens=((10**9,),)))
    assert isinstance(last, ErrorEvent)
    assert last.code == "invalid_request"


@pytest.mark.slow
def test_a_standard_request_is_admitted_in_the_next_step_although_bulk_fills_the_batch(
    host: Any, kit: Any, lane: MemoryLane, work: Any
) -> None:
    model, runner = host(max_num_seqs=4, step_seconds=0.02)
    job = kit.make_job().model_copy(update={"tier": Tier.BULK})
    rows = [kit.chat(f"bulk {row}", max_tokens=200, ignore_eos=True) for row in range(20)]
    worker = work(model, shards=[kit.make_work(rows, job=job)])
    wait_until(lambda: runner.steps > 10)
    assert model.engine.num_running == 4
    began, steps = time.monotonic(), runner.steps
    events = answer(lane, request(model, kit.chat("quick", max_tokens=6, ignore_eos=True)), CLOCK, CALL)
    first = next(events)
    print(f"first token after {1000 * (time.monotonic() - began):.0f} ms, {runner.steps - steps} steps of 20 ms")
    assert isinstance(first, TokensEvent)
    assert runner.steps - steps <= 5
    assert isinstance(list(events)[-1], EndEvent)
    worker.stop.set()
    worker.thread.join(HANG_SECONDS)
    assert worker.sink.released == [1], "the shard is released, not lost"


@pytest.mark.slow
def test_a_flood_of_one_tenant_does_not_delay_another_tenants_chat(
    host: Any, kit: Any, lane: MemoryLane, work: Any
) -> None:
    # Given more requests of one tenant than the worker has room for, whose answers take hundreds of steps,
    model, runner = host(max_num_seqs=4, step_seconds=0.002)
    work(model)
    chat = kit.chat("quick", max_tokens=2, ignore_eos=True)
    before = request(model, chat, "before", tenant="b", tier=Tier.INTERACTIVE)
    assert isinstance(events_of(lane, before)[-1], EndEvent)
    for number in range(30):
        body = kit.chat("long", max_tokens=300, ignore_eos=True, n=8)
        lane.send(request(model, body, f"flood {number}", tenant="a", tier=Tier.INTERACTIVE))
    wait_until(lambda: model.engine.num_running == 3)
    # when another tenant sends requests, then each is answered before any of these ends.
    for number in range(3):
        steps = runner.steps
        chat_request = request(model, chat, f"r{number}", tenant="b", tier=Tier.INTERACTIVE)
        assert isinstance(events_of(lane, chat_request)[-1], EndEvent)
        assert runner.steps - steps < 250
    for number in range(30):
        lane.cancel(request(model, {}, f"flood {number}", tenant="a"))


@pytest.mark.slow
def test_a_request_that_is_slow_to_prepare_holds_up_its_own_tenant_only(
    host: Any, kit: Any, lane: MemoryLane, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = host()
    go_on, prepare = threading.Event(), LaneReader.prepare

    def slow(self: LaneReader, lane_request: LaneRequest) -> Any:
        assert lane_request.id != "slow" or go_on.wait(HANG_SECONDS)
        return prepare(self, lane_request)

    monkeypatch.setattr(LaneReader, "prepare", slow)
    work(model)
    body = kit.chat("x", max_tokens=2)
    for name in ("slow", "behind", "cancelled"):
        lane.send(request(model, body, name, tenant="a"))
    for number in range(3):
        assert isinstance(events_of(lane, request(model, body, f"r{number}", tenant="b"))[-1], EndEvent)
    lane.cancel(request(model, body, "cancelled", tenant="a"))
    assert lane.read({"behind": START}, 0) == []
    go_on.set()
    for name in ("slow", "behind"):
        wait_until(lambda name=name: isinstance((lane.read({name: START}, 0) or [None])[-1], EndEvent))


@pytest.mark.slow
def test_unprepared_requests_are_handed_back_when_the_worker_ends(
    host: Any, kit: Any, lane: MemoryLane, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = host()
    begun, go_on, prepare = threading.Event(), threading.Event(), LaneReader.prepare

    def slow(self: LaneReader, lane_request: LaneRequest) -> Any:
        begun.set()
        assert go_on.wait(HANG_SECONDS)
        return prepare(self, lane_request)

    monkeypatch.setattr(LaneReader, "prepare", slow)
    worker = work(model, grace_seconds=0.0)
    for name in ("first", "second"):
        lane.send(request(model, kit.chat("x", max_tokens=2), name))
    assert begun.wait(HANG_SECONDS)
    worker.stop.set()
    wait_until(lambda: isinstance((lane.read({"second": START}, 0) or [None])[-1], HandBackEvent))
    go_on.set()
    wait_until(lambda: bool(lane.read({"first": START}, 0)))


@pytest.mark.slow
def test_many_are_answered_at_once(host: Any, kit: Any, lane: MemoryLane, work: Any) -> None:
    model, _ = host(max_num_seqs=4)
    work(model)
    requests = [request(model, kit.chat(f"{n}", max_tokens=20, ignore_eos=True), f"r{n}") for n in range(50)]
    alone = [alike(body) for body in as_rows(kit, host()[0], [one.body for one in requests])]
    for one in requests:
        lane.send(one)
    found = {}
    until = time.monotonic() + HANG_SECONDS
    while len(found) < len(requests) and time.monotonic() < until:
        for event in lane.read({one.id: START for one in requests if one.id not in found}, 0.1):
            if isinstance(event, EndEvent):
                found[event.request] = alike(event.response)
    assert [found[one.id] for one in requests] == alone


@pytest.mark.slow
def test_a_burst_is_left_to_others_in_part_although_the_batch_has_room(
    host: Any, kit: Any, lane: MemoryLane, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = host(max_num_seqs=512)
    requests = [request(model, kit.chat(f"{n}", max_tokens=2), f"r{n}") for n in range(300)]
    for one in requests:
        lane.send(one)
    sizes, take = list[int](), lane.take

    def record(*arguments: Any) -> list[LaneRequest]:
        taken = take(*arguments)
        sizes.append(len(taken))
        return taken

    monkeypatch.setattr(lane, "take", record)
    work(model)
    for one in requests:
        assert isinstance(events_of(lane, one)[-1], EndEvent)
    assert [size for size in sizes if size] == [128, 128, 44]


@pytest.mark.parametrize("serving", [LaneServing(emit_interval_seconds=0.01), LaneServing(emit_interval_seconds=60.0)])
@pytest.mark.slow
def test_a_cancel_frees_the_engine(host: Any, kit: Any, lane: MemoryLane, work: Any, serving: LaneServing) -> None:
    # Given a worker that emits often and seldom renews its holds, or the other way round, when a caller disconnects,
    model, runner = host(step_seconds=0.01)
    often = serving.emit_interval_seconds < 1
    work(
        model,
        emit_interval_seconds=serving.emit_interval_seconds,
        of_lane=LaneSettings(worker_timeout_seconds=300.0) if often else LANE_SETTINGS,
    )
    events = answer(lane, request(model, kit.chat(max_tokens=300, ignore_eos=True)), CLOCK, CALL)
    next(events)
    # then the worker removes the request at once all the same.
    assert model.engine.num_running == 1
    events.close()  # type: ignore[attr-defined]
    wait_until(lambda: model.engine.num_running == 0)
    assert runner.steps < 200, "it was not computed to its end"
    assert isinstance(events_of(lane, request(model, kit.chat(max_tokens=3), "r2"))[-1], EndEvent)


@pytest.mark.slow
def test_a_request_whose_events_take_long_does_not_delay_the_holds(
    host: Any, kit: Any, lane: MemoryLane, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a request whose events are being made,
    model, _ = host()
    is_making, may_end, holds = threading.Event(), threading.Event(), []
    grow, hold = LaneAnswer.grow, MemoryLane.hold

    def grow_slowly(answer: LaneAnswer, partial: Sequence[PartialChoice]) -> list[LaneEvent]:
        is_making.set()
        assert may_end.wait(HANG_SECONDS)
        return grow(answer, partial)

    def counted_hold(lane: MemoryLane, worker: str, requests: Collection[str]) -> frozenset[str]:
        if is_making.is_set():
            holds.append(set(requests))
        return hold(lane, worker, requests)

    monkeypatch.setattr(LaneAnswer, "grow", grow_slowly)
    monkeypatch.setattr(MemoryLane, "hold", counted_hold)
    work(model)
    events = answer(lane, request(model, kit.chat(max_tokens=30, ignore_eos=True)), CLOCK, CALL)
    # when the worker's lifetime in the lane passes several times, then its holds are renewed meanwhile,
    waiter = threading.Thread(target=lambda: (wait_until(lambda: len(holds) > 9), may_end.set()))
    waiter.start()
    received = list(events)
    waiter.join()
    assert holds[0] == {"r1"}
    # and it answers the request at its first attempt.
    assert (type(received[-1]), received[-1].attempt) == (EndEvent, 1)


@pytest.mark.slow
def test_a_request_that_waits_is_not_asked_for_tokens(
    host: Any, kit: Any, lane: MemoryLane, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given more choices than rows, when they are answered at the smallest intervals,
    model, _ = host(max_num_seqs=2)
    asked = []
    partial = Engine.partial

    def counted(engine: Engine, request: Any, given: Any = None, only: Any = None) -> Any:
        asked.append(only)
        return partial(engine, request, given, only)

    monkeypatch.setattr(Engine, "partial", counted)
    work(model, emit_interval_seconds=0.0, emit_interval_seconds_each=0.0)
    body = kit.completion("a", max_tokens=20, n=16, ignore_eos=True)
    (last,) = events_of(lane, request(model, body))[-1:]
    assert isinstance(last, EndEvent)
    # then a poll asks for as many as there are rows.
    assert asked
    assert max(len(only) for only in asked) <= 2


@pytest.mark.slow
def test_behind_its_deadline_a_request_ends_with_an_error(host: Any, kit: Any, lane: MemoryLane, work: Any) -> None:
    model, _ = host(step_seconds=0.02)
    work(model)
    soon = datetime.now(UTC) + timedelta(seconds=0.5)
    last = events_of(lane, request(model, kit.chat(max_tokens=300, ignore_eos=True), deadline=soon))[-1]
    assert isinstance(last, ErrorEvent)
    assert (last.code, last.status) == ("request_timeout", 408)
    wait_until(lambda: not model.engine.has_work)


@pytest.mark.slow
def test_a_stopped_worker_finishes_requests_within_its_grace_and_hands_back_the_rest(
    host: Any, kit: Any, work: Any
) -> None:
    lane = MemoryLane(CLOCK, LaneSettings(worker_timeout_seconds=60.0))  # no worker counts as dead here
    (one, _), (other, _) = host(step_seconds=0.05), host(step_seconds=0.005)
    quick = request(one, kit.chat("quick", max_tokens=5, ignore_eos=True), "quick")
    long = request(one, kit.chat("long", max_tokens=100, ignore_eos=True), "long")
    alone = [alike(body) for body in as_rows(kit, host()[0], [quick.body, long.body])]
    first = work(one, "w1", on=lane, grace_seconds=1.0)  # the long request takes five times as long
    begun = [answer(lane, each, CLOCK, CALL) for each in (quick, long)]
    received = [[next(events)] for events in begun]
    work(other, "w2", on=lane)
    first.stop.set()
    began = time.monotonic()
    for events, so_far in zip(begun, received, strict=True):
        so_far += list(events)
    print(f"all ended {time.monotonic() - began:.1f} s after the stop")
    assert [alike(response(events)) for events in received] == alone
    assert {event.attempt for event in received[0]} == {1}
    attempts = [event.attempt for event in received[1]]
    assert attempts[0] == 1
    assert attempts[-1] > 1, "what the first still takes while it ends it hands back, too"
    tokens = [t for event in received[1] if isinstance(event, TokensEvent) for t in event.tokens]
    assert len(tokens) == 100, "none twice, none missing"
    # And it took nothing new meanwhile.
    assert isinstance(events_of(lane, request(one, kit.chat("late", max_tokens=3), "late"))[-1], EndEvent)


@pytest.mark.slow
def test_given_a_worker_that_falls_silent_another_answers(host: Any, kit: Any, lane: MemoryLane, work: Any) -> None:
    model, _ = host()
    silent = lane.worker("silent")
    lane_request = request(model, kit.chat("x", max_tokens=30, ignore_eos=True))
    lane.send(lane_request)
    assert silent.take([LaneQueue(lane_request.model)], 1, 1.0) == [lane_request]
    silent.emit([TokensEvent(lane_request.id, 1, 0, tokens=(256,), text="?")])
    work(model)
    events = events_of(lane, lane_request)
    assert response(events)["usage"]["completion_tokens"] == 30
    assert {event.attempt for event in events} == {1, 2}


@pytest.mark.slow
def test_a_failed_step_costs_a_request_nothing_and_one_that_fails_again_ends_with_an_error(
    host: Any, kit: Any, lane: MemoryLane, work: Any
) -> None:
    model, runner = host(step_seconds=0.005)
    worker = work(model)
    events = answer(lane, request(model, kit.chat("good", max_tokens=60, ignore_eos=True)), CLOCK, CALL)
    next(events)
    failures = iter([True])
    runner.fails = lambda prompts: next(failures, False)
    assert response(list(events))["usage"]["completion_tokens"] == 60
    poison = model.tokenizer.encode_batch(["poison"], add_special_tokens=False)[0].tolist()
    runner.fails = lambda prompts: any(prompt == poison for prompt in prompts)
    last = events_of(lane, request(model, kit.completion("poison", max_tokens=5), "bad"))[-1]
    assert isinstance(last, ErrorEvent)
    assert (last.code, last.status) == ("engine_error", 500)
    assert worker.thread.is_alive()
    assert isinstance(events_of(lane, request(model, kit.chat("good"), "r3"))[-1], EndEvent)


@pytest.mark.slow
def test_rows_of_shards_survive_a_request_that_breaks_steps(host: Any, kit: Any, lane: MemoryLane, work: Any) -> None:
    model, runner = host(step_seconds=0.002)
    poison = model.tokenizer.encode_batch(["poison"], add_special_tokens=False)[0].tolist()
    runner.fails = lambda prompts: any(prompt == poison for prompt in prompts)
    rows = [kit.chat(f"row {row}", max_tokens=60, ignore_eos=True) for row in range(6)]
    worker = work(model, shards=[kit.make_work(rows)])
    wait_until(lambda: runner.steps > 5)
    last = events_of(lane, request(model, kit.completion("poison", max_tokens=5), "bad"))[-1]
    assert isinstance(last, ErrorEvent)
    wait_until(lambda: 1 in worker.sink.parts)
    assert [row.completion_tokens for row in worker.sink.parts[1]] == [60] * 6


@pytest.mark.slow
def test_given_an_engine_that_fails_with_everything_the_worker_ends_and_another_answers(
    host: Any, kit: Any, lane: MemoryLane, work: Any
) -> None:
    # Given no rows of shards, which would have shown it
    broken, runner = host()
    runner.fails = lambda prompts: True
    worker = LaneWorker(kit, broken, lane, "broken", ())
    events = answer(lane, request(broken, kit.chat("x", max_tokens=5, ignore_eos=True)), CLOCK, CALL)
    lane_events: list[LaneEvent] = []
    caller = threading.Thread(target=lambda: lane_events.extend(events))
    caller.start()
    worker.thread.join(HANG_SECONDS)
    assert isinstance(worker.error, BrokenEngineError)
    model, _ = host()
    work(model, "sound")
    caller.join(HANG_SECONDS)
    assert not caller.is_alive()
    assert response(lane_events)["usage"]["completion_tokens"] == 5


@pytest.mark.slow
def test_an_idle_worker_answers_at_once_and_burns_no_processor(
    host: Any, kit: Any, lane: MemoryLane, work: Any
) -> None:
    model, _ = host()
    work(model)
    time.sleep(0.2)
    began, used = time.monotonic(), time.process_time()
    time.sleep(1.0)
    share = (time.process_time() - used) / (time.monotonic() - began)
    began = time.monotonic()
    next(answer(lane, request(model, kit.chat("now", max_tokens=2)), CLOCK, CALL))
    first = time.monotonic() - began
    print(f"idle: {100 * share:.1f} % of a core; first token after {1000 * first:.0f} ms")
    assert share < 0.1
    assert first < 0.5


def test_text_that_may_begin_a_stop_string_is_not_emitted(host: Any, kit: Any) -> None:
    model, _ = host()
    lane_request = request(model, kit.completion("q", stop=["xyz!", "?"], max_tokens=50))
    row = LaneReader(model).prepare(lane_request)
    ids, last = (model.tokenizer.encode_batch([text], add_special_tokens=False)[0] for text in ("abcxyz", "!"))
    lane_answer = LaneAnswer(lane_request, row, model.tokenizer)
    early = lane_answer.grow([PartialChoice(0, ids)])
    assert text_of(early) == "abc"
    assert row.request.watcher is not None
    watcher = row.request.watcher(0)
    whole = np.concatenate([ids, last])
    assert [watcher.push(token_id) for token_id in whole.tolist()][-1]
    completion = Completion(
        row.request.request_id, (Choice(0, whole, FinishReason.STOP),), len(row.request.prompt_token_ids), 0,
        len(whole), 0.0, 1.0,
    )  # fmt: skip
    envelope = Envelope("j", CLOCK.now(), 1, lambda _: CLOCK.now())
    late = lane_answer.end(row, completion, ResponseBuilder(model.tokenizer), envelope)
    assert text_of([*early, *late]) == "abc" == response(late)["choices"][0]["text"]
    # An attempt that resumes those tokens reconstructs that no more text was emitted.
    again = replace(lane_request, attempt=2, tokens=(tuple(ids.tolist()),))
    more = LaneAnswer(again, LaneReader(model).prepare(again), model.tokenizer).grow([PartialChoice(0, last)])
    assert text_of(more) == "x"


@pytest.mark.parametrize("end", [False, True])
def test_an_answer_that_is_computed_again_with_other_tokens_is_an_error(host: Any, kit: Any, end: bool) -> None:
    """Given an answer with log-probabilities, which are not kept, so that another worker computes all its tokens."""
    model, _ = host()
    lane_request = request(model, kit.chat("q", logprobs=True, max_tokens=50))
    (ids,) = model.tokenizer.encode_batch(["abcxyz"], add_special_tokens=False)
    logprobs = TokenLogprobs(np.zeros(len(ids), np.float32), np.zeros((len(ids), 0), np.int32), np.zeros((len(ids), 0)))
    emitted = tuple(ids[:4].tolist())
    again = replace(lane_request, attempt=2, tokens=(emitted,))

    def events(given: Any) -> list[LaneEvent]:
        row = LaneReader(model).prepare(again)
        assert not row.request.partial
        lane_answer = LaneAnswer(again, row, model.tokenizer)
        grown = [] if end else lane_answer.grow([PartialChoice(0, given[:5], logprobs[:5])])
        completion = Completion(
            row.request.request_id, (Choice(0, given, FinishReason.STOP, None, logprobs[: len(given)]),), 3, 0,
            len(given), 0.0, 1.0,
        )  # fmt: skip
        envelope = Envelope("j", CLOCK.now(), 2, lambda _: CLOCK.now())
        return [*grown, *lane_answer.end(row, completion, ResponseBuilder(model.tokenizer), envelope)]

    same = events(ids)
    assert isinstance(same[-1], EndEvent)
    assert text_of(same) == model.tokenizer.decode(ids[4:])
    other = ids.copy()
    other[2] += 1
    for given in (other, ids[:3]):
        (error,) = events(given)
        assert isinstance(error, ErrorEvent)
        assert (error.status, error.code) == (500, "engine_error")
        assert "other tokens than those that were sent" in error.message


@pytest.mark.slow
def test_an_unexpected_exception_of_a_thread_ends_the_worker_and_its_requests_are_handed_back(
    host: Any, kit: Any, lane: MemoryLane
) -> None:
    class BrokenLane:
        """A lane that raises an unexpected exception."""

        def __init__(self) -> None:
            self.inner = lane.worker("broken")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def hold(self, requests: Any) -> frozenset[str]:
            raise ZeroDivisionError

    model, _ = host(step_seconds=0.01)
    lane_request = request(model, kit.chat("x", max_tokens=300, ignore_eos=True))
    lane.send(lane_request)
    server = LaneServer(
        model, BrokenLane(), CLOCK, serving=LaneServing(emit_interval_seconds=0.01), lane_settings=LANE_SETTINGS
    )
    with pytest.raises(ZeroDivisionError), server.running(threading.Event()) as side_work:
        ShardWorker(model, EndlessSource(), kit.MemorySink(), CLOCK, beside=side_work).run()


def wait_until(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < until, "the condition was not met in time"
        time.sleep(0.01)
