"""Shapes that steps are padded to, so that a captured graph can be replayed.

There are two kinds: decode-only steps, by their rows, and mixed steps, by their tokens. Both can have others of their
kind for steps whose decoding rows share prefixes, which are recorded with more launches. A step uses the smallest shape
that holds it. Finer sizes waste less computation on padding; coarser ones need fewer captures when the engine starts.
A mixed step larger than all shapes takes longer to compute than to launch, and runs without a graph.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.attention.base import AttentionBatch
from engine.plan import NO_BLOCK

FEWEST_SHARED_TOKENS = 64
"""Of a mixed shape for steps that share prefixes: padding up to there costs little beside the weights that a step
reads."""

NO_SLOT = -1
"""Slot of a padding token: its keys are written nowhere that is ever read."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The shape of one graph.

    Attributes:
        tokens: of the step, padding included.
        sequences: of the step, padding included; in a mixed shape the last one is always padding.
        decodes: maximum number of sequences with a single token.
        mixed: whether sequences may have more than one token.
        shared: whether decoding sequences may read together what they begin with.
    """

    tokens: int
    sequences: int
    decodes: int
    mixed: bool
    shared: bool = False


def decode_sizes(max_size: int) -> list[int]:
    """Return the row counts: each up to 2, then by 4 up to 8, by 8 up to 256, from there 16 to a doubling; and
    `max_size`."""
    sizes, size = [1, 2, 4, *range(8, 256, 8)], 256
    while size < max_size:
        sizes += range(size, 2 * size, size // 16)
        size *= 2
    return sorted({size for size in sizes if size < max_size} | {max_size})


def mixed_sizes(max_size: int) -> list[int]:
    """Return the token counts: four to a doubling from 16 on (at most a fifth is padding, except for few tokens)."""
    sizes, size = [], 16
    while size < max_size:
        sizes += [size * quarter // 4 for quarter in (4, 5, 6, 7)]
        size *= 2
    return sorted({size for size in sizes if size < max_size} | {max_size})


def shared_sizes(max_size: int) -> list[int]:
    """Return the row counts of steps that share prefixes: by doublings from 4 to 32, by 32 up to 256, from there 8 to a
    doubling; and `max_size`. They are few, because rows that only pad a step cost little."""
    sizes, size = [4, 8, 16, *range(32, 256, 32)], 256
    while size < max_size:
        sizes += range(size, 2 * size, size // 8)
        size *= 2
    return sorted({size for size in sizes if size < max_size} | {max_size})


class GraphBuckets:
    """The shapes of an engine.

    Args:
        max_num_seqs, max_num_batched_tokens: of a step.
        max_tokens: of a step that uses a graph and has several tokens for a row.
        shared: some are for steps that share prefixes.
    """

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, max_tokens: int, *, shared: bool = False
    ) -> None:
        max_rows = min(max_num_seqs, max_num_batched_tokens)
        max_mixed = min(max_num_batched_tokens, max_tokens)
        self._decodes = [GraphShape(size, size, size, False) for size in decode_sizes(max_rows)]
        self._mixed = [
            GraphShape(size, min(max_num_seqs, size) + 1, min(max_num_seqs, size), True)
            for size in mixed_sizes(max_mixed)
        ]
        self._shared: list[GraphShape] = []
        if shared and max_rows > 1:
            decodes = [GraphShape(size, size, size, False, True) for size in shared_sizes(max_rows)]
            mixed = [shape for shape in self._mixed if shape.tokens >= min(FEWEST_SHARED_TOKENS, max_mixed)]
            self._shared = decodes + [replace(shape, shared=True) for shape in mixed]
        self._decode_sizes = [shape.tokens for shape in self._decodes]
        self._mixed_sizes = [shape.tokens for shape in self._mixed]

    @property
    def shapes(self) -> list[GraphShape]:
        """All shapes, the largest first: the memory of the first capture is enough for the others."""
        shapes = [*self._decodes, *self._mixed, *self._shared]
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.mixed, shape.shared), reverse=True)

    def pick(self, rows: int, num_tokens: int, num_decodes: int) -> GraphShape | None:
        """Return the smallest shape that holds a step of these sizes; None: there is none."""
        single = num_decodes == rows
        sizes, shapes = (self._decode_sizes, self._decodes) if single else (self._mixed_sizes, self._mixed)
        at = bisect_left(sizes, num_tokens)
        return shapes[at] if at < len(shapes) else None

    def sharing(self, shape: GraphShape) -> GraphShape:
        """Return the smallest shape for steps that share prefixes which holds the steps of this one."""
        return next(own for own in self._shared if own.mixed == shape.mixed and own.tokens >= shape.tokens)


def padded(batch: AttentionBatch, shape: GraphShape) -> AttentionBatch:
    """Pad the step to the shape's sequences and tokens: padding sequences have no token, no keys, block 0 in their
    tables, and padding tokens have `NO_SLOT`."""
    sequences = shape.sequences - len(batch.starts)
    tokens = shape.tokens - len(batch.slot_mapping[0])

    def longer(array: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.concatenate([array, np.zeros((sequences, *array.shape[1:]), dtype=array.dtype)])

    assert NO_BLOCK == 0
    return replace(
        batch,
        starts=longer(batch.starts),
        counts=longer(batch.counts),
        block_tables=tuple(longer(table) for table in batch.block_tables),
        slot_mapping=tuple(
            np.concatenate([slots, np.full(tokens, NO_SLOT, dtype=slots.dtype)]) for slots in batch.slot_mapping
        ),
        wanted=None,
    )
