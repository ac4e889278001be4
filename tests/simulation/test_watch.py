"""The oracle's own reader of checkpoints, on bytes that the pipeline really writes."""

from __future__ import annotations

import numpy as np
import pytest

from schemas.jobs.checkpoints import CheckpointHead, FinishedRows, LoggedChoice, encode
from tests.simulation.watch import read_log


def written(*choices: tuple[int, int, int, int]) -> bytes:
    """A checkpoint with (row, choice, start, tokens) of each."""
    head = CheckpointHead(job="job-1", shard=1, attempt_id="a" * 16, sequence=0)
    running = [
        LoggedChoice(row, choice, start, np.arange(count, dtype=np.int32)) for row, choice, start, count in choices
    ]
    return encode(head, FinishedRows([], []), running)


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        ([written((3, 0, 0, 4))], 4),
        ([written((3, 0, 0, 4)), written((3, 0, 4, 2))], 6),
        ([written((3, 0, 0, 4)), written((3, 0, 6, 2))], 4),  # a gap
        ([written((3, 0, 0, 4), (3, 1, 0, 5))], 9),
        ([written((3, 0, 0, 7)), written((3, 0, 0, 2))], 7),  # it began anew, and had more
    ],
)
def test_what_an_attempt_logged_counts_up_to_the_first_gap(pieces: list[bytes], tokens: int) -> None:
    assert read_log([pieces]).running == {3: tokens}


def test_of_several_attempts_the_longest_counts_and_a_damaged_checkpoint_says_nothing() -> None:
    data = written((3, 0, 2, 30))
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    log = read_log([[written((3, 0, 0, 2)), damaged], [written((3, 0, 0, 5))]])
    assert log.running == {3: 5}
