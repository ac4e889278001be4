"""The block tables of all rows, over all cache groups: hits, growth, windows, publishing, release.

All groups' tables of a row have the same length; tables only grow at the end. In a sliding-window group the blocks
wholly behind the window of the next position to be computed are released, at the latest when the row needs its
next block. Their entries become `NO_BLOCK`; they stay cached until evicted. So a prefix hit of k blocks needs:

    full attention    all k blocks
    window w          the ceil((w - 1) / block_size) blocks before position k * block_size, or all k when fewer
    states            the block before position k * block_size

and the hit is the longest k on which all groups agree. A long prompt whose early window blocks were evicted still hits
at its end; a request that shares only its first part hits there only while those blocks have not been evicted.

In a group of layers with states (`engine.states`) not every block gets a slot: the last block of a row does, the one
before it when the row grows past it, each `snapshot_blocks`-th, the ends of retained prefixes, and those behind which
waiting sequences part, or those that came earlier.

Second tiers (`engine.cache.tiering`) may hold copies of blocks; `load` fetches those of a prefix before `match`.

A row can also borrow the last, partly filled block of another row, to be copied before it writes there (`borrow`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.cache.block_tier import BlockKey, BlockTier
from engine.cache.blocks import BlockPool
from engine.cache.host_tier import HostTier
from engine.cache.imported_blocks import ImportedBlocks
from engine.cache.prefix import Digest, HashChain, PrefixIndex, PrefixNode, chain_digest
from engine.cache.tiering import Tiering
from engine.plan import NO_BLOCK, BlockCopy, BlockRef, CacheGroup, RowState
from engine.request import Request

_UNPUBLISHED = np.iinfo(np.int32).max  # `published` of a row whose blocks are not (or no longer) published


class CacheTables:
    """Owns the pools and writes `RowState.block_tables`.

    Attributes (R rows):
        pools: one per group.
        length: int32 [R], entries of the row's tables in use.
        first: per group int32 [R], the first entry not released behind the window (0 without a window).
        published: int32 [R], leading blocks whose prefix has a node (which may refer to another block).
        retained: by row, the request whose prefixes are retained (`Request.retain`), of rows that have any.
        state_groups: indices of the groups of layers with states.
        borrowed: by row, of rows whose last block is another row's: its first positions that hold their tokens too.
        readers_known: bool [R], whether all readers of the row's blocks are registered (`Request.readers_known`).
        tiering: exchanges blocks with second tiers; None: there is none.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        rows: RowState,
        *,
        prefix_caching: bool,
        digest: Digest = chain_digest,
    ) -> None:
        num_rows = len(rows.num_known)
        self.groups = groups
        self.block_size = rows.block_size
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex(len(groups), digest)
        self.pools = [BlockPool(i, group.num_blocks, self.index) for i, group in enumerate(groups)]
        self.length = np.zeros(num_rows, dtype=np.int32)
        self.first = [np.zeros(num_rows, dtype=np.int32) for _ in groups]
        self.published = np.zeros(num_rows, dtype=np.int32)
        self.readers_known = np.zeros(num_rows, dtype=np.bool_)
        self.retained: dict[int, Request] = {}
        self.borrowed: dict[int, int] = {}
        self._copies: list[BlockCopy] = []
        self._sources: list[tuple[BlockPool, int, bool]] = []  # of the copies: block, and `readers_known` of its reader
        self._rows = rows
        self._tables = rows.block_tables
        self._tips: list[PrefixNode | None] = [None] * num_rows
        self.state_groups = [i for i, group in enumerate(groups) if group.snapshot_blocks is not None]
        self._windows = [(i, group.window) for i, group in enumerate(groups) if group.window is not None]
        self._full = [i for i, group in enumerate(groups) if group.window is None]
        self._reaches = [None if group.window is None else self.blocks_for(group.window - 1) for group in groups]
        self.tiering: Tiering | None = None

    def use_tiers(
        self, host: HostTier | None, imported: ImportedBlocks | None, disk: BlockTier | None, max_loads: int
    ) -> None:
        """Set the second tiers. `max_loads`: blocks of a full-attention group that one step may load."""
        self.tiering = Tiering(host, imported, disk, self.pools, self.index, self._reaches, self.block_size, max_loads)

    def set_time(self, now: float) -> None:
        """Set the time (seconds) that retained blocks are retained from."""
        for pool in self.pools:
            pool.now = now

    def retained_tokens(self, request: Request) -> int:
        """Return the prompt tokens whose blocks a request retains."""
        longest = max((tokens for tokens, _ in request.retain), default=0)
        return longest // self.block_size * self.block_size if self.prefix_caching else 0

    def blocks_for(self, positions: int) -> int:
        """Return the number of blocks that hold `positions` leading positions."""
        return -(-positions // self.block_size)

    def first_needed(self, window: int, position: int) -> int:
        """Return the index of the first block that a query at `position` sees."""
        return max(0, position - window + 1) // self.block_size

    def match(self, chain: HashChain, tokens: NDArray[np.int32], row: int | None = None) -> list[PrefixNode]:
        """Return the nodes that would be hit next, verified token by token; may be empty.

        Args:
            tokens: int32 [known]; at least the last one is always left to compute.
            row: the running row, computed so far to a block border; None for a sequence without a row.
        """
        if not self.prefix_caching:
            return []
        start, parent = self._end_of_hits(chain, row)
        size, nodes = self.block_size, []
        for block in range(start, (len(tokens) - 1) // size):
            if parent is None:
                break
            token_bytes = tokens[block * size : (block + 1) * size].tobytes()
            parent = self.index.find(parent, chain.of_block(block, token_bytes), token_bytes)
            if parent is None or any(parent.blocks[group] == NO_BLOCK for group in self._full):
                break
            nodes.append(parent)
        return nodes[: self._agreed(nodes, start)] if self._windows else nodes

    def num_cached(self, chain: HashChain, tokens: NDArray[np.int32]) -> int:
        """Return how many leading blocks of a new sequence the pools would hit now. Any thread may call it: it only
        looks nodes up, and a prefix that is evicted meanwhile makes the number wrong, and nothing else."""
        return len(self.match(chain, tokens))

    def _end_of_hits(self, chain: HashChain, row: int | None) -> tuple[int, PrefixNode | None]:
        """Return the index of the next block that could be hit, and the node of the prefix before it, if it has one."""
        if row is None:
            return 0, self.index.find(None, chain.root_digest, chain.root_key)
        start = int(self.length[row])
        return start, self._tips[row] if self.published[row] == start else None

    def load(self, chain: HashChain, tokens: NDArray[np.int32], row: int | None = None) -> bool:
        """Load blocks of a prefix from second tiers, where they have a longer part of it than the pools. `match`, which
        takes the same arguments, hits them, and the step that is being planned fills them. Returns whether a later step
        can load more."""
        if self.tiering is None or not self.prefix_caching:
            return False
        start, parent = self._end_of_hits(chain, row)
        if row is not None and parent is None:
            return False
        return self.tiering.load(chain, tokens, start, parent, len(self.match(chain, tokens, row)))

    def _agreed(self, nodes: list[PrefixNode], start: int) -> int:
        """Return how many leading `nodes` (blocks start, start + 1, …) the window groups can hit as well."""
        agreed = [True] * (len(nodes) + 1)
        for group, window in self._windows:
            reach = self.blocks_for(window - 1)
            run = 0
            for i, node in enumerate(nodes):
                run = run + 1 if node.blocks[group] != NO_BLOCK else 0
                if run < min(i + 1, reach):
                    agreed[i + 1] = False
        return max(i for i, ok in enumerate(agreed) if ok)

    def expect_reader(self, digests: Sequence[bytes]) -> None:
        """Register a sequence that will read the blocks with these digests, in their order: other blocks are evicted
        first. Of these the last is evicted first: without its beginning, the rest of a prefix hits nothing."""
        for digest in reversed(digests):
            self._requeue(self.index.expect(digest))

    def dismiss_reader(self, digests: Sequence[bytes]) -> None:
        """Unregister one `expect_reader`: blocks without registered readers are evicted first."""
        for digest in reversed(digests):
            self._requeue(self.index.dismiss(digest))

    def _requeue(self, node: PrefixNode | None) -> None:
        if node is not None:
            for pool, block in zip(self.pools, node.blocks, strict=True):
                if block != NO_BLOCK:
                    pool.requeue(block)

    def free_hits(self, nodes: list[PrefixNode], start: int = 0) -> list[int]:
        """Return, per group, how many free blocks these hits use."""
        end = start + len(nodes)
        taken = []
        for group, pool in enumerate(self.pools):
            skip = self._behind(group, end) - start
            taken.append(sum(pool.is_free(node.blocks[group]) for node in nodes[max(0, skip) :]))
        return taken

    def held_hits(self, num_blocks: int) -> list[int]:
        """Return, per group, the table entries of a sequence after hitting its first `num_blocks` blocks."""
        return [num_blocks - min(num_blocks, self._behind(group, num_blocks)) for group in range(len(self.pools))]

    def _behind(self, group: int, num_blocks: int) -> int:
        """Return the leading table entries of the group behind the window of position num_blocks * block_size."""
        window = self.groups[group].window
        return 0 if window is None else self.first_needed(window, num_blocks * self.block_size)

    def open(self, row: int, chain: HashChain, request: Request) -> None:
        """Start an empty row's chain."""
        self.readers_known[row] = request.readers_known
        if request.retain:
            self.retained[row] = request
            self.share(row, self.retained_tokens(request) // self.block_size)
        root = self.index.extend(None, chain.root_digest, chain.root_key) if self.prefix_caching else None
        if root is None:
            self.published[row] = _UNPUBLISHED
        else:
            self._move_tip(row, root)

    def take(self, row: int, nodes: list[PrefixNode], confirmed: int = 0) -> None:
        """Append the hit blocks to the row's tables; the caller advances num_computed (`confirmed`: see `release`)."""
        start = int(self.length[row])
        end = start + len(nodes)
        self.release_behind(row, end * self.block_size, confirmed)
        for group, pool in enumerate(self.pools):
            keep = max(start, self._behind(group, end))
            table = self._tables[group][row]
            for block in range(keep, end):
                physical = nodes[block - start].blocks[group]
                pool.acquire(physical)
                table[block] = physical
                if row in self.retained:
                    self._retain(row, block, pool, physical)
            if keep > start:
                self.first[group][row] = keep
        self.length[row] = self.published[row] = end
        self._move_tip(row, nodes[-1])

    def share(self, row: int, num_blocks: int) -> None:
        """Note that other requests have, or may have, the row's first blocks, so that the second tier on disk gets
        them."""
        if self.tiering is not None and self.tiering.has_disk and num_blocks:
            self.tiering.shared[row] = max(num_blocks, self.tiering.shared.get(row, 0))

    def confirm(self, row: int, positions: int) -> None:
        """Note that a row's first positions led to finite values: the second tier on disk gets its shared blocks, if
        they are among them."""
        tiering, tip, depth = self.tiering, self._tips[row], int(self.published[row])
        if tiering is not None and positions // self.block_size >= tiering.shared.get(row, _UNPUBLISHED):
            shared = tiering.shared.pop(row)
            if tip is not None and depth != _UNPUBLISHED:
                tiering.queue(tip, depth, shared)

    def blocks_to_export(self, row: int, positions: int) -> list[tuple[BlockKey, int, int]]:
        """Return the names and blocks that a hit of the row's first `positions` needs, each with its index in the
        prefix, the beginning first, as far as they are published."""
        node, depth = self._tips[row], int(self.published[row])
        if node is None or depth == _UNPUBLISHED:
            return []
        end = min(depth, positions // self.block_size)
        found: list[tuple[BlockKey, int, int]] = []
        while node.parent is not None:
            depth -= 1
            for group, (block, reach) in enumerate(zip(node.blocks, self._reaches, strict=True)):
                if block != NO_BLOCK and depth < end and (reach is None or depth >= end - reach):
                    found.append((BlockKey(group, node.digest, node.token_bytes), block, depth))
            node = node.parent
        return found[::-1]

    def num_held(self, group: int, row: int) -> int:
        """Return how many blocks of the group the row has."""
        length, first = int(self.length[row]), int(self.first[group][row])
        if group not in self.state_groups:
            return length - first
        return int(np.count_nonzero(self._tables[group][row, first:length]))

    def has_block(self, row: int, block: int) -> bool:
        """Whether the row has the block at this index of its tables in all groups."""
        return block < self.length[row] and all(table[row, block] != NO_BLOCK for table in self._tables)

    def borrow(self, row: int, source: int, tokens: int) -> None:
        """Append the block that another row, `source`, has at the same index. Its first `tokens` positions hold the
        row's tokens: `grow` copies them to a block of the row's own. The caller advances num_computed."""
        end = int(self.length[row])
        for pool, table in zip(self.pools, self._tables, strict=True):
            pool.share(int(table[source, end]))
            table[row, end] = table[source, end]
        self.length[row] = end + 1
        self.borrowed[row] = tokens

    def _own_borrowed(self, row: int) -> None:
        """Replace the row's borrowed block with a new one, and plan the copy. Until the plan is complete, nothing else
        can be written to the source."""
        last, tokens = int(self.length[row]) - 1, self.borrowed.pop(row)
        for group, (pool, table) in enumerate(zip(self.pools, self._tables, strict=True)):
            source = int(table[row, last])
            (target,) = pool.allocate(1)
            table[row, last] = target
            self._copies.append(BlockCopy(group, source, target, tokens))
            self._sources.append((pool, source, bool(self.readers_known[row])))

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Take the copies planned since the last call, which must be made before the next step."""
        copies, self._copies = tuple(self._copies), []
        for pool, source, readers_known in self._sources:
            pool.release([source], readers_known)
        self._sources.clear()
        return copies

    def _cut(self, group: int, row: int, start: int, end: int, confirmed: int) -> list[int]:
        """Clear the row's entries from index `start` up to `end`; returns their blocks (`confirmed`: see `release`)."""
        table = self._tables[group][row, start:end]
        blocks: list[int] = table.tolist()
        table[:] = NO_BLOCK
        if group in self.state_groups:  # a slot is written whole before it is read
            return [block for block in blocks if block != NO_BLOCK]
        for block in blocks[max(0, confirmed // self.block_size - start) :]:
            self.pools[group].suspect(block)
        return blocks

    def release_behind(self, row: int, position: int, confirmed: int) -> None:
        """Release the blocks that no query at `position` or later sees (`confirmed`: see `release`)."""
        for group, window in self._windows:
            first, needed = int(self.first[group][row]), self.first_needed(window, position)
            needed = min(needed, int(self.length[row]))
            if needed > first:
                if group in self.state_groups:
                    self._drop_passing(group, row, first, needed)
                blocks = self._cut(group, row, first, needed, confirmed)
                self.pools[group].release(blocks, bool(self.readers_known[row]))
                self.first[group][row] = needed

    def _drop_passing(self, group: int, row: int, first: int, end: int) -> None:
        """Unpublish those of a row's states that lie inside its answer, but for snapshots: nobody is likely to read
        them, and they would evict those of prompts."""
        every, of_prompt = self.groups[group].snapshot_blocks, int(self._rows.prompt_len[row]) // self.block_size
        assert every is not None
        for block in range(max(first, of_prompt), end):
            if (block + 1) % every and (slot := int(self._tables[group][row, block])) != NO_BLOCK:
                self.pools[group].drop(slot)

    def needed(self, length: int, num_blocks: int) -> list[int]:
        """Return, per group, the blocks that tables of `length` entries need to grow to `num_blocks`."""
        more = num_blocks - length
        if not self.state_groups:
            return [more] * len(self.pools)
        return [
            more if group.snapshot_blocks is None else len(_slots(length, num_blocks, group.snapshot_blocks))
            for group in self.groups
        ]

    def grow(self, row: int, num_blocks: int, chain: HashChain | None = None) -> bool:
        """Lengthen the row's tables to `num_blocks`, all of them its own or published ones; False, and nothing changed,
        when a pool has too few.

        Args:
            chain: the row's; None: its states may be rolled back to any of the new blocks, so each gets a slot.
        """
        length = int(self.length[row])
        more, borrows = num_blocks - length, row in self.borrowed
        if more + borrows <= 0:
            return True
        needed = [more] * len(self.pools) if chain is None else self.needed(length, num_blocks)
        if any(pool.num_free < count + borrows for pool, count in zip(self.pools, needed, strict=True)):
            return False
        if borrows:
            self._own_borrowed(row)
        for index, (pool, table) in enumerate(zip(self.pools, self._tables, strict=True)):
            if index in self.state_groups:
                entries = self._state_entries(index, row, num_blocks, chain)
                table[row, entries] = pool.allocate(len(entries))
            else:
                table[row, length:num_blocks] = pool.allocate(more)
        self.length[row] = num_blocks
        return True

    def _state_entries(self, group: int, row: int, num_blocks: int, chain: HashChain | None) -> list[int]:
        """Return the new entries of a row that get a slot: those needed and, as far as slots are free, the ends of
        prefixes that its request retains, and those behind which waiting sequences, or earlier ones, part."""
        length, every = int(self.length[row]), self.groups[group].snapshot_blocks
        assert every is not None
        if chain is None:
            return list(range(length, num_blocks))
        entries = _slots(length, num_blocks, every)
        spare = self.pools[group].num_free - len(entries)
        readers = [self.index.num_readers(chain.known(block)) for block in range(length, num_blocks)]
        wanted = [length + i for i, (own, after) in enumerate(pairwise(readers)) if own > after]
        if row in self.retained:
            ends = (tokens // self.block_size - 1 for tokens, _ in self.retained[row].retain)
            wanted = [*(block for block in ends if length <= block < num_blocks), *wanted]
        more = [block for block in dict.fromkeys(wanted) if block not in entries]
        return sorted([*entries, *more[: max(0, spare)]])

    def shrink(self, row: int, num_blocks: int, confirmed: int) -> None:
        """Shorten the row's tables to `num_blocks`: blocks of rejected drafts are released (`confirmed`: see
        `release`). Published blocks hold only known tokens, and are not affected."""
        length = int(self.length[row])
        if num_blocks >= length:
            return
        for group, pool in enumerate(self.pools):
            pool.release(reversed(self._cut(group, row, num_blocks, length, confirmed)))
        self.length[row] = num_blocks

    def publish(self, row: int, chain: HashChain, computed: int) -> None:
        """Publish every full block before position `computed`, which the step being planned will reach."""
        tip = self._tips[row]
        if tip is None:
            return
        size, tokens = self.block_size, self._rows.token_ids[row]
        for block in range(int(self.published[row]), computed // size):
            token_bytes = tokens[block * size : (block + 1) * size].tobytes()
            tip = self.index.extend(tip, chain.of_block(block, token_bytes), token_bytes)
            if tip is None:  # another prefix has this digest: later blocks can't be published
                self.published[row] = _UNPUBLISHED
                return
            self._move_tip(row, tip)
            for pool, table in zip(self.pools, self._tables, strict=True):
                if (physical := int(table[row, block])) != NO_BLOCK:
                    pool.publish(physical, tip)
            if row in self.retained:
                for pool, published in zip(self.pools, tip.blocks, strict=True):
                    if published != NO_BLOCK:
                        self._retain(row, block, pool, published)
            self.published[row] = block + 1

    def _retain(self, row: int, block: int, pool: BlockPool, physical: int) -> None:
        """Retain the block at a row's table index, if one of its request's prefixes covers it."""
        end = (block + 1) * self.block_size
        request = self.retained[row]
        seconds = max((seconds for tokens, seconds in request.retain if tokens >= end), default=0.0)
        if seconds:
            pool.retain(physical, seconds, request.salt)

    def _move_tip(self, row: int, node: PrefixNode | None) -> None:
        old, self._tips[row] = self._tips[row], node
        if node is not None:
            self.index.hold(node)
        if old is not None:
            self.index.drop(old)

    def release(self, row: int, confirmed: int) -> None:
        """Empty a row, tail first.

        Args:
            confirmed: positions before this one led to finite logits. Blocks reaching beyond may hold non-finite
                values that were not detected yet, so they are zeroed before another sequence writes to them.
        """
        if self.tiering is not None:
            self.tiering.shared.pop(row, None)
        length = int(self.length[row])
        for group, pool in enumerate(self.pools):
            blocks = self._cut(group, row, int(self.first[group][row]), length, confirmed)
            pool.release(reversed(blocks), bool(self.readers_known[row]))
            self.first[group][row] = 0
        self.length[row] = self.published[row] = 0
        self.retained.pop(row, None)
        self.borrowed.pop(row, None)
        self._move_tip(row, None)

    def withdraw(self, row: int) -> None:
        """Unpublish all blocks of the row's prefix, which led to non-finite values."""
        node = self._tips[row]
        while node is not None:
            parent = node.parent  # withdrawing may remove the node
            if self.tiering is not None:
                self.tiering.discard(node)
            for group, (pool, block) in enumerate(zip(self.pools, list(node.blocks), strict=True)):
                if block != NO_BLOCK:
                    if group not in self.state_groups:
                        pool.suspect(block)
                    pool.withdraw(block)
            node = parent

    def forget(self) -> None:
        """Unpublish every cached block."""
        for pool in self.pools:
            for block, _ in list(pool.named()):
                pool.withdraw(block)

    def take_dirty(self) -> tuple[BlockRef, ...]:
        """Take the blocks allocated since the last call that must be zeroed before use."""
        return tuple(BlockRef(group, block) for group, pool in enumerate(self.pools) for block in pool.take_dirty())

    def check_integrity(self) -> None:
        """Check every block's references over all tables; raises AssertionError with the arithmetic."""
        holders: dict[int, int] = {}
        for group, pool in enumerate(self.pools):
            table = self._tables[group]
            for row, length in enumerate(self.length.tolist()):
                held, outside = table[row, self.first[group][row] : length], table[row, length:]
                lacks = held[-1:] if group in self.state_groups else held
                if (lacks == NO_BLOCK).any() or outside.any() or table[row, : self.first[group][row]].any():
                    raise AssertionError(f"group {group} row {row}: table {table[row].tolist()}, length {length}")
            refs = np.bincount(table[table != NO_BLOCK], minlength=pool.num_blocks)
            pool.check(refs)
            for _, node in pool.named():
                holders[id(node)] = holders.get(id(node), 0) + 1
        for tip in self._tips:
            if tip is not None:
                holders[id(tip)] = holders.get(id(tip), 0) + 1
        self.index.check(holders)


def _slots(length: int, num_blocks: int, every: int) -> list[int]:
    """Return the entries that need a slot when a table grows from `length` to `num_blocks`: the last one; the one
    before it, which is the last full block of a prompt that ends there; and each `every`-th."""
    last = range(max(length, num_blocks - 2), num_blocks)
    return [*(block for block in range(length, last.start) if (block + 1) % every == 0), *last]
