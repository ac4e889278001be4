"""llama.cpp's blocks keep their numbers: what they stand for is what the gguf package says, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.checkpoints.gguf_file import GGUFFile
from engine.quant.formats.gguf_blocks import unpack
from engine.quant.weight import TwoLevel, stack

FACTORS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (),
}  # fmt: skip
"""Quantization -> where a block has its float16 numbers; all else may be any bytes."""

BITS = {
    "Q4_0": 5,
    "Q4_1": 5,
    "Q5_0": 8.5,
    "Q5_1": 9,
    "Q8_0": 8.5,
    "Q4_K": 4.625,
    "Q5_K": 8.625,
    "Q6_K": 8.5625,
    "MXFP4": 8.5,
}
"""Quantization -> bits that an element takes in memory, factors included."""

ROWS, COLUMNS = 24, 512
SOME_ROWS = 4096


def blocks(name: str, seed: int = 1, size: float = 0.01) -> Any:
    """Rows of random blocks: uint8 [ROWS, bytes]."""
    kind = GGMLQuantizationType[name]
    block, width = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    stored = rng.integers(0, 256, (ROWS, COLUMNS // block, width), dtype=np.uint8)
    for at in FACTORS[name]:
        factor = (rng.standard_normal((ROWS, COLUMNS // block, 1)) * size).astype(np.float16)
        stored[..., at : at + 2] = factor.view(np.uint8)
    return stored.reshape(ROWS, -1)


def wanted(name: str, stored: Any) -> torch.Tensor:
    return torch.from_numpy(dequantize(stored, GGMLQuantizationType[name]).copy())


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("at_once", [1 << 22, 1000])  # all rows, or a few at a time
def test_random_blocks_dequantize_as_in_the_gguf_package(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.quant.formats.gguf_blocks._BYTES_AT_ONCE", at_once)
    stored = blocks(name)
    weight = unpack(GGMLQuantizationType[name], stored)
    assert weight is not None
    assert (weight.n, weight.k) == (ROWS, COLUMNS)
    assert torch.equal(weight.dequantize(), wanted(name, stored))
    assert torch.equal(weight.dequantize(torch.bfloat16), wanted(name, stored).bfloat16())
    assert weight.nbytes == ROWS * COLUMNS * BITS[name] / 8


def test_a_factor_whose_eightfold_float16_does_not_hold() -> None:
    stored = blocks("Q4_0", size=9_000)
    weight = unpack(GGMLQuantizationType.Q4_0, stored)
    assert weight is not None
    assert torch.equal(weight.dequantize(), wanted("Q4_0", stored))


def test_forms_that_are_not_retained_are_dequantized() -> None:
    for kind in (GGMLQuantizationType.F16, GGMLQuantizationType.Q2_K, GGMLQuantizationType.IQ4_NL):
        assert unpack(kind, np.zeros((2, 256), np.uint8)) is None


@pytest.mark.parametrize(
    ("names", "form", "two_levels"),
    [
        (["Q4_K", "Q4_K"], "int4", True),
        (["Q4_K", "Q6_K"], "int8", True),
        (["Q6_K", "Q5_K"], "int8", True),
        (["Q4_1", "Q4_0"], "int4", False),
        (["Q5_0", "Q8_0", "Q5_1"], "int8", False),
        (["Q4_K", "Q8_0"], "int8", False),
    ],
)
def test_unlike_blocks_are_stacked_exactly(names: list[str], form: str, two_levels: bool) -> None:
    # Given q, k and v of unlike quantizations (as mixed files have them), when they become one product
    stored = [blocks(name, seed) for seed, name in enumerate(names)]
    parts = [unpack(GGMLQuantizationType[name], part) for name, part in zip(names, stored, strict=True)]
    whole = stack([part for part in parts if part is not None])
    # Then it has the rows of each, to the bit
    assert whole is not None
    assert whole.form == form
    assert isinstance(whole.scale, TwoLevel) is two_levels
    rows = [wanted(name, part) for name, part in zip(names, stored, strict=True)]
    assert torch.equal(whole.dequantize(), torch.cat(rows))


def test_rows_are_taken_and_sliced_with_their_factors() -> None:
    weight = unpack(GGMLQuantizationType.Q4_K, blocks("Q4_K"))
    assert weight is not None
    index = torch.tensor([5, 0, 23, 5])
    assert torch.equal(weight.take(index).dequantize(), weight.dequantize()[index])
    assert torch.equal(weight.rows(3, 9).dequantize(), weight.dequantize()[3:9])
    assert weight.take(torch.arange(ROWS)).equals(weight)
    assert not weight.take(torch.arange(ROWS).flip(0)).equals(weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"])
def test_every_tensor_of_a_real_file_is_what_the_gguf_package_reads(name: str) -> None:
    # Given the files in the folder that TOKENMILL_TEST_MODELS names
    path = Path(os.environ.get("TOKENMILL_TEST_MODELS", ".")) / name
    if not path.is_file():
        pytest.skip(f"NOT TESTED HERE: a real file; TOKENMILL_TEST_MODELS names no folder with {name}")
    ours, num_quantized = GGUFFile(path), 0
    for tensor in gguf.GGUFReader(path).tensors:
        weight = ours.quantized(tensor.name)
        if weight is None:
            assert tensor.tensor_type.name == "F32"
            continue
        num_quantized += 1
        for first in {
            0,
            max(0, weight.n - SOME_ROWS),
        }:  # of embeddings the ends
            theirs = torch.from_numpy(dequantize(tensor.data[first : first + SOME_ROWS], tensor.tensor_type))
            assert torch.equal(weight.rows(first, first + len(theirs)).dequantize(), theirs)
    assert num_quantized > 100
