"""Cursor pagination over a tenant's index: a page starts after a given id, in either order, and reads only its
length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal, TypeVar

from pipeline.ledger.tenant_index import TenantIndex
from pipeline.ports import ObjectStore

DEFAULT_LIMIT: Final = 20
MAX_BATCHES_PER_PAGE: Final = 100
MAX_FILES_PER_PAGE: Final = 10_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The parameters of a page. `after`: the id of the previous page's last item, which may have been deleted since."""

    limit: int = DEFAULT_LIMIT
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


def list_ids(store: ObjectStore, tenant_index: TenantIndex, page: PageRequest) -> Iterator[str]:
    """List the ids in the page's order, starting after its `after`."""
    names = tenant_index.newest if page.order == "desc" else tenant_index.oldest
    return names(store, page.after)


def take_page(items: Iterable[T | None], limit: int) -> tuple[list[T], bool]:
    """The first `limit` items that aren't None, and whether more follow."""
    taken = list(islice((item for item in items if item is not None), limit + 1))
    return taken[:limit], len(taken) > limit


def map_chunks(read: Callable[[str], T], names: Iterable[str], map_: Callable[..., Iterable[T]], size: int) -> Any:
    """Apply `read` to the names lazily, in chunks of `size` that `map_` (an executor's `map`) reads in parallel."""
    names = iter(names)
    while chunk := list(islice(names, size)):
        yield from map_(read, chunk)
