"""Tensors that a checkpoint stores stacked, seen one by one: q, k and v, or gate and up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoints.checkpoint import PartSource, WeightSource
from engine.errors import CorruptWeights
from engine.quant.weight import QWeight


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows first ... end - 1 of a stored tensor of `total` rows."""

    stored: str
    first: int
    end: int
    total: int


class UnstackedWeights:
    """A `WeightSource` with the parts of stacked tensors under names of their own."""

    def __init__(self, source: WeightSource, stacked: Mapping[str, Mapping[str, int]]) -> None:
        """`stacked`: stored module (its name's end, "qkv_proj") -> its parts and their rows, in order; their names take
        the place of that end."""
        self._source = source
        self._parts: dict[str, _Rows] = {}
        names = set(source.names)
        for name in source.names:
            path, _, kind = name.rpartition(".")
            module = next((end for end in stacked if path.endswith(f".{end}")), None)
            if module is None or kind not in ("weight", "bias"):
                continue
            prefix = path.removesuffix(f".{module}")
            names.remove(name)
            first, total = 0, sum(stacked[module].values())
            for part, rows in stacked[module].items():
                self._parts[f"{prefix}.{part}.{kind}"] = _Rows(name, first, first + rows, total)
                first += rows
        self._names = names | self._parts.keys()

    @property
    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a part's shape. The stored tensor must have the rows of all parts."""
        if (rows := self._parts.get(name)) is None:
            return self._source.shape(name)
        whole = self._source.shape(rows.stored)
        if not whole or whole[0] != rows.total:
            raise CorruptWeights(
                f"tensor {rows.stored} has shape {list(whole)}, but the config asks for {rows.total} rows"
            )
        return (rows.end - rows.first, *whole[1:])

    def read(self, name: str, into: Tensor) -> None:
        if name in self._parts:
            self.read_part(name, 0, 0, into.shape[0], into)
        else:
            self._source.read(name, into)

    def read_part(self, name: str, axis: int, first: int, end: int, into: Tensor) -> None:
        """See `PartSource.read_part`; a source that reads no parts is read whole."""
        rows = self._parts.get(name)
        if rows is not None and axis == 0:
            self._read_stored(rows.stored, 0, rows.first + first, rows.first + end, into)
        elif rows is not None:
            whole = torch.empty(self.shape(name), dtype=into.dtype)
            self.read(name, whole)
            into.copy_(whole.narrow(axis, first, end - first))
        else:
            self._read_stored(name, axis, first, end, into)

    def _read_stored(self, name: str, axis: int, first: int, end: int, into: Tensor) -> None:
        if isinstance(self._source, PartSource):
            self._source.read_part(name, axis, first, end, into)
            return
        whole = torch.empty(self._source.shape(name), dtype=into.dtype)
        self._source.read(name, whole)
        into.copy_(whole.narrow(axis, first, end - first))

    def quantized(self, name: str) -> QWeight | None:
        if (rows := self._parts.get(name)) is None:
            return self._source.quantized(name)
        weight = self._source.quantized(rows.stored)
        return None if weight is None else weight.rows(rows.first, rows.end)
