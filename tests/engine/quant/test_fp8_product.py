"""The fp8 product: what it computes, with which weights, and that broken rows stay broken. On a CPU the same operator
stands in for the matrix units."""

from __future__ import annotations

import pytest
import torch

from engine.quant.fp8_linear import Fp8Kernel, Fp8Product, multiplies_rowwise, quantize_rows_fp8
from engine.quant.rtn import Rounding, round_to_nearest
from engine.quant.weight import Activations, QWeight

BY_ROWS = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="NOT TESTED HERE: the product; this torch has no factors by rows on CPUs",
)


def weight(n: int = 48, k: int = 64, scale: float | None = None, group: int | None = None) -> QWeight:
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    return round_to_nearest(dense, Rounding("fp8", group=group, activations=Activations("fp8", scale)))


@BY_ROWS
@pytest.mark.parametrize("scale", [None, 0.02])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_product_of_quantized_inputs_with_the_weight(scale: float | None, dtype: torch.dtype) -> None:
    q, x = weight(scale=scale), torch.randn(7, 64, dtype=dtype)
    bias = torch.randn(48)
    codes, scales = quantize_rows_fp8(x, scale)
    wanted = (codes.float() * scales) @ q.dequantize().t() + bias
    y = Fp8Product(q, bias)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), wanted, rtol=1e-2, atol=2e-2)  # the sum is rounded to bfloat16
    torch.testing.assert_close(y.float(), x.float() @ q.dequantize().t() + bias, rtol=0.1, atol=0.8)


@BY_ROWS
def test_a_rows_result_does_not_depend_on_other_rows() -> None:
    # Its scale is its own. The operator may add up in another order, and round a sum that is almost 0 otherwise.
    q, x = weight(), torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    product = Fp8Product(q, None)
    whole = product(torch.cat([x, 1e4 * x]))
    for row in range(9):
        torch.testing.assert_close(product(x[row : row + 1])[0], whole[row], rtol=2**-7, atol=1e-4)


def test_values_beyond_a_calibrated_scale_are_clipped_and_zeros_stay_zeros() -> None:
    x = torch.tensor([[1000.0, -1000.0, 0.5], [0.0, 0.0, 0.0]])
    codes, scales = quantize_rows_fp8(x, 0.01)
    assert (codes.float() * scales)[0].tolist() == pytest.approx([4.48, -4.48, 0.5], rel=0.1)
    for scale in (None, 0.01):
        codes, scales = quantize_rows_fp8(x, scale)
        assert (codes.float() * scales.nan_to_num())[1].tolist() == [0.0, 0.0, 0.0]
        assert bool(scales.isfinite().all())


@BY_ROWS
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gives_no_finite_products_and_the_others_do(broken: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = broken
    for scale in (None, 0.05):
        y = Fp8Product(weight(scale=scale), None)(x)
        assert not y[1].isfinite().any()
        assert bool(y[[0, 2]].isfinite().all())


def test_only_weights_that_the_product_takes_are_given_to_it() -> None:
    assert multiplies_rowwise(weight())
    assert not multiplies_rowwise(weight(group=32))
    assert not multiplies_rowwise(weight(n=40))
    assert not multiplies_rowwise(round_to_nearest(torch.randn(32, 32), Rounding("fp8")))
    assert not multiplies_rowwise(round_to_nearest(torch.randn(32, 32), Rounding("int8")))
    assert not Fp8Kernel().runs(weight()), "a CPU has kernels of its own"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED HERE: the product on a GPU; there is none")
def test_a_gpu_gives_what_the_cpu_gives() -> None:
    x = torch.randn(33, 64)
    q = weight()
    there = QWeight("fp8", q.codes.cuda(), q.n, q.k, q.group, q.scale.cuda(), activations=q.activations)  # type: ignore[union-attr]
    assert Fp8Kernel().runs(there)
    torch.testing.assert_close(Fp8Product(there, None)(x.cuda()).cpu(), Fp8Product(q, None)(x), rtol=1e-2, atol=1e-2)
