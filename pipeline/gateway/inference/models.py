"""The models of the catalog, in the format of OpenAI's API."""

from __future__ import annotations

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.response_models import Model, ModelExtension, ModelList, VirtualModelExtension
from pipeline.models.catalog import Catalog
from pipeline.models.virtual_models import VirtualModels
from pipeline.ports import ObjectStore
from schemas.jobs.batch import unix_time
from schemas.models import CatalogEntry, merged_hint
from schemas.virtual_models import VirtualModel


class ServedModels:
    """The models that a root serves."""

    def __init__(self, store: ObjectStore) -> None:
        self._catalog = Catalog(store)
        self._virtual = VirtualModels(store)

    def page(self) -> ModelList:
        """The list of all models."""
        served = [_response(entry) for entry in self._catalog.entries()]
        names = {model.id for model in served}
        virtual = [self._describe(one) for one in self._virtual.all() if one.name not in names]
        return ModelList(data=served + [one for one in virtual if one is not None])

    def get(self, name: str) -> Model:
        """The model with this name; raises `ApiError` (404)."""
        entry = self._catalog.find(name)
        if entry is None:
            virtual = self._virtual.find(name)
            if virtual is not None and (described := self._describe(virtual)) is not None:
                return described
            served = [other.pin for other in self._catalog.entries()]
            known = ", ".join(pin.name for pin in served) or "none yet: start a worker"
            message = f"model {name[:80]!r} is not served here ({known}){merged_hint(served, name)}"
            raise ApiError(404, "model_not_found", message, param="model")
        return _response(entry)

    def _describe(self, virtual: VirtualModel) -> Model | None:
        """A virtual model, with the shortest context of its models; None: none of them is in the catalog any more."""
        entries = [entry for name in virtual.models if (entry := self._catalog.find(name)) is not None]
        if not entries:
            return None
        return Model(
            id=virtual.name,
            created=unix_time(virtual.published_at) or 0,
            root=virtual.name,
            max_model_len=min(entry.max_model_len for entry in entries),
            tokenmill=VirtualModelExtension(models=list(virtual.models)),
        )


def _response(entry: CatalogEntry) -> Model:
    pin = entry.pin
    return Model(
        id=pin.name,
        created=unix_time(entry.published_at) or 0,
        root=pin.adapter or pin.source,
        parent=pin.base,
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
