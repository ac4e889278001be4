"""A store whose owner dies at one of its calls, or lets others continue there: for tests that repeat a history for each
call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.ports import ObjectInfo, ObjectStore


class Killed(BaseException):
    """The process is gone. Nothing of the pipeline's may catch it."""


class WatchedStore:
    """`ObjectStore` that reports each call before it is made.

    Attributes:
        calls: what was called with which key, in order.
    """

    def __init__(self, store: ObjectStore, before: Callable[[int], None] = lambda nth: None) -> None:
        self.calls: list[tuple[str, str]] = []
        self._store = store
        self._before = before

    def _point(self, call: str, key: str) -> None:
        self.calls.append((call, key))
        self._before(len(self.calls))

    def create(self, key: str, data: bytes | Path) -> bool:
        self._point("create", key)
        return self._store.create(key, data)

    def read(self, key: str) -> bytes:
        self._point("read", key)
        return self._store.read(key)

    def open(self, key: str) -> BinaryIO:
        self._point("open", key)
        return self._store.open(key)

    def info(self, key: str) -> ObjectInfo | None:
        self._point("info", key)
        return self._store.info(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._point("list", prefix)
        return self._store.list(prefix, after)

    def folders(self, prefix: str) -> Iterator[str]:
        self._point("folders", prefix)
        return self._store.folders(prefix)

    def delete(self, key: str) -> None:
        self._point("delete", key)
        self._store.delete(key)

    def replace(self, key: str, data: bytes) -> None:
        self._point("replace", key)
        self._store.replace(key, data)

    def locate(self, key: str) -> str:
        return self._store.locate(key)


def dies_at(nth: int) -> Callable[[int], None]:
    """Dies before its call number `nth`, counted from 1."""

    def before(call: int) -> None:
        if call >= nth:
            raise Killed

    return before


def lets_in(nth: int, others: Callable[[], object]) -> Callable[[int], None]:
    """Others go on before its call number `nth`, counted from 1."""

    def before(call: int) -> None:
        if call == nth:
            others()

    return before
