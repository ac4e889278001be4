"""The index of a job's custom_ids with their first rows: exact over any number of rows, in bounded memory.

Digests of the newest ids are in a dict; a full dict becomes a sorted, memory-mapped file, and small files are merged
into larger ones. A look-up is a few binary searches over a whole batch at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
RUN_IDS = 1 << 17
RUNS_TO_MERGE = 16
MAX_LEVEL = 1  # merging needs twice the merged run's memory: 100 MB
DIGEST = np.dtype(f"S{DIGEST_BYTES}")  # numpy drops trailing zero bytes, from both sides of every comparison


T = TypeVar("T", bound=np.generic)


class _Run(NamedTuple):
    """Digests in ascending order, and the first row of each; both mapped from files."""

    level: int
    digests: NDArray[np.bytes_]
    rows: NDArray[np.int64]


class SeenIds:
    """The ids of one job. `folder` is used only by this object; its files take 24 bytes an id."""

    def __init__(self, folder: Path, run_ids: int = RUN_IDS) -> None:
        self._folder = folder
        self._run_ids = run_ids
        self._recent: dict[bytes, int] = {}
        self._runs: list[_Run] = []
        self._files = 0

    def add(self, custom_ids: Sequence[str], rows: Sequence[int]) -> list[int | None]:
        """Add ids in row order; returns for each its first row, or None when it is new."""
        digests = [
            blake2b(name.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest() for name in custom_ids
        ]
        older = self._find_in_runs(digests)
        firsts: list[int | None] = []
        for digest, row, first in zip(digests, rows, older, strict=True):
            if first < 0:
                first = self._recent.setdefault(digest, row)
            firsts.append(None if first == row else first)
        if len(self._recent) >= self._run_ids:
            self._flush()
        return firsts

    def _find_in_runs(self, digests: list[bytes]) -> list[int]:
        """The row of each digest in the runs, or -1."""
        wanted = np.array(digests, dtype=DIGEST)
        found = np.full(len(digests), -1, dtype=np.int64)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run.digests, wanted), len(run.digests) - 1)
            hit = run.digests[at] == wanted
            found[hit] = run.rows[at[hit]]
        return [int(row) for row in found]

    def _flush(self) -> None:
        digests = np.array(list(self._recent.keys()), dtype=DIGEST)
        rows = np.array(list(self._recent.values()), dtype=np.int64)
        self._recent.clear()
        self._add_run(0, digests, rows)
        level = 0
        while level < MAX_LEVEL and len(group := [run for run in self._runs if run.level == level]) >= RUNS_TO_MERGE:
            self._runs = [run for run in self._runs if run.level != level]
            level += 1
            digests = np.concatenate([run.digests for run in group])
            self._add_run(level, digests, np.concatenate([run.rows for run in group]))

    def _add_run(self, level: int, digests: NDArray[np.bytes_], rows: NDArray[np.int64]) -> None:
        order = np.argsort(digests, kind="stable")
        self._runs.append(_Run(level, self._mapped(digests[order]), self._mapped(rows[order])))

    def _mapped(self, values: NDArray[T]) -> NDArray[T]:
        path = self._folder / f"ids-{self._files}.npy"
        self._files += 1
        np.save(path, values)
        mapped: NDArray[T] = np.load(path, mmap_mode="r")
        path.unlink()  # the mapping keeps the bytes; no file is left behind, even after a crash
        return mapped
