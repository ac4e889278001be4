"""The benchmark of stages on a tiny model: whose turns it counts, and what it makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from stages import DECODE_ROWS, Stages, Turn, bubble, fit_turns, make_model


def test_given_turns_then_the_bubble_is_the_share_of_time_without_one() -> None:
    first = [Turn(8, 0, 10), Turn(8, 10, 20)]
    second = [Turn(8, 10, 20), Turn(8, 20, 30)]
    assert bubble([first, second]) == pytest.approx(1 / 3), "(S - 1) / (M + S - 1)"
    assert bubble([first]) == 0


def test_given_turns_of_several_sizes_then_their_constant_and_slope_are_found() -> None:
    turns = [Turn(tokens, 0, 1_000_000 * (3 + 2 * tokens)) for tokens in (1, 4, 16) for _ in range(3)]
    assert fit_turns(turns) == pytest.approx((3.0, 2.0))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_given_two_stages_when_they_decode_then_each_step_has_the_turns_of_both(tmp_path: Path) -> None:
    make_model(tmp_path / "model", layers=3, hidden=128)
    stages = Stages(tmp_path, stages=2, shards=1)
    try:
        for count in (4, 2):
            steps = stages.run(tmp_path / "model", "decode", count, steps=5, seed=0)
            assert len(steps) == 5
            for step in steps:
                assert step.tokens == DECODE_ROWS
                assert [[turn.tokens for turn in turns] for turns in step.stages] == [[64 // count] * count] * 2
                first, second = step.stages
                for one, other in zip(first, second, strict=True):
                    assert one.ended <= other.begun, "of this step, and not of another one"
    finally:
        stages.rank_group.close()
