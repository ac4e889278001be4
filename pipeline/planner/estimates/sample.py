"""Shards to look at closely before a job runs: all of a small job, and of a large one pieces from all over it.

Pieces are cut from the running order as shards are (groups stay whole), only smaller. Every piece is taken until they
hold too many tokens; then every second one goes, and from there on every second one is taken, and so on. So the memory
is bounded whatever the input's size, every part of the input weighs the same, and the same input gives the same sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Final

import pyarrow as pa

from pipeline.planner.segment import SegmentPlan

MOST_TOKENS: Final = 4_000_000
"""Of prompts and expected answers that a sample holds; a request counts as `LEAST_TOKENS` at least."""

PIECE_TOKENS: Final = 32_768
LEAST_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class _Piece:
    number: int
    shard: int
    table: pa.Table
    weight: int
    prompt_tokens: int
    expected_tokens: int


class ShardSample:
    """Takes in segments, in the input's order.

    Attributes:
        prompt_tokens, expected_tokens: of the requests computed in all segments, estimated.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS, piece_tokens: int = PIECE_TOKENS) -> None:
        self.prompt_tokens = self.expected_tokens = 0
        self._most = most_tokens
        self._piece_tokens = piece_tokens
        self._kept: list[_Piece] = []
        self._weight = self._pieces = self._shards = 0
        self._stride = 1

    def add(self, plan: SegmentPlan) -> None:
        """Take in a segment, whose texts can be read."""
        pieces = plan.pieces(self._piece_tokens)
        first = self._pieces
        for at, draft in plan.drafts([(start, end) for _, start, end in pieces], lambda at: self._wants(first + at)):
            weight = max(draft.prompt_tokens + draft.expected_tokens, LEAST_TOKENS * draft.computed_rows)
            shard = self._shards + pieces[at][0]
            kept = _Piece(first + at, shard, draft.table, weight, draft.prompt_tokens, draft.expected_tokens)
            self._kept.append(kept)
            self._weight += weight
            while self._weight > self._most and len(self._kept) > 1:
                self._thin()
        self._pieces += len(pieces)
        self._shards += len(plan.ranges)
        self.prompt_tokens += plan.prompt_tokens
        self.expected_tokens += plan.expected_tokens

    @property
    def whole(self) -> bool:
        """Whether the sample is all there is."""
        return self._stride == 1

    @property
    def kept_prompt_tokens(self) -> int:
        """Of the sample's requests, estimated as `prompt_tokens` is."""
        return sum(piece.prompt_tokens for piece in self._kept)

    def shards(self, workers: int = 1) -> tuple[list[pa.Table], float]:
        """The shards of one of so many workers, in running order, and how many times as much its part of the whole job
        is."""
        if self.whole:
            parts = [list(pieces) for _, pieces in groupby(self._kept, key=lambda piece: piece.shard)]
        else:  # as large as the shards are: a worker has some of them open at once, and they must fill its batch
            size = max(1, round(self._pieces / self._shards))
            parts = [self._kept[at : at + size] for at in range(0, len(self._kept), size)]
        parts = parts[::workers]
        tokens = sum(piece.prompt_tokens + piece.expected_tokens for part in parts for piece in part)
        tables = [pa.concat_tables([piece.table for piece in part]) for part in parts]
        return tables, (self.prompt_tokens + self.expected_tokens) / workers / max(1, tokens)

    def _wants(self, number: int) -> bool:
        return number % self._stride == 0

    def _thin(self) -> None:
        self._stride *= 2
        self._kept = [piece for piece in self._kept if self._wants(piece.number)]
        self._weight = sum(piece.weight for piece in self._kept)
