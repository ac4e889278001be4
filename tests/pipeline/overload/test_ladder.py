"""The ladder: steps begin and end one at a time, and not at every change of the load."""

from __future__ import annotations

from pipeline.overload.ladder import DegradationLadder, LadderRules

RULES = LadderRules(enter_load=0.8, leave_load=0.4, enter_seconds=2.0, leave_seconds=10.0)


def run(ladder: DegradationLadder, loads: list[float], start: int) -> list[int]:
    """The changes, with one load for each second."""
    return [ladder.update(load, float(start + second)) for second, load in enumerate(loads)]


def test_steps_begin_one_after_the_other_while_the_load_stays_high() -> None:
    ladder = DegradationLadder(RULES, 2, 0.0)
    assert run(ladder, [1.0] * 9, 0) == [0, 0, 1, 0, 1, 0, 0, 0, 0]
    assert ladder.depth == 2


def test_a_peak_begins_nothing() -> None:
    ladder = DegradationLadder(RULES, 2, 0.0)
    assert not any(run(ladder, [5.0, 0.7] * 10, 0))


def test_steps_end_one_after_the_other_when_the_load_has_stayed_low() -> None:
    ladder = DegradationLadder(RULES, 2, 0.0)
    run(ladder, [1.0] * 5, 0)
    changes = run(ladder, [0.1] * 30, 5)
    assert [second for second, change in enumerate(changes) if change] == [9, 19]
    assert ladder.depth == 0


def test_between_the_thresholds_nothing_changes() -> None:
    ladder = DegradationLadder(RULES, 2, 0.0)
    run(ladder, [1.0] * 3, 0)
    assert ladder.depth == 1
    assert not any(run(ladder, [0.6] * 100, 3))
    # A single second above `leave_load` begins the wait anew.
    assert not any(run(ladder, [0.1] * 9 + [0.5] + [0.1] * 9, 103))
    assert run(ladder, [0.1] * 2, 122) == [-1, 0]


def test_without_steps_nothing_changes() -> None:
    assert not any(run(DegradationLadder(RULES, 0, 0.0), [9.0] * 20, 0))
