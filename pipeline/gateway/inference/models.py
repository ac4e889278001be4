"""The models of the catalog, in the format of OpenAI's API."""

from __future__ import annotations

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.response_models import Model, ModelExtension, ModelList
from pipeline.models.catalog import Catalog
from pipeline.ports import ObjectStore
from schemas.jobs.batch import unix_time
from schemas.models import CatalogEntry


class ServedModels:
    """The models that a root serves."""

    def __init__(self, store: ObjectStore) -> None:
        self._catalog = Catalog(store)

    def page(self) -> ModelList:
        """The list of all models."""
        return ModelList(data=[_response(entry) for entry in self._catalog.entries()])

    def get(self, name: str) -> Model:
        """The model with this name; raises `ApiError` (404)."""
        entry = self._catalog.find(name)
        if entry is None:
            known = ", ".join(other.pin.name for other in self._catalog.entries()) or "none yet: start a worker"
            message = f"model {name[:80]!r} is not served here ({known})"
            raise ApiError(404, "model_not_found", message, param="model")
        return _response(entry)


def _response(entry: CatalogEntry) -> Model:
    pin = entry.pin
    return Model(
        id=pin.name,
        created=unix_time(entry.published_at) or 0,
        max_model_len=entry.max_model_len,
        tokenmill=ModelExtension(
            digest=pin.digest,
            revision=pin.revision,
            dtype=pin.dtype,
            quantization=pin.quantization,
            kv_dtype=pin.kv_dtype,
            engine=pin.engine,
            engine_version=pin.engine_version,
        ),
    )
