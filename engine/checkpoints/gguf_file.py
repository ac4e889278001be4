"""Reads GGUF files (ggml's container, specification version 3): metadata, and tensors dequantized by rows.

Written for the header's speed: vocabularies are hundreds of thousands of strings that the engine does not need, so they
are skipped instead of being made into objects. Every length is checked against the file before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import CorruptWeights, UnsupportedModel
from engine.quant.formats.gguf_blocks import unpack
from engine.quant.weight import QWeight

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 1 << 20
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """An array of the metadata that was stepped over."""

    length: int


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is row-major (the reverse of the file's), `start` and `size` are in bytes."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int


class GGUFFile:
    """An open GGUF file.

    Attributes:
        metadata: key -> number, bool, string or `SkippedArray`.
        tensors: name -> where it lies.

    Raises:
        UnsupportedModel: a version, byte order or quantization that can't be read.
        CorruptWeights: no GGUF file, or a truncated one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise CorruptWeights(f"{path} is empty") from error
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CorruptWeights(f"{path} ends or breaks inside its header: {error}") from error

    def read(self, name: str, into: Tensor) -> None:
        """Dequantize a tensor into `into` (its shape, any float dtype and device), some rows at a time."""
        tensor = self.tensors[name]
        columns = tensor.shape[-1]
        stored = self._stored(tensor)
        rows = into.view(-1, columns)
        step = max(1, _CHUNK_ELEMENTS // columns)
        for first in range(0, rows.shape[0], step):
            rows[first : first + step].copy_(_floats(stored[first : first + step], tensor.kind))
        self._forget(tensor)

    def quantized(self, name: str) -> QWeight | None:
        """Return a matrix as stored; None: it is no matrix, not quantized, or of a form that is dequantized."""
        tensor = self.tensors[name]
        if len(tensor.shape) != 2:
            return None
        weight = unpack(tensor.kind, self._stored(tensor))
        self._forget(tensor)
        return weight

    def unstack(self, name: str, parts: int = 1) -> list[list[str]]:
        """Replace a tensor of three axes by its matrices, or one of two by its rows, each cut into `parts` along its
        first axis; returns their names.

        Raises:
            CorruptWeights: the rows can't be cut so.
        """
        whole = self.tensors.pop(name)
        count, rows, *columns = whole.shape
        if rows % parts:
            raise CorruptWeights(f"tensor {name} of {self.path} has {rows} rows, which are not {parts} times as many")
        shape, size = (rows // parts, *columns), whole.size // (count * parts)
        names = [[f"{name}[{index}, {part}]" for part in range(parts)] for index in range(count)]
        for index, part in enumerate(name for matrix in names for name in matrix):
            self.tensors[part] = GGUFTensor(shape, whole.kind, whole.start + index * size, size)
        return names

    def _stored(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """A tensor's bytes, uint8 [rows, bytes of a row], where they lie."""
        stored = np.frombuffer(self._data, np.uint8, tensor.size, tensor.start)
        return stored.reshape(math.prod(tensor.shape[:-1]), -1)

    def _forget(self, tensor: GGUFTensor) -> None:
        """Release the mapped pages of a tensor that was read: they would count as this process's memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
            if (size := tensor.start + tensor.size - first) > 0:
                self._data.madvise(mmap.MADV_DONTNEED, first, size)

    def _parse(self) -> None:
        magic, version = struct.unpack_from("<4sI", self._data)
        if magic != b"GGUF":
            raise CorruptWeights(f"{self.path} is not a GGUF file")
        if version & 0xFFFF == 0:
            raise UnsupportedModel(f"{self.path} is a big-endian GGUF file")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path} is GGUF version {version}; 2 and 3 can be read")
        num_tensors, num_keys = struct.unpack_from("<QQ", self._data, 8)
        if max(num_tensors, num_keys) > _MAX_ENTRIES:
            raise CorruptWeights(f"{self.path} claims {num_tensors} tensors and {num_keys} keys")
        at = 24
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", self._data, at)
            self.metadata[key], at = self._value(kind, at + 4)
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, at = self._string(at)
            (dimensions,) = struct.unpack_from("<I", self._data, at)
            shape = struct.unpack_from(f"<{min(dimensions, 8)}Q", self._data, at + 4)
            kind, offset = struct.unpack_from("<IQ", self._data, at + 4 + 8 * dimensions)
            found.append((name, shape[::-1], kind, offset))
            at += 16 + 8 * dimensions
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise CorruptWeights(f"{self.path} is aligned to {alignment!r}, but must be to a number of bytes")
        start = -(-at // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in found}

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GGUFTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise UnsupportedModel(f"tensor {name} of {self.path} has the unknown quantization {kind}") from error
        block, width = GGML_QUANT_SIZES[quantization]
        if not shape or 0 in shape or shape[-1] % block:
            raise CorruptWeights(f"tensor {name} of {self.path} has shape {list(shape)}, not whole {block}-blocks")
        size = math.prod(shape) // block * width
        if start + size > len(self._data):
            raise CorruptWeights(f"{self.path} ends inside tensor {name}; fetch it again")
        return GGUFTensor(shape, quantization, start, size)

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, at)
        end = at + 8 + length
        if end > len(self._data):
            raise CorruptWeights(f"{self.path} ends inside its header; fetch it again")
        return self._data[at + 8 : end].decode("utf-8"), end

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(at)
        if kind == _ARRAY:
            return self._skip_array(at)
        if kind not in _SCALARS:
            raise CorruptWeights(f"{self.path} has metadata of the unknown type {kind}")
        form = "<" + _SCALARS[kind]
        return struct.unpack_from(form, self._data, at)[0], at + struct.calcsize(form)

    def _skip_array(self, at: int) -> tuple[SkippedArray, int]:
        kind, length = struct.unpack_from("<IQ", self._data, at)
        at += 12
        if kind == _STRING:
            size_of, data = struct.Struct("<Q").unpack_from, self._data
            for _ in range(length):
                at += 8 + size_of(data, at)[0]
        elif kind in _SCALARS:
            at += length * struct.calcsize("<" + _SCALARS[kind])
        else:
            raise CorruptWeights(f"{self.path} has a metadata array of the unknown type {kind}")
        if at > len(self._data):
            raise CorruptWeights(f"{self.path} ends inside its header; fetch it again")
        return SkippedArray(length), at


def _floats(stored: Any, kind: GGMLQuantizationType) -> Tensor:
    """Rows of stored bytes as a float32 (or, where it is stored so, bfloat16) tensor."""
    if kind == GGMLQuantizationType.BF16:
        return torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)
    try:
        values = dequantize(stored, kind)
    except NotImplementedError as error:
        raise UnsupportedModel(f"GGUF quantization {kind.name} can't be dequantized") from error
    return torch.from_numpy(np.ascontiguousarray(values) if values.flags.writeable else values.copy())
