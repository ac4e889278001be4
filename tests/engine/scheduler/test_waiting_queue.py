"""The order of waiting requests near the end of a run, the learnt lengths, and fairness between owners."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ScheduleConfig
from engine.plan import CacheGroup
from engine.request import Request, SamplingParams
from engine.scheduler.length_estimator import LengthEstimator
from engine.scheduler.sequence import SequenceState
from engine.scheduler.waiting_queue import due_first, until_due
from tests.engine.scheduler.scheduler_harness import Harness

lengths = st.lists(st.integers(0, 60), max_size=40)


@given(lengths, st.integers(0, 500), st.integers(1, 16))
def test_the_order_leaves_arrival_only_for_what_lasts_to_the_end(expected: list[int], running: int, rows: int) -> None:
    left = float(running + sum(expected))
    chosen = due_first(expected, left, rows)
    assert chosen == due_first(expected, left, rows)
    assert sorted(chosen) == list(range(len(expected)))
    waiting = list(range(len(expected)))
    for i in chosen:
        longest = max(expected[j] for j in waiting)
        if longest * rows >= left:
            assert i == next(j for j in waiting if expected[j] == longest), "the longest one, the first of equals"
        else:
            assert i == waiting[0], "nothing is due: by arrival"
        waiting.remove(i)
        left -= expected[i]
    early = until_due(expected, float(running + sum(expected)), rows)
    assert chosen[:early] == list(range(early)), "until then the order is arrival"


def make_request(name: str, max_tokens: int, **more: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return Request(name, np.array([3, 4, 5], dtype=np.int32), params, **more)


def started(h: Harness) -> list[str]:
    return [new.request.request_id for plan in h.plans for new in plan.new_rows]


def make(rows: int) -> Harness:
    return Harness(ScheduleConfig(rows, 64), (CacheGroup((0,), None, 65),), 4)


def test_only_when_nothing_more_comes_a_long_answer_is_taken_forward() -> None:
    # Given two rows, six short answers and then a long one,
    orders = {}
    for more_to_come in (True, False):
        h = make(2)
        for name in "abcdef":
            h.scheduler.add(make_request(name, 4, expected_tokens=4), 0.0)
        h.scheduler.add(make_request("long", 30, expected_tokens=30), 0.0)
        h.scheduler.settle(more_to_come=more_to_come)
        h.run()
        orders[more_to_come] = started(h)
    # then it starts last while others may come, and first when they can't: it takes longer than all the rest.
    assert orders[True] == [*"abcdef", "long"]
    assert orders[False] == ["long", *"abcdef"]


def test_highest_classes_go_first_however_long_others_last() -> None:
    h = make(1)
    h.scheduler.add(make_request("long", 30, expected_tokens=30, priority=2), 0.0)
    h.scheduler.add(make_request("short", 2, expected_tokens=2, priority=1), 0.0)
    h.scheduler.settle(more_to_come=False)
    h.run()
    assert started(h) == ["short", "long"]


def test_what_finished_rows_of_a_group_show_decides_who_is_due() -> None:
    # Given two groups with the same hints, of which the one that comes later has shown to be four times as long,
    h = make(2)
    for number in range(12):
        h.scheduler.add(make_request(f"seen {number}", 4, expected_tokens=4, prefix_group=1), 0.0)
        h.scheduler.add(make_request(f"Seen {number}", 16, expected_tokens=4, prefix_group=2), 0.0)
    h.run()
    h.plans.clear()
    for number in range(2):
        h.scheduler.add(make_request(f"short {number}", 20, expected_tokens=4, prefix_group=1), 0.0)
    h.scheduler.add(make_request("long", 20, expected_tokens=4, prefix_group=2), 0.0)
    h.scheduler.settle(more_to_come=False)
    h.run()
    # then its answer starts first.
    assert started(h) == ["long", "short 0", "short 1"]


def test_hints_are_scaled_by_what_their_group_has_shown() -> None:
    lengths = LengthEstimator()
    for _ in range(50):
        lengths.observe(make_request("a", 100, expected_tokens=50, prefix_group=1), 10)
        lengths.observe(make_request("b", 100, expected_tokens=50, prefix_group=2), 90)
    assert 8 <= lengths.expect(make_request("x", 100, expected_tokens=50, prefix_group=1)) <= 16
    assert 84 <= lengths.expect(make_request("y", 100, expected_tokens=50, prefix_group=2)) <= 92
    assert 40 <= lengths.expect(make_request("z", 100, expected_tokens=50)) <= 60
    assert lengths.expect(make_request("none", 0, expected_tokens=50)) == 0


@pytest.mark.slow
def test_answers_that_are_not_due_cost_no_ordering() -> None:
    # Given two rows, many short answers, and one at the end that is longer but short against all of them together,
    h = make(2)
    for number in range(1000):
        h.scheduler.add(make_request(f"r{number}", 2, expected_tokens=2), 0.0)
    h.scheduler.add(make_request("long", 40, expected_tokens=40), 0.0)
    estimates = 0
    estimate = LengthEstimator.expect

    def counted(self: LengthEstimator, request: Request) -> int:
        nonlocal estimates
        estimates += 1
        return estimate(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LengthEstimator, "expect", counted)
        h.scheduler.settle(more_to_come=False)
        h.run()
    # then the queue is looked through a few times only, and yet the long one starts before the end.
    position = started(h).index("long")
    assert 900 < position < 990
    assert estimates < 5 * 1001


# -- several owners


def flood(h: Harness, owner: bytes, requests: int, n: int) -> None:
    params = SamplingParams(max_tokens=20, n=n, ignore_eos=True, seed=1)
    for number in range(requests):
        prompt = np.array([3, 4, 5], dtype=np.int32)
        h.scheduler.add(Request(f"flood {number}", prompt, params, priority=0, salt=owner), 0.0)


def rows_by_owner(h: Harness) -> Counter[bytes]:
    sequences = [sequence for siblings in h.scheduler._requests.values() for sequence in siblings]
    return Counter(one.request.salt for one in sequences if one.state is SequenceState.RUNNING)


def waiting_owners(h: Harness) -> set[bytes]:
    sequences = [sequence for siblings in h.scheduler._requests.values() for sequence in siblings]
    return {one.request.salt for one in sequences if one.state is SequenceState.WAITING}


def test_a_caller_behind_another_owners_flood_gets_a_row_at_once() -> None:
    # Given four rows, and one owner's requests, of eight choices each, in all of them,
    h = make(4)
    flood(h, b"a", requests=20, n=8)
    h.step()
    assert rows_by_owner(h) == {b"a": 4}
    # when a request of another owner comes, then the newest row is preempted in the same step,
    h.scheduler.add(make_request("one", 2, priority=0, salt=b"b"), 0.0)
    h.step()
    assert "one" in started(h)
    assert rows_by_owner(h) == {b"a": 3, b"b": 1}
    # and from then on one row is left for it: no row is preempted again.
    while h.scheduler.sampled("one"):
        h.step()
    preemptions = h.scheduler.stats.preemptions
    for _ in range(30):
        h.step()
        assert rows_by_owner(h)[b"a"] <= 3
    h.scheduler.add(make_request("two", 2, priority=0, salt=b"b"), 0.0)
    h.step()
    assert started(h)[-1] == "two"
    assert h.scheduler.stats.preemptions == preemptions


@pytest.mark.parametrize("tokens", [20, 31])
def test_a_caller_behind_another_owners_flood_gets_blocks_at_once(tokens: int) -> None:
    # Given rows enough, and one owner's answers, which become longer than what all blocks hold,
    h = Harness(ScheduleConfig(16, 64), (CacheGroup((0,), None, 65),), 4)
    h.scheduler.add(make_request("before", 1, priority=0, salt=b"b"), 0.0)
    h.run()
    params = SamplingParams(max_tokens=60, n=8, ignore_eos=True, seed=1)
    h.scheduler.add(Request("flood", np.array([3, 4, 5], dtype=np.int32), params, priority=0, salt=b"a"), 0.0)
    for _ in range(tokens):
        h.step()
    # when requests of another owner come, then each starts with the next step, and none is preempted.
    for number in range(5):
        h.scheduler.add(make_request(f"other {number}", 6, priority=0, salt=b"b"), 0.0)
        h.step()
        assert started(h)[-1] == f"other {number}"
        while h.scheduler.sampled(f"other {number}"):
            h.step()
        assert h.finished[f"other {number}", 0].preemptions == 0
    assert rows_by_owner(h)[b"a"] >= 1
    h.run()
    h.check_empty()


@pytest.mark.slow
def test_owners_with_equally_many_rows_take_nothing_from_each_other() -> None:
    h = make(4)
    flood(h, b"a", requests=20, n=8)
    for number in range(20):
        h.scheduler.add(make_request(f"b{number}", 20, priority=0, salt=b"b"), 0.0)
    h.run()
    assert h.scheduler.stats.preemptions == 0
    h.check_empty()


def test_one_owner_alone_gets_all_rows() -> None:
    h = make(4)
    flood(h, b"a", requests=3, n=8)
    h.step()
    assert h.scheduler.num_running == 4


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 3), st.integers(1, 6)), max_size=25))
@pytest.mark.slow
def test_an_owner_who_waits_has_as_many_rows_as_any_other_but_one(requests: list[tuple[bytes, int, int]]) -> None:
    h = make(5)
    for number, (owner, n, tokens) in enumerate(requests):
        params = SamplingParams(max_tokens=tokens, n=n, ignore_eos=True, seed=1)
        prompt = np.array([3, 4, 5], dtype=np.int32)
        h.scheduler.add(Request(f"r{number}", prompt, params, priority=0, salt=owner), 0.0)
        for _ in range(2 if number % 3 else 0):
            ended = len(h.finished)
            h.step()
            rows, waiting = rows_by_owner(h), waiting_owners(h)
            if len(h.finished) > ended:  # rows that have become free are given away with the next step
                continue
            assert all(most <= rows[owner] + 1 for owner in waiting for most in rows.values()), (rows, waiting)
    h.run()
    h.check_empty()
