"""Which adapters are loaded: a fixed number of places, taken on demand and given away by last use.

An adapter keeps its place while a running row uses it. A request whose adapter finds none is set aside, and others that
have a place go first. So that it is not set aside for ever, the adapter with the fewest rows then gets no more of them:
its place becomes free when these have ended.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

from engine.errors import RequestRefused


class AdapterPlaces:
    """The places of a model's adapters.

    Args:
        digests: names of all adapters -> 16 bytes that identify them.
        max_loras: places.

    Attributes:
        digests: as given.
        names: [max_loras], of the adapter in each place, or None.
        draining: the adapter whose place is to become free; None: there is none.
    """

    def __init__(self, digests: Mapping[str, bytes] | None = None, max_loras: int = 0) -> None:
        self.digests = dict(digests or {})
        self.names: list[str | None] = [None] * max_loras
        self.draining: str | None = None
        self._draining_for = 0
        self._places: OrderedDict[str, int] = OrderedDict()  # the least recently used first
        self._rows = Counter[str]()

    def check(self, name: str | None) -> None:
        """Raise `RequestRefused` if there is no such adapter."""
        if name is not None and name not in self.digests:
            known = ", ".join(sorted(self.digests)) or "none"
            raise RequestRefused(f"there is no adapter {name!r}; there are: {known}")

    def digest(self, name: str | None) -> bytes:
        """Return what identifies an adapter: keys and values depend on it. Empty: there is none."""
        return b"" if name is None else self.digests[name]

    def place(self, name: str | None) -> int:
        """Return the place of a running row's adapter; -1: it has none."""
        return -1 if name is None else self._places[name]

    @property
    def num_idle(self) -> int:
        """Places that no running row uses."""
        return len(self.names) - len(self._rows)

    @property
    def num_used(self) -> int:
        """Adapters that running rows use."""
        return len(self._rows)

    def has_place(self, name: str | None, priority: int) -> bool:
        """Whether a sequence with this adapter may have a row."""
        if name is None:
            return True
        if self._rows[name]:
            return name != self.draining or priority < self._draining_for
        return name in self._places or self.num_idle > 0

    def is_used(self, name: str) -> bool:
        """Whether running rows use the adapter."""
        return name in self._rows

    def take(self, name: str | None) -> None:
        """Count a row that starts to run; `has_place` must be true. The adapter gets a place if it has none."""
        if name is None:
            return
        if name not in self._places:
            if None in self.names:
                place = self.names.index(None)
            else:
                place = self._places.pop(next(other for other in self._places if other not in self._rows))
            self.names[place] = name
            self._places[name] = place
        self._places.move_to_end(name)
        self._rows[name] += 1

    def release(self, name: str | None) -> None:
        """Count off a row that has ended or was preempted."""
        if name is None:
            return
        self._rows[name] -= 1
        if not self._rows[name]:
            del self._rows[name]

    def drain(self, priority: int | None) -> None:
        """Free a place for sequences of this class that are set aside; None: there are none."""
        if priority is None:
            self.draining = None
            return
        self._draining_for = priority
        if self.draining not in self._rows:
            self.draining = min(self._rows, key=self._rows.__getitem__, default=None)

    def check_rows(self, rows: Counter[str]) -> None:
        """Compare the counts of running rows by adapter; raises AssertionError with the arithmetic."""
        if rows != self._rows:
            raise AssertionError(f"rows by adapter are {rows}, but {self._rows} are counted")
