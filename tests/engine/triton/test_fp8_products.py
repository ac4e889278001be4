"""fp8 in Triton: inputs quantized as torch would, and products whose groups have factors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from engine.quant.fp8_linear import (
    BlockFp8Product,
    multiplies_blocks,
    multiplies_groups,
    multiplies_rowwise,
    quantize_rows_fp8,
)
from engine.quant.linear import fast_kernel
from engine.quant.rtn import Rounding, round_to_nearest
from engine.quant.weight import Activations, QWeight

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

from engine.triton_kernels import fp8
from engine.triton_kernels.fp8 import GroupedFp8Product, quantize_groups, quantize_rows

DTYPES = (torch.bfloat16, *(pytest.param(other, marks=pytest.mark.slow) for other in (torch.float16, torch.float32)))


def grouped(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups, by torch's operators: each group as a row."""
    rows, k = x.shape
    padded = torch.nn.functional.pad(x, (0, -k % group)).view(-1, group)
    codes, scales = quantize_rows_fp8(padded)
    return codes.view(torch.uint8).view(rows, -1)[:, :k].view(torch.float8_e4m3fn), scales.view(rows, -1)


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], x: Tensor, group: int) -> None:
    """Equal factors and codes; a GPU may take the other code of a value in the middle between two."""
    assert torch.equal(got[1].cpu().nan_to_num(nan=-1), want[1].nan_to_num(nan=-1))
    ours, theirs = got[0].cpu().float(), want[0].float()
    other = ours != theirs
    assert got[0].is_cuda or not other.any()
    quotients = x.float() / want[1].repeat_interleave(group, 1)[:, : x.shape[1]]
    torch.testing.assert_close(((ours + theirs) / 2)[other], quotients[other], rtol=1e-6, atol=0)


def inputs(k: int, dtype: torch.dtype) -> Tensor:
    """Rows of many sizes; zeros, what is too small for a scale, and what is not finite among them."""
    x = torch.randn(12, k, generator=torch.Generator().manual_seed(k))
    x *= 10.0 ** torch.arange(-6, 6)[:, None]
    x = x.clamp(-6e4, 6e4).to(dtype)
    x[1] = 0
    x[2] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps if dtype == torch.float32 else 0
    x[3, 5], x[4, 7], x[5, k - 1] = float("nan"), float("inf"), float("-inf")
    x[6, 0] = 448
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.01])
def test_rows_are_quantized_as_by_torch(
    dtype: torch.dtype, scale: float | None, device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_MOST_COLUMNS", 64)  # a row takes turns
    x = inputs(150, dtype)
    same(quantize_rows(x.to(device), scale, upcast), quantize_rows_fp8(x, scale), x, 150)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 96, 128])
def test_groups_are_quantized_as_by_torch(dtype: torch.dtype, group: int, device: torch.device, upcast: bool) -> None:
    x = inputs(300, dtype)
    same(quantize_groups(x.to(device), group, upcast), grouped(x, group), x, group)


def test_rounding_by_hand_is_torchs() -> None:
    """All of float8, all midpoints between its numbers, and the nearest numbers to them."""
    if torch.cuda.is_available():
        pytest.skip("NOT TESTED HERE: a GPU rounds by itself")
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    neighbours = [middles.nextafter(torch.full_like(middles, to)) for to in (0.0, 500.0)]
    values = torch.cat([numbers, middles, *neighbours])
    values = torch.cat([values, -values, torch.tensor([448.0])])  # the largest makes the scale 1
    codes, scales = quantize_rows(values[None], 1.0, True)
    assert scales.tolist() == [[1.0]]
    assert torch.equal(codes[0].float(), values.to(torch.float8_e4m3fn).float())


def weight(n: int, k: int, group: int, scale: float | None = None) -> QWeight:
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    return round_to_nearest(dense, Rounding("fp8", group=group, activations=Activations("fp8", scale)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), [(130, 384, 128), (48, 300, 128), (33, 192, 96), (64, 64, 32)])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.slow
def test_a_product_of_groups(
    n: int, k: int, group: int, rows: int, dtype: torch.dtype, device: torch.device, upcast: bool
) -> None:
    q = weight(n, k, group)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(dtype)
    bias = torch.randn(n)
    codes, scales = (part.cpu() for part in quantize_groups(x.to(device), group, upcast))
    wanted = (codes.double() * scales.double().repeat_interleave(group, 1)[:, :k]) @ q.dequantize().double().t() + bias
    y = GroupedFp8Product(q.to(device), bias.to(device), upcast)(x.to(device))
    assert y.dtype == dtype
    # A Hopper's matrix units keep 13 bits behind the point of a group's largest sum (DeepSeek-V3, section 3.3.2).
    step = max(torch.finfo(dtype).eps, 2**-13 if device.type == "cuda" else 0)
    torch.testing.assert_close(
        y.cpu().double(), wanted, rtol=2 * step, atol=float(8 * step * wanted.abs().mean()) + 1e-4
    )


def test_blocks_of_a_checkpoint_are_groups_whose_rows_repeat_their_factor(device: torch.device, upcast: bool) -> None:
    codes = torch.randn(256, 256).to(torch.float8_e4m3fn)
    blocks = torch.rand(2, 2) + 0.5
    q = QWeight("fp8", codes, 256, 256, 128, blocks.repeat_interleave(128, 0), activations=Activations("fp8"))
    assert multiplies_groups(q)
    assert not multiplies_rowwise(q)
    x, scales = grouped(torch.randn(3, 256), 128)
    whole = codes.float() * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = x.float() * scales.repeat_interleave(128, 1)
    got = GroupedFp8Product(q.to(device), None, upcast)(values.to(device)).cpu()
    torch.testing.assert_close(got, values @ whole.t(), rtol=1e-4, atol=1e-3)


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: Any, scale_b: Tensor, recipe_b: Any, *, bias: Tensor | None,
    output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.scaled_mm` of blocks, which torch has for Hopper alone, with what it requires there (torch
    2.13, ScaledBlas.cpp, `_scaled_block1x128_block128x128` and `_scaled_block1x128_block1x128`; rows by cuBLASLt)."""
    (rows, k), n = a.shape, b.shape[1]
    groups, blocks = -(-k // 128), -(-n // 128)
    assert rows % 4 == 0 == k % 16 == n % 16
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert recipe_a == ScalingType.BlockWise1x128
    assert (scale_a.dtype, scale_a.shape, scale_a.stride()) == (torch.float32, (rows, groups), (1, rows))
    if recipe_b == ScalingType.BlockWise128x128:
        room = -(-groups // 4) * 4
        assert (scale_b.dtype, scale_b.shape, scale_b.stride()) == (torch.float32, (room, blocks), (1, room))
        of_weight = scale_b.t().repeat_interleave(128, 0)[:n, :groups]
    else:
        assert recipe_b == ScalingType.BlockWise1x128
        assert (scale_b.dtype, scale_b.shape, scale_b.stride()) == (torch.float32, (n, groups), (1, n))
        of_weight = scale_b
    left, right = (
        codes.float() * scale.repeat_interleave(128, 1)[:, :k] for codes, scale in ((a, scale_a), (b.t(), of_weight))
    )
    assert bias is None or bias.dtype == torch.bfloat16
    return (left @ right.t() + (0 if bias is None else bias.float())).to(output_dtype)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("rows", [1, 8])
def test_blocks_reach_torchs_product_in_its_layout(
    blocks: bool, rows: int, device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a number of groups that is no multiple of four, and outputs that fill no block."""
    monkeypatch.setattr("engine.quant.fp8_linear.F.scaled_mm", scaled_product)
    codes = torch.randn(208, 640).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 5) if blocks else torch.rand(208, 5)
    if blocks:
        scale = scale.repeat_interleave(128, 0)[:208].contiguous()
    q = QWeight("fp8", codes, 208, 640, 128, scale, activations=Activations("fp8"))
    assert multiplies_blocks(q)
    x, bias = torch.randn(rows, 640), torch.randn(208)
    product = BlockFp8Product(q.to(device), bias.to(device), partial(quantize_groups, interpreted=upcast))
    want = GroupedFp8Product(q.to(device), bias.to(device), upcast)(x.to(device))
    got = product(x.to(device))
    assert got.shape == (rows, 208)
    assert got.dtype == x.dtype
    assert (product._recipe == ScalingType.BlockWise128x128) == blocks
    torch.testing.assert_close(got, want, rtol=2**-7, atol=float(2**-7 * want.abs().mean()))


def test_a_calibrated_scale_is_one_for_all_groups(device: torch.device, upcast: bool) -> None:
    q, x = weight(48, 128, 32, scale=0.02), torch.randn(5, 128)
    codes, scales = quantize_rows_fp8(x, 0.02)
    got = GroupedFp8Product(q.to(device), None, upcast)(x.to(device)).cpu()
    torch.testing.assert_close(got, (codes.float() * scales) @ q.dequantize().t(), rtol=1e-4, atol=1e-3)


def test_a_row_that_is_not_finite_harms_no_other(device: torch.device, upcast: bool) -> None:
    x = torch.randn(3, 128)
    x[1, 5] = float("nan")
    y = GroupedFp8Product(weight(32, 128, 32).to(device), None, upcast)(x.to(device))
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


def test_what_it_takes() -> None:
    assert multiplies_groups(weight(16, 256, 128))
    assert not multiplies_groups(weight(16, 256, 16)), "a product of the matrix units takes 32 columns"
    assert multiplies_blocks(weight(16, 256, 128))
    assert not multiplies_blocks(weight(16, 256, 64))
    assert not multiplies_blocks(weight(24, 256, 128)), "torch's product takes multiples of 16"
    assert not multiplies_blocks(weight(16, 256, 128, scale=0.02)), "an input's groups have factors of their own"
    assert not multiplies_groups(round_to_nearest(torch.randn(16, 256), Rounding("fp8", group=128)))
    assert fast_kernel(weight(16, 256, 128)) is None, "a CPU has kernels of its own"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED HERE: the choice on a GPU; there is none")
def test_a_gpu_multiplies_blocks_as_they_are() -> None:
    kernel = fast_kernel(weight(16, 256, 128).to(torch.device("cuda")))
    assert kernel is not None
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert kernel.name == ("fp8 blocks" if hopper else "fp8 groups")
