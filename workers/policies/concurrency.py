"""Judges the texts of many rows, several at a time where a policy waits for another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Row = TypeVar("Row")
Result = TypeVar("Result")


def for_each_row(work: Callable[[Row], Result], rows: Sequence[Row], concurrency: int) -> list[Result]:
    """The results of `work` for each row, in their order; raises what it raises."""
    if concurrency == 1 or len(rows) < 2:
        return [work(row) for row in rows]
    with ThreadPoolExecutor(min(concurrency, len(rows)), "policy") as pool:
        return list(pool.map(work, rows))
