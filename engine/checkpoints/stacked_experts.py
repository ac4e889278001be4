"""Experts that a checkpoint stores as one tensor for a layer, seen as each expert's matrices and biases, under the
names of other checkpoints.

The stacks are `experts.gate_up_proj` and `experts.down_proj`, or Granite's `input_linear` and `output_linear`, with
three axes, the first of them the experts. Layouts differ, see `StackLayout`. In MXFP4, gpt-oss's matrices are not
transposed: see `engine.quant.formats.mxfp4`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.checkpoints.checkpoint import SafetensorsCheckpoint
from engine.errors import CorruptWeights
from engine.quant.formats.base import part
from engine.quant.formats.mxfp4 import BLOCKS, SCALES, matrix_shape, mxfp4_weight
from engine.quant.weight import QWeight

StackLayout = Literal["rows", "columns", "interleaved"]
"""An expert's part of a stack: its rows, gate above up; or transposed, and gate beside up (as rows, too, where the
sizes say so: transformers stores them again otherwise than it read them); or transposed, and a column of gate and of up
in turn."""

_GATE_UP, _DOWN = ("gate_proj", "up_proj"), ("down_proj",)
_STACKS = {
    ".experts.gate_up_proj": _GATE_UP,
    ".experts.down_proj": _DOWN,
    ".input_linear.weight": _GATE_UP,
    ".output_linear.weight": _DOWN,
}
_KINDS = {"": "weight", BLOCKS: "weight", "_bias": "bias"}


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows `rows` of an expert's part of the tensor `stack`, or of the MXFP4 blocks of that name."""

    stack: str
    expert: int
    rows: slice
    shape: tuple[int, ...]
    packed: bool
    transposed: bool


class StackedExperts:
    """A `WeightSource` that splits the stacks of a checkpoint; other tensors stay as they are.

    Raises:
        CorruptWeights: a stack has another shape, its scales are missing, or an expert is stored twice.
    """

    def __init__(
        self, source: SafetensorsCheckpoint, num_experts: int, layout: StackLayout, columns: tuple[int, int]
    ) -> None:
        """`columns`: of gate and up, and of down."""
        self._source = source
        self._experts = num_experts
        self._columns = {_GATE_UP: columns[0], _DOWN: columns[1]}
        self._layout = layout
        self._pieces: dict[str, _Piece] = {}
        read = set()
        for name in source.names:
            for stack, modules in _STACKS.items():
                for ending, kind in _KINDS.items():
                    if name.endswith(stack + ending) and ".shared_mlp." not in name:  # Granite's is no stack
                        self._split(name, name.removesuffix(stack + ending), modules, kind, packed=ending == BLOCKS)
                        read |= {name, name.removesuffix(BLOCKS) + SCALES} if ending == BLOCKS else {name}
        self.names: Collection[str] = {*source.names} - read | self._pieces.keys()

    def _split(self, stack: str, block: str, modules: tuple[str, ...], kind: str, *, packed: bool) -> None:
        shape = matrix_shape(self._source, stack) if packed else self._source.shape(stack)
        if len(shape) != (2 if kind == "bias" else 3) or shape[0] != self._experts:
            raise CorruptWeights(
                f"tensor {stack} has shape {list(shape)}, but the config asks for {self._experts} experts"
            )
        transposed = not packed and kind == "weight" and self._layout != "rows"
        if self._layout == "columns" and shape[1] != self._columns[modules] == shape[-1]:
            transposed = False
        rows, *columns = shape[:0:-1] if transposed else shape[1:]
        if rows % len(modules):
            raise CorruptWeights(f"tensor {stack} has {rows} rows, but gate and up have as many each")
        size = rows // len(modules)
        for expert in range(self._experts):
            for number, module in enumerate(modules):
                name = f"{block}.experts.{expert}.{module}.{kind}"
                if name in self._pieces or name in self._source.names:
                    raise CorruptWeights(f"tensor {name} is stored twice, one of them in the stack {stack}")
                alternate = self._layout == "interleaved"
                chosen = slice(number, None, len(modules)) if alternate else slice(number * size, (number + 1) * size)
                self._pieces[name] = _Piece(stack, expert, chosen, (size, *columns), packed, transposed)

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
        return (whole.t() if piece.transposed else whole)[piece.rows]

    def _packed(self, piece: _Piece) -> QWeight:
        stack = piece.stack.removesuffix(BLOCKS)
        blocks = part(self._source, piece.stack, [torch.uint8])
        scales = part(self._source, stack + SCALES, [torch.uint8], blocks.shape[:3])
        return mxfp4_weight(blocks[piece.expert, piece.rows], scales[piece.expert, piece.rows], stack + SCALES)
