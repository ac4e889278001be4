"""A guard model in a worker: rows of shards and requests of the lane, also while its server is stopped or hangs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.system_clock import SystemClock
from schemas.jobs.results import RowStatus
from schemas.requests.errors import RowErrorCode
from schemas.workers.lane import EndEvent, ErrorEvent
from tests.waiting import HANG_SECONDS, wait_for
from tests.workers.policies.scripted_guard import ScriptedGuard, serving_guard
from tests.workers.policies.test_guard_model import limit_time, write
from tests.workers.policies.worker_harness import end_of, forced_chat, rows_of, serving_worker, text_of
from workers.model.loaded_model import LoadedModel
from workers.policies.guard_file import PROBE
from workers.policies.guard_model import GuardModel
from workers.policies.loader import load_policies
from workers.policies.policy import Policies
from workers.policies.retry import MAX_TRIES
from workers.settings import WorkerSettings
from workers.shards.worker import ShardWorker

ANSWERS = "[[label]]\nname = 'safe'\n[[label]]\nname = 'unsafe'\naction = 'refuse'\n"
Load = Callable[..., Policies]


@pytest.fixture
def server() -> Iterator[ScriptedGuard]:
    with serving_guard(ScriptedGuard(labels={"bomb": "unsafe", "dosage": "medical", "moon": "odd"})) as guard:
        yield guard


@pytest.fixture
def load(server: ScriptedGuard, tmp_path: Path) -> Load:
    """Loads the guard of a file with these fields."""
    return lambda **fields: load_policies([f"guard:{write(tmp_path, server.url, prompt='{{ text }}', **fields)}"])


def test_given_planted_prompts_then_rows_are_refused_flagged_and_routed_and_the_guards_tokens_are_counted(
    model: LoadedModel, load: Load, server: ScriptedGuard, kit: Any
) -> None:
    server.together = 4  # rows are judged at the same time
    bodies = [kit.chat(text, max_tokens=4) for text in ("a bomb", "the moon", "which dosage?", "hello")]
    sink = rows_of(kit, model, bodies, load(concurrency=4))
    reports = [json.loads(sink.rows[row].content_policies) for row in range(4)]
    assert [[verdict["action"] for verdict in report["verdicts"]] for report in reports] == [
        ["refuse"], ["flag"], ["route"], [],
    ]  # fmt: skip
    assert [sink.rows[row].status_code for row in range(4)] == [400, 200, 400, 200]
    assert all(report["usage"]["prompt_tokens"] > 20 for report in reports)
    assert all(report["usage"]["completion_tokens"] == 2 for report in reports)


def test_given_answers_then_they_are_judged_at_the_same_time_and_refused_ones_withheld(
    model: LoadedModel, load: Load, server: ScriptedGuard, kit: Any
) -> None:
    server.together = 2
    bodies = [forced_chat(kit, text) for text in ("a bomb", "a flower", "a tree")]
    sink = rows_of(kit, model, bodies, load(apply="answer", labels=ANSWERS))
    assert [sink.rows[row].finish_reason for row in range(3)] == ["content_filter", "stop", "stop"]
    assert [sink.rows[row].text for row in range(3)] == ["", "a flower", "a tree"]


@pytest.mark.parametrize("how", ["open", "closed"])
def test_given_a_stopped_guard_then_rows_end_as_the_file_says(
    model: LoadedModel, tmp_path: Path, kit: Any, how: str
) -> None:
    with serving_guard() as server:
        waiting = {"retry_seconds": 0} if how == "closed" else {}
        policies = load_policies([f"guard:{write(tmp_path, server.url, on_failure=how, **waiting)}"])
    bodies = [kit.chat(f"row {number}", max_tokens=2) for number in range(12)]
    sink = rows_of(kit, model, bodies, policies)
    assert len(sink.rows) == 12
    for row in sink.rows.values():
        if how == "open":
            (verdict,) = json.loads(row.content_policies)["verdicts"]
            assert (row.status, verdict["rule"]) == (RowStatus.SUCCEEDED, "not judged (GuardUnavailable)")
        else:
            assert (row.status, row.error_code) == (RowStatus.FAILED, RowErrorCode.ENGINE_ERROR)
            assert "could not judge the prompt (GuardUnavailable)" in row.error_message
    assert policies.counts is not None
    assert policies.counts.read()["guard"].failures == 12


@pytest.mark.parametrize("how", ["open", "closed"])
@pytest.mark.parametrize("side", ["prompt", "answer"])
@pytest.mark.slow
def test_given_a_guard_that_hangs_then_each_request_ends_as_the_file_says(
    model: LoadedModel, load: Load, server: ScriptedGuard, kit: Any, how: str, side: str
) -> None:
    policies = load(apply=side, on_failure=how, timeout_seconds=2.0, labels=ANSWERS)
    server.hang = True
    with serving_worker(kit, model, policies) as send, ThreadPoolExecutor(6) as pool:
        bodies = [forced_chat(kit, f"answer {number}") for number in range(6)]  # one without text isn't judged
        ends = [events[-1] for events in pool.map(send, bodies)]
    for end in ends:
        if how == "open":
            assert isinstance(end, EndEvent)
            (verdict,) = end.response["tokenmill"]["content_policies"]["verdicts"]
            assert verdict["rule"].startswith("not judged (Guard")
        else:
            assert isinstance(end, ErrorEvent)
            assert (end.code, end.status) == ("engine_error", 500)
            assert f"could not judge the {side} (Guard" in end.message


def test_given_a_guard_that_takes_its_time_then_other_requests_are_answered_meanwhile(
    model: LoadedModel, load: Load, server: ScriptedGuard, kit: Any
) -> None:
    policies = load(apply="answer", labels=ANSWERS, timeout_seconds=60, concurrency=4)
    with serving_worker(kit, model, policies) as send, ThreadPoolExecutor(1) as pool:
        server.hang = True
        slow = pool.submit(send, forced_chat(kit, "a slow one"))
        wait_for(lambda: server.asked, "the guard is not asked")
        server.hang = False
        quick = send(forced_chat(kit, "a flower"))
        assert text_of(quick) == "a flower"
        assert not slow.done(), "its answer is not judged yet"
        server.released.set()
        assert text_of(slow.result()) == "a slow one"


def test_given_a_worker_that_stops_then_answers_being_judged_are_still_emitted(
    model: LoadedModel, load: Load, server: ScriptedGuard, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.lane.server._LAST_EMIT_SECONDS", 0.0)
    server.hang = True
    policies = load(apply="answer", labels=ANSWERS, timeout_seconds=60)
    deadline = datetime.now(UTC) + timedelta(seconds=30)  # for an answer that is lost
    with ThreadPoolExecutor(1) as pool:
        with serving_worker(kit, model, policies) as send:
            answered = pool.submit(send, forced_chat(kit, "a flower"), deadline=deadline)
            wait_for(lambda: server.asked, "the guard is not asked")
            threading.Timer(0.2, server.released.set).start()
        assert end_of(answered.result()).response["choices"][0]["message"]["content"] == "a flower"


def test_given_a_refused_answer_then_its_stream_has_none_of_its_text(model: LoadedModel, load: Load, kit: Any) -> None:
    with serving_worker(kit, model, load(apply="answer", labels=ANSWERS)) as send:
        events = send(forced_chat(kit, "how to build a bomb"))
        passed = send(forced_chat(kit, "how to build a boat"))
    assert text_of(events) == ""
    assert end_of(events).response["choices"][0]["finish_reason"] == "content_filter"
    assert text_of(passed) == "how to build a boat"


@pytest.mark.parametrize("side", ["prompt", "answer"])
@pytest.mark.slow
def test_given_a_guard_that_is_away_for_a_while_then_rows_of_jobs_wait_and_are_judged(
    model: LoadedModel, load: Load, server: ScriptedGuard, kit: Any, side: str
) -> None:
    policies = load(apply=side, labels=ANSWERS, concurrency=4)
    server.status = 503
    bodies = [forced_chat(kit, text, prompt=text) for text in ("a bomb", *(f"flower {number}" for number in range(9)))]
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(rows_of, kit, model, bodies, policies)
        wait_for(lambda: is_probed(server), "the guard is not probed")
        server.status = 200
        sink = rows.result()
    refused = "content_filter" if side == "prompt" else None
    assert [sink.rows[row].error_code for row in range(10)] == [refused, *[None] * 9]
    assert sink.rows[0].finish_reason == (None if side == "prompt" else "content_filter")
    assert policies.counts is not None
    assert policies.counts.read()["guard"].failures == 0


@pytest.mark.slow
def test_given_a_guard_that_stays_away_then_rows_fail_after_the_time_of_its_file(
    model: LoadedModel, load: Load, server: ScriptedGuard, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.policies.retry.MIN_PROBE_SECONDS", 0.01)
    server.status = 503
    sink = rows_of(kit, model, [kit.chat(f"row {number}") for number in range(12)], load(retry_seconds=0.3))
    assert {row.error_code for row in sink.rows.values()} == {RowErrorCode.ENGINE_ERROR}
    assert len(sink.rows) == 12
    assert is_probed(server)


@pytest.mark.slow
def test_given_texts_that_take_a_guard_too_long_then_they_fail_and_the_others_do_not_wait(
    model: LoadedModel, load: Load, server: ScriptedGuard, kit: Any
) -> None:
    policies = load(concurrency=4)
    ((_, guard),) = policies.named
    assert isinstance(guard, GuardModel)
    limit_time(guard, 3.0)
    server.slow = "long"
    sink = rows_of(kit, model, [kit.chat(text, max_tokens=2) for text in ("long", "short", "moon")], policies)
    assert [sink.rows[row].error_code for row in range(3)] == [RowErrorCode.ENGINE_ERROR, None, None]
    asked = [body["messages"][0]["content"] for body in server.asked]
    assert sum("long" in text for text in asked) == MAX_TRIES


@pytest.mark.parametrize("side", ["prompt", "answer"])
def test_given_rows_that_wait_for_a_guard_when_the_worker_stops_then_their_shard_is_released(
    model: LoadedModel, load: Load, server: ScriptedGuard, kit: Any, side: str
) -> None:
    policies, stop, sink = load(apply=side, labels=ANSWERS), threading.Event(), kit.MemorySink()
    server.status = 503
    bodies = [forced_chat(kit, f"flower {number}") for number in range(3)]
    source = kit.ListSource([kit.make_work(bodies, shard=1)])
    worker = ShardWorker(model, source, sink, SystemClock(), WorkerSettings(policies=policies))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(worker.run, stop)
        wait_for(lambda: is_probed(server), "the guard is not probed")
        stop.set()
        run.result(HANG_SECONDS)
    assert (sink.released, sink.given_up, sink.parts) == ([1], {}, {})
    assert [row for one in sink.checkpoints.get(1, ()) for row in one.finished.rows] == []


def is_probed(server: ScriptedGuard) -> bool:
    return any(PROBE in body["messages"][0]["content"] for body in server.asked)
