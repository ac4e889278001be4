"""A sample of shards for a dry run: all of a small job, and pieces from all over a large one.

Pieces are cut from the running order like shards (groups stay whole), only smaller. Every piece is taken until they
hold too many tokens; then every second one is discarded, from there on every second one is taken, and so on. So memory
is bounded for any input size, every part of the input has the same weight, and the same input gives the same sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Final

import pyarrow as pa

from pipeline.planner.segment import SegmentPlan

MAX_TOKENS: Final = 4_000_000
"""Maximum prompt and expected answer tokens of a sample; a request counts as `MIN_TOKENS` at least."""

PIECE_TOKENS: Final = 32_768
MIN_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class _Piece:
    number: int
    shard: int
    table: pa.Table
    weight: int
    prompt_tokens: int
    expected_tokens: int


class ShardSample:
    """Collects the sample from segments, in the input's order.

    Attributes:
        prompt_tokens, expected_tokens: estimated tokens of the computed requests of all segments.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS, piece_tokens: int = PIECE_TOKENS) -> None:
        self.prompt_tokens = self.expected_tokens = 0
        self._max_tokens = max_tokens
        self._piece_tokens = piece_tokens
        self._sampled: list[_Piece] = []
        self._weight = self._pieces = self._shards = 0
        self._stride = 1

    def add(self, plan: SegmentPlan) -> None:
        """Add a segment, whose texts can be read."""
        pieces = plan.pieces(self._piece_tokens)
        first = self._pieces
        for at, draft in plan.drafts(
            [(start, end) for _, start, end in pieces], lambda at: self._is_sampled(first + at)
        ):
            weight = max(draft.prompt_tokens + draft.expected_tokens, MIN_TOKENS * draft.computed_rows)
            shard = self._shards + pieces[at][0]
            piece = _Piece(first + at, shard, draft.table, weight, draft.prompt_tokens, draft.expected_tokens)
            self._sampled.append(piece)
            self._weight += weight
            while self._weight > self._max_tokens and len(self._sampled) > 1:
                self._thin()
        self._pieces += len(pieces)
        self._shards += len(plan.ranges)
        self.prompt_tokens += plan.prompt_tokens
        self.expected_tokens += plan.expected_tokens

    @property
    def whole(self) -> bool:
        """Whether the sample contains the whole job."""
        return self._stride == 1

    @property
    def sampled_prompt_tokens(self) -> int:
        """Prompt tokens of the sample's requests, estimated like `prompt_tokens`."""
        return sum(piece.prompt_tokens for piece in self._sampled)

    def shards(self, workers: int = 1) -> tuple[list[pa.Table], float]:
        """The sampled shards of one of so many workers, in running order, and the factor from them to its share of the
        whole job."""
        if self.whole:
            parts = [list(pieces) for _, pieces in groupby(self._sampled, key=lambda piece: piece.shard)]
        else:  # as large as shards: a worker has several open at once, and they must fill its batch
            size = max(1, round(self._pieces / self._shards))
            parts = [self._sampled[at : at + size] for at in range(0, len(self._sampled), size)]
        parts = parts[::workers]
        tokens = sum(piece.prompt_tokens + piece.expected_tokens for part in parts for piece in part)
        tables = [pa.concat_tables([piece.table for piece in part]) for part in parts]
        return tables, (self.prompt_tokens + self.expected_tokens) / workers / max(1, tokens)

    def _is_sampled(self, number: int) -> bool:
        return number % self._stride == 0

    def _thin(self) -> None:
        self._stride *= 2
        self._sampled = [piece for piece in self._sampled if self._is_sampled(piece.number)]
        self._weight = sum(piece.weight for piece in self._sampled)
