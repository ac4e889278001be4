"""The order of preparation: fair between tenants, and slow requests never occupy all threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.workers.lane import LaneRequest
from tests.waiting import HANG_SECONDS
from workers.lane.preparation import LARGE_BYTES, MAX_OVERTAKEN, PreparationQueue, is_large


def request(name: str, tenant: str = "a", size: int = 1, attempt: int = 1) -> LaneRequest:
    return LaneRequest(name, "m", {"prompt": "x" * size}, tenant=tenant, attempt=attempt)


class PreparationThreads:
    """Prepares on threads. A request whose name is in `held` stays in preparation until it is released."""

    def __init__(self, *held: str, threads: int = 2) -> None:
        self.held = {name: threading.Event() for name in held}
        self.begun: list[str] = []
        self.changed = threading.Condition()
        self.queue = PreparationQueue(self._prepare, threads)
        self.threads = [threading.Thread(target=self.queue.work, daemon=True) for _ in range(threads)]

    def _prepare(self, prepared: LaneRequest) -> None:
        with self.changed:
            self.begun.append(prepared.id)
            self.changed.notify_all()
        if prepared.id in self.held:
            assert self.held[prepared.id].wait(HANG_SECONDS)

    def wait_for(self, *names: str) -> None:
        """Wait until the preparation of these has begun."""
        with self.changed:
            assert self.changed.wait_for(lambda: set(names) <= set(self.begun), HANG_SECONDS), self.begun

    @contextmanager
    def running(self) -> Iterator[PreparationThreads]:
        for thread in self.threads:
            thread.start()
        try:
            yield self
        finally:
            for event in self.held.values():
                event.set()
            self.queue.close()
            for thread in self.threads:
                thread.join(HANG_SECONDS)
            assert not self.queue.busy


def test_one_tenants_slow_requests_leave_a_thread_to_others() -> None:
    with PreparationThreads("slow 0", "slow 1").running() as made:
        # Given requests of one tenant that take for ever,
        for number in range(4):
            made.queue.put(request(f"slow {number}"))
        made.wait_for("slow 0")
        # then those of others are prepared meanwhile, and only the first of its own.
        for number in range(5):
            made.queue.put(request(f"quick {number}", "b"))
        made.wait_for(*(f"quick {number}" for number in range(5)))
        assert "slow 1" not in made.begun
        made.held["slow 0"].set()
        made.wait_for("slow 1")


def test_large_requests_of_many_tenants_leave_a_thread_to_small_ones() -> None:
    with PreparationThreads("large a", "large b").running() as made:
        for tenant in "ab":
            made.queue.put(request(f"large {tenant}", tenant, LARGE_BYTES + 1))
        made.wait_for("large a")
        made.queue.put(request("small", "c"))
        made.wait_for("small")
        assert "large b" not in made.begun
        made.held["large a"].set()
        made.wait_for("large b")


def prepared_in_order(*requests: LaneRequest) -> list[str]:
    """The order of preparation on one thread, when all of them wait."""
    made = PreparationThreads(threads=1)
    for one in requests:
        made.queue.put(one)
    with made.running():
        made.wait_for(*(one.id for one in requests))
    return made.begun


def test_small_requests_overtake_a_large_one_a_bounded_number_of_times() -> None:
    small = [request(f"s{number}") for number in range(MAX_OVERTAKEN + 2)]
    order = prepared_in_order(request("large", size=LARGE_BYTES + 1), *small)
    names = [one.id for one in small]
    assert order == [*names[:MAX_OVERTAKEN], "large", *names[MAX_OVERTAKEN:]]


@given(st.lists(st.sampled_from("aaabcd"), max_size=30))
@pytest.mark.slow
def test_tenants_alternate_and_each_is_served_in_order(tenants: list[str]) -> None:
    order = prepared_in_order(*(request(f"{tenant}{number}", tenant) for number, tenant in enumerate(tenants)))
    for tenant in set(tenants):
        numbers = [int(name[1:]) for name in order if name[0] == tenant]
        assert numbers == sorted(numbers)
        # No other tenant is served twice while this one waits.
        positions = [at for at, name in enumerate(order) if name[0] == tenant]
        for before, after in zip([-1, *positions], positions, strict=False):
            between = [name[0] for name in order[before + 1 : after]]
            assert len(set(between)) == len(between), order


def test_a_discarded_request_is_not_prepared() -> None:
    made = PreparationThreads(threads=1)
    for name in ("r0", "r1", "r2"):
        made.queue.put(request(name))
    made.queue.put(request("big", size=LARGE_BYTES + 1))
    gone = made.queue.discard({("r1", 1), ("r2", 2), ("big", 1)})
    assert {one.id for one in gone} == {"r1", "big"}
    with made.running():
        made.wait_for("r0", "r2")
    assert made.begun == ["r0", "r2"]


def test_closing_returns_waiting_requests_and_finishes_those_in_preparation() -> None:
    with PreparationThreads("first", threads=1).running() as made:
        made.queue.put(request("first"))
        made.wait_for("first")
        made.queue.put(request("second"))
        assert [one.id for one in made.queue.close()] == ["second"]
        assert made.queue.busy
    assert made.begun == ["first"]


@pytest.mark.parametrize(
    ("body", "large"),
    [
        ({"prompt": "x" * 1_000}, False),
        ({"prompt": "x" * (LARGE_BYTES + 1)}, True),
        ({"messages": [{"role": "user", "content": "x" * 100}] * 1_000}, True),
        ({"prompt": [1] * LARGE_BYTES}, True),
        ({"schema": {f"p{number}": {"type": "string"} for number in range(5_000)}}, True),
        ({}, False),
    ],
)
def test_a_body_is_large_by_its_size(body: dict[str, object], large: bool) -> None:
    assert is_large(body) is large
