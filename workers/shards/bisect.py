"""Finds the rows that make the engine's steps fail, by bisection, so that a poison row fails alone.

When a step raises, all of its rows are suspects. Suspects are tried again apart from all other rows, in ever smaller
halves. A row that fails alone, twice, has failed for good. Sampling depends on (seed, choice, position) only, so a row
that is computed again gives the same answer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from workers.rows import PreparedRow


class SuspectBisection:
    """The suspects, until each has succeeded or failed alone."""

    def __init__(self) -> None:
        self._groups: list[list[PreparedRow]] = []
        self._fresh: list[PreparedRow] = []
        self._reasons: set[str] = set()
        self._failed: set[str] = set()  # request ids of rows that were in a failed step before
        self._alone: str | None = None

    def __bool__(self) -> bool:
        """Whether there are rows to try. Meanwhile no other row should enter the engine."""
        return bool(self._groups or self._fresh)

    def suspect(self, groups: Iterable[list[PreparedRow]]) -> None:
        """Add groups of rows that may have ended an earlier process. Each is tried apart from all others, in this
        order."""
        self._groups[:0] = list(groups)[::-1]

    def remove(self, rows: Container[str]) -> None:
        """Remove the rows with these request ids."""
        self._fresh = [row for row in self._fresh if row.request.request_id not in rows]
        remaining = ([row for row in group if row.request.request_id not in rows] for group in self._groups)
        self._groups = [group for group in remaining if group]

    def step_failed(self, reason: str) -> None:
        """Record that a step raised; rows whose completion has the error `reason` are suspects."""
        self._reasons.add(reason)

    def is_step_failure(self, error: str | None) -> bool:
        """Whether a step failed with this error, which any of its rows may have caused."""
        return error in self._reasons

    def take(self, row: PreparedRow) -> bool:
        """Add a row that a failed step ended. False: it failed alone, and before that in another failed step, so it is
        not tried again. A single failure may be chance: rows are also alone after their process died."""
        name = row.request.request_id
        if name != self._alone or name not in self._failed:
            self._failed.add(name)
            self._fresh.append(row)
            return True
        return False

    def peek(self) -> Sequence[PreparedRow]:
        """The rows that `next_group` would return."""
        if self._fresh:
            middle = len(self._fresh) // 2
            self._groups += [half for half in (self._fresh[middle:], self._fresh[:middle]) if half]
            self._fresh = []
        return self._groups[-1] if self._groups else ()

    def next_group(self) -> Sequence[PreparedRow]:
        """Remove and return the rows to try next, in one batch. Call it when the engine is empty."""
        group = self.peek()
        if not group:
            return ()
        self._groups.pop()
        self._alone = group[0].request.request_id if len(group) == 1 else None
        return group
