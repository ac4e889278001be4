"""Experts that a checkpoint stores as one tensor: transformers' `experts.gate_up_proj` [experts, 2 * inner, hidden] and
`experts.down_proj` [experts, hidden, inner], or Granite's `input_linear` and `output_linear`, appear as each expert's
matrices, under the names of other checkpoints."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from engine.checkpoints.checkpoint import SafetensorsCheckpoint
from engine.errors import CorruptWeights
from engine.quant.weight import QWeight

_GATE_UP, _DOWN = ("gate_proj", "up_proj"), ("down_proj",)
_STACKS = {
    ".experts.gate_up_proj": _GATE_UP,
    ".experts.down_proj": _DOWN,
    ".input_linear.weight": _GATE_UP,
    ".output_linear.weight": _DOWN,
}


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Rows first ... end - 1 of an expert's part of the tensor `stack`."""

    stack: str
    expert: int
    first: int
    end: int


class StackedExperts:
    """A `WeightSource` that splits the stacks of a checkpoint; other tensors stay as they are.

    Raises:
        CorruptWeights: a stack has another shape.
    """

    def __init__(self, source: SafetensorsCheckpoint, num_experts: int) -> None:
        self._source = source
        self._matrices: dict[str, _Matrix] = {}
        for name in source.names:
            for ending, modules in _STACKS.items():
                if name.endswith(ending):
                    self._split(name, name.removesuffix(ending), modules, num_experts)
        stacks = {matrix.stack for matrix in self._matrices.values()}
        self.names: Collection[str] = {*source.names} - stacks | self._matrices.keys()

    def _split(self, stack: str, block: str, modules: tuple[str, ...], num_experts: int) -> None:
        shape = self._source.shape(stack)
        if len(shape) != 3 or shape[0] != num_experts or shape[1] % len(modules):
            raise CorruptWeights(
                f"tensor {stack} has shape {list(shape)}, but the config asks for {num_experts} experts"
            )
        rows = shape[1] // len(modules)
        for expert in range(num_experts):
            for number, module in enumerate(modules):
                name = f"{block}.experts.{expert}.{module}.weight"
                if name in self._matrices or name in self._source.names:
                    raise CorruptWeights(f"tensor {name} is stored twice, one of them in the stack {stack}")
                self._matrices[name] = _Matrix(stack, expert, number * rows, (number + 1) * rows)

    def shape(self, name: str) -> tuple[int, ...]:
        if (matrix := self._matrices.get(name)) is None:
            return self._source.shape(name)
        return matrix.end - matrix.first, self._source.shape(matrix.stack)[2]

    def read(self, name: str, into: Tensor) -> None:
        if name in self._matrices:
            into.copy_(self._mapped(name))
        else:
            self._source.read(name, into)

    def read_part(self, name: str, axis: int, first: int, end: int, into: Tensor) -> None:
        """See `PartSource.read_part`."""
        if name in self._matrices:
            into.copy_(self._mapped(name).narrow(axis, first, end - first))
        else:
            self._source.read_part(name, axis, first, end, into)

    def quantized(self, name: str) -> QWeight | None:
        """None: stacks of quantized weights are not read."""
        return None if name in self._matrices else self._source.quantized(name)

    def _mapped(self, name: str) -> Tensor:
        matrix = self._matrices[name]
        return self._source.floats(matrix.stack)[matrix.expert, matrix.first : matrix.end]
