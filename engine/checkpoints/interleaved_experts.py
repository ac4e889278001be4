"""Experts as gpt-oss stores them: all of a layer in one tensor, gate and up row by row in turn, with biases.

Dense, the matrices are transposed: `experts.gate_up_proj` [experts, hidden, 2 * inner] and `experts.down_proj`
[experts, inner, hidden]. In MXFP4 they are not: see `engine.quant.formats.mxfp4`. Both appear as each expert's matrices
and biases, under the names of other checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoints.checkpoint import SafetensorsCheckpoint
from engine.errors import CorruptWeights
from engine.quant.formats.base import part
from engine.quant.formats.mxfp4 import BLOCKS, SCALES, matrix_shape, mxfp4_weight
from engine.quant.weight import QWeight

_MODULES = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
"""Stacks -> the modules of an expert, and which rows are theirs."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows `rows` of an expert's part of the tensor `stack`, or of the MXFP4 blocks of that name."""

    stack: str
    expert: int
    rows: slice
    shape: tuple[int, ...]
    packed: bool = False


class InterleavedExperts:
    """A `WeightSource` that splits the stacks of a checkpoint; other tensors stay as they are.

    Raises:
        CorruptWeights: a stack has another shape, or its scales are missing.
    """

    def __init__(self, source: SafetensorsCheckpoint, num_experts: int) -> None:
        self._source = source
        self._experts = num_experts
        self._pieces: dict[str, _Piece] = {}
        read = set()
        for name in source.names:
            for stack in _MODULES:
                for ending, kind in (("", "weight"), (BLOCKS, "weight"), ("_bias", "bias")):
                    if name.endswith(f".experts.{stack}{ending}"):
                        self._split(name, stack, kind, packed=ending == BLOCKS)
                        read |= {name, name.removesuffix(BLOCKS) + SCALES} if ending == BLOCKS else {name}
        self.names: Collection[str] = {*source.names} - read | self._pieces.keys()

    def _split(self, name: str, stack: str, kind: str, *, packed: bool) -> None:
        shape = matrix_shape(self._source, name) if packed else self._source.shape(name)
        if len(shape) != (2 if kind == "bias" else 3) or shape[0] != self._experts:
            raise CorruptWeights(
                f"tensor {name} has shape {list(shape)}, but the config asks for {self._experts} experts"
            )
        rows, *columns = shape[1:] if packed else shape[:0:-1]
        if rows % len(_MODULES[stack]):
            raise CorruptWeights(f"tensor {name} has {rows} rows, but gate and up have as many each")
        block = name[: name.rindex(".experts.")]
        for expert in range(self._experts):
            for module, chosen in _MODULES[stack].items():
                size = (len(range(*chosen.indices(rows))), *columns)
                piece = f"{block}.experts.{expert}.{module}.{kind}"
                if piece in self._pieces:
                    raise CorruptWeights(f"tensor {name} stores {piece}, which another tensor stores, too")
                self._pieces[piece] = _Piece(name, expert, chosen, size, packed)

    def shape(self, name: str) -> tuple[int, ...]:
        piece = self._pieces.get(name)
        return self._source.shape(name) if piece is None else piece.shape

    def read(self, name: str, into: Tensor) -> None:
        if (piece := self._pieces.get(name)) is None:
            self._source.read(name, into)
        elif piece.packed:
            self._packed(piece).dequantize(into=into)
        else:
            into.copy_(self._mapped(piece))

    def read_part(self, name: str, axis: int, first: int, end: int, into: Tensor) -> None:
        """See `PartSource.read_part`."""
        if (piece := self._pieces.get(name)) is None:
            self._source.read_part(name, axis, first, end, into)
        else:
            whole = self._packed(piece).dequantize(into.dtype) if piece.packed else self._mapped(piece)
            into.copy_(whole.narrow(axis, first, end - first))

    def quantized(self, name: str) -> QWeight | None:
        """A matrix that is stored in MXFP4."""
        piece = self._pieces.get(name)
        return self._packed(piece) if piece is not None and piece.packed else None

    def _mapped(self, piece: _Piece) -> Tensor:
        """Rows first: a view."""
        whole = self._source.floats(piece.stack)[piece.expert]
        return whole.t()[piece.rows] if whole.dim() == 2 else whole[piece.rows]

    def _packed(self, piece: _Piece) -> QWeight:
        stack = piece.stack.removesuffix(BLOCKS)
        blocks = part(self._source, piece.stack, [torch.uint8])
        scales = part(self._source, stack + SCALES, [torch.uint8], blocks.shape[:3])
        return mxfp4_weight(blocks[piece.expert, piece.rows], scales[piece.expert, piece.rows], stack + SCALES)
