"""The contract of lanes while their server runs. An adapter's test module subclasses `LaneContract` and gives a
`make_lane` fixture: a function settings -> the caller's side of a lane, on which `worker(name)` gives a worker's side;
each call is one more view of the same, initially empty, lane. Times are real, and short."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from pipeline.lane.ports import (
    ADDRESSED_TO_ANY,
    LANE_OVERRUN,
    START,
    AnswerCounts,
    Lane,
    LaneFull,
    LaneQueue,
    LaneStream,
    LaneWorker,
    OpenLane,
    TenantShares,
)
from pipeline.lane.queue_order import STEAL_AFTER_SECONDS, QueueOrder
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import (
    DECODE,
    EndEvent,
    ErrorEvent,
    HandBackEvent,
    LaneEvent,
    LaneRequest,
    Position,
    Route,
    TokensEvent,
    position_of,
)
from tests.waiting import HANG_SECONDS

LIFETIME = 3.0
"""Long beside the pauses of a busy machine."""
MODEL = "0123456789abcdef"
GENERAL, OWN, ANY = LaneQueue(MODEL), LaneQueue(MODEL, "@w1"), LaneQueue(MODEL, ADDRESSED_TO_ANY)
"""OWN: of the worker w1."""


MakeLane = Callable[[LaneSettings], OpenLane]


def request(name: str = "r1", attempt: int = 1, model: str = MODEL, **more: object) -> LaneRequest:
    body = {"messages": [{"role": "user", "content": "héllo"}], "seed": 2**60}
    return LaneRequest(name, model, body, attempt=attempt, **more)  # type: ignore[arg-type]


def tokens(name: str, sequence: int, attempt: int = 1) -> TokensEvent:
    return TokensEvent(name, attempt, sequence, tokens=(sequence, 7), text=f" w{sequence}")


def end(name: str, sequence: int, attempt: int = 1) -> EndEvent:
    return EndEvent(name, attempt, sequence, {"id": name, "usage": {"completion_tokens": 2}})


def read_events(lane: Lane, name: str, after: Position = START, timeout: float = 2.0) -> list[LaneEvent]:
    return lane.read({name: after}, timeout)


class LaneContract:
    """Given any adapter of the port, then this holds."""

    @pytest.fixture
    def lane(self, make_lane: MakeLane) -> OpenLane:
        return make_lane(LaneSettings(worker_timeout_seconds=LIFETIME))

    @pytest.fixture
    def worker(self, lane: OpenLane) -> LaneWorker:
        return lane.worker("w1")

    def test_a_request_comes_to_a_worker_as_it_was_sent(self, lane: OpenLane, worker: LaneWorker) -> None:
        sent = request(
            url="/v1/completions",
            tenant="acme",
            deadline=datetime.now(UTC) + timedelta(hours=1),
            tokens=((1, 2), (), (3,)),
            attempt=3,
        )
        lane.send(sent)
        assert worker.take([LaneQueue(MODEL)], 4, 2.0) == [sent]
        assert worker.take([LaneQueue(MODEL)], 4, 0) == []

    def test_events_come_in_order_and_reading_goes_on_anywhere(self, lane: OpenLane, worker: LaneWorker) -> None:
        lane.send(request())
        worker.take([LaneQueue(MODEL)], 1, 2.0)
        events = [*(tokens("r1", n) for n in range(5)), end("r1", 5)]
        assert worker.emit(events[:2]) == frozenset()
        assert read_events(lane, "r1") == events[:2]
        assert worker.emit(events[2:5]) == frozenset()
        assert read_events(lane, "r1", Position(1, 3)) == events[4:5]
        assert read_events(lane, "r1", Position(1, 4), timeout=0) == []
        assert worker.emit(events[5:]) == frozenset()
        assert read_events(lane, "r1") == events

    def test_events_can_be_read_again_until_the_end_was_and_then_all_or_none_are_there(
        self, lane: OpenLane, worker: LaneWorker
    ) -> None:
        lane.send(request("r1"))
        lane.send(request("r2"))
        worker.take([LaneQueue(MODEL)], 2, 2.0)
        begun = [tokens("r1", 0), tokens("r1", 1)]
        worker.emit([*begun, tokens("r2", 0)])
        for _ in range(3):
            assert read_events(lane, "r1") == begun
        whole = [*begun, end("r1", 2)]
        worker.emit(whole[2:])
        assert read_events(lane, "r1", Position(1, 1)) == whole[2:]
        left = read_events(lane, "r1", timeout=0)
        assert left in ([], whole)
        # The worker is done with it, and what it sends again changes nothing
        assert worker.hold(["r1", "r2"]) == {"r1"}
        worker.emit(whole)
        assert read_events(lane, "r1", timeout=0) == left
        assert lane.waiting([MODEL]) == {MODEL: 0}
        assert worker.take([LaneQueue(MODEL)], 1, 0) == []
        assert read_events(lane, "r2") == [tokens("r2", 0)], "another's answer is not affected"

    def test_a_reader_that_waits_for_events_or_requests_is_woken(self, make_lane: MakeLane, lane: OpenLane) -> None:
        worker = lane.worker("w1")
        threading.Timer(0.2, lane.send, [request()]).start()
        assert [one.id for one in worker.take([LaneQueue(MODEL)], 1, 20.0)] == ["r1"]
        threading.Timer(0.2, worker.emit, [[tokens("r1", 0)]]).start()
        assert read_events(lane, "r1", timeout=20.0) == [tokens("r1", 0)]

    def test_requests_wait_until_a_worker_begins_to_answer_them_or_they_are_cancelled(
        self, lane: OpenLane, worker: LaneWorker
    ) -> None:
        assert lane.waiting([MODEL, "other"]) == {MODEL: 0, "other": 0}
        for name in ("r1", "r2", "r3"):
            lane.send(request(name))
        assert lane.waiting([MODEL, "other"]) == {MODEL: 3, "other": 0}
        worker.take([LaneQueue(MODEL)], 1, 2.0)
        worker.emit([tokens("r1", 0)])
        lane.cancel(request("r2"))
        assert lane.waiting([MODEL]) == {MODEL: 1}

    def test_answers_of_all_callers_are_counted_by_model(self, make_lane: MakeLane, lane: OpenLane) -> None:
        assert lane.answers([MODEL]) == {MODEL: AnswerCounts()}
        lane.add_answers({MODEL: AnswerCounts(3, 2, 1), "other": AnswerCounts(late_tokens=5)})
        make_lane(LaneSettings()).add_answers({MODEL: AnswerCounts(in_time=1)})
        lane.add_answers({})
        assert lane.answers([MODEL, "other"]) == {
            MODEL: AnswerCounts(4, 2, 1), "other": AnswerCounts(late_tokens=5),
        }  # fmt: skip
        assert lane.answers([]) == {}

    def test_many_requests_are_read_at_once(self, lane: OpenLane, worker: LaneWorker) -> None:
        names = [f"r{number}" for number in range(30)]
        for name in names:
            lane.send(request(name))
        assert [one.id for one in worker.take([LaneQueue(MODEL)], 20, 2.0)] == names[:20]
        assert [one.id for one in worker.take([LaneQueue(MODEL)], 20, 2.0)] == names[20:]
        worker.emit([tokens(name, 0) for name in names])
        found = lane.read(dict.fromkeys(names, START), 2.0)
        assert sorted(event.request for event in found) == sorted(names)

    def test_a_worker_gets_what_its_models_can_do(self, lane: OpenLane, worker: LaneWorker) -> None:
        lane.send(request("a", model="ma"))
        lane.send(request("b", model="mb"))
        lane.send(request("c", model="mc"))
        taken = {one.id for _ in range(4) for one in worker.take([LaneQueue("ma"), LaneQueue("mb")], 1, 0.1)}
        assert taken == {"a", "b"}

    def test_of_two_workers_each_request_goes_to_one(self, lane: OpenLane) -> None:
        for number in range(20):
            lane.send(request(f"r{number}"))
        one, two = lane.worker("w1"), lane.worker("w2")
        taken = [r.id for _ in range(10) for worker in (one, two) for r in worker.take([LaneQueue(MODEL)], 1, 0.1)]
        assert sorted(taken) == sorted(f"r{number}" for number in range(20))

    def test_sending_the_same_attempt_again_changes_nothing(self, lane: OpenLane, worker: LaneWorker) -> None:
        lane.send(request())
        lane.send(request())
        assert len(worker.take([LaneQueue(MODEL)], 9, 2.0)) == 1
        worker.emit([tokens("r1", 0)])
        lane.send(request())
        assert worker.take([LaneQueue(MODEL)], 9, 0.1) == []

    def test_an_event_emitted_twice_is_there_once(self, lane: OpenLane, worker: LaneWorker) -> None:
        lane.send(request())
        worker.take([LaneQueue(MODEL)], 1, 2.0)
        for _ in range(2):
            assert worker.emit([tokens("r1", 0), tokens("r1", 1)]) == frozenset()
        assert read_events(lane, "r1") == [tokens("r1", 0), tokens("r1", 1)]

    # -- several tenants

    def test_behind_a_flood_of_one_tenant_another_is_next(self, lane: OpenLane, worker: LaneWorker) -> None:
        for number in range(30):
            lane.send(request(f"a{number}", tenant="a"))
        first = worker.take([LaneQueue(MODEL)], 4, 2.0)
        assert [one.id for one in first] == ["a0", "a1", "a2", "a3"]
        lane.send(request("b0", tenant="b"))
        assert [one.id for one in worker.take([LaneQueue(MODEL)], 2, 2.0, TenantShares({"a": 4}))] == ["b0", "a4"]

    def test_a_tenant_with_its_share_waits_until_the_worker_holds_fewer(
        self, lane: OpenLane, worker: LaneWorker
    ) -> None:
        for number in range(5):
            lane.send(request(f"a{number}", tenant="a"))
        assert len(worker.take([LaneQueue(MODEL)], 5, 2.0, TenantShares({}, max_each=3))) == 3
        assert worker.take([LaneQueue(MODEL)], 5, 0.1, TenantShares({"a": 3}, max_each=3)) == []
        lane.send(request("b0", tenant="b"))
        assert [one.id for one in worker.take([LaneQueue(MODEL)], 5, 2.0, TenantShares({"a": 3}, max_each=3))] == ["b0"]
        assert [
            one.id for one in worker.take([LaneQueue(MODEL)], 5, 2.0, TenantShares({"a": 2, "b": 1}, max_each=3))
        ] == ["a3"]

    def test_a_worker_at_its_share_of_one_tenant_is_woken_by_another(self, lane: OpenLane, worker: LaneWorker) -> None:
        lane.send(request("a0", tenant="a"))
        threading.Timer(0.3, lane.send, [request("b0", tenant="b")]).start()
        assert [one.id for one in worker.take([LaneQueue(MODEL)], 5, 60.0, TenantShares({"a": 3}, max_each=3))] == [
            "b0"
        ]

    def test_several_workers_give_each_tenant_its_turn(self, lane: OpenLane) -> None:
        for number in range(8):
            for tenant in "ab":
                lane.send(request(f"{tenant}{number}", tenant=tenant))
        one, two = lane.worker("w1"), lane.worker("w2")
        taken = [
            found.id for _ in range(4) for worker in (one, two) for found in worker.take([LaneQueue(MODEL)], 2, 0.1)
        ]
        for at in range(0, 16, 2):
            assert {name[0] for name in taken[at : at + 2]} == {"a", "b"}, taken
        for tenant in "ab":
            assert [name for name in taken if name[0] == tenant] == [f"{tenant}{number}" for number in range(8)]

    @pytest.mark.slow
    def test_a_request_that_comes_back_from_a_dead_worker_keeps_its_position(self, lane: OpenLane) -> None:
        dies, lives = lane.worker("dies"), lane.worker("lives")
        for number in range(3):
            lane.send(request(f"a{number}", tenant="a"))
        assert [one.id for one in dies.take([LaneQueue(MODEL)], 1, 2.0)] == ["a0"]
        time.sleep(LIFETIME * 1.3)
        assert [one.id for one in lives.take([LaneQueue(MODEL)], 3, 2.0)] == ["a0", "a1", "a2"]

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_is_sent_taken_and_cancelled_tenants_are_served_by_what_is_held(
        self, make_lane: MakeLane, seed: int
    ) -> None:
        """Each request that is taken is the oldest of its tenant, of which the worker held no more than of any other
        tenant that waited and was below its share."""
        lane, rng = make_lane(LaneSettings(worker_timeout_seconds=600.0)), random.Random(seed)
        workers = {name: lane.worker(name) for name in ("w1", "w2")}
        held: dict[str, Counter[str]] = {name: Counter() for name in workers}
        waiting: dict[str, list[LaneRequest]] = {}
        for number in range(150):
            for _ in range(rng.choice((0, 1, 1, 3))):
                tenant = rng.choice("aaaaabcde")
                sent = request(f"r{number}-{rng.getrandbits(40)}", tenant=tenant)
                lane.send(sent)
                waiting.setdefault(tenant, []).append(sent)
            if rng.random() < 0.2 and (cancelled := [one for mine in waiting.values() for one in mine]):
                chosen = rng.choice(cancelled)
                lane.cancel(chosen)
                waiting[chosen.tenant].remove(chosen)
            name, most, each = rng.choice(sorted(workers)), rng.randint(1, 3), rng.randint(2, 6)
            here = held[name]
            for taken in workers[name].take([LaneQueue(MODEL)], most, 0, TenantShares(dict(here), each)):
                assert taken == waiting[taken.tenant].pop(0)
                others = [here[tenant] for tenant, mine in waiting.items() if mine]
                assert here[taken.tenant] <= min([*others, each - 1])
                here[taken.tenant] += 1
                most -= 1
            assert not most or all(here[tenant] >= each for tenant, mine in waiting.items() if mine)
            if here and rng.random() < 0.6:
                here[rng.choice(sorted(here.elements()))] -= 1
                held[name] = +here

    def test_one_tenant_can_not_take_all_the_room_to_wait(self, make_lane: MakeLane) -> None:
        lane = make_lane(LaneSettings(worker_timeout_seconds=LIFETIME, max_waiting=16))
        for number in range(14):
            lane.send(request(f"a{number}", tenant="a"))
        with pytest.raises(LaneFull, match="14 requests of this tenant wait"):
            lane.send(request("a14", tenant="a"))
        lane.send(request("b0", tenant="b"))

    # -- sub-queues

    def test_a_worker_takes_from_the_sub_queues_that_it_names_in_their_order(
        self, lane: OpenLane, worker: LaneWorker
    ) -> None:
        for name, queue in (("general", ""), ("other", "@w2"), ("own", "@w1"), ("decode", DECODE)):
            lane.send(request(name, queue=queue))
        assert worker.take([OWN], 1, 2.0) == [request("own", queue="@w1")]
        assert worker.take([OWN], 1, 0) == []
        assert [one.id for one in worker.take([LaneQueue(MODEL, DECODE), OWN, GENERAL], 4, 2.0)] == [
            "decode",
            "general",
        ]
        assert worker.take([OWN, GENERAL, LaneQueue(MODEL, DECODE)], 4, 0) == []
        assert [one.id for one in lane.worker("w2").take([LaneQueue(MODEL, "@w2")], 4, 2.0)] == ["other"]

    def test_the_preferred_queue_is_emptied_before_the_next_one(self, lane: OpenLane, worker: LaneWorker) -> None:
        for number in range(3):
            lane.send(request(f"g{number}", tenant="t"))
            lane.send(request(f"o{number}", tenant="t", queue="@w1"))
        assert [one.id for one in worker.take([OWN, GENERAL], 4, 2.0)] == ["o0", "o1", "o2", "g0"]
        assert [one.id for one in worker.take([OWN, GENERAL], 4, 2.0)] == ["g1", "g2"]

    def test_within_a_sub_queue_tenants_have_their_turns(self, lane: OpenLane, worker: LaneWorker) -> None:
        for number in range(4):
            lane.send(request(f"a{number}", tenant="a", queue="@w1"))
        for tenant in "bc":
            lane.send(request(f"{tenant}0", tenant=tenant, queue="@w1"))
        taken = [one.id for one in worker.take([OWN], 5, 2.0, TenantShares({"c": 1}))]
        assert taken == ["a0", "b0", "c0", "a1", "a2"]

    def test_a_tenant_of_which_the_worker_holds_fewer_is_next_in_whatever_queue(
        self, lane: OpenLane, worker: LaneWorker
    ) -> None:
        for number in range(3):
            lane.send(request(f"a{number}", tenant="a", queue="@w1"))
            lane.send(request(f"b{number}", tenant="b"))
        lane.send(request("c0", tenant="c", queue=DECODE))
        queues = [OWN, GENERAL, LaneQueue(MODEL, DECODE)]
        assert [one.id for one in worker.take(queues, 4, 2.0, TenantShares({"a": 1}))] == ["b0", "c0", "a0", "b1"]

    def test_a_tenant_has_one_turn_for_all_queues_that_the_worker_reads(
        self, lane: OpenLane, worker: LaneWorker
    ) -> None:
        for name, tenant, queue in (("a0", "a", ""), ("b0", "b", ""), ("a1", "a", "@w1")):
            lane.send(request(name, tenant=tenant, queue=queue))
        assert [one.id for one in worker.take([OWN, GENERAL], 1, 2.0)] == ["a1"]
        assert [one.id for one in worker.take([GENERAL, OWN], 1, 2.0)] == ["b0"]

    @pytest.mark.parametrize("queue", ["", "@w1"])
    @pytest.mark.slow
    def test_tenants_that_always_have_requests_waiting_are_served_alike(
        self, lane: OpenLane, worker: LaneWorker, queue: str
    ) -> None:
        """Eight tenants share a worker with 16 places, in whatever queue the first one's requests wait."""
        for tenant in "abcdefgh":
            for number in range(60):
                lane.send(request(f"{tenant}{number}", tenant=tenant, queue=queue if tenant == "a" else ""))
        order, held, served = QueueOrder([MODEL], "w1", STEAL_AFTER_SECONDS), deque[LaneRequest](), Counter[str]()
        for _ in range(300):
            shares = TenantShares(Counter(one.tenant for one in held), 14)
            taken = worker.take(order.next(), 16 - len(held), 0, shares)
            held.extend(taken)
            served.update(one.tenant for one in taken)
            lane.cancel(held.popleft())
        assert 39 <= served.pop("a") <= 41, served
        assert all(36 <= count <= 40 for count in served.values()), served

    @pytest.mark.slow
    def test_another_worker_takes_an_addressed_request_only_after_its_time(self, lane: OpenLane) -> None:
        other = lane.worker("w2")
        lane.send(request("r1", queue="@w1"))
        assert other.take([GENERAL, LaneQueue(MODEL, ADDRESSED_TO_ANY, 60.0)], 1, 0.2) == []
        began = time.monotonic()
        stealing = LaneQueue(MODEL, ADDRESSED_TO_ANY, 1.0)
        assert [one.id for one in other.take([stealing], 1, 2 * HANG_SECONDS)] == ["r1"]
        assert time.monotonic() - began > 0.5, "it may be taken then, and not before"
        assert lane.worker("w1").take([OWN], 1, 0) == [], "each request goes to one worker"

    def test_a_worker_that_waits_already_takes_an_addressed_request_when_its_time_has_come(
        self, lane: OpenLane
    ) -> None:
        threading.Timer(0.2, lane.send, [request("r1", queue="@w1")]).start()
        stealing = [GENERAL, LaneQueue(MODEL, ADDRESSED_TO_ANY, 0.3)]
        assert [one.id for one in lane.worker("w2").take(stealing, 1, 2 * HANG_SECONDS)] == ["r1"]

    def test_an_addressed_request_is_taken_once_by_its_worker_or_another(self, lane: OpenLane) -> None:
        for number in range(6):
            lane.send(request(f"r{number}", queue="@w1"))
        own, other = lane.worker("w1"), lane.worker("w2")
        assert [one.id for one in own.take([OWN], 2, 2.0)] == ["r0", "r1"]
        assert [one.id for one in other.take([ANY], 2, 2.0)] == ["r2", "r3"]
        assert [one.id for one in own.take([OWN, ANY], 9, 2.0)] == ["r4", "r5"]
        assert own.take([OWN, ANY], 9, 0) == other.take([ANY], 9, 0) == []

    @pytest.mark.slow
    def test_stealing_is_fair_to_tenants_among_the_requests_whose_time_has_come(self, lane: OpenLane) -> None:
        for number in range(4):
            lane.send(request(f"a{number}", tenant="a", queue="@w1"))
        lane.send(request("b0", tenant="b", queue="@w3"))
        time.sleep(1.2)
        lane.send(request("c0", tenant="c", queue="@w1"))
        stealing = LaneQueue(MODEL, ADDRESSED_TO_ANY, 1.0)
        other = lane.worker("w2")
        assert [one.id for one in other.take([stealing], 4, 0, TenantShares({"b": 1}))] == ["a0", "b0", "a1", "a2"]
        assert [one.id for one in other.take([stealing], 4, 60.0)] == ["a3"]
        assert [one.id for one in other.take([stealing], 4, 60.0)] == ["c0"]

    @pytest.mark.slow
    def test_of_one_tenants_requests_another_worker_takes_each_only_after_its_time(self, lane: OpenLane) -> None:
        lane.send(request("r1", queue="@w1"))
        time.sleep(1.2)
        lane.send(request("r2", queue="@w1"))
        other, stealing = lane.worker("w2"), LaneQueue(MODEL, ADDRESSED_TO_ANY, 1.0)
        assert [one.id for one in other.take([stealing], 2, 0)] == ["r1"]
        assert [one.id for one in other.take([stealing], 2, 60.0)] == ["r2"]

    @pytest.mark.slow
    def test_tenants_whose_turn_comes_first_and_whose_requests_are_not_due_delay_no_other(self, lane: OpenLane) -> None:
        for number in range(4):
            lane.send(request(f"old{number}", tenant=f"a{number}", queue="@w1"))
        lane.send(request("b0", tenant="b", queue="@w1"))
        time.sleep(1.2)
        for number in range(4):
            lane.send(request(f"new{number}", tenant=f"a{number}", queue="@w1"))
            lane.cancel(request(f"old{number}", tenant=f"a{number}", queue="@w1"))
        stealing = LaneQueue(MODEL, ADDRESSED_TO_ANY, 1.0)
        assert [one.id for one in lane.worker("w2").take([stealing], 1, 0)] == ["b0"]

    def test_a_tenant_at_its_share_is_not_stolen_from(self, lane: OpenLane) -> None:
        lane.send(request("a0", tenant="a", queue="@w1"))
        other = lane.worker("w2")
        assert other.take([LaneQueue(MODEL, ADDRESSED_TO_ANY, 0.1)], 1, 0.5, TenantShares({"a": 3}, max_each=3)) == []
        assert [one.id for one in other.take([ANY], 1, 2.0, TenantShares({"a": 2}, max_each=3))] == ["a0"]

    @pytest.mark.slow
    def test_an_addressed_request_whose_worker_fell_silent_waits_in_the_general_queue_at_its_old_position(
        self, lane: OpenLane
    ) -> None:
        dies, lives = lane.worker("w1"), lane.worker("w2")
        lane.send(request("a0", queue="@w1"))
        lane.send(request("d0", queue=DECODE))
        lane.send(request("a1"))
        assert [one.id for one in dies.take([OWN, LaneQueue(MODEL, DECODE)], 2, 2.0)] == ["a0", "d0"]
        time.sleep(LIFETIME * 1.3)
        assert [one.id for one in lives.take([GENERAL], 3, 2.0)] == ["a0", "a1"]
        assert [one.id for one in lives.take([LaneQueue(MODEL, DECODE)], 3, 2.0)] == ["d0"]
        assert dies.take([OWN, ANY], 3, 0) == []
        assert dies.emit([tokens("a0", 0)]) == {"a0"}

    def test_counts_are_of_all_sub_queues(self, make_lane: MakeLane) -> None:
        lane = make_lane(LaneSettings(worker_timeout_seconds=LIFETIME, max_waiting=16))
        sent = [request(f"r{n}", queue=queue) for n, queue in enumerate(["", "@w1", "@w2", DECODE, "", "@w1", "@w2"])]
        for one in sent * 2:
            lane.send(one)
        assert lane.waiting([MODEL]) == {MODEL: 7}
        assert lane.lost(sent) == frozenset()
        for number in range(7):
            lane.send(request(f"s{number}", queue="@w1"))
        for queue in ("", "@w3", DECODE):
            with pytest.raises(LaneFull, match="14 requests of this tenant wait"):
                lane.send(request("late", queue=queue))
        lane.send(request("b0", tenant="b"))
        lane.send(request("b1", tenant="b", queue="@w1"))
        with pytest.raises(LaneFull, match="16 requests wait"):
            lane.send(request("b2", tenant="b"))

    @pytest.mark.parametrize("queue", ["@w1", DECODE])
    def test_a_cancelled_request_leaves_its_sub_queue(self, lane: OpenLane, worker: LaneWorker, queue: str) -> None:
        lane.send(request("r1", queue=queue))
        lane.cancel(request("r1", queue=queue))
        lane.send(request("r2", queue=queue))
        assert [one.id for one in worker.take([OWN, LaneQueue(MODEL, DECODE), ANY], 9, 2.0)] == ["r2"]
        assert worker.take([OWN, LaneQueue(MODEL, DECODE), ANY], 9, 0) == []

    def test_a_later_attempt_waits_only_where_it_was_sent(self, lane: OpenLane, worker: LaneWorker) -> None:
        lane.send(request("r1", queue="@w1"))
        lane.send(request("r1", attempt=2))
        assert worker.take([OWN, ANY], 9, 0) == []
        assert worker.take([GENERAL], 9, 2.0) == [request("r1", attempt=2)]
        lane.send(request("r1", attempt=3, queue="@w1"))
        assert worker.take([GENERAL], 9, 0) == []
        assert worker.take([OWN], 9, 2.0) == [request("r1", attempt=3, queue="@w1")]

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_is_sent_taken_and_cancelled_in_sub_queues_each_request_is_taken_once(
        self, make_lane: MakeLane, seed: int
    ) -> None:
        """Of each taken request's tenant the worker held the fewest, among those with requests in the named queues and
        below their share; the request is the tenant's oldest in the first queue that has one of such a tenant."""
        lane, rng = make_lane(LaneSettings(worker_timeout_seconds=600.0)), random.Random(seed)
        workers = {name: lane.worker(name) for name in ("w1", "w2", "w3")}
        waiting: list[LaneRequest] = []
        for number in range(120):
            for _ in range(rng.choice((0, 1, 1, 3))):
                queue = rng.choice(("", DECODE, "@w1", "@w1", "@w2", "@w3", "@gone"))
                waiting.append(request(f"r{number}-{rng.getrandbits(40)}", tenant=rng.choice("aaab"), queue=queue))
                lane.send(waiting[-1])
            if waiting and rng.random() < 0.2:
                lane.cancel(waiting.pop(rng.randrange(len(waiting))))
            name = rng.choice(sorted(workers))
            names = rng.sample(["", DECODE, f"@{name}", ADDRESSED_TO_ANY], rng.randint(1, 4))
            each = rng.randint(1, 3)
            held: Counter[str] = Counter()
            for taken in workers[name].take([LaneQueue(MODEL, one) for one in names], 3, 0, TenantShares({}, each)):
                ready = [
                    (held[one.tenant], order)
                    for one in waiting
                    for order, queue in enumerate(names)
                    if waits_in(one, queue) and held[one.tenant] < each
                ]
                fewest, order = min(ready)
                assert held[taken.tenant] == fewest
                assert taken == next(
                    one for one in waiting if one.tenant == taken.tenant and waits_in(one, names[order])
                )
                waiting.remove(taken)
                held[taken.tenant] += 1
        assert lane.waiting([MODEL])[MODEL] >= len(waiting)
        everything = [GENERAL, LaneQueue(MODEL, DECODE), ANY]
        assert sorted(one.id for one in workers["w1"].take(everything, 999, 0)) == sorted(one.id for one in waiting)

    # -- cancelling, deadlines

    def test_a_cancel_reaches_the_worker_with_its_next_call(self, lane: OpenLane, worker: LaneWorker) -> None:
        for name in ("r1", "r2", "r3"):
            lane.send(request(name))
        worker.take([LaneQueue(MODEL)], 3, 2.0)
        worker.emit([tokens("r1", 0)])
        lane.cancel(request("r1"))
        lane.cancel(request("r2"))
        assert worker.emit([tokens("r1", 1), tokens("r3", 0)]) == {"r1"}
        assert worker.hold(["r2", "r3"]) == {"r2"}
        lane.cancel(request("never sent"))

    def test_a_cancelled_request_is_handed_to_no_worker(self, lane: OpenLane, worker: LaneWorker) -> None:
        lane.send(request("r1"))
        lane.send(request("r2"))
        lane.cancel(request("r1"))
        assert [one.id for one in worker.take([LaneQueue(MODEL)], 9, 2.0)] == ["r2"]

    @pytest.mark.slow
    def test_after_its_deadline_a_request_is_no_longer_wanted(self, lane: OpenLane, worker: LaneWorker) -> None:
        soon = datetime.now(UTC) + timedelta(seconds=3.0)
        lane.send(request("r1", deadline=soon))
        lane.send(request("r2", deadline=soon))
        assert [one.id for one in worker.take([LaneQueue(MODEL)], 1, 2.0)] == ["r1"]
        time.sleep(3.1)
        assert worker.take([LaneQueue(MODEL)], 1, 0.1) == []
        assert worker.emit([tokens("r1", 0)]) == {"r1"}

    # -- workers that die

    @pytest.mark.slow
    def test_what_a_dead_worker_did_not_answer_another_gets(self, lane: OpenLane) -> None:
        dies, lives = lane.worker("dies"), lane.worker("lives")
        lane.send(request())
        assert len(dies.take([LaneQueue(MODEL)], 1, 2.0)) == 1
        assert lives.take([LaneQueue(MODEL)], 1, LIFETIME / 3) == []
        assert lane.lost([request()]) == frozenset(), "it still waits"
        again = taken_within(lives, 4 * LIFETIME)
        assert [one.id for one in again] == ["r1"]
        assert dies.hold(["r1"]) == {"r1"}
        assert dies.emit([tokens("r1", 0)]) == {"r1"}, "it was stopped, and goes on"
        assert lives.emit([TokensEvent("r1", 1, 0, text="mine")]) == frozenset()
        assert read_events(lane, "r1") == [TokensEvent("r1", 1, 0, text="mine")]

    @pytest.mark.slow
    def test_a_stopped_worker_adds_nothing_to_anothers_answer(self, lane: OpenLane) -> None:
        stopped, lives = lane.worker("stopped"), lane.worker("lives")
        for name in ("r1", "r2"):
            lane.send(request(name))
        stopped.take([LaneQueue(MODEL)], 2, 2.0)
        assert taken_within(lives, 4 * LIFETIME) == [request("r1")]
        assert taken_within(lives, 4 * LIFETIME) == [request("r2")]
        assert stopped.emit([tokens("r1", 0)]) == {"r1"}, "the other has not begun yet"
        lives.emit([tokens("r1", 0), tokens("r2", 0)])
        assert stopped.emit([tokens("r2", 0), tokens("r2", 1)]) == {"r2"}, "the other has begun"
        assert lives.emit([end("r1", 1), end("r2", 1)]) == frozenset()
        for name in ("r1", "r2"):
            assert read_events(lane, name) == [tokens(name, 0), end(name, 1)]

    @pytest.mark.slow
    def test_what_a_worker_holds_stays_its_own(self, lane: OpenLane, worker: LaneWorker) -> None:
        lane.send(request())
        worker.take([LaneQueue(MODEL)], 1, 2.0)
        other = lane.worker("other")
        for _ in range(6):
            assert worker.hold(["r1"]) == frozenset()
            assert other.take([LaneQueue(MODEL)], 1, LIFETIME / 3) == []
        assert worker.emit([tokens("r1", 0)]) == frozenset()

    @pytest.mark.slow
    def test_an_answer_whose_worker_died_is_lost_and_goes_on_in_a_later_attempt(self, lane: OpenLane) -> None:
        dies, lives = lane.worker("dies"), lane.worker("lives")
        stream = LaneStream(request())
        lane.send(stream.request)
        dies.take([LaneQueue(MODEL)], 1, 2.0)
        dies.emit([tokens("r1", 0), tokens("r1", 1)])
        assert [stream.accept(event) for event in read_events(lane, "r1")] == [tokens("r1", 0), tokens("r1", 1)]
        assert lane.lost([request()]) == frozenset()
        time.sleep(LIFETIME * 1.3)
        assert lane.lost([request(), request("other")]) == {"r1", "other"}
        lane.send(stream.again())
        (taken,) = lives.take([LaneQueue(MODEL)], 1, 2.0)
        assert (taken.attempt, taken.tokens) == (2, ((0, 7, 1, 7),))
        assert lives.emit([tokens("r1", 0, attempt=2)]) == frozenset()
        assert dies.emit([tokens("r1", 2)]) == {"r1"}, "it was only stopped"
        lives.emit([end("r1", 1, attempt=2)])
        accepted = [stream.accept(event) for event in read_events(lane, "r1", stream.position)]
        assert accepted == [tokens("r1", 0, attempt=2), end("r1", 1, attempt=2)]
        assert stream.ended

    @pytest.mark.slow
    def test_an_ended_answer_is_not_lost(self, lane: OpenLane, worker: LaneWorker) -> None:
        lane.send(request())
        worker.take([LaneQueue(MODEL)], 1, 2.0)
        worker.emit([ErrorEvent("r1", 1, 0, "engine_error", "no", 500)])
        time.sleep(LIFETIME * 1.3)
        assert lane.lost([request()]) == frozenset()
        assert read_events(lane, "r1") == [ErrorEvent("r1", 1, 0, "engine_error", "no", 500)]
        assert worker.hold(["r1"]) == {"r1"}

    def test_a_worker_that_has_both_attempts_keeps_the_later_one(self, lane: OpenLane, worker: LaneWorker) -> None:
        lane.send(request())
        worker.take([LaneQueue(MODEL)], 1, 2.0)
        worker.emit([tokens("r1", 0)])
        lane.send(request(attempt=2))
        assert worker.take([LaneQueue(MODEL)], 1, 2.0) == [request(attempt=2)]
        assert worker.emit([tokens("r1", 1), tokens("r1", 0, attempt=2)]) == frozenset()
        assert read_events(lane, "r1") == [tokens("r1", 0), tokens("r1", 0, attempt=2)]

    def test_what_a_worker_hands_back_is_sent_again_and_goes_on_elsewhere(self, lane: OpenLane) -> None:
        ends, goes_on = lane.worker("ends"), lane.worker("goes-on")
        begun, untouched = LaneStream(request("r1")), LaneStream(request("r2"))
        lane.send(begun.request)
        lane.send(untouched.request)
        ends.take([LaneQueue(MODEL)], 2, 2.0)
        assert ends.emit([tokens("r1", 0), HandBackEvent("r1", 1, 1), HandBackEvent("r2", 1, 0)]) == frozenset()
        assert lane.lost([request("r1"), request("r2")]) == frozenset(), "its callers know already"
        assert ends.hold(["r1", "r2"]) == {"r1", "r2"}
        for stream, events in ((begun, 2), (untouched, 1)):
            accepted = [stream.accept(event) for event in read_events(lane, stream.request.id)]
            assert len(accepted) == events
            assert isinstance(accepted[-1], HandBackEvent)
            assert not stream.ended
            lane.send(stream.again())
        again = sorted(goes_on.take([LaneQueue(MODEL)], 2, 2.0), key=lambda one: one.id)
        assert [(one.attempt, one.tokens) for one in again] == [(2, ((0, 7),)), (2, ())]
        assert goes_on.emit([end("r1", 0, attempt=2), end("r2", 0, attempt=2)]) == frozenset()
        assert [begun.accept(event) for event in read_events(lane, "r1", begun.position)] == [end("r1", 0, attempt=2)]

    # -- bounds

    def test_what_is_handed_back_for_another_model_waits_and_is_answered_there(self, lane: OpenLane) -> None:
        other = "fedcba9876543210"
        first, second = lane.worker("w1"), lane.worker("w2")
        lane.send(request())
        first.take([LaneQueue(MODEL)], 1, 2.0)
        stream = LaneStream(request())
        first.emit([HandBackEvent("r1", 1, 0, route=Route(other, "big"))])
        accept_all(stream, read_events(lane, "r1"))
        again = stream.again(route=Route(other, "big"))
        lane.send(again)
        assert lane.waiting([MODEL, other]) == {MODEL: 0, other: 1}
        assert first.take([LaneQueue(MODEL)], 1, 0) == []
        assert first.hold(["r1"]) == {"r1"}, "it is no longer this worker's"
        assert second.take([LaneQueue(other)], 1, 2.0) == [again]
        second.emit([end("r1", 0, attempt=2)])
        assert lane.waiting([MODEL, other]) == {MODEL: 0, other: 0}
        assert [event.kind for event in read_events(lane, "r1", stream.position)] == ["end"]

    def test_more_than_may_wait_are_refused(self, make_lane: MakeLane) -> None:
        lane = make_lane(LaneSettings(worker_timeout_seconds=LIFETIME, max_waiting=3))
        for number in range(3):
            lane.send(request(f"r{number}"))
        with pytest.raises(LaneFull):
            lane.send(request("r3"))
        lane.send(request("r3", model="another"))
        worker = lane.worker("w1")
        worker.take([LaneQueue(MODEL)], 1, 2.0)
        worker.emit([tokens("r0", 0)])
        lane.send(request("r3"))

    def test_a_later_attempt_is_taken_however_many_wait(self, make_lane: MakeLane) -> None:
        lane = make_lane(LaneSettings(worker_timeout_seconds=LIFETIME, max_waiting=1))
        worker = lane.worker("w1")
        lane.send(request("r0"))
        assert len(worker.take([LaneQueue(MODEL)], 1, 2.0)) == 1
        worker.emit([tokens("r0", 0)])
        lane.send(request("r1"))
        again = request("r0", attempt=2, tokens=((0, 7),))
        lane.send(again)
        assert again in worker.take([LaneQueue(MODEL)], 2, 2.0)
        with pytest.raises(LaneFull):
            lane.send(request("r2"))

    @pytest.mark.slow
    def test_what_is_cancelled_behind_its_deadline_leaves_room(self, make_lane: MakeLane) -> None:
        lane = make_lane(LaneSettings(worker_timeout_seconds=LIFETIME, max_waiting=2))
        deadline = datetime.now(UTC) + timedelta(seconds=3.0)
        late = [request(name, deadline=deadline) for name in ("r0", "r1")]
        for one in late:
            lane.send(one)
        with pytest.raises(LaneFull):
            lane.send(request("r2"))
        until = time.monotonic() + HANG_SECONDS
        while lane.lost(late) != {"r0", "r1"}:  # they are no longer wanted
            assert time.monotonic() < until
            time.sleep(0.02)
        for one in late:
            lane.cancel(one)
        lane.send(request("r2"))
        lane.send(request("r3"))
        with pytest.raises(LaneFull):
            lane.send(request("r4"))

    @pytest.mark.parametrize("queue", ["", DECODE, "@gone"])
    @pytest.mark.slow
    def test_what_is_behind_its_deadline_leaves_room_without_a_cancel(self, make_lane: MakeLane, queue: str) -> None:
        lane = make_lane(
            LaneSettings(worker_timeout_seconds=LIFETIME, client_timeout_seconds=10 * HANG_SECONDS, max_waiting=16)
        )
        deadline = datetime.now(UTC) + timedelta(seconds=1.0)
        late = [request(f"r{number}", queue=queue, deadline=deadline) for number in range(14)]
        for one in late:
            lane.send(one)
        lane.lost(late[7:])  # the other callers check nothing
        until = time.monotonic() + HANG_SECONDS
        while lane.waiting([MODEL]) != {MODEL: 0}:
            assert time.monotonic() < until
            time.sleep(0.02)
        for number in range(14):
            lane.send(request(f"s{number}"))
        assert lane.waiting([MODEL]) == {MODEL: 14}
        with pytest.raises(LaneFull, match="14 requests of this tenant wait"):
            lane.send(request("s14"))

    def test_a_request_that_is_sent_again_behind_its_deadline_takes_its_own_room(self, make_lane: MakeLane) -> None:
        lane = make_lane(LaneSettings(worker_timeout_seconds=LIFETIME, max_waiting=1))
        late = request(queue="@gone", deadline=datetime.now(UTC) + timedelta(seconds=0.3))
        lane.send(late)
        until = time.monotonic() + HANG_SECONDS
        while lane.lost([late]) != {late.id}:  # it is no longer wanted
            assert time.monotonic() < until
            time.sleep(0.02)
        lane.send(request())
        assert lane.worker("w1").take([GENERAL, ANY], 9, 2.0) == [request()]

    def test_a_slow_reader_loses_only_itself(self, make_lane: MakeLane) -> None:
        lane = make_lane(LaneSettings(worker_timeout_seconds=LIFETIME, max_events=8))
        worker = lane.worker("w1")
        lane.send(request("slow"))
        lane.send(request("fast"))
        worker.take([LaneQueue(MODEL)], 2, 2.0)
        fast, slow = LaneStream(request("fast")), LaneStream(request("slow"))
        for number in range(20):
            assert worker.emit([tokens("slow", number), tokens("fast", number)]) == frozenset()
            accept_all(fast, read_events(lane, "fast", fast.position))
        assert position_of(tokens("fast", 19)) == fast.position
        found = read_events(lane, "slow")
        assert len(found) == 8
        last = slow.accept(found[0])
        assert isinstance(last, ErrorEvent)
        assert (last.code, slow.ended) == (LANE_OVERRUN, True)


def accept_all(stream: LaneStream, events: Sequence[LaneEvent]) -> None:
    for event in events:
        assert stream.accept(event) is not None


def waits_in(sent: LaneRequest, queue: str) -> bool:
    return sent.queue == queue or (queue == ADDRESSED_TO_ANY and sent.queue.startswith("@"))


def taken_within(worker: LaneWorker, seconds: float) -> list[LaneRequest]:
    """The requests that it takes, polling as workers do."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if taken := worker.take([LaneQueue(MODEL)], 1, 0.1):
            return taken
    return []
