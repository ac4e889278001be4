"""A tier of blocks that another engine computed, until the sequence that they were fetched for loads them.

A block is found by its name alone: group, tokens, and the digest of its prefix, which begins with the owner's salt.
Model and layout were verified before it was imported (`engine.block_exchange`). Loaded blocks are removed: the pools
have them then. Those that no sequence loads are dropped by the ones that come after them.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.cache.block_tier import BlockKey, Bytes, TierStats


class ImportedBlocks:
    """Holds up to `max_bytes` of blocks; the oldest are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[BlockKey, Bytes] = OrderedDict()
        self._held_bytes = 0
        self._hits = self._bytes_read = self._bytes_written = 0

    def contains(self, key: BlockKey) -> bool:
        """See `BlockTier`."""
        return key in self._blocks

    def load(self, key: BlockKey) -> Bytes | None:
        """See `BlockTier`. The block stays here until `discard`."""
        return self._blocks.get(key)

    def take(self, key: BlockKey) -> None:
        """Note that a block which `load` returned is used; it is removed."""
        self._hits += 1
        self._bytes_read += len(self._blocks[key])
        self.discard(key)

    def store(self, key: BlockKey, data: Bytes) -> None:
        """Store a block, uint8 [bytes], in the place of one of the same name."""
        self.discard(key)
        self._blocks[key] = data
        self._held_bytes += len(data)
        self._bytes_written += len(data)
        while self._held_bytes > self._max_bytes:
            self.discard(next(iter(self._blocks)))

    def discard(self, key: BlockKey) -> None:
        """See `BlockTier`."""
        if (data := self._blocks.pop(key, None)) is not None:
            self._held_bytes -= len(data)

    def stats(self) -> TierStats:
        """See `BlockTier`."""
        return TierStats(self._hits, self._bytes_read, self._bytes_written)
