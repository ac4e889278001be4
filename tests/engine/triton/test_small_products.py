"""Weight-only products in Triton against the dequantized weight, for each form, grouping and dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.quant.linear import fast_kernel
from engine.quant.rtn import Rounding, round_to_nearest
from engine.quant.small_weights import SmallWeightKernel, multiplies_small
from engine.quant.weight import Activations, QWeight, TwoLevel

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

from engine.triton_kernels import small_weights
from engine.triton_kernels.small_weights import SmallWeightProduct


def weight(form: str, n: int, k: int, group: int | None, *, symmetric: bool = True) -> QWeight:
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
    return round_to_nearest(dense, Rounding(form, group=group, symmetric=symmetric))  # type: ignore[arg-type]


def two_levels(n: int, k: int) -> QWeight:
    """A weight as Q4_K stores it: eight groups of 32 share a step of the scales, and one of the lowest values."""
    made = torch.Generator().manual_seed(3)
    groups, wide = -(-k // 32), -(-k // 256)

    def factors(high: int, dtype: torch.dtype) -> TwoLevel:
        codes = torch.randint(0, high, (n, groups), generator=made).to(dtype)
        return TwoLevel(codes, torch.rand(n, wide, generator=made).half() / high, 8)

    codes = torch.randint(0, 256, (n, k // 2), generator=made).to(torch.uint8)
    low = factors(63, torch.int8)
    return QWeight("int4", codes, n, k, 32, factors(63, torch.uint8), replace(low, codes=-low.codes))


WEIGHTS = {
    "int4, groups of 128": weight("int4", 96, 256, 128),
    "int4, groups of 32, zeros, and shapes that no tile divides": weight("int4", 77, 160, 32, symmetric=False),
    "int4, a factor a row": weight("int4", 64, 192, None),
    "int4, an odd number of columns": weight("int4", 40, 63, None),
    "int4, two levels": two_levels(80, 512),
    "int8, groups of 16 (Q6_K)": weight("int8", 48, 272, 16),
    "int8, a factor a row": weight("int8", 33, 130, None),
}
DTYPES = (torch.bfloat16, *(pytest.param(other, marks=pytest.mark.slow) for other in (torch.float16, torch.float32)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", list(WEIGHTS))
@pytest.mark.parametrize("rows", [1, 20])
def test_it_is_the_product_with_the_dequantized_weight(
    form: str, rows: int, dtype: torch.dtype, device: torch.device, upcast: bool
) -> None:
    q = WEIGHTS[form].to(device)
    x = torch.randn(rows, q.k, generator=torch.Generator().manual_seed(rows)).to(device, dtype)
    bias = torch.randn(q.n).to(device)
    wanted = x.double() @ q.dequantize(dtype).double().t() + bias.double()
    y = SmallWeightProduct(q, bias, upcast)(x)
    assert y.dtype == dtype
    step = torch.finfo(dtype).eps
    steps = 64 if device.type == "cuda" else 16  # a GPU adds one product after the other
    torch.testing.assert_close(y.double(), wanted, rtol=2 * step, atol=float(steps * step * wanted.abs().mean()) + 1e-5)


@pytest.mark.parametrize("rows", [33, 65, 128])
def test_thick_batches_take_larger_tiles_and_give_the_same(rows: int, device: torch.device, upcast: bool) -> None:
    q = WEIGHTS["int4, groups of 128"].to(device)
    x = torch.randn(rows, q.k, device=device)
    y = SmallWeightProduct(q, None, upcast)(x)
    torch.testing.assert_close(y, x @ q.dequantize().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["int4, two levels", "int4, an odd number of columns", "int8, groups of 16 (Q6_K)"])
def test_programs_share_the_columns_of_few_outputs(
    form: str, device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_weights, "_SPLIT_TURNS", 1)
    monkeypatch.setattr(small_weights, "_COLUMNS", 32)
    q = WEIGHTS[form].to(device)
    x, bias = torch.randn(3, q.k, device=device), torch.randn(q.n, device=device)
    product = SmallWeightProduct(q, bias, upcast, processors=3)
    assert product._splits() > 1
    torch.testing.assert_close(product(x), x @ q.dequantize().t() + bias, rtol=1e-4, atol=1e-4)


def test_a_weight_is_split_as_far_as_a_device_has_room(device: torch.device) -> None:
    def splits(n: int, k: int) -> int:
        codes, scale = torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 128)
        return SmallWeightProduct(QWeight("int4", codes, n, k, 128, scale), None, processors=132)._splits()

    assert [splits(28672, 4096), splits(4096, 4096), splits(4096, 14336), splits(1024, 4096)] == [1, 8, 8, 8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", list(WEIGHTS))
def test_a_weight_of_many_rows_is_dequantized_once(
    form: str, dtype: torch.dtype, device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element as torch would, some of its rows at a time. The interpreter cuts further bits of bfloat16 off; a GPU
    adds the lowest value to a product that it has not rounded."""
    q = WEIGHTS[form].to(device)
    monkeypatch.setattr(small_weights, "MAX_ROWS", 2)
    monkeypatch.setattr(small_weights, "_SCRATCH_BYTES", 40 * q.k * dtype.itemsize)
    got = SmallWeightProduct(q, None, upcast)(torch.eye(q.k, dtype=dtype, device=device))
    step = torch.finfo(dtype).eps
    cut = step if upcast and dtype == torch.bfloat16 else 0
    fused = float(step * q.dequantize().abs().max()) if device.type == "cuda" else 0
    torch.testing.assert_close(got.t(), q.dequantize(dtype), rtol=cut, atol=fused)
    bias = torch.randn(q.n, device=device)
    x = torch.randn(3, q.k, device=device)
    got = SmallWeightProduct(q, bias, upcast)(x)
    torch.testing.assert_close(got, x @ q.dequantize().t() + bias, rtol=1e-4, atol=1e-4)


def test_columns_in_another_order_meet_their_inputs(device: torch.device, upcast: bool) -> None:
    q = replace(WEIGHTS["int4, groups of 128"], order=torch.randperm(256)).to(device)
    x = torch.randn(5, 256, device=device)
    torch.testing.assert_close(SmallWeightProduct(q, None, upcast)(x), x @ q.dequantize().t(), rtol=1e-4, atol=1e-4)


def test_rows_that_lie_apart_and_no_rows_at_all(device: torch.device, upcast: bool) -> None:
    q = WEIGHTS["int8, a factor a row"].to(device)
    wide = torch.randn(6, 200, device=device)
    product = SmallWeightProduct(q, None, upcast)
    torch.testing.assert_close(product(wide[:, :130]), wide[:, :130] @ q.dequantize().t(), rtol=1e-4, atol=1e-4)
    assert product(wide[:0, :130]).shape == (0, 33)


def test_what_it_takes() -> None:
    assert all(multiplies_small(q) for q in WEIGHTS.values())
    assert not multiplies_small(weight("int4", 8, 63, 21))  # a byte would belong to two groups
    assert not multiplies_small(replace(WEIGHTS["int8, a factor a row"], activations=Activations("int8")))
    assert not multiplies_small(weight("fp8", 16, 32, None))
    assert not SmallWeightKernel().runs(WEIGHTS["int4, groups of 128"]), "a CPU has kernels of its own"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED HERE: the choice on a GPU; there is none")
def test_a_gpu_multiplies_with_the_small_form() -> None:
    kernel = fast_kernel(WEIGHTS["int4, groups of 128"].to(torch.device("cuda")))
    assert kernel is not None
    assert kernel.name == "triton"
