"""Which worker a prefix has: it moves only when it must, and no worker gets more than its share."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipeline.lane.rendezvous import choose_worker, rank_workers

WORKERS = [f"host-{number}-1234-{number:08x}" for number in range(8)]
NAMES = st.lists(st.text("abc-.", min_size=1, max_size=6), min_size=2, max_size=9, unique=True)


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(count)]


@given(NAMES, st.binary(max_size=64))
def test_when_a_worker_leaves_only_its_own_keys_move_and_each_to_the_next_in_its_order(
    workers: list[str], key: bytes
) -> None:
    ranked = rank_workers(key, workers)
    assert sorted(ranked) == sorted(workers)
    for gone in workers:
        assert rank_workers(key, [name for name in workers if name != gone]) == [n for n in ranked if n != gone]


@given(NAMES, st.binary(max_size=64))
def test_the_order_of_the_workers_list_changes_nothing(workers: list[str], key: bytes) -> None:
    assert rank_workers(key, workers) == rank_workers(key, sorted(workers, reverse=True))


def test_a_worker_that_joins_gets_its_part_of_the_keys_from_all_others() -> None:
    before = {key: rank_workers(key, WORKERS[:4])[0] for key in keys(4_000)}
    after = {key: rank_workers(key, WORKERS[:5])[0] for key in keys(4_000)}
    moved = [key for key in before if before[key] != after[key]]
    assert {after[key] for key in moved} == {WORKERS[4]}
    assert 600 < len(moved) < 1_000, "a fifth"
    assert all(count > 100 for count in Counter(before[key] for key in moved).values())


def test_keys_are_spread_evenly() -> None:
    counts = Counter(rank_workers(key, WORKERS)[0] for key in keys(8_000))
    assert set(counts) == set(WORKERS)
    assert all(850 < count < 1_150 for count in counts.values())


@given(
    st.integers(1, 7),
    st.sampled_from([1.0, 1.1, 1.25, 2.0]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 10**6)), max_size=120),
)
def test_no_worker_gets_more_than_its_share_whatever_begins_and_ends(
    count: int, ratio: float, steps: list[tuple[bool, int, int]]
) -> None:
    """A step: a request of one of four prefixes, the first one being as hot as all others; or one ends."""
    loads = dict.fromkeys(WORKERS[:count], 0)
    open_requests: list[str] = []
    for begins, prefix, pick in steps:
        if not begins and open_requests:
            loads[open_requests.pop(pick % len(open_requests))] -= 1
            continue
        choice = choose_worker(bytes([prefix]), loads, ratio)
        loads[choice.worker] += 1
        open_requests.append(choice.worker)
        assert loads[choice.worker] <= math.ceil(ratio * len(open_requests) / count)
        ranked = rank_workers(bytes([prefix]), loads)
        assert choice.is_preferred == (choice.worker == ranked[0])
        for better in ranked[: ranked.index(choice.worker)]:
            assert loads[better] + 1 > math.ceil(ratio * len(open_requests) / count), "it had room"


def test_a_hot_prefix_fills_the_workers_in_its_order() -> None:
    loads = dict.fromkeys(WORKERS[:4], 0)
    first, second, *_ = rank_workers(b"hot", loads)
    for _ in range(32):
        loads[choose_worker(b"hot", loads, 1.25).worker] += 1
    assert loads[first] == loads[second] == 10
    assert sum(loads.values()) == 32
