"""int8 in Triton: inputs quantized and sums scaled as by torch, in few launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.quant import int8_linear
from engine.quant.int8_linear import Int8Linear, quantize_by

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

from engine.triton_kernels import int8
from engine.triton_kernels.int8 import quantize_rows, scale_sums

DTYPES = (torch.bfloat16, *(pytest.param(other, marks=pytest.mark.slow) for other in (torch.float16, torch.float32)))


def inputs(k: int, dtype: torch.dtype) -> Tensor:
    """Rows of many sizes; zeros, ties, and what is not finite among them."""
    x = torch.randn(9, k, generator=torch.Generator().manual_seed(k)) * 10.0 ** torch.arange(-4, 5)[:, None]
    x = x.clamp(-6e4, 6e4).to(dtype)
    x[1], x[2] = 0, torch.arange(k) - 63.5
    x[2, 0] = 127
    x[3, 5], x[4, 7], x[5, k - 1] = float("nan"), float("inf"), float("-inf")
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.03])
def test_rows_are_quantized_as_by_torch(
    dtype: torch.dtype, scale: float | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "_MOST_COLUMNS", 64)  # a row takes turns
    x = inputs(150, dtype)
    codes, scales = quantize_rows(x.to(device), scale, 17)
    want, want_scales = int8_linear.quantize_rows(x) if scale is None else quantize_by(x, scale)
    assert codes.shape == (17, 150)
    finite = x.isfinite().all(1)
    assert torch.equal(scales.cpu()[finite], want_scales[finite])
    assert torch.equal(codes.cpu()[:9][finite], want[finite])
    assert not scales.cpu()[~finite].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_sums_are_scaled(dtype: torch.dtype, has_bias: bool, device: torch.device) -> None:
    made = torch.Generator().manual_seed(1)
    sums = torch.randint(-(1 << 15), 1 << 15, (20, 1300), generator=made, dtype=torch.int32)
    rows, scales, bias = (torch.rand(shape, generator=made) for shape in ((5, 1), (1300,), (1300,)))
    want = sums[:5].float() * rows * scales + (bias if has_bias else 0)
    on_device = [each.to(device) for each in (sums, rows, scales, bias)]
    got = scale_sums(*on_device[:3], on_device[3] if has_bias else None, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu(), want.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_a_product_takes_three_launches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []

    class Counted:
        def __init__(self, name: str, kernel: Any) -> None:
            self._name, self._kernel = name, kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                launches.append(self._name)
                with _disable_current_modes():
                    self._kernel[grid](*args, **kwargs)

            return launch

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            launches.extend([] if name in ("empty", "t") else [name])
            return func(*args, **(kwargs or {}))

    for name in ("_quantize_rows", "_scale_sums"):
        monkeypatch.setattr(int8, name, Counted(name, getattr(int8, name)))
    made = torch.Generator().manual_seed(1)
    linear = Int8Linear(torch.randn(24, 32, generator=made).to(device), torch.randn(24, generator=made).to(device))
    x = torch.randn(3, 32, generator=made).to(device)
    with Operations():
        got = linear._fused(x)
    assert launches == ["_quantize_rows", "_int_mm", "_scale_sums"]
    torch.testing.assert_close(got, linear(x), rtol=1e-6, atol=1e-6)
