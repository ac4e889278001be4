"""Pages of what a tenant has: a page is a listing that goes on behind the last one's id, in either order, and reads no
further than it is long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal, TypeVar

from pipeline.ledger.tenant_index import TenantIndex
from pipeline.ports import ObjectStore

DEFAULT_LIMIT: Final = 20
MOST_BATCHES: Final = 100
MOST_FILES: Final = 10_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What is asked for. `after`: the id of the last one that was seen; it needn't exist any more."""

    limit: int = DEFAULT_LIMIT
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


@dataclass(frozen=True, slots=True)
class PageResult:
    """A page as OpenAI's clients read it. `data`: each has an `id`."""

    data: Sequence[dict[str, Any]]
    has_more: bool

    def document(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": list(self.data),
            "first_id": self.data[0]["id"] if self.data else None,
            "last_id": self.data[-1]["id"] if self.data else None,
            "has_more": self.has_more,
        }


def ids_behind(store: ObjectStore, shelf: TenantIndex, page: PageRequest) -> Iterator[str]:
    """Ids in the page's order, behind its `after`."""
    names = shelf.newest if page.order == "desc" else shelf.oldest
    return names(store, page.after)


def fill(found: Iterable[T | None], limit: int) -> tuple[list[T], bool]:
    """The first `limit` of those that are something, and whether there are more."""
    some = list(islice((one for one in found if one is not None), limit + 1))
    return some[:limit], len(some) > limit


def map_ahead(look: Callable[[str], T], names: Iterable[str], together: Callable[..., Iterable[T]], size: int) -> Any:
    """`look` at the names, `size` of them at a time by `together` (an executor's `map`), no further than is read."""
    names = iter(names)
    while some := list(islice(names, size)):
        yield from together(look, some)
