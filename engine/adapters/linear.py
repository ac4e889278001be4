"""Low-rank products beside a decoder's own: by Triton's kernels on a CUDA device, elsewhere by torch's operators, a
pair for each run of tokens with one adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.adapter import Adapter, LowRank
from engine.adapters.targets import Product
from engine.adapters.tiles import TokenTiles
from engine.device_transfer import make_transfer
from engine.logs import get_logger
from engine.models.decoder import HeadAttention, Layer
from engine.models.experts import Mlp
from engine.quant.base import Linear

if TYPE_CHECKING:
    from engine.triton_kernels.low_rank import StackedLowRank

logger = get_logger(__name__)


def runs_of(slots: NDArray[np.int32] | None) -> Iterator[tuple[int, int, int]]:
    """Yield (slot, first token, token behind the last) of neighbours with one adapter; slots int32 [T], -1: none."""
    if slots is None or not len(slots):
        return
    borders = np.flatnonzero(np.diff(slots)) + 1
    for first, end in zip((0, *borders.tolist()), (*borders.tolist(), len(slots)), strict=True):
        if slots[first] >= 0:
            yield int(slots[first]), first, end


class LowRankSlots(Protocol):
    """What the adapters in slots add to one product."""

    def place(self, slot: int, change: LowRank | None) -> None:
        """Put a change, in the layers' dtype, into a slot; None: empty it."""
        ...

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add to y [T, out_features] what the adapters of the step's tokens make of x [T, in_features]."""
        ...


class StepRuns:
    """The runs of the step that is being computed; all products of a decoder read them.

    Attributes:
        runs: (slot, first token, token behind the last).
    """

    recordable = False

    def __init__(self) -> None:
        self.runs: tuple[tuple[int, int, int], ...] = ()

    def set(self, adapters: NDArray[np.int32] | TokenTiles | None) -> None:
        """Begin a step; adapters as of `Attend`."""
        assert not isinstance(adapters, TokenTiles), "only a step that is recorded has tiles already"
        self.runs = tuple(runs_of(adapters))

    def slots(self, base: Linear, max_loras: int, max_rank: int, dtype: torch.dtype) -> RunPairs:
        """Make the slots of a product."""
        return RunPairs(self, max_loras)


class RunPairs:
    """`LowRankSlots` by torch's operators: a pair of products for each run."""

    def __init__(self, step: StepRuns, max_loras: int) -> None:
        self._step = step
        self._changes: list[LowRank | None] = [None] * max_loras

    def place(self, slot: int, change: LowRank | None) -> None:
        """See `LowRankSlots.place`."""
        self._changes[slot] = change

    def add(self, x: Tensor, y: Tensor) -> None:
        """See `LowRankSlots.add`."""
        for slot, first, end in self._step.runs:
            if (change := self._changes[slot]) is not None:
                y[first:end] += F.linear(F.linear(x[first:end], change.a), change.b)


class StepTiles:
    """The tiles of the step that is being computed, for Triton's kernels.

    Args:
        upcast: see `StackedLowRank`.

    Attributes:
        tiles: None: no token has an adapter.
    """

    recordable = True

    def __init__(self, device: torch.device, *, upcast: bool = False) -> None:
        self.tiles: TokenTiles | None = None
        self._transfer = make_transfer(device)
        self._device = device
        self._upcast = upcast

    def set(self, adapters: NDArray[np.int32] | TokenTiles | None) -> None:
        """Begin a step; adapters as of `Attend`."""
        if isinstance(adapters, TokenTiles):
            self.tiles = adapters
        else:
            self.tiles = None if adapters is None else TokenTiles.of(adapters, self._transfer)

    def slots(self, base: Linear, max_loras: int, max_rank: int, dtype: torch.dtype) -> TiledProduct:
        """Make the slots of a product."""
        from engine.triton_kernels.low_rank import StackedLowRank  # noqa: PLC0415 - comes with CUDA's torch

        shape = max_loras, max_rank, base.in_features, base.out_features
        return TiledProduct(self, StackedLowRank(*shape, dtype, self._device, upcast=self._upcast))


class TiledProduct:
    """`LowRankSlots` by Triton's kernels."""

    def __init__(self, step: StepTiles, stacked: StackedLowRank) -> None:
        self._step = step
        self._stacked = stacked

    def place(self, slot: int, change: LowRank | None) -> None:
        """See `LowRankSlots.place`."""
        self._stacked.place(slot, change)

    def add(self, x: Tensor, y: Tensor) -> None:
        """See `LowRankSlots.add`."""
        if self._step.tiles is not None:
            self._stacked.add(x, y, self._step.tiles)


def make_step(device: torch.device) -> StepRuns | StepTiles:
    """Triton's kernels on a CUDA device, else torch's operators, and that is logged."""
    if device.type != "cuda":
        return StepRuns()
    if find_spec("triton") is None:
        logger.warning("adapters are multiplied one by one, which is slower", reason="triton is not installed")
        return StepRuns()
    return StepTiles(device)


class AdaptedLinear:
    """A `Linear`, and the low-rank products of the adapters in slots."""

    __slots__ = ("_base", "in_features", "out_features", "slots")

    def __init__(self, base: Linear, slots: LowRankSlots) -> None:
        self._base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.slots = slots

    def __call__(self, x: Tensor) -> Tensor:
        y = self._base(x)
        self.slots.add(x, y)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class TorchAdapter:
    """An adapter that slots can take.

    Attributes:
        buffer: all its matrices, in host memory, page-locked for a CUDA device: one copy brings them there.
        changes: (layer, product) -> what it adds, views of the buffer.
    """

    buffer: Tensor
    changes: Mapping[tuple[int, Product], LowRank]

    @property
    def nbytes(self) -> int:
        """Of all its matrices."""
        return self.buffer.nbytes


class AdaptedLayers:
    """A decoder's layers with slots for adapters.

    Args:
        max_ranks: of each product; 0: no adapter changes it.

    Attributes:
        layers: in the place of those without.
        step: of all their products.
        max_loras: slots.
    """

    def __init__(
        self, layers: tuple[Layer, ...], max_loras: int, max_ranks: Mapping[Product, int], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.step = make_step(device)
        self.max_loras = max_loras
        self._max_ranks = max_ranks
        self._dtype, self._device = dtype, device
        self._linears: dict[tuple[int, Product], AdaptedLinear] = {}
        self.layers = tuple(self._adapted(index, layer) for index, layer in enumerate(layers))

    def pack(self, adapter: Adapter) -> TorchAdapter:
        """Read an adapter into host memory, in the layers' dtype."""
        ranks = {at: rank for at in self._linears if (rank := adapter.rank(*at))}
        shapes = [(rank, self._linears[at].in_features, self._linears[at].out_features) for at, rank in ranks.items()]
        size = sum(rank * (columns + rows) for rank, columns, rows in shapes)
        buffer = torch.empty(size, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        packed = TorchAdapter(buffer, dict(zip(ranks, _views(buffer, shapes), strict=True)))
        for at, (a, b) in packed.changes.items():
            change = adapter.read(*at)
            assert change is not None
            a.copy_(change.a)
            b.copy_(change.b)
        return packed

    def place(self, slot: int, adapter: TorchAdapter | None) -> None:
        """Put an adapter into a slot, without waiting for the device; None: empty it."""
        there: dict[tuple[int, Product], LowRank] = {}
        if adapter is not None:
            shapes = [(*change.a.shape, len(change.b)) for change in adapter.changes.values()]
            buffer = adapter.buffer.to(self._device, non_blocking=True)
            there = dict(zip(adapter.changes, _views(buffer, shapes), strict=True))
        for at, linear in self._linears.items():
            linear.slots.place(slot, there.get(at))

    def _adapted(self, index: int, layer: Layer) -> Layer:
        assert isinstance(layer.attention, HeadAttention), "`find_targets` refuses other layers"
        attention = replace(layer.attention, qkv=self._linear(index, "qkv", layer.attention.qkv))
        output = self._linear(index, "output", layer.output)
        mlp = layer.mlp
        if isinstance(mlp, Mlp):
            mlp = Mlp(self._linear(index, "gate_up", mlp.gate_up), self._linear(index, "down", mlp.down))
        return replace(layer, attention=attention, output=output, mlp=mlp)

    def _linear(self, index: int, product: Product, base: Linear | None) -> Linear:
        assert base is not None
        if not (max_rank := self._max_ranks[product]):
            return base
        slots = self.step.slots(base, self.max_loras, max_rank, self._dtype)
        linear = self._linears[index, product] = AdaptedLinear(base, slots)
        return linear


def _views(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[LowRank]:
    """Cut a buffer into changes of these ranks, columns and rows, one behind the other."""
    at = 0
    for rank, columns, rows in shapes:
        middle, end = at + rank * columns, at + rank * (columns + rows)
        yield LowRank(buffer[at:middle].view(rank, columns), buffer[middle:end].view(rows, rank))
        at = end
