"""Round-to-nearest is the library's, code for code, and no code is further from its weight than half a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.quant.rtn import AT_LOAD, Rounding, round_to_nearest


def random_weight(n: int = 24, k: int = 128, seed: int = 5) -> Tensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    weight[3] = 0  # a row of zeros
    weight[4] = weight[4].abs() + 0.01  # all of one sign
    weight[5, :32] *= 40
    return weight


ROUNDINGS = {
    **{f"int4-{g}": Rounding("int4", g) for g in (32, 64, 128)},
    **{f"int4-{g}-asymmetric": Rounding("int4", g, symmetric=False) for g in (32, 64, 128)},
    "int4-rows": Rounding("int4"),
    "int8-rows": Rounding("int8"),
    "int8-rows-asymmetric": Rounding("int8", symmetric=False),
    "int8-32": Rounding("int8", 32),
    "fp8-rows": Rounding("fp8"),
}
BETWEEN = Rounding("int4", 32, symmetric=False, whole_zero=False)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_it_is_the_librarys(name: str) -> None:
    # Given compressed-tensors with the same settings, when it rounds the same weight, then both stand for the same
    reason = "NOT TESTED HERE: the library of the format is not installed"
    library: Any = pytest.importorskip("compressed_tensors.quantization", reason=reason)
    forward: Any = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    helpers: Any = pytest.importorskip("compressed_tensors.quantization.utils")
    rounding, weight = ROUNDINGS[name], random_weight()
    arguments = library.QuantizationArgs(
        num_bits=4 if rounding.form == "int4" else 8,
        type="float" if rounding.form == "fp8" else "int",
        symmetric=rounding.symmetric,
        strategy="channel" if rounding.group is None else "group",
        group_size=rounding.group,
    )
    parts = weight.view(24, -1, rounding.group or 128)
    scale, zero = helpers.calculate_qparams(parts.amin(2), parts.amax(2), arguments)
    theirs = forward.fake_quantize(weight, scale, zero, arguments)
    ours = round_to_nearest(weight, rounding)
    assert torch.equal(ours.scale.float(), scale)
    torch.testing.assert_close(ours.dequantize(), theirs, rtol=4e-7, atol=2e-7)


@pytest.mark.parametrize("name", [*ROUNDINGS, "int4-between"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_off_by_more_than_half_a_step(name: str, dtype: torch.dtype) -> None:
    rounding, weight = ROUNDINGS.get(name, BETWEEN), random_weight().to(dtype)
    found = round_to_nearest(weight, rounding)
    assert (found.form, found.n, found.k) == (rounding.form, 24, 128)
    off = (found.dequantize() - weight.float()).abs()
    if rounding.form == "fp8":
        assert bool((off <= weight.float().abs() / 16 + found.scale.float() / 512).all())
    else:
        step = found.scale.float().repeat_interleave(found.group, 1)
        assert bool((off <= step * (0.5 + 1e-3) + 1e-7).all())
    assert bool((found.dequantize()[3] == 0).all())


def test_rows_are_rounded_alike_however_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = round_to_nearest(random_weight(), AT_LOAD["int4"])
    monkeypatch.setattr("engine.quant.rtn._ELEMENTS_AT_ONCE", 700)
    assert round_to_nearest(random_weight(), AT_LOAD["int4"]).equals(whole)


def test_codes_are_chosen_for_the_scale_that_is_stored() -> None:
    # Given scales of bfloat16, then no code has a neighbour that is nearer
    weight = random_weight()
    found = round_to_nearest(weight, Rounding("int8", 32, scale_dtype=torch.bfloat16))
    assert found.scale.dtype == torch.bfloat16
    scale = found.scale.float().repeat_interleave(32, 1)
    codes = found.integers().float()
    off = (codes * scale - weight).abs()
    for other in (codes - 1, codes + 1):
        inside = (other >= -128) & (other <= 127)
        assert bool((off <= (other * scale - weight).abs() + 1e-7)[inside].all())


def test_weights_on_sixteen_evenly_spaced_values_are_exact() -> None:
    # Given weights of llama.cpp's Q4_1 kind, when they are rounded again in the same groups, then nothing is lost
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (8, 4, 32), generator=generator)
    codes[:, :, 0], codes[:, :, 1] = 0, 15
    scale, low = torch.rand(8, 4, 1, generator=generator).bfloat16().float(), -torch.rand(8, 4, 1).bfloat16().float()
    weight = (codes * scale + low).view(8, 128)
    found = round_to_nearest(weight, AT_LOAD["int4"])
    torch.testing.assert_close(found.dequantize(), weight, rtol=1e-6, atol=1e-6)
    assert found.nbytes == 8 * 128 * 5 / 8


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_scales_beyond_float16_are_stored_in_float32(size: float) -> None:
    weight = random_weight() * size
    found = round_to_nearest(weight, AT_LOAD["int4"])
    assert found.scale.dtype == (torch.float16 if size == 1 else torch.float32)
    step = found.scale.float().repeat_interleave(32, 1)
    assert bool(((found.dequantize() - weight).abs() <= step * 0.51).all())


def test_columns_that_fill_no_group() -> None:
    weight = random_weight(8, 80)
    found = round_to_nearest(weight, Rounding("int4", 32))
    assert (found.k, found.groups, found.group) == (80, 3, 32)
    assert torch.equal(found.dequantize()[:, :64], round_to_nearest(weight[:, :64], Rounding("int4", 32)).dequantize())
    assert float((found.dequantize() - weight).abs().max()) < float(weight.abs().max()) / 14


def test_infinity_and_nan_stay_visible() -> None:
    weight = random_weight()
    weight[0, 0], weight[1, 1] = torch.inf, torch.nan
    for rounding in (*ROUNDINGS.values(), BETWEEN):
        broken = round_to_nearest(weight, rounding).dequantize()
        assert not bool(broken[0].isfinite().all())
        assert not bool(broken[1].isfinite().all())
        assert bool(broken[2:].isfinite().all())
