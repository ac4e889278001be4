"""The short version of `make chaos`: real processes of a tiny model, killed in the middle."""

from __future__ import annotations

import json
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tokenmill.chaos.killing import SEVERAL_ANSWERS, compare, long_answers
from tests.tokenmill.chaos.running import Setup

pytestmark = pytest.mark.slow


@pytest.fixture
def setup(folder: Path, model_folder: Path) -> Setup:
    """Small steps, so that there is something to interrupt."""
    options = ("--threads", "1", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")
    return Setup(f"tiny={model_folder}", folder, options, (("TOKENMILL_PLAN__MAX_SHARD_ROWS", "8"),))


@pytest.mark.parametrize(
    ("how", "compress"),
    [
        (signal.SIGKILL, False),
        pytest.param(signal.SIGKILL, True, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.exhaustive),
    ],
)
def test_given_kills_at_random_moments_when_started_again_then_the_answers_are_those_of_an_unbroken_run(
    setup: Setup, how: signal.Signals, compress: bool
) -> None:
    report = compare(setup, rows=24, max_tokens=80, seed=3, kills=1, how=how, compress=compress)
    assert report["kills"] == 1
    assert report["readers_opened"] >= 1


@pytest.fixture
def long_context(setup: Setup, folder: Path) -> Setup:
    """The same weights with room for answers that take a machine of any speed a while; logged often."""
    model = folder / "long-context"
    shutil.copytree(setup.model.removeprefix("tiny="), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return Setup(f"tiny={model}", folder, setup.options, (("TOKENMILL_CHECKPOINT_SECONDS", "0.05"),))


@pytest.mark.exhaustive
def test_given_a_long_answer_when_killed_then_it_goes_on_from_its_last_logged_token(long_context: Setup) -> None:
    report = long_answers(long_context, random.Random(2), tokens=4000, kills=1)
    assert len(report["logged_at_each_kill"]) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [1, 2])
def test_given_several_prompts_in_a_row_when_killed_then_all_answers_are_those_of_an_unbroken_run(
    long_context: Setup, kills: int
) -> None:
    """Three of the six answers run at a time: at the last kill others have ended."""
    setup = replace(long_context, options=(*long_context.options, "--max-num-seqs", "3"))
    report = long_answers(setup, random.Random(4), tokens=600 * kills, kills=kills, asked=SEVERAL_ANSWERS)
    assert len(report["logged_at_each_kill"]) == kills
