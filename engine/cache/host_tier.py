"""A tier of blocks in the host's memory, which ends with its engine.

Each cache group has slots of the size of its blocks. The tier only decides which block has which slot; the caller
copies, on a device's streams (`engine.runner.block_transfer`). So the bytes that `load` returns may still be on their
way there, and have to be read behind the copies that were queued before.

A block is found by its name alone: group, tokens, and the digest of its prefix, which begins with the owner's salt. The
model and the layout are the engine's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from engine.cache.block_tier import BlockKey, Bytes, TierStats


class _Entry(NamedTuple):
    slot: int
    is_suspect: bool


class HostTier:
    """Holds evicted blocks; those that were not used for longest lose their slots.

    Args:
        memory: per cache group uint8 [slots, bytes of a block].
    """

    def __init__(self, memory: Sequence[Bytes]) -> None:
        self._memory = memory
        self._entries: list[OrderedDict[BlockKey, _Entry]] = [OrderedDict() for _ in memory]  # used last: at the end
        self._free = [list(range(len(slots) - 1, -1, -1)) for slots in memory]
        self._lent: set[BlockKey] = set()
        self._hits = self._bytes_read = self._bytes_written = 0

    def contains(self, key: BlockKey) -> bool:
        """See `BlockTier`."""
        return key in self._entries[key.group]

    def touch(self, key: BlockKey) -> bool:
        """Note that a block is used now; False: it is not there."""
        if not self.contains(key):
            return False
        self._entries[key.group].move_to_end(key)
        return True

    def is_suspect(self, key: BlockKey) -> bool:
        """Whether a block is there that may hold non-finite values."""
        entry = self._entries[key.group].get(key)
        return entry is not None and entry.is_suspect

    def load(self, key: BlockKey) -> Bytes | None:
        """Return the block's slot, uint8 [bytes], which is not given to another block before `release`; None: the block
        is not there."""
        if not self.touch(key):
            return None
        self._lent.add(key)
        data: Bytes = self._memory[key.group][self._entries[key.group][key].slot]
        self._hits += 1
        self._bytes_read += len(data)
        return data

    def release(self) -> None:
        """Note that the copies from all slots that `load` returned are queued."""
        self._lent.clear()

    def allocate(self, key: BlockKey, *, is_suspect: bool) -> Bytes | None:
        """Return a slot to copy a block to, uint8 [bytes]; from here on the block is there. None: it was already, or
        all slots are being read.

        Args:
            is_suspect: the block may hold non-finite values.
        """
        entries, free = self._entries[key.group], self._free[key.group]
        if key in entries:
            return None
        if not free:
            oldest = next((other for other in entries if other not in self._lent), None)
            if oldest is None:
                return None
            self.discard(oldest)
        entries[key] = _Entry(free.pop(), is_suspect)
        data: Bytes = self._memory[key.group][entries[key].slot]
        self._bytes_written += len(data)
        return data

    def discard(self, key: BlockKey) -> None:
        """See `BlockTier`."""
        entry = self._entries[key.group].pop(key, None)
        if entry is not None:
            self._free[key.group].append(entry.slot)

    def stats(self) -> TierStats:
        """See `BlockTier`."""
        return TierStats(self._hits, self._bytes_read, self._bytes_written)

    def check_integrity(self) -> None:
        """Check that each slot is free or has one block; raises AssertionError with the arithmetic."""
        for group, (slots, entries, free) in enumerate(zip(self._memory, self._entries, self._free, strict=True)):
            used = [entry.slot for entry in entries.values()]
            if sorted(used + free) != list(range(len(slots))):
                raise AssertionError(f"group {group}: slots {sorted(used)} + free {sorted(free)} != {len(slots)}")
