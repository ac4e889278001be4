"""The port of a second tier of the prefix cache: copies of published blocks outside of the pools.

Its adapters never raise: a block that can't be read, or is not exactly the one that was asked for, is absent, and a
tier that can't be written to switches itself off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class BlockKey(NamedTuple):
    """The name of a block in a tier.

    Attributes:
        group: index of its cache group.
        digest: of the prefix that ends with the block, from the owner's salt on (`engine.cache.prefix`).
        token_bytes: the block's own tokens, int32.
    """

    group: int
    digest: bytes
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts since the start.

    Attributes:
        hits: blocks that were loaded.
        bytes_read, bytes_written: of loaded and of stored blocks.
        rejected: blocks that were damaged, or not what their name says; they were not used.
        is_on: false after the tier has switched itself off.
    """

    hits: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    rejected: int = 0
    is_on: bool = True


class BlockTier(Protocol):
    """Holds blocks as bytes, up to a size; those that were not used for longest are evicted first. One thread calls all
    methods."""

    @property
    def is_busy(self) -> bool:
        """Whether so many blocks are still being stored that others should wait."""
        ...

    def contains(self, key: BlockKey) -> bool:
        """Whether a block of this name is there. It may still be rejected by `load`, or be gone by then."""
        ...

    def load(self, key: BlockKey) -> Bytes | None:
        """Return the block's bytes, uint8 [bytes]; None: it is not there, or not what its name says."""
        ...

    def store(self, key: BlockKey, num_bytes: int, content: Callable[[], Bytes]) -> None:
        """Store a block. `content` returns its bytes, uint8 [num_bytes]; it may wait for them, and is called on any
        thread."""
        ...

    def discard(self, key: BlockKey) -> None:
        """Remove a block, if it is there."""
        ...

    def stats(self) -> TierStats:
        """Return the counts since the start."""
        ...

    def close(self) -> None:
        """Complete what is being stored."""
        ...
