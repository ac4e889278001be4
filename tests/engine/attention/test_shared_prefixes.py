"""Groups of sequences whose first blocks are the same: as few blocks are read as by any grouping."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.attention import AttentionBatch, KVLayout
from engine.attention.native import NativeAttention
from engine.attention.shared_prefixes import shared_prefixes
from engine.plan import CacheGroup
from tests.native_paths import PATHS, native_path

Table = NDArray[np.int32]


def fewest_read(table: Table, whole: Table, rows: list[int], block: int) -> int:
    """Blocks that need not be read at best, of sequences that agree up to this block, by definition: at each block the
    group goes on, or ends and is cut into its branches."""
    if len(rows) < 2:
        return 0
    branches = defaultdict(list)
    for row in rows:
        if block < min(int(whole[row]), table.shape[1]):
            branches[int(table[row, block])].append(row)
    apart = sum(fewest_read(table, whole, branch, block + 1) for branch in branches.values())
    return max((len(rows) - 1) * block, apart)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, Table]:
    """Block tables of a few sequences, where a block that two of them have holds the same tokens, and their whole
    blocks."""
    count, width = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    tokens = draw(st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=count, max_size=count))
    blocks: dict[tuple[int, ...], int] = {}
    table = [[blocks.setdefault((*line[: i + 1],), len(blocks) + 1) for i in range(width)] for line in tokens]
    whole = draw(st.lists(st.integers(0, width + 1), min_size=count, max_size=count))
    return np.array(table, np.int32), np.array(whole, np.int32)


@settings(max_examples=300, deadline=None)
@given(tables())
@pytest.mark.slow
def test_no_grouping_saves_more(made: tuple[Table, Table]) -> None:
    table, whole = made
    found = shared_prefixes(table, whole)
    rows = [int(row) for own, _ in found for row in own]
    assert len(rows) == len(set(rows)), "a sequence is in one group"
    for own, blocks in found:
        assert len(own) >= 2
        assert 0 < blocks <= whole[own].min()
        assert (table[own, :blocks] == table[own[0], :blocks]).all()
    saved = sum((len(own) - 1) * blocks for own, blocks in found)
    assert saved == fewest_read(table, whole, list(range(len(table))), 0)


@pytest.mark.parametrize("path", PATHS[:1])
@settings(max_examples=50, deadline=None)
@given(tables())
def test_the_native_kernels_group_the_same_sequences(path: str, made: tuple[Table, Table]) -> None:
    """Where a block is as long as their tiles."""
    table, whole = made
    block = 256
    layout = KVLayout((CacheGroup((0,), None, 8),), block, 1, 16, 1)
    native = NativeAttention(layout, torch.float32, native_path(path, 1))
    table = np.pad(table, ((0, 0), (0, 2)))  # a sequence's last token is behind its whole blocks
    starts, one = (whole * block).astype(np.int32), np.ones(len(whole), np.int32)
    batch = AttentionBatch(starts, one, len(one), (table,), (np.zeros(len(one), np.int64),))
    found = shared_prefixes(table, whole)
    assert native.prepare(batch).tasks.shared_rows(0) == sum(len(rows) for rows, _ in found)
