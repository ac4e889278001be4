"""The short version of `make chaos`: real processes of a tiny model, killed in the middle."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.tokenmill.chaos.killing import Setup, compare, long_answer

pytestmark = pytest.mark.slow


@pytest.fixture
def setup(place: Path, model_folder: Path) -> Setup:
    """Small steps and frequent logs, so that there is something to interrupt."""
    options = ("--threads", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    environment = (("TOKENMILL_PLAN__MAX_SHARD_ROWS", "8"), ("TOKENMILL_CHECKPOINT_SECONDS", "0.05"))
    return Setup(f"tiny={model_folder}", place, None, options, environment)


def test_given_kills_at_random_moments_when_started_again_then_the_answers_are_those_of_an_unbroken_run(
    setup: Setup,
) -> None:
    story = compare(setup, rows=60, max_tokens=60, seed=3, kills=2, how=signal.SIGKILL)
    assert story["kills"] >= 1
    assert story["readers_opened"] >= 3


def test_given_a_long_answer_when_killed_then_it_goes_on_from_its_last_logged_token(
    setup: Setup,
) -> None:
    told = long_answer(setup, random.Random(2), tokens=480, kills=1)
    assert len(told["logged_at_each_kill"]) == 1
