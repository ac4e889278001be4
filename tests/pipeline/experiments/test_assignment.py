"""Which arm a worker has, and when."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from pipeline.experiments.assignment import arm_of, slice_at
from tests.pipeline.experiments.simulated_slices import START, make_experiment


def test_each_block_has_each_arm_once_and_all_workers_have_the_same() -> None:
    experiment = make_experiment("a", "b", "c")
    for block in range(64):
        names = [arm_of(experiment, "w1", 3 * block + at).name for at in range(3)]
        assert sorted(names) == ["a", "b", "c"]
        assert names == [arm_of(experiment, "w2", 3 * block + at).name for at in range(3)]


def test_the_order_in_a_block_is_drawn_and_differs_between_experiments() -> None:
    def orders(number: int) -> list[str]:
        experiment = make_experiment(number=number)
        return [arm_of(experiment, "w", 2 * block).name for block in range(64)]

    assert 20 <= Counter(orders(1))["own"] <= 44
    assert orders(1) == orders(1) != orders(2)
    changes = sum(one != other for one, other in zip(orders(1), orders(1)[1:], strict=False))
    assert 20 <= changes <= 44, "it neither alternates nor stays"


def test_by_worker_an_arm_stays_and_each_has_its_share_of_machines() -> None:
    experiment = make_experiment(assignment="worker")
    arms = {f"w{n}": {arm_of(experiment, f"w{n}", at).name for at in range(20)} for n in range(400)}
    assert all(len(names) == 1 for names in arms.values())
    assert 150 <= sum(names == {"own"} for names in arms.values()) <= 250


def test_a_slice_is_measured_behind_its_carry_over() -> None:
    experiment = make_experiment(slice_seconds=100, carry_over=0.25)
    found = slice_at(experiment, "w", START + timedelta(seconds=350))
    assert found is not None
    assert found.number == 3
    seconds = [(at - START).total_seconds() for at in (found.starts_at, found.measured_at, found.ends_at)]
    assert seconds == [300, 325, 400]


def test_there_is_no_slice_before_the_start_and_behind_the_last_block() -> None:
    experiment = make_experiment(slice_seconds=100, max_blocks=8)
    assert slice_at(experiment, "w", START - timedelta(seconds=0.1)) is None
    last = slice_at(experiment, "w", START + timedelta(seconds=1599.9))
    assert last is not None
    assert last.number == 15
    assert slice_at(experiment, "w", START + timedelta(seconds=1600)) is None
    assert experiment.ends_at == START + timedelta(seconds=1600)
