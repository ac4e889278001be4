"""int8 weights with torch's operators: near what they stand for, half of bfloat16's bytes, and each row alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quant.int8_linear import Int8Linear, Int8WeightLinear, int8_product, quantize_rows

SHAPES = ((1, 1), (33, 7), (96, 576), (576, 96))
ROWS = (1, 2, 17, 130)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_inputs(n: int, k: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * k + rows)
    return (
        torch.randn(n, k, generator=generator),
        torch.randn(n, generator=generator),
        torch.randn(rows, k, generator=generator),
    )


def relative_error(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [True, False])
def test_the_product_of_quantized_rows_and_weights_is_that_of_what_they_stand_for(
    shape: tuple[int, int], rows: int, dtype: torch.dtype, exact: bool
) -> None:
    # Given rows and weights, and what int8 makes of each
    weight, bias, x = random_inputs(*shape, rows)
    x = x.to(dtype)
    (whole, scale), (weights, per_column) = quantize_rows(x), quantize_rows(weight)
    wanted = F.linear(whole.double() * scale, weights.double() * per_column, bias.double())
    # When they are multiplied, in int8 or in float32, then it is their product, rounded once
    if exact and not Int8Linear(weight)._exact:
        pytest.skip("torch's int8 product is not exact on this processor")
    y = Int8Linear(weight, bias, exact=exact)(x)
    assert (y.dtype, y.shape, y.is_contiguous()) == (dtype, (rows, shape[0]), True)
    assert relative_error(y, wanted) < {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_kinds_are_near_the_product_and_take_less_memory(dtype: torch.dtype) -> None:
    weight, bias, x = random_inputs(96, 576, 40)
    x = x.to(dtype)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    both, weights_only = Int8Linear(weight, bias), Int8WeightLinear(weight, bias)
    for linear, most in ((both, 0.012), (weights_only, 0.009)):
        assert 0.002 < relative_error(linear(x), wanted) < most  # it is quantized, and close
        assert (linear.in_features, linear.out_features) == (576, 96)
        assert linear.num_bytes < 0.51 * weight.to(torch.bfloat16).nbytes


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(rows: int) -> None:
    weight, bias, x = random_inputs(96, 576, rows)
    linear = Int8Linear(weight, bias)
    if not linear._exact:
        pytest.skip("torch's int8 product is not exact on this processor")
    together = linear(x)
    for row in range(rows):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("made_of", [Int8Linear, Int8WeightLinear])
def test_a_row_that_is_not_finite_spoils_itself_only(made_of: type[Int8Linear] | type[Int8WeightLinear]) -> None:
    weight, bias, x = random_inputs(33, 48, 5)
    sound = made_of(weight, bias)(x)
    x[1, 7], x[3, 0] = float("nan"), float("inf")
    y = made_of(weight, bias)(x)
    assert y.isfinite().all(dim=1).tolist() == [True, False, True, False, True]
    assert not y[[1, 3]].isfinite().any()
    torch.testing.assert_close(y[[0, 2, 4]], sound[[0, 2, 4]])


def test_rows_and_weights_of_zeros_are_zero() -> None:
    linear = Int8Linear(torch.zeros(8, 16), torch.arange(8.0))
    for x in (torch.zeros(2, 16), torch.ones(2, 16), torch.full((2, 16), 1e-45)):
        assert torch.equal(linear(x), torch.arange(8.0).expand(2, 8))
    assert Int8Linear(torch.ones(8, 16))(torch.ones(0, 16)).shape == (0, 8)


@pytest.mark.slow
def test_where_torchs_int8_product_is_cut_off_it_is_not_used() -> None:
    """On processors without VNNI pairs of products are added in 16 bits; torch can be set to compute like one."""
    program = (
        "import torch; from engine.quant.int8_linear import Int8Linear\n"
        "x = torch.full((3, 64), 2.0)\n"
        "print(Int8Linear(torch.ones(4, 64))(x).tolist() == [[128.0] * 4] * 3)"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_a_library_that_wants_more_rows_gets_zeros(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    # Given a product like CUDA's, which refuses 16 rows and fewer
    multiply = torch._int_mm

    def picky(left: Tensor, right: Tensor) -> Tensor:
        assert len(left) > 16, "self.size(0) needs to be greater than 16"
        return multiply(left, right)

    monkeypatch.setattr(torch, "_int_mm", picky)
    generator = torch.Generator().manual_seed(rows)
    left, weight = (torch.randint(-8, 8, (n, 32), generator=generator, dtype=torch.int8) for n in (rows, 24))
    # When rows are multiplied, then the requested ones come back
    product = int8_product(left, weight, min_rows=17)
    assert torch.equal(product.long(), left.long() @ weight.long().t())
