"""Finds the models to which content policies send requests."""

from __future__ import annotations

import threading
from typing import Final, Protocol

from pipeline.models.catalog import Catalog
from pipeline.ports import Clock, ObjectStore, PipelineError
from schemas.requests.errors import RowError, RowErrorCode
from schemas.workers.lane import Route
from workers.policies.policy import PromptRouted

_CACHE_SECONDS: Final = 5.0


class FindModel(Protocol):
    """Finds a served model by its name."""

    def __call__(self, name: str) -> str | None:
        """`ModelPin.key`; None: it isn't served. Raises `PipelineError` where the catalog can't be read."""
        ...


def no_models(name: str) -> str | None:
    """There are no other models."""
    return None


class CatalogModels:
    """The models of a root's catalog, each cached for a few seconds. Thread-safe."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._catalog = Catalog(store)
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[str, tuple[float, str | None]] = {}  # name -> (when it expires, key); policies name few

    def __call__(self, name: str) -> str | None:
        """See `FindModel`."""
        now = self._clock.monotonic()
        with self._lock:
            known = self._found.get(name)
        if known is not None and now < known[0]:
            return known[1]
        entry = self._catalog.find(name)
        key = None if entry is None else entry.pin.key
        with self._lock:
            self._found[name] = now + _CACHE_SECONDS, key
        return key


def route_of(routed: PromptRouted, find_model: FindModel) -> Route:
    """The route of a request. Raises `RowError` if the model isn't served or the catalog can't be read."""
    what = f"content policy {routed.policy!r} routes the prompt to model {routed.model!r}"
    try:
        key = find_model(routed.model)
    except PipelineError as error:
        message = f"{what}, and the catalog can't be read; send the request again"
        raise RowError(RowErrorCode.ENGINE_ERROR, message) from error
    if key is None:
        message = f"{what}, which is not served here; serve it, or change the policy"
        raise RowError(RowErrorCode.ENGINE_ERROR, message)
    return Route(key, routed.model, routed.report)
