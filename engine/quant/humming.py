"""Four-bit weights times float inputs by humming-kernels, a library that compiles its products for the device.

Its codes have the engine's layout (the first column in the lowest bits), so that a weight is passed unchanged. Its
factors are stored in the inputs' dtype, and zeros as whole numbers: other weights use the Triton kernel.
It has not run on a GPU here yet: the layout is tested against compressed-tensors' packing, which is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.quant.weight import QWeight

PACKAGE = "humming-kernels"

_TILE = 128
"""Rows and columns of a weight come in multiples of it: what the library's products are cut into."""

_GROUPS = (32, 64, 128)
_SINCE = (7, 5)
_MIDDLE = 8


class HummingKernel:
    """W4A16, where the library is installed and its requirements are met.

    Args:
        dtype: of the inputs.
    """

    name = "humming"
    repacks = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def runs(self, weight: QWeight) -> bool:
        return _on_a_device_for_it(weight.codes.device) and fits(weight) and _layer_class() is not None

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        layer_class = _layer_class()
        assert layer_class is not None, "asked for only where it runs"
        return HummingProduct(layer_class, weight, bias, self._dtype)


def _on_a_device_for_it(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _SINCE


def fits(weight: QWeight) -> bool:
    """Whether a weight is of a form and shape that the library takes without rounding its zeros."""
    if weight.form != "int4" or weight.activations is not None or not isinstance(weight.scale, Tensor):
        return False
    shaped = weight.n % _TILE == 0 and weight.k % _TILE == 0
    grouped = weight.groups == 1 or weight.group in _GROUPS
    return shaped and grouped and whole_zeros(weight) is not None


def whole_zeros(weight: QWeight) -> Tensor | None:
    """Codes that stand for zero, uint8 [n, groups]; None: there are none."""
    assert isinstance(weight.scale, Tensor)
    scale = weight.scale.float()
    if weight.low is None:
        return torch.zeros_like(scale, dtype=torch.uint8)
    if not isinstance(weight.low, Tensor):
        return None
    low = weight.low.float()
    zeros = (-low / scale).round_()
    exact = (zeros >= 0) & (zeros <= 15) & (-zeros * scale == low)
    return zeros.to(torch.uint8) if bool(exact.all()) else None


def packed(weight: QWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer under the library's names.

    weight: int32 [n, k / 8], columns from the lowest bits up.  weight_scale: `dtype` [n, groups].
    zero_point: int32 [n / 8, groups], rows from the lowest bits up; missing where all zeros are the middle code.
    """
    assert isinstance(weight.scale, Tensor)
    zeros = whole_zeros(weight)
    assert zeros is not None
    tensors = {"weight": weight.codes.contiguous().view(torch.int32), "weight_scale": weight.scale.to(dtype)}
    if not bool((zeros == _MIDDLE).all()):
        pairs = zeros[0::2] | zeros[1::2] << 4  # [n / 2, groups]
        words = pairs.t().clone(memory_format=torch.contiguous_format).view(torch.int32)
        tensors["zero_point"] = words.t().contiguous()
    return tensors


class HummingProduct:
    """x W^T + b by a layer of the library; bias [n] of any float dtype.

    Raises:
        EngineError: the library can't lay out the weight here (it has no compiler, say).
    """

    def __init__(self, layer_class: Any, weight: QWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._order = weight.order
        tensors = packed(weight, dtype)
        config = {
            "quant_method": "humming",
            "dtype": "uint4",
            "group_size": 0 if weight.groups == 1 else weight.group,
            "has_zero_point": "zero_point" in tensors,
        }
        if bias is not None:
            tensors["bias"] = bias.to(dtype)
        try:
            with weight.codes.device:
                self._layer = layer_class(
                    shape_n=weight.n,
                    shape_k=weight.k,
                    weight_config=config,
                    has_bias=bias is not None,
                    torch_dtype=dtype,
                )
                self._layer.load_from_tensors(tensors)
                self._layer.transform()
        except Exception as error:
            raise EngineError(
                f"{PACKAGE} can't prepare a weight of {weight.n} x {weight.k} ({type(error).__name__}: {error}): give "
                "it the compiler it needs, or uninstall it, and our own kernel serves"
            ) from error

    def __call__(self, x: Tensor) -> Tensor:
        """[T, k] -> [T, n], in x's dtype."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        y: Tensor = self._layer(x.contiguous())
        return y


@cache
def _layer_class() -> Any | None:
    """The library's layer; None: it is not installed, or can't be imported here."""
    try:
        if find_spec("humming") is None:
            return None
        return getattr(import_module("humming.layer"), "HummingLayer", None)
    except (ImportError, OSError, RuntimeError):
        return None
