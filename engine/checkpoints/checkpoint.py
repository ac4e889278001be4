"""Weight sources: named tensors that are read one at a time, directly into their final memory.

Safetensors files are read in pieces (`engine.checkpoints.chunked_reader`), so loading holds one copy of the model and a
few pieces; quantized tensors are mapped. Pickled weights are never opened: they can run code.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoints.chunked_reader import ChunkedReader, Extent
from engine.checkpoints.config import quantization_settings
from engine.errors import CorruptWeights, ModelNotFound, UnsupportedModel
from engine.quant.weight import QWeight

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

DERIVED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Endings of tensors that old checkpoints store though they follow from the config."""


class WeightSource(Protocol):
    """Named tensors, under the names transformers gives them, in row-major [out, in] order."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, into: Tensor) -> None:
        """Copy a tensor into `into` (the same shape, any float dtype and device), dequantized if it is quantized."""
        ...

    def quantized(self, name: str) -> QWeight | None:
        """A matrix as it is stored, if it is quantized (on the CPU)."""
        ...


@runtime_checkable
class PartSource(Protocol):
    """A `WeightSource` that can read a part of a tensor without the rest of it."""

    def read_part(self, name: str, axis: int, first: int, end: int, into: Tensor) -> None:
        """Copy elements first ... end - 1 along `axis` into `into`, as `WeightSource.read` does a whole tensor."""
        ...


class SafetensorsCheckpoint:
    """The weights of a Hugging Face folder: one safetensors file, or several with an index.

    Raises:
        ModelNotFound: there are no weights.
        UnsupportedModel: there are only pickled weights.
        CorruptWeights: a file is truncated or no safetensors file, or the index contradicts the files.
    """

    def __init__(self, folder: Path, file: str | None = None) -> None:
        """`file`: the name of the only file to read; None: as a model's folder names its files."""
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._extents: dict[str, Extent] = {}
        self._reader: ChunkedReader | None = None
        listed = {} if file is not None else _indexed(folder)
        single = folder / file if file is not None else None
        for path in sorted(set(listed.values())) if listed else [single or _single_file(folder)]:
            handle = _open(path)
            extents = _extents(path)
            for name in handle.keys():  # noqa: SIM118  (not a mapping)
                if name in self._files:
                    raise CorruptWeights(f"tensor {name} is in both {self._paths[name].name} and {path.name}")
                self._files[name], self._paths[name] = handle, path
                if name in extents:
                    self._extents[name] = extents[name]
        for name, path in listed.items():
            if self._paths.get(name) != path:
                raise CorruptWeights(f"{folder / _INDEX} places tensor {name} in {path.name}, but it is not there")

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    @property
    def num_bytes(self) -> int:
        """Of the files."""
        return sum(path.stat().st_size for path in set(self._paths.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, into: Tensor) -> None:
        self.check_float(name)
        if self._reader is None or self._reader.device != into.device:
            self._reader = ChunkedReader(into.device)
        if not into.is_contiguous():
            into.copy_(self.tensor(name))
            return
        try:
            self._reader.fill(self._extents[name], into)
        except OSError as error:
            raise CorruptWeights(f"tensor {name} in {self._paths[name]} can't be read: {error}") from error

    def read_part(self, name: str, axis: int, first: int, end: int, into: Tensor) -> None:
        """See `PartSource.read_part`. The file is mapped: pages of other parts are never touched."""
        into.copy_(self.floats(name).narrow(axis, first, end - first))

    def floats(self, name: str) -> Tensor:
        """A tensor of a float dtype, mapped."""
        self.check_float(name)
        return self.tensor(name)

    def check_float(self, name: str) -> None:
        """Raise `UnsupportedModel` where a tensor's dtype is not a float one that is read."""
        dtype = self._files[name].get_slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise UnsupportedModel(f"tensor {name} in {self._paths[name]} is {dtype}, not one of {', '.join(_FLOATS)}")

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored, of any dtype."""
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
            return tensor
        except SafetensorError as error:
            raise CorruptWeights(f"tensor {name} in {self._paths[name]} can't be read: {error}") from error

    def quantized(self, name: str) -> QWeight | None:
        """None: what is quantized appears as such through `folder_weights`."""
        return None


def folder_weights(folder: Path) -> WeightSource:
    """The weights of a Hugging Face folder, quantized or not.

    Raises:
        ModelNotFound, UnsupportedModel, CorruptWeights: as `SafetensorsCheckpoint`; and if they are quantized in a way
            that can't be read, or that contradicts the config.
    """
    settings = quantization_settings(folder)
    stored = SafetensorsCheckpoint(folder)
    if settings is None:
        return stored
    from engine.quant.formats.registry import quantized_checkpoint  # noqa: PLC0415 - needs pydantic, for nothing else

    try:
        return quantized_checkpoint(stored, settings)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder / 'config.json'}: {error}") from error


def _indexed(folder: Path) -> dict[str, Path]:
    """Tensor -> file as the index says; empty when there is none."""
    index = folder / _INDEX
    if not index.is_file():
        return {}
    try:
        listed = json.loads(index.read_bytes())["weight_map"]
        files = {str(name): str(file) for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptWeights(f"{index} is not a safetensors index: {error}") from error
    for name, file in files.items():
        if file == ".." or Path(file).name != file or "\\" in file:
            raise CorruptWeights(f"{index} points outside its folder: tensor {name} in {file!r}")
        if not (folder / file).is_file():
            raise CorruptWeights(f"{folder / file} is missing, but {_INDEX} places tensor {name} there")
    return {name: folder / file for name, file in files.items()}


def _single_file(folder: Path) -> Path:
    if (folder / _SINGLE).is_file():
        return folder / _SINGLE
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise CorruptWeights(f"{folder} holds {len(found)} safetensors files, but no {_INDEX} to say what is where")
    if pickles := sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES):
        raise UnsupportedModel(f"{folder / pickles[0]} is pickled, which can run code; convert it to safetensors")
    if list(folder.glob("*.gguf")):
        raise ModelNotFound(f"{folder} holds GGUF files: name one of them instead of the folder")
    raise ModelNotFound(f"{folder} holds no weights (*.safetensors)")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CorruptWeights(f"{path} is not a whole safetensors file ({error}); fetch it again") from error


def _extents(path: Path) -> dict[str, Extent]:
    """Where the tensors of float dtypes lie in a file whose header `_open` has checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in _FLOATS:
            begin, end = entry["data_offsets"]
            found[name] = Extent(path, 8 + length + begin, end - begin, _FLOATS[entry["dtype"]])
    return found
