"""How long a job takes on a machine whose speed was measured.

A step takes as long as its rows, its prompt tokens and the keys and values that all of them look at: figures that
`bench` measures apart. How many rows are in each step follows from the lengths of the answers: the longest ones start
first, and a slot that is free is filled, until none is left to fill it with.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_PLAYED: Final = 20_000
"""Answers whose ends are played through one by one; of more, a sample stands for all."""

PRECISION: Final = 16
"""Lengths of answers above this are told apart by a sixteenth of an octave."""


@dataclass(frozen=True, slots=True)
class Work:
    """What there is to compute, as far as time depends on it.

    Attributes:
        prompts: tokens of prompts to compute, without shared ones.
        prompt_pairs: pairs of a prompt's token and one that it looks at.
        answer_pairs: the same of answers' tokens.
        lengths: of answers -> how many.
        longest: answer that nothing can end before.
    """

    prompts: float = 0.0
    prompt_pairs: float = 0.0
    answer_pairs: float = 0.0
    lengths: Counter[int] = field(default_factory=Counter)
    longest: int = 0

    @classmethod
    def of(
        cls,
        prompts: NDArray[np.int32],
        expected: NDArray[np.int32],
        choices: NDArray[np.int64],
        shared: float,
        longest: int,
    ) -> Work:
        """Of requests [requests]; `shared`: prompt tokens of theirs that others compute."""
        if not len(prompts):
            return cls()
        sizes, answers = prompts.astype(np.float64), np.maximum(1, expected).astype(np.float64)
        total = float(sizes.sum())
        # A shared prefix is a part of each prompt, as large for all: its pairs are not computed again either.
        share = min(1.0, shared / total)
        counts: Counter[int] = Counter()
        for length, count in zip(*np.unique(_rounded(answers), return_counts=True), strict=True):
            counts[int(length)] += int(count)
        if (choices > 1).any():
            counts = Counter()
            for length, count in zip(_rounded(answers).tolist(), choices.tolist(), strict=True):
                counts[int(length)] += count
        return cls(
            prompts=total - shared,
            prompt_pairs=float((sizes**2).sum()) / 2 * (1 - share**2),
            answer_pairs=float((choices * answers * (sizes + answers / 2)).sum()),
            lengths=counts,
            longest=longest,
        )

    def __add__(self, other: Work) -> Work:
        return Work(
            self.prompts + other.prompts,
            self.prompt_pairs + other.prompt_pairs,
            self.answer_pairs + other.answer_pairs,
            self.lengths + other.lengths,
            max(self.longest, other.longest),
        )

    def divided(self, workers: int) -> Work:
        """The part of one of so many workers."""
        lengths = Counter({length: ceil(count / workers) for length, count in self.lengths.items()})
        return Work(
            self.prompts / workers, self.prompt_pairs / workers, self.answer_pairs / workers, lengths, self.longest
        )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a machine was measured to take; seconds.

    Attributes:
        decode: rows -> of a step that computes a token of each, which looks at `looked_at` others.
        prompt_token: of a prompt.  pair: of a token and one that it looks at, in prompts.
        answer_pair: the same in decode.
    """

    decode: Mapping[int, float]
    looked_at: float
    prompt_token: float
    pair: float = 0.0
    answer_pair: float = 0.0

    def step(self, rows: int) -> float:
        """Of a decode step: between two that were measured, on the line that joins them; beyond, on the last one's."""
        sizes = sorted(self.decode)
        if len(sizes) == 1:
            return self.decode[sizes[0]] * max(1.0, rows / sizes[0])
        at = min(max(1, bisect_left(sizes, rows)), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        slope = (self.decode[high] - self.decode[low]) / (high - low)
        return max(self.decode[sizes[0]], self.decode[low] + slope * (rows - low))


def seconds_of(work: Work, times: StepTimes, most_rows: int) -> float:
    """How long one worker takes for it, from its first step to its last; `most_rows`: of its running batch."""
    decode, tokens = _decode(work.lengths, times, most_rows)
    looking = max(0.0, work.answer_pairs - tokens * times.looked_at) * times.answer_pair
    return work.prompts * times.prompt_token + work.prompt_pairs * times.pair + decode + looking


def _decode(lengths: Mapping[int, int], times: StepTimes, most_rows: int) -> tuple[float, int]:
    """Seconds of the steps, and tokens that they compute. The first token of an answer comes with its prompt."""
    total = sum(lengths.values())
    tokens = sum(max(0, length - 1) * count for length, count in lengths.items())
    if not total:
        return 0.0, 0
    played = _sample(lengths, total)
    seconds = 0.0
    for rows, steps in _profile(played, min(most_rows, total)):
        seconds += steps * times.step(rows)
    # Where a sample was played, the other answers were in full batches.
    rest = tokens - sum(max(0, length - 1) for length in played)
    return seconds + rest / most_rows * times.step(most_rows), tokens


def _profile(lengths: Sequence[int], slots: int) -> list[tuple[int, int]]:
    """(rows, steps) one after the other, of answers that start in this order."""
    running: list[int] = []
    profile, now, waiting = list[tuple[int, int]](), 0, 0
    while running or waiting < len(lengths):
        while waiting < len(lengths) and len(running) < slots:
            heapq.heappush(running, now + max(0, lengths[waiting] - 1))
            waiting += 1
        end = running[0]
        if end > now:
            profile.append((len(running), end - now))
        now = end
        while running and running[0] == end:
            heapq.heappop(running)
    return profile


def _sample(lengths: Mapping[int, int], total: int) -> list[int]:
    """The lengths, the longest first; at most so many, evenly chosen."""
    ordered = sorted(lengths.items(), reverse=True)
    if total <= MOST_PLAYED:
        return [length for length, count in ordered for _ in range(count)]
    ends = np.cumsum([count for _, count in ordered])
    places = (np.arange(MOST_PLAYED) + 0.5) * total / MOST_PLAYED
    return [ordered[at][0] for at in np.searchsorted(ends, places)]


def _rounded(lengths: NDArray[np.float64]) -> NDArray[np.int64]:
    steps = np.maximum(1.0, 2.0 ** (np.floor(np.log2(lengths)) - np.log2(PRECISION)))
    return np.asarray(np.round(lengths / steps) * steps, dtype=np.int64)
