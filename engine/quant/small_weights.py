"""Kernels on a GPU for small weights without dequantization in memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from torch import Tensor

from engine.quant.weight import QWeight


class SmallWeightKernel:
    """W4A16 and W8A16 in Triton (`engine.triton_kernels.small_weights`), factors of one level or two."""

    name = "triton"
    repacks = False

    def runs(self, weight: QWeight) -> bool:
        return weight.codes.device.type == "cuda" and multiplies_small(weight) and find_spec("triton") is not None

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        from engine.triton_kernels.small_weights import SmallWeightProduct  # noqa: PLC0415 - comes with CUDA's torch

        return SmallWeightProduct(weight, bias)


def multiplies_small(weight: QWeight) -> bool:
    """Whether it is weight-only, and no pair of packed columns belongs to two groups."""
    small = weight.form in ("int4", "int8") and weight.activations is None
    return small and (weight.form == "int8" or weight.groups == 1 or weight.group % 2 == 0)
