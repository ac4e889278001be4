"""Finds the rows that make the engine's steps fail, so that one poisoned row costs only itself.

When a step raises, every row of it is suspect. Suspects are tried again apart from all others, in halves of halves;
what fails alone has failed for good. Sampling depends on (seed, choice, position) only, so a row that is computed
again gives the same answer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from workers.rows import PreparedRow


class SuspectBisection:
    """Rows of failed steps, until they are cleared or condemned."""

    def __init__(self) -> None:
        self._groups: list[list[PreparedRow]] = []
        self._fresh: list[PreparedRow] = []
        self._reasons: set[str] = set()
        self._failed: set[str] = set()  # request ids of rows that a failed step had before
        self._alone: str | None = None

    def __bool__(self) -> bool:
        """Whether there are rows to try; meanwhile nothing else should enter the engine."""
        return bool(self._groups or self._fresh)

    def suspect(self, groups: Iterable[list[PreparedRow]]) -> None:
        """Rows that may have ended the process before: each group is tried apart from all others, in this order."""
        self._groups[:0] = list(groups)[::-1]

    def drop(self, rows: Container[str]) -> None:
        """Forget the rows with these request ids."""
        self._fresh = [row for row in self._fresh if row.request.request_id not in rows]
        kept = ([row for row in group if row.request.request_id not in rows] for group in self._groups)
        self._groups = [group for group in kept if group]

    def step_failed(self, reason: str) -> None:
        """A step raised; completions whose error is `reason` are suspects."""
        self._reasons.add(reason)

    def concerns(self, error: str | None) -> bool:
        """Whether a step failed with this, which any row of it may have caused."""
        return error in self._reasons

    def take(self, row: PreparedRow) -> bool:
        """Whether the row, ended by a failed step, is to be tried again; False: it failed alone, and not only once.
        Once may be chance, and rows are also alone when their process has died."""
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
        """The rows to try next, together; to be called when the engine is empty."""
        group = self.peek()
        if not group:
            return ()
        self._groups.pop()
        self._alone = group[0].request.request_id if len(group) == 1 else None
        return group
