"""The models of the catalog, in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.records import seconds
from pipeline.models.catalog import Catalog
from pipeline.ports import ObjectStore
from schemas.models import CatalogEntry


class ServedModels:
    """The models that a root serves."""

    def __init__(self, store: ObjectStore) -> None:
        self._catalog = Catalog(store)

    def page(self) -> dict[str, Any]:
        """The list of all models."""
        return {"object": "list", "data": [_document(entry) for entry in self._catalog.entries()]}

    def get(self, name: str) -> dict[str, Any]:
        """The model with this name; raises `ApiError` (404)."""
        entry = self._catalog.find(name)
        if entry is None:
            known = ", ".join(other.pin.name for other in self._catalog.entries()) or "none yet: start a worker"
            message = f"model {name[:80]!r} is not served here ({known})"
            raise ApiError(404, "model_not_found", message, param="model")
        return _document(entry)


def _document(entry: CatalogEntry) -> dict[str, Any]:
    pin = entry.pin
    return {
        "id": pin.name,
        "object": "model",
        "created": seconds(entry.published_at) or 0,
        "owned_by": "tokenmill",
        "max_model_len": entry.max_model_len,
        "tokenmill": {
            "digest": pin.digest,
            "revision": pin.revision,
            "dtype": pin.dtype,
            "quantization": pin.quantization,
            "kv_dtype": pin.kv_dtype,
        },
    }
