"""AWQ checkpoints (Lin et al. 2023, arXiv 2306.00978) in AutoAWQ's "gemm" layout.

All three tensors run along the output: `qweight` int32 [k, n / 8] and `qzeros` [groups, n / 8] with eight numbers of
four bits in a word, of which the i-th from the lowest bits stands for column 0, 2, 4, 6, 1, 3, 5, 7 of its eight;
`scales` [groups, n].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import AliasChoices, Field, field_validator

from engine.errors import CorruptWeights, UnsupportedModel
from engine.quant.formats.base import FLOATS, StoredTensors, affine, part, part_shape, unpacked
from engine.quant.formats.settings import FormatSettings, GroupSize, read_settings
from engine.quant.weight import QWeight

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_IN_A_WORD = 8


class _AWQ(FormatSettings):
    bits: Annotated[Literal[4], Field(validation_alias=AliasChoices("bits", "w_bit"))]
    group_size: Annotated[GroupSize, Field(validation_alias=AliasChoices("group_size", "q_group_size"))]
    version: Literal["gemm"] = "gemm"

    @field_validator("version", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value


class AWQ:
    """Reads modules that hold `qweight`."""

    markers = (".qweight",)
    parts = (".qweight", ".qzeros", ".scales")

    def __init__(self, stored: StoredTensors, values: Mapping[str, Any]) -> None:
        self._stored = stored
        self._settings = read_settings(_AWQ, values)
        if self._settings.group_size == 0:
            raise UnsupportedModel("quantization_config.group_size is 0: must be a number of columns, or -1 for all")

    def shape(self, module: str) -> tuple[int, int]:
        shape = part_shape(self._stored, f"{module}.qweight")
        if len(shape) != 2 or 0 in shape:
            raise CorruptWeights(f"tensor {module}.qweight has shape {list(shape)}, but must have rows and columns")
        return shape[1] * _IN_A_WORD, shape[0]

    def weight(self, module: str) -> QWeight:
        stored, (n, k) = self._stored, self.shape(module)
        group = k if self._settings.group_size == -1 else self._settings.group_size
        count = -(-k // group)
        codes = unpacked(part(stored, f"{module}.qweight", [torch.int32]), 4, _ORDER).t()
        scale = part(stored, f"{module}.scales", FLOATS, (count, n)).t().contiguous()
        name = f"{module}.qzeros"
        zero = None
        if name in stored.names:
            zero = unpacked(part(stored, name, [torch.int32], (count, n // _IN_A_WORD)), 4, _ORDER).t()
        return affine(codes, 4, scale, zero, group)
