"""Packs weights number by number, as the specifications of GPTQ, AWQ and block fp8 say: slowly, and by no code of ours.

Each `pack_…` gives a module's tensors and the dense weight that they stand for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ, `awq/utils/packing_utils.py`: the column that goes to each four bits of a word, from the lowest up."""


def words(numbers: NDArray[np.int64], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [rows, columns * bits / 32]: numbers [rows, columns] along each row, from the lowest bits up."""
    each = 32 // bits
    order = order or tuple(range(each))
    out = np.zeros((len(numbers), numbers.shape[1] // each), dtype=np.uint32)
    for row in range(len(numbers)):
        for word in range(out.shape[1]):
            for position, column in enumerate(order):
                out[row, word] |= np.uint32(int(numbers[row, word * each + column]) << (bits * position))
    return torch.from_numpy(out.view(np.int32).copy())


def quantized(
    weight: Tensor, bits: int, group: int, symmetric: bool, groups: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float16], NDArray[np.int64], Tensor]:
    """Codes [n, k], scales and zeros [n, groups], and scale * (code - zero), with float16 scales.

    Args:
        groups: each column's group; None: columns lie group after group.
    """
    values = weight.double().numpy()
    n, k = values.shape
    of = np.arange(k) // group if groups is None else groups
    count, most = int(of.max()) + 1, (1 << bits) - 1
    scales, zeros = np.zeros((n, count), np.float16), np.zeros((n, count), np.int64)
    codes = np.zeros((n, k), np.int64)
    for g in range(count):
        part = values[:, of == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(high, -low)
            scales[:, g], zeros[:, g] = 2 * high / most, (most + 1) // 2
        else:
            scales[:, g] = (high - low) / most
            zeros[:, g] = np.clip(np.round(-low / scales[:, g].astype(np.float64)), 0, most)
        code = np.round(part / scales[:, g, None].astype(np.float64)) + zeros[:, g, None]
        codes[:, of == g] = np.clip(code, 0, most)
    dense = scales[:, of].astype(np.float64) * (codes - zeros[:, of])
    return codes, scales, zeros, torch.from_numpy(dense).float()


def pack_gptq(
    weight: Tensor, *, bits: int = 4, group: int = 16, symmetric: bool = True, shuffled: bool = False, version: int = 1
) -> Packed:
    """AutoGPTQ's `QuantLinear.pack`; version 1 stores zeros less one. `shuffled`: groups of columns that lie apart."""
    k = weight.shape[1]
    size = k if group == -1 else group
    groups = np.arange(k) // size
    if shuffled:
        groups = np.random.default_rng(len(weight)).permutation(groups)
    codes, scales, zeros, dense = quantized(weight, bits, size, symmetric, groups)
    if version == 1:
        zeros = np.maximum(zeros, 1)  # this version can't store a zero of zero
        dense = torch.from_numpy(scales[:, groups].astype(np.float64) * (codes - zeros[:, groups])).float()
    return {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(zeros.T - (1 if version == 1 else 0), bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }, dense


def pack_awq(weight: Tensor, *, group: int = 16, symmetric: bool = False) -> Packed:
    """AutoAWQ's `WQLinear_GEMM.from_linear`."""
    codes, scales, zeros, dense = quantized(weight, 4, weight.shape[1] if group == -1 else group, symmetric)
    return {
        "qweight": words(codes.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales.T.copy()),
    }, dense


def pack_fp8(weight: Tensor, *, block: tuple[int, int] | None = (16, 32), static: bool = False) -> Packed:
    """DeepSeek-V3's `weight_dequant` the other way round; a scale for the whole tensor where there are no blocks."""
    n, k = weight.shape
    rows, columns = block or (n, k)
    scale = torch.zeros(-(-n // rows), -(-k // columns))
    codes, dense = torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.zeros(n, k)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
            dense[at] = codes[at].float() * scale[i, j]
    tensors = {"weight": codes, "weight_scale_inv" if block else "weight_scale": scale if block else scale[0, 0]}
    if static:
        tensors["input_scale"] = torch.tensor(0.02)
    return tensors, dense


def write(
    folder: Path,
    out: Path,
    settings: dict[str, Any],
    pack: Callable[[str, Tensor], Packed | None],
    edit: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
) -> Path:
    """A quantized copy of a checkpoint in `out`, and what it stands for in `out`-dense; returns the latter.

    Args:
        pack: of each module with a matrix that is no embedding; None: it stays.  edit: changes the quantized tensors.
    """
    tensors, made, dense = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        found = pack(module, tensor) if tensor.dim() == 2 and "embed" not in name else None
        dense[name] = tensor if found is None else found[1]
        made |= {name: tensor} if found is None else {f"{module}.{part}": t for part, t in found[0].items()}
    edit(made)
    plain = out.with_name(out.name + "-dense")
    for target, content in ((out, made), (plain, dense)):
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(
            {n: t.contiguous() for n, t in content.items()}, target / "model.safetensors", metadata={"format": "pt"}
        )
    file = out / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    return plain
