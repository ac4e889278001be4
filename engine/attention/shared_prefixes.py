"""Finds decoding sequences whose first blocks are the same memory, so that attention can read these once for all.

The native kernels find them by the same rule on their own tiles of keys (`TaskBuilder::share` in native/csrc). The
algorithm walks the intervals of equal prefixes of the sorted block tables (Abouelhoda et al. 2004, "Replacing suffix
trees with enhanced suffix arrays", section 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SharedPrefix(NamedTuple):
    """Sequences that share their first blocks.

    Attributes:
        rows: intp [n], two or more, their lines of the block table.
        blocks: that they share.
    """

    rows: NDArray[np.intp]
    blocks: int


@dataclass(slots=True)
class _Node:
    """Sorted sequences from `begin` on that share `common` blocks; what their branches save, and how."""

    common: int
    begin: int
    saved: int = 0
    chosen: list[tuple[int, int, int]] = field(default_factory=list)


def shared_prefixes(table: NDArray[np.int32], whole_blocks: NDArray[np.int32]) -> list[SharedPrefix]:
    """Group sequences so that the fewest blocks are read; a sequence is in one group at most.

    Taking n sequences together over b blocks saves reading (n - 1) b blocks: a node of the tree of prefixes becomes one
    group, or is cut into its branches, whatever saves more.

    Args:
        table: int32 [B, width], blocks of each sequence.
        whole_blocks: int32 [B], of each sequence, that are full: only those can be shared as they are.
    """
    count, width = table.shape
    if count < 2 or len(np.unique(table[:, 0])) == count:
        return []
    # Where a sequence has no whole block it differs from all others, at the latest behind the table's last column.
    whole_blocks = np.minimum(whole_blocks, width)
    lines = np.empty((count, width + 1), ">u4")
    own = ~np.arange(count, dtype=np.uint32)
    lines[:] = own[:, None]
    np.copyto(lines[:, :width], table, where=np.arange(width) < whole_blocks[:, None], casting="unsafe")
    order = np.argsort(lines.view(f"V{lines.itemsize * lines.shape[1]}")[:, 0], kind="stable")
    lines = lines[order]
    common = np.argmax(lines[1:] != lines[:-1], axis=1).tolist()
    stack = [_Node(0, 0)]
    for end, shared in enumerate([*common, 0], start=1):
        begin = end - 1
        while stack[-1].common > shared:
            node = stack.pop()
            begin, together = node.begin, (end - node.begin - 1) * node.common
            if together >= node.saved:
                node.saved, node.chosen = together, [(node.begin, end, node.common)]
            if stack[-1].common < shared:
                stack.append(_Node(shared, begin))
            stack[-1].saved += node.saved
            stack[-1].chosen += node.chosen
        if stack[-1].common < shared:
            stack.append(_Node(shared, begin))
    return [SharedPrefix(order[begin:end], blocks) for begin, end, blocks in stack[0].chosen]
