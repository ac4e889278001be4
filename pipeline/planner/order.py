"""In which order a segment's requests run: no work twice, shared prefixes side by side, long answers first.

Prefix chains make a forest: a node is a prefix that at least two requests share. Requests run in depth-first order,
at each level the subtree with the longest expected answer first. So every shared prefix is computed once while its
blocks are still warm, and long answers start early, so that the end of a job is not a lonely tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_GROUP = -1
MOST_TOKENS = 2**31 - 1

Ints = NDArray[np.int64]


def find_leaders(request_hashes: NDArray[np.uint64], shareable: NDArray[np.bool_], max_copies: int) -> Ints:
    """For each request the one whose answer it takes: its own index when it is computed.

    Args:
        request_hashes: [requests, 2].  shareable: [requests], False is always computed.
        max_copies: most requests that wait for one leader; the next equal one leads again.
    Returns:
        int64 [requests]; a leader is the earliest of those that take its answer.
    """
    count = len(shareable)
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((request_hashes[:, 1], request_hashes[:, 0]))  # stable: equal ones stay in input order
    ordered = request_hashes[order]
    first = np.ones(count, dtype=bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first |= ~shareable[order]
    places = np.arange(count)
    rank = places - np.maximum.accumulate(np.where(first, places, 0))
    first |= rank % (max_copies + 1) == 0
    leaders = np.empty(count, dtype=np.int64)
    leaders[order] = order[np.maximum.accumulate(np.where(first, places, 0))]
    return leaders


@dataclass(frozen=True, slots=True)
class Chains:
    """Prefix chains of many requests, end to end.

    Attributes (E entries of R requests):
        hashes: int64 [E].  sizes: int32 [E], bytes covered.  depths: int64 [R], entries of each request.
    """

    hashes: Ints
    sizes: NDArray[np.int32]
    depths: Ints

    def take(self, indices: Ints) -> Chains:
        """The chains of some requests, in the order of `indices`."""
        depths = self.depths[indices]
        starts = (np.cumsum(self.depths) - self.depths)[indices]
        ends = np.cumsum(depths)
        entries = np.arange(int(depths.sum())) + np.repeat(starts - (ends - depths), depths)
        return Chains(self.hashes[entries], self.sizes[entries], depths)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How requests run.

    Attributes (R requests):
        order: int64 [R], indices in running order.
        joined: bool [R], in running order: must stay in one shard with the request before it.
        groups: int64 [R], by index: the longest shared prefix (its hash), or `NO_GROUP`.
        shared_bytes: prompt bytes that an earlier request has computed.
    """

    order: Ints
    joined: NDArray[np.bool_]
    groups: Ints
    shared_bytes: int


def arrange(models: NDArray[np.int32], expected: NDArray[np.int32], chains: Chains, min_group_rows: int) -> Arrangement:
    """Order requests by model, prefix and expected answer.

    Args:
        models: [R], model codes: the first sort key.  expected: [R], tokens of the answer.
        min_group_rows: prefixes shared by fewer requests are not split between shards.
    """
    count = len(expected)
    indices = np.arange(count, dtype=np.int64)
    alone = _sort_key(expected, indices)  # of a request that shares nothing (any more)
    keys: list[Ints] = []
    groups = np.full(count, NO_GROUP, dtype=np.int64)
    small = np.full(count, NO_GROUP, dtype=np.int64)  # the largest unsplittable prefix a request has
    starts = np.cumsum(chains.depths) - chains.depths
    shared_bytes = 0
    active, depth = indices, 0  # those whose prefix at the depth before was shared
    while len(active := active[chains.depths[active] > depth]):
        entries = starts[active] + depth
        node, first, size, longest = _nodes(chains.hashes[entries], active, expected[active])
        edge = chains.sizes[entries] - (chains.sizes[entries - 1] if depth else 0)
        shared = size[node] > 1
        shared_bytes += int(edge[shared & (active != first[node])].sum())
        active, node = active[shared], node[shared]
        if not len(active):
            break
        key = alone.copy()
        key[active] = _sort_key(longest, first)[node]
        keys.append(key)
        groups[active] = chains.hashes[starts[active] + depth]
        now_small = (size[node] < min_group_rows) & (small[active] == NO_GROUP)
        small[active[now_small]] = groups[active[now_small]]
        depth += 1
    sort_keys: list[NDArray[np.integer]] = [alone, *reversed(keys), models]
    order = np.lexsort(sort_keys)
    joined = np.zeros(count, dtype=bool)
    ordered = small[order]
    joined[1:] = (ordered[1:] == ordered[:-1]) & (ordered[1:] != NO_GROUP)
    return Arrangement(order, joined, groups, shared_bytes)


def _nodes(hashes: Ints, indices: Ints, expected: NDArray[np.int32]) -> tuple[Ints, Ints, Ints, NDArray[np.int32]]:
    """Equal hashes as nodes: each entry's node, and each node's first index, size and longest expected answer."""
    order = np.argsort(hashes, kind="stable")  # indices ascend, so they do within a node
    ordered = hashes[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    sizes = np.diff(np.append(begins, len(hashes)))
    node = np.empty(len(hashes), dtype=np.int64)
    node[order] = np.repeat(np.arange(len(begins)), sizes)
    return node, indices[order[begins]], sizes, np.maximum.reduceat(expected[order], begins)


def _sort_key(expected: NDArray[np.int32], first: Ints) -> Ints:
    """Ascends with falling expectation, then with the input's order; unique for each `first` (below 2**32)."""
    return ((MOST_TOKENS - expected.astype(np.int64)) << 32) | first
