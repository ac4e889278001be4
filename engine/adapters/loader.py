"""The adapters that requests may name, and which of them the model has in its places.

Those that lose their place stay in memory, the most recently used ones, so that the next time they aren't read again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.adapters.adapter import Adapter, open_adapter
from engine.adapters.places import AdapterPlaces
from engine.adapters.targets import PRODUCTS
from engine.config import LoraConfig
from engine.errors import EngineError, UnsupportedModel
from engine.logs import get_logger
from engine.models.base import AdaptedModel, CausalModel, PackedAdapter

logger = get_logger(__name__)


class AdapterLoader:
    """Puts adapters into a model's places, as the steps' plans name them.

    Args:
        model: with places.
        adapters: all, by name.
        cache_bytes: as `LoraConfig.cache_bytes`.

    Attributes:
        loads: how often each adapter was read from its files.
        reserved_bytes: of host memory that adapters without a place may come to take.
    """

    def __init__(self, model: AdaptedModel, adapters: Mapping[str, Adapter], max_loras: int, cache_bytes: int) -> None:
        self.loads = Counter[str]()
        self._model = model
        self._adapters = dict(adapters)
        self._loaded: list[str | None] = [None] * max_loras
        self._cache_bytes = cache_bytes
        self._packed: OrderedDict[str, PackedAdapter] = OrderedDict()  # with and without a place; the oldest first
        max_ranks = {product: max(one.max_rank(product) for one in adapters.values()) for product in PRODUCTS}
        model.add_places(max_loras, max_ranks)
        # The largest ones show how much memory places take, before the KV cache gets the rest.
        largest = sorted(adapters.values(), key=lambda adapter: -adapter.num_elements)
        self.load([adapter.name for adapter in largest[:max_loras]])
        placed = sum(adapter.num_elements for adapter in largest[:max_loras])
        element_bytes = sum(packed.nbytes for packed in self._packed.values()) / max(1, placed)
        others = sum(adapter.num_elements for adapter in largest[max_loras:])
        self.reserved_bytes = min(cache_bytes, int(others * element_bytes))

    @property
    def resident_bytes(self) -> int:
        """Bytes of host memory of the adapters in places, and of others that may come to be kept."""
        return sum(packed.nbytes for packed in self._packed.values()) + self.reserved_bytes

    def make_places(self) -> AdapterPlaces:
        """Return the scheduler's view of the places."""
        digests = {name: adapter.digest for name, adapter in self._adapters.items()}
        return AdapterPlaces(digests, len(self._loaded))

    def load(self, names: Sequence[str | None]) -> None:
        """Put what a step's plan has in each place there; a place without a name stays as it is."""
        for place, name in enumerate(names):
            if name is not None and name != self._loaded[place]:
                self._loaded[place] = None  # while it is neither the old nor the new one
                self._model.place_adapter(place, self._take(name))
                self._loaded[place] = name
                self._evict()

    def _take(self, name: str) -> PackedAdapter:
        packed = self._packed.pop(name, None)
        if packed is None:
            packed = self._model.pack_adapter(self._adapters[name])
            self.loads[name] += 1
        self._packed[name] = packed
        return packed

    def _evict(self) -> None:
        """Free adapters without a place until the others take no more than `cache_bytes`."""
        idle = [name for name in self._packed if name not in self._loaded]
        excess = sum(self._packed[name].nbytes for name in idle) - self._cache_bytes
        for name in idle:
            if excess <= 0:
                break
            excess -= self._packed.pop(name).nbytes


def load_adapters(config: LoraConfig, model: CausalModel) -> AdapterLoader | None:
    """Open all adapters and make places for them; None: there are none.

    Raises:
        EngineError: two have one name, or there is no place.  UnsupportedModel: the model takes none, or an adapter
            does more than is supported.  ModelNotFound, CorruptWeights: as `open_adapter`.
    """
    if not config.adapters:
        return None
    if config.max_loras < 1:
        raise EngineError(f"max_loras is {config.max_loras}, but must be 1 or more")
    if not isinstance(model, AdaptedModel):
        raise UnsupportedModel(
            f"adapters are not supported for {model.spec.architecture}, which transformers' code computes; merge the "
            "adapter into the model"
        )
    adapters: dict[str, Adapter] = {}
    for name, folder in config.adapters:
        if not name or name in adapters:
            raise EngineError(f"the adapter name {name!r} is {'given twice' if name else 'empty'}; names must differ")
        adapters[name] = open_adapter(name, Path(folder), model.decoder_spec)
    places = min(config.max_loras, len(adapters))
    logger.info("adapters are ready", adapters=len(adapters), places=places)
    return AdapterLoader(model, adapters, places, config.cache_bytes)
