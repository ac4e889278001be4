"""llama.cpp's block quantizations as `QWeight`s, number for number (ggml-quants.c, `dequantize_row_*`).

Blocks of 32 have one or two float16 factors, or in MXFP4 a power of two. The K-quants' blocks of 256 have smaller
groups, whose factors are small integers times a float16 of the block. Codes of 5 and 6 bits are kept as int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from engine.quant.formats.mxfp4 import TWICE
from engine.quant.weight import Factors, Form, QWeight, TwoLevel

Bytes = NDArray[np.uint8]

_BYTES_AT_ONCE = 1 << 22
"""Of a stored tensor, while it is taken apart."""


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """What blocks hold. All arrays are [blocks, …].

    Attributes:
        codes: uint8 or int8 [blocks, columns], one by one.
        scale, low: float16 [blocks, 1], or uint16, the bits of a bfloat16, or the integers [blocks, groups] of a
            K-quant.
        step, low_step: what a K-quant's integers are multiplied by, float16 [blocks, 1].
    """

    codes: NDArray[np.uint8] | NDArray[np.int8]
    scale: NDArray[np.generic]
    low: NDArray[np.generic] | None = None
    step: NDArray[np.generic] | None = None
    low_step: NDArray[np.generic] | None = None


def unpack(kind: GGMLQuantizationType, stored: Bytes) -> QWeight | None:
    """Return the weight whose rows are `stored` (uint8 [n, bytes of a row]); None: not a retained quantization.

    Reads some rows at a time, so that it needs little memory in addition to the result.
    """
    if kind not in _KINDS:
        return None
    form, group, split = _KINDS[kind]
    block, width = GGML_QUANT_SIZES[kind]
    n, k = len(stored), stored.shape[1] // width * block
    pieces = []
    step = max(1, _BYTES_AT_ONCE // max(1, stored.shape[1]))
    for first in range(0, n, step):
        rows = stored[first : first + step]
        pieces.append(_laid_out(form, block // group, split(rows.reshape(-1, width)), len(rows)))
    codes, scale, low = zip(*pieces, strict=True)
    lows = [factors for factors in low if factors is not None]
    return QWeight(form, torch.cat(codes), n, k, group, _joined(scale), _joined(lows) if lows else None)


def _laid_out(form: Form, per: int, parts: _Parts, n: int) -> tuple[Tensor, Factors, Factors | None]:
    codes = parts.codes.reshape(n, -1)
    if form == "int4":
        codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    low = None if parts.low is None else _factors(parts.low, parts.low_step, per, n)
    return _tensor(codes), _factors(parts.scale, parts.step, per, n), low


def _factors(values: NDArray[np.generic], step: NDArray[np.generic] | None, per: int, n: int) -> Factors:
    each = _tensor(values.reshape(n, -1))
    return each if step is None else TwoLevel(each, _tensor(step.reshape(n, -1)), per)


def _joined(parts: list[Factors] | tuple[Factors, ...]) -> Factors:
    levels = [part for part in parts if isinstance(part, TwoLevel)]
    if levels:
        return TwoLevel(torch.cat([p.codes for p in levels]), torch.cat([p.step for p in levels]), levels[0].per)
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _tensor(values: NDArray[np.generic]) -> Tensor:
    tensor = torch.from_numpy(np.array(values, order="C"))  # a copy: what lies under it is the file
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The float16 at this byte of each block: [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """Lower halves first, then upper ones: [blocks, …, w] -> [blocks, …, 2 w]."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """A bit for each of 32 columns, from four bytes a block, where 16 stands: [blocks, 32]."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _eighths(factor: NDArray[np.float16]) -> NDArray[np.generic]:
    """-8 times the factor, where float16 holds it; else in float32."""
    low = factor.astype(np.float32) * np.float32(-8)
    with np.errstate(over="ignore"):
        half = low.astype(np.float16)
    return half if (half.astype(np.float32) == low).all() else low


def _q4_0(blocks: Bytes) -> _Parts:
    factor = _half(blocks, 0)
    return _Parts(_nibbles(blocks[:, 2:]), factor, _eighths(factor))


def _q4_1(blocks: Bytes) -> _Parts:
    return _Parts(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _Parts(codes.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Parts(codes.view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> _Parts:
    return _Parts(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _q4_k(blocks: Bytes) -> _Parts:
    scale, low = _six_bits(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return _Parts(codes, scale, -low, _half(blocks, 0), _half(blocks, 2))


def _q5_k(blocks: Bytes) -> _Parts:
    scale, low = _six_bits(blocks[:, 4:16])
    fifth = blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1  # column j of group g: bit g of byte j
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth.swapaxes(1, 2) << 4
    return _Parts(codes.view(np.int8), scale, -low, _half(blocks, 0), _half(blocks, 2))


def _q6_k(blocks: Bytes) -> _Parts:
    lower = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([[0], [2], [4], [6]], dtype=np.uint8)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = (lower | upper << 4).view(np.int8) - np.int8(32)
    return _Parts(codes, blocks[:, 192:208].view(np.int8), None, _half(blocks, 208))


def _mxfp4(blocks: Bytes) -> _Parts:
    """Twice the numbers, by half of 2^(exponent - 127), the least of which bfloat16 holds without its leading bit."""
    exponent = blocks[:, :1].astype(np.uint16)
    scale = np.where(exponent < 2, np.uint16(0x20) << exponent, exponent - np.uint16(1) << np.uint16(7))
    return _Parts(np.array(TWICE, np.int8)[_nibbles(blocks[:, 1:])], scale.astype(np.uint16))


def _six_bits(packed: Bytes) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Eight scales and eight lows of six bits from twelve bytes a block, both int8 [blocks, 8]."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate((first & 63, rest & 15 | first >> 6 << 4), axis=1)
    low = np.concatenate((second & 63, rest >> 4 | second >> 6 << 4), axis=1)
    return scale.view(np.int8), low.view(np.int8)


_KINDS: dict[GGMLQuantizationType, tuple[Form, int, Callable[[Bytes], _Parts]]] = {
    GGMLQuantizationType.Q4_0: ("int4", 32, _q4_0),
    GGMLQuantizationType.Q4_1: ("int4", 32, _q4_1),
    GGMLQuantizationType.Q5_0: ("int8", 32, _q5_0),
    GGMLQuantizationType.Q5_1: ("int8", 32, _q5_1),
    GGMLQuantizationType.Q8_0: ("int8", 32, _q8_0),
    GGMLQuantizationType.Q4_K: ("int4", 32, _q4_k),
    GGMLQuantizationType.Q5_K: ("int8", 32, _q5_k),
    GGMLQuantizationType.Q6_K: ("int8", 16, _q6_k),
    GGMLQuantizationType.MXFP4: ("int8", 32, _mxfp4),
}
"""Quantization -> its codes' form, columns of a group, and what takes blocks apart."""
