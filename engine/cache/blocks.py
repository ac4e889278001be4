"""The block pool of one cache group: references, free blocks, and the order of allocation.

A free block is, in the order of allocation:

    clean      it is not published
    spent      published, but only its writer read it, and all readers are known: there are none
    untouched  never allocated so far; its memory may not be mapped yet
    cached     published: a prefix node points to it
    awaited    the same, and sequences are registered that will read it
    retained   the same as cached or awaited, and a request's mark keeps it for some more seconds

Clean and spent blocks are allocated last in, first out: their memory is mapped, and may still be in the processor's
caches. So a job whose plan is known touches no more memory than it needs at a time. Cached and awaited blocks are
evicted in the order they were freed; an `OrderedDict` maintains it with O(1) removal from the middle (a hit takes a
block out of the free ones). Published blocks can be hit until they are allocated to a new owner.

At most half of the pool's blocks are free and retained, so marks leave room for the cached blocks of those who set
none. A mark counts its seconds from a block's last release; afterwards the block is cached or awaited. When one more is
released than may be retained, or all other free blocks are gone, the owner that has most of them gives one up
(`RetainedBlocks`): it is cached or awaited in the first case, evicted in the second.

    num_blocks - 1 == clean + spent + untouched + cached + awaited + retained + referenced  (block 0 is `NO_BLOCK`)
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from engine.cache.prefix import PrefixIndex, PrefixNode
from engine.cache.retained_blocks import RetainedBlocks
from engine.plan import NO_BLOCK


class BlockPool:
    """Allocation, sharing and eviction of one group's blocks.

    Args:
        group: the group's index, the slot of `PrefixNode.blocks` that this pool writes.
        num_blocks: blocks in the group's storage, block 0 included.
        index: holds the nodes of published blocks.

    Attributes:
        max_retained: most blocks that are free and retained.
        now: in seconds; its owner sets it.
        on_evict: called with a cached block and its node before it is unpublished for a new owner. Spent blocks are
            not passed: nothing will read them. None: nothing is called.
    """

    __slots__ = (
        "_awaited", "_cached", "_clean", "_dirty", "_group", "_index", "_nodes", "_refs", "_retained", "_shared",
        "_spent", "_suspect", "_untouched", "max_retained", "now", "num_blocks", "on_evict",
    )  # fmt: skip

    def __init__(self, group: int, num_blocks: int, index: PrefixIndex) -> None:
        if num_blocks < 2:
            raise ValueError(f"cache group {group} has {num_blocks} blocks; block 0 is reserved, give it 2 or more")
        self.num_blocks = num_blocks
        self._group = group
        self._index = index
        self._refs = array("i", bytes(4 * num_blocks))
        self._clean: list[int] = []
        self._spent: OrderedDict[int, None] = OrderedDict()
        self._untouched = NO_BLOCK + 1  # this one and all above it
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._awaited: OrderedDict[int, None] = OrderedDict()
        self._retained = RetainedBlocks()
        self.max_retained = (num_blocks - 1) // 2
        self.now = 0.0
        self.on_evict: Callable[[int, PrefixNode], None] | None = None
        self._nodes: list[PrefixNode | None] = [None] * num_blocks
        self._shared = bytearray(num_blocks)  # it was hit since it was published
        self._suspect = bytearray(num_blocks)
        self._dirty: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, cached ones included."""
        return len(self._clean) + self.num_blocks - self._untouched + self.num_cached

    @property
    def num_cached(self) -> int:
        """Free blocks that a prefix hit could still take, spent, awaited and retained ones included."""
        count = len(self._spent) + len(self._cached) + len(self._awaited)
        return count + self.num_retained if self._retained else count

    @property
    def num_retained(self) -> int:
        """Free blocks that are retained, until a deadline that may have passed."""
        return self._retained.num_free

    @property
    def refs(self) -> NDArray[np.int32]:
        """References of every block, int32 [num_blocks] (a view; read only)."""
        view = np.frombuffer(self._refs, dtype=np.int32)
        view.flags.writeable = False
        return view

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each. The caller ensures that `count <= num_free`."""
        assert count <= self.num_free, f"{count} blocks requested, {self.num_free} free"
        blocks = []
        for _ in range(count):
            if self._clean:
                block = self._clean.pop()
            elif self._spent:
                block, _ = self._spent.popitem()
                self._unpublish(block)
            elif self._untouched < self.num_blocks:
                block = self._untouched
                self._untouched += 1
            else:
                block = self._evict()
            self._refs[block] = 1
            if self._suspect[block]:
                self._suspect[block] = 0
                self._dirty.append(block)
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """Add a reference to a published block (a prefix hit)."""
        if self._refs[block] == 0:
            self._take_out(block)
        self._refs[block] += 1
        self._shared[block] = 1

    def share(self, block: int) -> None:
        """Add a reference to a referenced block, published or not: it will be copied."""
        assert self._refs[block] > 0
        self._refs[block] += 1

    def release(self, blocks: Iterable[int], readers_known: bool = False) -> None:
        """Release references. Blocks without references become free in this order: pass a sequence's tail first, so
        that it is evicted first and the prefixes survive longest.

        Args:
            readers_known: all sequences that will read these blocks are registered already.
        """
        spent = []
        for block in blocks:
            refs = self._refs[block] - 1
            assert refs >= 0, f"block {block} of group {self._group} was released more often than taken"
            self._refs[block] = refs
            if refs == 0:
                node = self._nodes[block]
                if node is None:
                    self._clean.append(block)
                elif block in self._retained:
                    self._put_retained(block)
                elif self._index.is_awaited(node):
                    self._awaited[block] = None
                elif readers_known and not self._shared[block]:
                    spent.append(block)
                else:
                    self._cached[block] = None
        self._spent.update(dict.fromkeys(reversed(spent)))  # last in, first out

    def requeue(self, block: int) -> None:
        """Move a published free block after its prefix got its first registered reader, or lost its last one."""
        if self._refs[block] == 0 and block not in self._retained:
            self._take_out(block)
            self._put(block)

    def retain(self, block: int, seconds: float, owner: bytes) -> None:
        """Keep a published block for some seconds from its last release: others are evicted before. Of several calls
        the most seconds count. `owner`: the salt of the block's prefix."""
        is_free = self._refs[block] == 0
        if is_free:
            self._take_out(block)
        self._retained.mark(block, owner, seconds)
        if is_free:
            self._put_retained(block)

    def publish(self, block: int, node: PrefixNode) -> None:
        """Publish a referenced block under `node`, unless another block already is."""
        if node.blocks[self._group] != NO_BLOCK:
            return
        assert self._refs[block] > 0
        assert self._nodes[block] is None
        node.blocks[self._group] = block
        self._nodes[block] = node
        self._index.hold(node)

    def withdraw(self, block: int) -> None:
        """Unpublish a block; existing references remain valid."""
        if self._refs[block] == 0 and self._nodes[block] is not None:
            self._take_out(block)
            self._clean.append(block)
        self._unpublish(block)

    def drop(self, block: int) -> None:
        """Unpublish a block that only one row references, unless registered sequences will read it."""
        node = self._nodes[block]
        if node is not None and self._refs[block] == 1 and not self._index.is_awaited(node):
            self._unpublish(block)

    def suspect(self, block: int) -> None:
        """Mark a block that may hold non-finite values: it is zeroed before its next owner uses it."""
        self._suspect[block] = 1

    def is_suspect(self, block: int) -> bool:
        """Whether the block may hold non-finite values."""
        return bool(self._suspect[block])

    def take_dirty(self) -> list[int]:
        """Take the suspect blocks allocated since the last call, which must be zeroed before the next step."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def named(self) -> Iterable[tuple[int, PrefixNode]]:
        """Iterate over published blocks and their nodes."""
        return ((block, node) for block, node in enumerate(self._nodes) if node is not None)

    def check(self, expected_refs: NDArray[np.int64]) -> None:
        """Compare with the references counted in the block tables; raises AssertionError with the arithmetic."""
        wrong = np.flatnonzero(self.refs != expected_refs)
        if wrong.size:
            block = int(wrong[0])
            raise AssertionError(
                f"group {self._group} block {block}: {self._refs[block]} references counted, "
                f"{int(expected_refs[block])} in the tables"
            )
        used = int(np.count_nonzero(expected_refs))
        retained = self._retained.check()
        if len(retained) > self.max_retained or self.num_retained != len(retained):
            raise AssertionError(
                f"group {self._group}: {len(retained)} blocks are retained, {self.num_retained} counted, "
                f"{self.max_retained} allowed"
            )
        named = {*self._spent, *self._cached, *self._awaited, *retained}
        free = {*self._clean, *named, *range(self._untouched, self.num_blocks)}
        if len(free) + used != self.num_blocks - 1 or self.num_free != len(free):
            raise AssertionError(
                f"group {self._group}: {len(self._clean)} clean + {len(self._spent)} spent + "
                f"{self.num_blocks - self._untouched} untouched + {len(self._cached)} cached + {len(self._awaited)} "
                f"awaited + {len(retained)} retained + {used} in use != {self.num_blocks} - 1"
            )
        for block in free:
            if self._refs[block] or block == NO_BLOCK:
                raise AssertionError(f"group {self._group} block {block} is free with {self._refs[block]} references")
            node = self._nodes[block]
            if (node is None) == (block in named):
                raise AssertionError(
                    f"group {self._group} block {block}: published and clean, or unpublished and cached"
                )
            if (block in self._retained) != (block in retained):
                raise AssertionError(
                    f"group {self._group} block {block}: retained, but not in its queue, or the reverse"
                )
            if node is not None and block not in retained and self._index.is_awaited(node) != (block in self._awaited):
                raise AssertionError(f"group {self._group} block {block}: its queue does not match its readers")
        for block, node in self.named():
            if node.blocks[self._group] != block:
                raise AssertionError(f"group {self._group} block {block}: its node names {node.blocks[self._group]}")

    def _evict(self) -> int:
        """Take the published free block that is worth least."""
        self._expire()
        if queue := self._cached or self._awaited:
            block, _ = queue.popitem(last=False)
        else:
            block = self._retained.give_up()
        node = self._nodes[block]
        assert node is not None
        if self.on_evict is not None:
            self.on_evict(block, node)
        self._unpublish(block)
        return block

    def _expire(self) -> None:
        """Put the blocks whose deadline has passed behind the other cached or awaited ones."""
        if self._retained:
            for block in self._retained.expire(self.now):
                self._put(block)

    def _put(self, block: int) -> None:
        """Append a published free block to the cached or the awaited ones."""
        node = self._nodes[block]
        assert node is not None
        queue = self._awaited if self._index.is_awaited(node) else self._cached
        queue[block] = None

    def _put_retained(self, block: int) -> None:
        self._retained.add(block, self.now)
        if self.num_retained > self.max_retained:
            self._expire()
        if self.num_retained > self.max_retained:
            self._put(self._retained.give_up())

    def _take_out(self, block: int) -> None:
        """Take a published free block out of its queue."""
        if block in self._retained:
            self._retained.remove(block)
        elif block in self._awaited:
            del self._awaited[block]
        else:
            del (self._spent if block in self._spent else self._cached)[block]

    def _unpublish(self, block: int) -> None:
        node = self._nodes[block]
        if node is not None:
            self._nodes[block] = None
            self._retained.unmark(block)
            self._shared[block] = 0
            node.blocks[self._group] = NO_BLOCK
            self._index.drop(node)
