"""Exchanges blocks between the pools and the second tiers of the prefix cache: host memory, blocks that were imported
from another engine, a disk, or several of them.

Loading precedes a lookup: before a waiting sequence (or a row at a block's border) looks for hits, the blocks that the
tiers have beyond the pools are allocated, published and released, so that they are cached blocks like others. The step
being planned fills them before it computes. They are read and verified while the step is planned: a block that a tier
rejects was never promised to a row, and its tokens are computed.

    pools    |- hits -|
    tiers        |- their blocks -----|
    loaded            |- of all full-attention groups, and the last window of others -|

Host memory gets each cached block that is evicted, so those of preempted rows, too: a preempted row waits as a reader
of all its whole blocks, generated tokens included. The step that gives a block to a new owner copies it first
(`StepPlan.store_blocks`). A block may be evicted before a row has shown that its values are finite; it is marked then
(`BlockStore.is_suspect`), and so is the block that it is loaded to, which is zeroed before it gets another owner.

Imported blocks (`engine.cache.imported_blocks`) leave their tier when they are loaded. They count as suspect, too: no
row here has shown that they are finite.

The disk gets only prefixes that are worth their bytes: those that another request has hit, and those that a request
retains. They are stored once a row that read them had finite logits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cache.block_tier import BlockKey, BlockTier, Bytes
from engine.cache.blocks import BlockPool
from engine.cache.host_tier import HostTier
from engine.cache.imported_blocks import ImportedBlocks
from engine.cache.prefix import HashChain, PrefixIndex, PrefixNode
from engine.plan import NO_BLOCK, BlockLoad, BlockStore


class _Link(NamedTuple):
    """One block of a prefix: its digest and tokens, and its node, if the pools have any of it."""

    digest: bytes
    token_bytes: bytes
    node: PrefixNode | None

    def key(self, group: int) -> BlockKey:
        return BlockKey(group, self.digest, self.token_bytes)

    def block(self, group: int) -> int:
        return NO_BLOCK if self.node is None else self.node.blocks[group]


class Tiering:
    """Decides which blocks are loaded and stored.

    Args:
        host, imported, disk: the tiers, in the order in which blocks are looked up; None: there is none of this kind.
        reaches: per group the blocks before a position that a hit there needs; None: all of them.
        max_loads: blocks of a full-attention group that one step may load.

    Attributes:
        has_disk: whether there is a tier on disk.
        shared: row -> leading blocks that the disk gets once the row is confirmed.
    """

    def __init__(
        self,
        host: HostTier | None,
        imported: ImportedBlocks | None,
        disk: BlockTier | None,
        pools: Sequence[BlockPool],
        index: PrefixIndex,
        reaches: Sequence[int | None],
        block_size: int,
        max_loads: int,
    ) -> None:
        self._host = host
        self._imported = imported
        self._disk = disk
        self.has_disk = disk is not None
        self.shared: dict[int, int] = {}
        self._pools = pools
        self._index = index
        self._reaches = reaches
        self._block_size = block_size
        self._max_loads = max_loads
        self._loads: dict[tuple[int, int], tuple[PrefixNode, BlockLoad]] = {}  # by group and block
        self._evicted: list[BlockStore] = []
        self._stores: deque[tuple[PrefixNode, int]] = deque()
        if host is not None:
            for group, pool in enumerate(pools):
                pool.on_evict = partial(self._note_eviction, host, group)

    # -- loading

    def load(
        self, chain: HashChain, tokens: NDArray[np.int32], start: int, parent: PrefixNode | None, hits: int
    ) -> bool:
        """Load the blocks that make the hit of a prefix longer.

        Args:
            start, parent: the first block that is not held yet, and the node of the prefix before it; None: the root,
                which has no node yet.
            hits: blocks from `start` on that the pools have.

        Returns:
            Whether the tiers have more, which a later step can load.
        """
        absent: set[BlockKey] = set()
        read: dict[BlockKey, Bytes] = {}
        while True:
            links, has_more = self._links(chain, tokens, start, parent, absent)
            count = self._longest(links, hits, absent)
            needed = [
                (group, link)
                for group, reach in enumerate(self._reaches)
                for link in links[0 if reach is None else max(0, count - reach) : count]
            ]
            if count == hits or not self._has_room(needed):
                return has_more
            # The beginning of a prefix is read last: the tier evicts it last.
            keys = [link.key(group) for group, link in reversed(needed) if link.block(group) == NO_BLOCK]
            for key in keys:
                if key not in read:
                    if (data := self._read(key)) is None:
                        absent.add(key)
                        break
                    read[key] = data
            else:
                self._publish(chain, links[:count], parent, needed, read)
                return has_more

    def _links(
        self, chain: HashChain, tokens: NDArray[np.int32], start: int, parent: PrefixNode | None, absent: set[BlockKey]
    ) -> tuple[list[_Link], bool]:
        """Return the prefix's next blocks, as far as pools and tiers have those of all full-attention groups, and
        whether they have more, which this step can't load."""
        size, node = self._block_size, parent
        full = [group for group, reach in enumerate(self._reaches) if reach is None]
        room = self._max_loads - len(self._loads)
        links: list[_Link] = []
        for block in range(start, (len(tokens) - 1) // size):
            token_bytes = tokens[block * size : (block + 1) * size].tobytes()
            digest = chain.of_block(block, token_bytes)
            node = None if node is None else self._index.find(node, digest, token_bytes)
            link = _Link(digest, token_bytes, node)
            if not all(self._has(link, group, absent) for group in full):
                break
            room -= any(link.block(group) == NO_BLOCK for group in full)
            if room < 0:
                return links, True
            links.append(link)
        return links, False

    def _longest(self, links: list[_Link], hits: int, absent: set[BlockKey]) -> int:
        """Return how many leading blocks the other groups, which need only the last ones, have as well."""
        windows = [(group, reach) for group, reach in enumerate(self._reaches) if reach is not None]
        for count in range(len(links), hits, -1):
            if all(
                self._has(link, group, absent)
                for group, reach in windows
                for link in reversed(links[max(0, count - reach) : count])
            ):
                return count
        return hits

    def _has(self, link: _Link, group: int, absent: set[BlockKey]) -> bool:
        if link.block(group) != NO_BLOCK:
            return True
        key = link.key(group)
        if key in absent:
            return False
        return any(tier.contains(key) for tier in (self._host, self._imported, self._disk) if tier is not None)

    def _read(self, key: BlockKey) -> Bytes | None:
        for tier in (self._host, self._imported, self._disk):
            if tier is not None and (data := tier.load(key)) is not None:
                return data
        return None

    def _has_room(self, needed: list[tuple[int, _Link]]) -> bool:
        """Whether the pools can allocate the missing blocks without evicting those that are hit."""
        taken = Counter(
            group
            for group, link in needed
            if (block := link.block(group)) == NO_BLOCK or self._pools[group].is_free(block)
        )
        return all(count <= self._pools[group].num_free for group, count in taken.items())

    def _publish(
        self,
        chain: HashChain,
        links: list[_Link],
        parent: PrefixNode | None,
        needed: list[tuple[int, _Link]],
        read: dict[BlockKey, Bytes],
    ) -> None:
        """Publish the blocks that were read, as cached ones. Those that are hit are held, so that none is evicted."""
        held = [(group, block) for group, link in needed if (block := link.block(group)) != NO_BLOCK]
        for group, block in held:
            self._pools[group].acquire(block)
        node = parent or self._index.extend(None, chain.root_digest, chain.root_key)
        nodes: dict[bytes, PrefixNode] = {}
        for link in links:
            if node is None or (child := self._index.extend(node, link.digest, link.token_bytes)) is None:
                break  # another prefix has this digest
            nodes[link.digest] = node = child
        if node is not None:
            self._index.hold(node)  # until its blocks are published, nothing else may refer to it
        for group, link in needed:
            if link.digest in nodes and link.block(group) == NO_BLOCK:
                (block,) = self._pools[group].allocate(1)
                self._pools[group].publish(block, nodes[link.digest])
                key = link.key(group)
                if self._host is not None and self._host.contains(key):
                    is_suspect = self._host.is_suspect(key)
                elif is_suspect := self._imported is not None and self._imported.contains(key):
                    self._imported.take(key)
                else:
                    nodes[link.digest].on_disk |= {group}
                if is_suspect:
                    self._pools[group].suspect(block)
                self._loads[group, block] = nodes[link.digest], BlockLoad(group, block, read[key])
                held.append((group, block))
        for group, block in reversed(held):
            self._pools[group].release([block])
        if node is not None:
            self._index.drop(node)

    def take_loads(self) -> tuple[BlockLoad, ...]:
        """Take the blocks to fill before the next step computes: those that were not evicted meanwhile."""
        loads, self._loads = self._loads, {}
        return tuple(load for node, load in loads.values() if node.blocks[load.group] == load.block)

    # -- storing in host memory

    def _note_eviction(self, host: HostTier, group: int, block: int, node: PrefixNode) -> None:
        """Note that a cached block loses its memory to a new owner."""
        if self._loads.pop((group, block), None) is not None:
            return  # it is not filled yet
        key = BlockKey(group, node.digest, node.token_bytes)
        if not host.touch(key):
            self._evicted.append(BlockStore(block, key, self._pools[group].is_suspect(block)))

    def take_evicted(self) -> tuple[BlockStore, ...]:
        """Take the blocks that the next step copies to host memory before anything is written to them."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def drop_evicted(self, stores: Iterable[BlockStore]) -> None:
        """Remove these blocks, and all that were evicted since the last step, from host memory: a step that should
        have filled them failed."""
        self._evicted.clear()
        if self._host is not None:
            for store in stores:
                self._host.discard(store.key)

    # -- storing on the disk

    def queue(self, tip: PrefixNode, depth: int, num_blocks: int) -> None:
        """Queue the first `num_blocks` blocks of a row's prefix, of `depth` blocks, for the disk. The beginning of a
        prefix is stored last: the disk evicts it last."""
        node = tip
        while node.parent is not None:
            depth -= 1
            if depth < num_blocks:
                for group, block in enumerate(node.blocks):
                    if block != NO_BLOCK and group not in node.on_disk:
                        node.on_disk |= {group}
                        self._stores.append((node, group))
            node = node.parent

    def take_stores(self, max_blocks: int) -> list[BlockStore]:
        """Take up to so many blocks that the disk is to have, and that are still published: they hold what their names
        say, until the next step is submitted."""
        chosen: list[BlockStore] = []
        while self._stores and len(chosen) < max_blocks:
            node, group = self._stores.popleft()
            if (block := node.blocks[group]) == NO_BLOCK:
                node.on_disk -= {group}
            elif group in node.on_disk:  # else it was discarded
                chosen.append(BlockStore(block, BlockKey(group, node.digest, node.token_bytes)))
        return chosen

    def discard(self, node: PrefixNode) -> None:
        """Remove a prefix's block, which led to non-finite values, from the tiers."""
        if self._disk is not None:
            for group in node.on_disk:
                self._disk.discard(BlockKey(group, node.digest, node.token_bytes))
            node.on_disk = frozenset()
        if self._host is not None:
            for group in range(len(self._pools)):
                self._host.discard(BlockKey(group, node.digest, node.token_bytes))
            self._evicted = [store for store in self._evicted if store.key.digest != node.digest]
