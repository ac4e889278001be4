"""The order of rows within a segment: duplicates once, shared prefixes adjacent, long answers first.

Prefix chains form a forest: a node is a prefix that at least two requests share. Requests run in depth-first order, at
each level the subtree with the longest expected answer first. So every shared prefix is computed once while its blocks
are still cached, and long answers start early, which keeps the job's tail short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_GROUP = -1
INNER_READERS = 8  # minimum readers of a prefix inside a shared one for a group of its own
MAX_TOKENS = 2**31 - 1

Ints = NDArray[np.int64]


def find_leaders(request_hashes: NDArray[np.uint64], shareable: NDArray[np.bool_], max_copies: int) -> Ints:
    """The leader of each request, whose answer it takes: its own index when it is computed.

    Args:
        request_hashes: [requests, 2].  shareable: [requests], False is always computed.
        max_copies: maximum number of requests that wait for one leader; the next equal one is a leader again.
    Returns:
        int64 [requests]; a leader is the earliest of the requests that take its answer.
    """
    count = len(shareable)
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((request_hashes[:, 1], request_hashes[:, 0]))  # stable: equal ones stay in input order
    ordered = request_hashes[order]
    first = np.ones(count, dtype=bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first |= ~shareable[order]
    indices = np.arange(count)
    rank = indices - np.maximum.accumulate(np.where(first, indices, 0))
    first |= rank % (max_copies + 1) == 0
    leaders = np.empty(count, dtype=np.int64)
    leaders[order] = order[np.maximum.accumulate(np.where(first, indices, 0))]
    return leaders


@dataclass(frozen=True, slots=True)
class PrefixChains:
    """Prefix chains of many requests, concatenated.

    Attributes (E entries of R requests):
        hashes: int64 [E].  sizes: int32 [E], bytes covered.  depths: int64 [R], entries of each request.
    """

    hashes: Ints
    sizes: NDArray[np.int32]
    depths: Ints

    def take(self, indices: Ints) -> PrefixChains:
        """The chains of the requests at `indices`, in that order."""
        depths = self.depths[indices]
        starts = (np.cumsum(self.depths) - self.depths)[indices]
        ends = np.cumsum(depths)
        entries = np.arange(int(depths.sum())) + np.repeat(starts - (ends - depths), depths)
        return PrefixChains(self.hashes[entries], self.sizes[entries], depths)


@dataclass(frozen=True, slots=True)
class RunningOrder:
    """A running order of requests. All arrays have one entry a request, in running order.

    Attributes:
        order: int64, indices.
        joined: bool, must stay in one shard with the previous request.
        groups: int64, hash of the shared prefix worth caching for this request, or `NO_GROUP`.
        group_ends: int64, the index after the last request that begins with that prefix, including nested groups:
            readers of a prefix are always adjacent.
        shared_bytes: prompt bytes of all requests that an earlier request has computed.
    """

    order: Ints
    joined: NDArray[np.bool_]
    groups: Ints
    group_ends: Ints
    shared_bytes: int


def arrange(
    models: NDArray[np.int32],
    expected: NDArray[np.int32],
    chains: PrefixChains,
    *,
    min_group_rows: int,
    min_prefix_bytes: int,
) -> RunningOrder:
    """Order requests by model, prefix and expected answer.

    Args:
        models: [R], model codes: the first sort key.  expected: [R], tokens of the answer.
        min_group_rows: prefixes shared by fewer requests are not split between shards.
        min_prefix_bytes: minimum bytes that a nested group must add to the outer group's prefix.
    """
    indices = np.arange(len(expected), dtype=np.int64)
    alone = _sort_key(expected, indices)  # of a request without a (further) shared prefix
    keys: list[Ints] = []
    memberships = _Memberships(len(expected), min_group_rows, min_prefix_bytes)
    starts = np.cumsum(chains.depths) - chains.depths
    shared_bytes = 0
    active = indices  # requests whose prefix at the previous depth was shared
    while len(active := active[chains.depths[active] > len(keys)]):
        depth = len(keys)
        entries = starts[active] + depth
        node, first, readers, longest = _nodes(chains.hashes[entries], active, expected[active])
        edge = chains.sizes[entries] - (chains.sizes[entries - 1] if depth else 0)
        shared = readers[node] > 1
        shared_bytes += int(edge[shared & (active != first[node])].sum())
        active, node, entries = active[shared], node[shared], entries[shared]
        if not len(active):
            break
        key = alone.copy()
        key[active] = _sort_key(longest, first)[node]
        keys.append(key)
        memberships.descend(depth, active, chains.hashes[entries], chains.sizes[entries], readers[node])
    sort_keys: list[NDArray[np.integer]] = [alone, *reversed(keys), models]
    order = np.lexsort(sort_keys)
    small = memberships.small[order]
    joined = np.zeros(len(order), dtype=bool)
    joined[1:] = (small[1:] == small[:-1]) & (small[1:] != NO_GROUP)
    depths = memberships.depths[order]
    ends = np.zeros(len(order), dtype=np.int64)
    for depth, key in enumerate(keys):
        chosen = depths == depth
        ends[chosen] = _run_ends(key[order])[chosen]
    return RunningOrder(order, joined, memberships.groups[order], ends, shared_bytes)


class _Memberships:
    """The group of each request, one of its shared prefixes; filled from short prefixes to long ones.

    A nested prefix is a group of its own when it adds enough bytes and has enough readers; with the same readers it
    replaces the shorter one.

    Attributes ([R], by index):
        groups, depths: the group's hash and depth, or `NO_GROUP`.
        small: the shortest shared prefix with too few readers to be split, or `NO_GROUP`.
    """

    def __init__(self, count: int, min_group_rows: int, min_prefix_bytes: int) -> None:
        self.groups = np.full(count, NO_GROUP, dtype=np.int64)
        self.depths = np.full(count, NO_GROUP, dtype=np.int64)
        self.small = np.full(count, NO_GROUP, dtype=np.int64)
        self._readers = np.zeros(count, dtype=np.int64)
        self._bytes = np.zeros(count, dtype=np.int64)
        self._min_group_rows = min_group_rows
        self._min_prefix_bytes = min_prefix_bytes

    def descend(self, depth: int, active: Ints, hashes: Ints, sizes: NDArray[np.int32], readers: Ints) -> None:
        """Add the shared prefixes of one depth: for requests `active`, the prefix and its number of readers."""
        small = (readers < self._min_group_rows) & (self.small[active] == NO_GROUP)
        self.small[active[small]] = hashes[small]
        worth = (readers >= INNER_READERS) & (sizes - self._bytes[active] >= self._min_prefix_bytes)
        better = (self.groups[active] == NO_GROUP) | (readers == self._readers[active]) | worth
        chosen = active[better]
        self.groups[chosen] = hashes[better]
        self.depths[chosen] = depth
        self._readers[chosen] = readers[better]
        self._bytes[chosen] = sizes[better]


def _run_ends(values: Ints) -> Ints:
    """For each index, the end of its run of equal values."""
    ends = np.append(np.flatnonzero(values[1:] != values[:-1]) + 1, len(values))
    return np.repeat(ends, np.diff(ends, prepend=0))


def _nodes(hashes: Ints, indices: Ints, expected: NDArray[np.int32]) -> tuple[Ints, Ints, Ints, NDArray[np.int32]]:
    """Group equal hashes into nodes: each entry's node, and each node's first index, size and longest expected
    answer."""
    order = np.argsort(hashes, kind="stable")  # indices ascend, so they do within a node
    ordered = hashes[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    sizes = np.diff(np.append(begins, len(hashes)))
    node = np.empty(len(hashes), dtype=np.int64)
    node[order] = np.repeat(np.arange(len(begins)), sizes)
    return node, indices[order[begins]], sizes, np.maximum.reduceat(expected[order], begins)


def _sort_key(expected: NDArray[np.int32], first: Ints) -> Ints:
    """A sort key: longest expected answer first, then input order; unique for each `first` (below 2**32)."""
    return ((MAX_TOKENS - expected.astype(np.int64)) << 32) | first
