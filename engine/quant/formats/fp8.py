"""float8 checkpoints of the method "fp8": Hugging Face's in blocks (DeepSeek-V3, Qwen3-FP8), and AutoFP8's.

`weight` is float8_e4m3fn [n, k]. `weight_scale_inv` multiplies it, in spite of its name: one number for each block of
`weight_block_size` rows and columns, or one for the tensor. AutoFP8 calls the latter `weight_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from engine.errors import CorruptWeights
from engine.quant.formats.base import FLOATS, StoredTensors, part, part_shape
from engine.quant.formats.settings import FormatSettings, read_settings
from engine.quant.weight import Activations, QWeight

_Size = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]


_DEFAULT_BLOCK = (128, 128)


class _FP8(FormatSettings):
    weight_block_size: tuple[_Size, _Size] | None = None
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    fmt: Literal["e4m3"] = "e4m3"
    scale_fmt: Literal["float", "ue8m0"] | None = None


class BlockFP8:
    """Reads modules that hold `weight_scale_inv`."""

    markers = (".weight_scale_inv", ".weight_scale")
    parts = (".weight", ".weight_scale_inv", ".weight_scale", ".activation_scale", ".input_scale")

    def __init__(self, stored: StoredTensors, values: Mapping[str, Any]) -> None:
        self._stored = stored
        self._settings = read_settings(_FP8, values)

    def shape(self, module: str) -> tuple[int, int]:
        return matrix_shape(self._stored, f"{module}.weight")

    def weight(self, module: str) -> QWeight:
        codes = part(self._stored, f"{module}.weight", [torch.float8_e4m3fn], self.shape(module))
        inverse = f"{module}.weight_scale_inv" in self._stored.names
        name = f"{module}.weight_scale_inv" if inverse else f"{module}.weight_scale"
        scale = part(self._stored, name, (*FLOATS, torch.float8_e8m0fnu))
        block = self._settings.weight_block_size
        if inverse and "weight_block_size" not in self._settings.model_fields_set:
            block = _DEFAULT_BLOCK
        group, scale = spread_scale(codes.shape, scale, name, block)
        n, k = codes.shape
        return QWeight("fp8", codes, n, k, group, scale, activations=Activations("fp8", self._input(module)))

    def _input(self, module: str) -> float | None:
        if self._settings.activation_scheme == "dynamic":
            return None
        for name in (f"{module}.activation_scale", f"{module}.input_scale"):
            if name in self._stored.names:
                return single(part(self._stored, name, FLOATS), name)
        raise CorruptWeights(f"tensor {module}.activation_scale is missing, but activation_scheme is 'static'")


def matrix_shape(stored: StoredTensors, name: str) -> tuple[int, int]:
    """The shape of a tensor that must have rows and columns."""
    shape = part_shape(stored, name)
    if len(shape) != 2 or 0 in shape:
        raise CorruptWeights(f"tensor {name} has shape {list(shape)}, but must have rows and columns")
    return shape[0], shape[1]


def single(tensor: Tensor, name: str) -> float:
    """The only number of a tensor, which must be a scale.

    Raises:
        CorruptWeights: there are more, or it is none.
    """
    if tensor.numel() != 1 or not 0 < float(tensor) < float("inf"):
        raise CorruptWeights(f"tensor {name} must hold one positive number")
    return float(tensor)


def spread_scale(
    shape: tuple[int, ...], scale: Tensor, name: str, block: tuple[int, int] | None = None, group: int | None = None
) -> tuple[int, Tensor]:
    """The columns that share a scale, and the scales [n, groups], of a weight [n, k].

    Args:
        scale: one number; [n] or [n, 1]; [n, k / group]; or one for each `block` of rows and columns.

    Raises:
        CorruptWeights: it has another shape.
    """
    n, k = shape
    scale = scale.float() if scale.dtype == torch.float8_e8m0fnu else scale
    if scale.numel() == 1 and block is None:
        return k, scale.reshape(1, 1).repeat(n, 1)
    rows, columns = block or (1, group or k)
    wanted = (-(-n // rows), -(-k // columns))
    if tuple(scale.shape) != wanted and not (wanted[1] == 1 and tuple(scale.shape) == wanted[:1]):
        raise CorruptWeights(
            f"tensor {name} has shape {list(scale.shape)}, but its quantization asks for {list(wanted)}"
        )
    return min(columns, k), scale.reshape(wanted).repeat_interleave(rows, dim=0)[:n]
