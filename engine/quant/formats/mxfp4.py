"""MXFP4 (OCP Microscaling Formats 1.0, section 5): 32 numbers of 4 bits share a scale that is a power of two.

gpt-oss stores it for the experts of a layer: `…_blocks` uint8 [experts, rows, columns / 32, 16], the even column in the
lower half of a byte, and `…_scales` uint8 [experts, rows, columns / 32], exponents of 2 with 127 added (E8M0).

A number of 4 bits (E2M1) times 2 is a whole one, so that a weight becomes `QWeight`'s int8 in groups of 32, exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import CorruptWeights
from engine.quant.formats.base import StoredTensors, part_shape
from engine.quant.weight import QWeight

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the tensors of a weight."""

BLOCK = 32
"""Columns that share a scale."""

TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The numbers of 4 bits, times 2 (table 6 of the specification)."""

_NAN = 255


def matrix_shape(stored: StoredTensors, name: str) -> tuple[int, int, int]:
    """Experts, rows and columns of the weights whose blocks are the tensor `name`, from what headers say.

    Raises:
        CorruptWeights: these are no blocks, or their scales are missing or not as many.
    """
    shape = part_shape(stored, name)
    if len(shape) != 4 or shape[3] != BLOCK // 2 or 0 in shape:
        raise CorruptWeights(
            f"tensor {name} has shape {list(shape)}, but MXFP4 asks for [experts, rows, columns / 32, 16]"
        )
    scales = name.removesuffix(BLOCKS) + SCALES
    if (found := part_shape(stored, scales)) != shape[:3]:
        raise CorruptWeights(
            f"tensor {scales} has shape {list(found)}, but its quantization asks for {list(shape[:3])}"
        )
    return shape[0], shape[1], shape[2] * BLOCK


def mxfp4_weight(blocks: Tensor, scales: Tensor, name: str) -> QWeight:
    """The weight of blocks uint8 [n, groups, 16] and scales uint8 [n, groups], from the tensor `name`.

    Raises:
        CorruptWeights: a scale is not a number.
    """
    if bool((scales == _NAN).any()):
        raise CorruptWeights(f"tensor {name} holds a scale that is not a number")
    n, groups = scales.shape
    # The two numbers of every byte, looked up together: each by itself takes 25 times as long.
    twice, byte = torch.tensor(TWICE, dtype=torch.int8), torch.arange(256)
    pairs = torch.stack((twice[byte & 15], twice[byte >> 4]), dim=1).view(torch.int16).flatten()
    codes = pairs.index_select(0, blocks.flatten().int()).view(torch.int8).view(n, groups * BLOCK)
    scale = torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - 128).to(
        torch.bfloat16
    )  # all of them are exact
    return QWeight("int8", codes, n, groups * BLOCK, BLOCK, scale)
