"""GPTQ checkpoints (Frantar et al. 2022, arXiv 2210.17323) as AutoGPTQ and GPTQModel write them.

`qweight` int32 [k * bits / 32, n] is packed along the input, `qzeros` [groups, n * bits / 32] along the output, lowest
bits first; `scales` [groups, n] and `g_idx` [k], the group of each input. The first version of the format stores each
zero less one, the second (`checkpoint_format` "gptq_v2") as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from engine.errors import CorruptWeights, UnsupportedModel
from engine.quant.formats.base import FLOATS, StoredTensors, affine, column_order, part, part_shape, unpacked
from engine.quant.formats.settings import FormatSettings, GroupSize, Patterns, Text, read_settings
from engine.quant.weight import QWeight

Bits = Literal[4, 8]


class _Dynamic(FormatSettings):
    """What differs in the modules that a pattern matches."""

    bits: Bits | None = None
    group_size: GroupSize | None = None


class _GPTQ(FormatSettings):
    bits: Bits
    group_size: GroupSize
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None
    format: Literal["gptq", "gptq_v2"] | None = None
    pack_dtype: Literal["int32"] | None = None
    is_marlin_format: Literal[False] | None = None
    dynamic: Annotated[dict[Text, _Dynamic | bool | None], Field(max_length=10_000)] | None = None


class GPTQ:
    """Reads modules that hold `qweight`."""

    markers = (".qweight",)
    parts = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, stored: StoredTensors, values: Mapping[str, Any]) -> None:
        self._stored = stored
        self._settings = read_settings(_GPTQ, values)
        self._zero_offset = 0 if "gptq_v2" in (self._settings.checkpoint_format, self._settings.format) else 1
        self._dynamic = [
            (Patterns("quantization_config.dynamic", [], [pattern.removeprefix("+:")]), said)
            for pattern, said in (self._settings.dynamic or {}).items()
            if not pattern.startswith("-:") and isinstance(said, _Dynamic)
        ]

    def shape(self, module: str) -> tuple[int, int]:
        words, n = self._words(module)
        return n, words * 32 // self._said(module)[0]

    def weight(self, module: str) -> QWeight:
        stored, (bits, group) = self._stored, self._said(module)
        words, n = self._words(module)
        k = words * 32 // bits
        group = k if group == -1 else group
        count = -(-k // group)
        packed = part(stored, f"{module}.qweight", [torch.int32])
        codes = unpacked(packed.t(), bits)
        scale = part(stored, f"{module}.scales", FLOATS, (count, n)).t().contiguous()
        zeros = part(stored, f"{module}.qzeros", [torch.int32], (count, -(-n * bits // 32)))
        zero = unpacked(zeros, bits)[:, :n].t().to(torch.int32) + self._zero_offset
        order = None
        if (name := f"{module}.g_idx") in stored.names:
            order = column_order(part(stored, name, [torch.int32, torch.int64], (k,)), name, group, count)
        if order is not None:
            codes = codes.index_select(1, order)
        return affine(codes, bits, scale, zero, group, order)

    def _words(self, module: str) -> tuple[int, int]:
        shape = part_shape(self._stored, f"{module}.qweight")
        if len(shape) != 2 or 0 in shape:
            raise CorruptWeights(f"tensor {module}.qweight has shape {list(shape)}, but must have rows and columns")
        return shape[0], shape[1]

    def _said(self, module: str) -> tuple[int, int]:
        """Bits and columns of a group (-1: all) of this module."""
        bits, group = self._settings.bits, self._settings.group_size
        for patterns, said in self._dynamic:
            if patterns.match(module):
                bits, group = said.bits or bits, said.group_size or group
                break
        if group == 0:
            raise UnsupportedModel("quantization_config.group_size is 0: must be a number of columns, or -1 for all")
        return bits, group
