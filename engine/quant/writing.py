"""Writes quantized checkpoints in the format of compressed-tensors, which vLLM, SGLang and transformers read.

Tensors are written in files of a bounded size. Nothing has its final name before all is written: the files are made in
a separate folder, which the caller renames.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine.quant.formats.base import halves
from engine.quant.rtn import Rounding
from engine.quant.weight import QWeight

Target = Literal["int8", "int4", "fp8"]

FILE_BYTES = 1 << 30
"""Of a file, about; it is held in memory until it is full."""

_TOKENS = {"strategy": "token", "dynamic": True, "symmetric": True, "num_bits": 8}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The target form of a checkpoint.

    Attributes:
        target: W8A8 of int8 or of fp8, or weights of 4 bits alone.
        group: of int4, columns that share a scale.  symmetric: of int4, codes lie evenly about zero.
        dtype: of scales, and of all that is not quantized.
    """

    target: Target
    group: int = 32
    symmetric: bool = True
    dtype: torch.dtype = torch.bfloat16

    @property
    def rounding(self) -> Rounding:
        group = self.group if self.target == "int4" else None
        return Rounding(self.target, group, self.symmetric, scale_dtype=self.dtype)

    @property
    def format(self) -> str:
        """compressed-tensors' name of the format."""
        return {"int8": "int-quantized", "int4": "pack-quantized", "fp8": "float-quantized"}[self.target]

    def fits(self, columns: int) -> bool:
        """Whether a weight of so many columns can be written: groups are whole, and so are words of eight codes."""
        return self.target != "int4" or columns % self.group == 0 == columns % 8

    def settings(self, ignored: list[str]) -> dict[str, Any]:
        """The checkpoint's `quantization_config`; `ignored`: linear layers that stay as they are."""
        kind = "float" if self.target == "fp8" else "int"
        weights: dict[str, Any] = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
        if self.target == "int4":
            weights |= {"num_bits": 4, "strategy": "group", "group_size": self.group, "symmetric": self.symmetric}
        inputs = None if self.target == "int4" else {"type": kind, **_TOKENS}
        group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.format,
            "config_groups": {"group_0": group | {"format": self.format}},
            "ignore": ignored,
        }


def module_tensors(weight: QWeight, scheme: Scheme) -> dict[str, Tensor]:
    """A rounded weight's tensors, by the ends of their names."""
    assert isinstance(weight.scale, Tensor)
    tensors = {"weight_scale": weight.scale.to(scheme.dtype)}
    if weight.form != "int4":
        return tensors | {"weight": weight.codes}
    packed = weight.codes.contiguous().view(torch.int32)  # the lowest bits are the first column, in both
    tensors |= {"weight_packed": packed, "weight_shape": torch.tensor([weight.n, weight.k])}
    if not scheme.symmetric:
        assert isinstance(weight.low, Tensor)
        zero = (-weight.low.float() / weight.scale.float()).round().to(torch.uint8).t()
        columns = halves(F.pad(zero, (0, -weight.n % 8)))
        tensors["weight_zero_point"] = columns.contiguous().view(torch.int32).t()
    return tensors


class CheckpointWriter:
    """Tensors into safetensors files of a folder, with an index if there are several."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._held: dict[str, Tensor] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Buffer a tensor until its file is full."""
        self._held[name] = tensor.contiguous()
        self.num_bytes += tensor.nbytes
        if sum(held.nbytes for held in self._held.values()) >= self._file_bytes:
            self._write()

    def close(self) -> None:
        """Write the remaining tensors and the index. Raises OSError when a file can't be written."""
        if self._held or not self._files:
            self._write()
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / "model.safetensors")
            return
        listed: dict[str, str] = {}
        count = len(self._files)
        for at, (path, names) in enumerate(self._files, 1):
            final = path.with_name(f"model-{at:05}-of-{count:05}.safetensors")
            path.rename(final)
            listed |= dict.fromkeys(names, final.name)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": listed}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        path = self._folder / f"part-{len(self._files):05}.safetensors"
        try:
            save_file(self._held, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path.name}: {error}") from error
        self._files.append((path, list(self._held)))
        self._held = {}
