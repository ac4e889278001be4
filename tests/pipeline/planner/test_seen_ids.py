"""Ids are remembered exactly, in a dict, in runs and across merged runs alike."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planner.seen_ids import RUNS_TO_MERGE, SeenIds

batches = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=12), max_size=40)


@settings(deadline=None, max_examples=50)
@given(batches, st.integers(1, 10))
def test_the_first_row_of_every_id_is_known(batches: list[list[int]], run_ids: int) -> None:
    firsts: dict[str, int] = {}
    row = 0
    with tempfile.TemporaryDirectory() as folder:
        seen = SeenIds(Path(folder), run_ids)
        for batch in batches:
            names = [f"id {number}" for number in batch]
            rows = list(range(row, row + len(names)))
            expected = [
                None if firsts.setdefault(name, at) == at else firsts[name]
                for name, at in zip(names, rows, strict=True)
            ]
            assert seen.add(names, rows) == expected
            row += len(names)
        assert not list(Path(folder).iterdir())


def test_many_ids_take_few_runs_and_none_is_mistaken_for_another() -> None:
    """Given 40,000 ids in runs of 1,000, then runs were merged, every repeat is found and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        seen = SeenIds(Path(folder), 1000)
        for start in range(0, 40_000, 500):
            names = [f"request-{number}" for number in range(start, start + 500)]
            assert seen.add(names, range(start, start + 500)) == [None] * 500
        assert len(seen._runs) < 40_000 // 1000 // RUNS_TO_MERGE + RUNS_TO_MERGE
        sample = np.random.default_rng(0).permutation(40_000)[:2000].tolist()
        assert seen.add([f"request-{number}" for number in sample], range(50_000, 52_000)) == sample
