"""The order of the fields in each row's prompt, chosen so that rows share prefixes as long as possible.

Greedy Group Recursion (Liu et al., "Optimizing LLM Queries in Relational Data Analytics Workloads", MLSys 2025, section
4.2): the value that repeats most, weighted by its squared length, comes first in all rows that have it; their other
fields are ordered likewise, and so are the other rows. Functional dependencies between columns need no declaration
here: a column that depends on the chosen one repeats in the whole group, and so comes next.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

FieldOrder = tuple[int, ...]


def order_fields(rows: Sequence[Sequence[str]]) -> list[FieldOrder]:
    """The order of each row's fields, as indices. Fields that share nothing keep the given order.

    Args:
        rows: [rows][fields], the text of each field as prompts have it.

    Time grows as rows · fields² · log(rows), and memory as rows · fields.
    """
    orders: list[FieldOrder] = [()] * len(rows)
    open_groups = [(list(range(len(rows))), tuple(range(len(rows[0]) if rows else 0)), FieldOrder())]
    while open_groups:
        members, fields, prefix = open_groups.pop()
        left = set(members)
        for field, group in _groups(rows, members, fields, left):
            open_groups.append((group, tuple(other for other in fields if other != field), (*prefix, field)))
        for row in left:
            orders[row] = prefix + fields
    return orders


def _groups(
    rows: Sequence[Sequence[str]], members: Sequence[int], fields: Sequence[int], left: set[int]
) -> list[tuple[int, list[int]]]:
    """The groups of rows that begin with the same field, the best first. Their rows are removed from `left`.

    A group's gain only shrinks as other groups take rows from it, so its old gain in the heap is an upper bound: it is
    computed again when the group comes up.
    """
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row in members:
        for field in fields:
            groups[field, rows[row][field]].append(row)
    heap = [(-_gain(text, len(group)), field, text) for (field, text), group in groups.items() if len(group) > 1]
    heapq.heapify(heap)
    chosen = []
    while heap:
        bound, field, text = heapq.heappop(heap)
        group = [row for row in groups[field, text] if row in left]
        gain = _gain(text, len(group))
        if gain == -bound:
            left.difference_update(group)
            chosen.append((field, group))
        elif gain > 0:
            groups[field, text] = group
            heapq.heappush(heap, (-gain, field, text))
    return chosen


def _gain(text: str, count: int) -> int:
    """The squared length of what `count` rows don't compute again."""
    return len(text) ** 2 * (count - 1)


def shared_characters(rows: Sequence[Sequence[str]], orders: Sequence[FieldOrder]) -> int:
    """Characters of whole fields that another row's prompt begins with as well, and that are computed once: the hits of
    a prefix cache that forgets nothing. The order of the rows doesn't matter."""
    children: dict[tuple[int, str], int] = {}
    shared = 0
    for row, order in zip(rows, orders, strict=True):
        node = 0
        for field in order:
            known = len(children)
            child = children.setdefault((node, row[field]), known + 1)
            if len(children) == known:
                shared += len(row[field])
            node = child
    return shared
