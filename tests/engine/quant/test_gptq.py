"""GPTQ: what it rounds to, and that products come out closer than with each weight rounded by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.decoder import DecoderSpec
from engine.models.families.registry import fused_family
from engine.models.head_order import qkv_order
from engine.quant.gptq_rounding import CalibratingBuilder, by_module, gptq
from engine.quant.rtn import Rounding, round_to_nearest
from engine.quant.weight import QWeight


def inputs(tokens: int = 2000, k: int = 128, seed: int = 1) -> Tensor:
    """Channels that are correlated and not of one size, as a model's do."""
    make = torch.Generator().manual_seed(seed)
    mix = torch.randn(k // 4, k, generator=make)
    spread = torch.exp(torch.randn(k, generator=make))
    return (torch.randn(tokens, k // 4, generator=make) @ mix + 0.3 * torch.randn(tokens, k, generator=make)) * spread


def weight(n: int = 96, k: int = 128) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(2))


def error(x: Tensor, dense: Tensor, q: QWeight) -> float:
    """The relative error of the product."""
    return float((x @ (q.dequantize() - dense).t()).norm() / (x @ dense.t()).norm())


@pytest.mark.parametrize(
    "rounding",
    [
        Rounding("int4", group=32),
        Rounding("int4", group=32, symmetric=False),
        Rounding("int4", group=48, scale_dtype=torch.bfloat16),
        Rounding("int4"),
        Rounding("int8"),
    ],
)
def test_products_are_closer_than_with_weights_rounded_one_by_one(rounding: Rounding) -> None:
    x, dense = inputs(), weight()
    later = inputs(seed=1)[1000:]
    made, nearest = gptq(dense, x[:1000].t() @ x[:1000], rounding), round_to_nearest(dense, rounding)
    assert (made.form, made.group, made.codes.shape, made.order) == (
        nearest.form,
        nearest.group,
        nearest.codes.shape,
        None,
    )
    assert error(later, dense, made) < 0.6 * error(later, dense, nearest)


def test_inputs_that_have_nothing_to_do_with_each_other_leave_nothing_to_make_up_for() -> None:
    dense = weight()
    for rounding in (Rounding("int8"), Rounding("int8", group=32, symmetric=False)):
        made = gptq(dense, torch.eye(128), rounding)
        nearest = round_to_nearest(dense, rounding)
        wrong, best = ((q.dequantize() - dense).square().sum() for q in (made, nearest))
        assert float(wrong) <= 1.0001 * float(best), "a smaller range may be better, a worse one never is"


def test_channels_that_nothing_comes_through_cost_the_others_nothing() -> None:
    x, dense = inputs(), weight()
    x[:, ::3] = 0
    rounding = Rounding("int4", group=32)
    made = gptq(dense, x.t() @ x, rounding)
    assert made.dequantize().isfinite().all()
    assert error(x, dense, made) < 0.7 * error(x, dense, round_to_nearest(dense, rounding))
    nothing = gptq(dense, torch.zeros(128, 128), rounding)
    assert nothing.dequantize().isfinite().all()


def test_fewer_tokens_than_channels_are_enough() -> None:
    x, dense = inputs()[:40], weight()
    made = gptq(dense, x.t() @ x, Rounding("int4", group=32))
    assert made.dequantize().isfinite().all()
    assert error(x, dense, made) < 0.5 * error(x, dense, round_to_nearest(dense, Rounding("int4", group=32)))


def test_a_product_quantizes_itself_to_what_it_sees_and_passes_on_what_it_then_computes() -> None:
    x, dense = inputs(), weight()
    counts: list[int] = []
    builder = CalibratingBuilder(rounding=Rounding("int4", group=32), progress=counts.append)
    y = builder.linear(dense.clone(), torch.ones(96))(x)
    odd = builder.linear(weight(k=72), None)
    torch.testing.assert_close(odd(x[:, :72]), x[:, :72] @ weight(k=72).t())
    quantized, refused = builder.done
    assert quantized is not None
    assert refused is None, "32 does not divide 72"
    assert counts == [1, 2]
    torch.testing.assert_close(y, x @ quantized.dequantize().t() + 1.0)


def spec_of(family: str, tiny_models: Any) -> DecoderSpec:
    """Of 4 heads and 2 key-value heads of 8 dimensions, and an MLP of 40 columns."""
    config = tiny_models.make_config(family, hidden_size=32, intermediate_size=40, head_dim=8)
    described = fused_family(config)
    assert described is not None
    return described(config)


def test_fused_products_are_split_again(tiny_models: Any) -> None:
    stacked = [round_to_nearest(weight(n), Rounding("int4", group=32)) for n in (64, 32, 80, 32)]
    spec = spec_of("llama", tiny_models)
    modules = by_module([*stacked, None, *stacked[1:]], spec, "model.")
    assert len(modules) == 7 + 4
    again = torch.cat([modules[f"model.layers.0.self_attn.{part}_proj"].dequantize() for part in "qkv"])
    torch.testing.assert_close(again, stacked[0].dequantize())
    assert "model.layers.1.self_attn.q_proj" not in modules
    torch.testing.assert_close(modules["model.layers.1.mlp.up_proj"].dequantize(), stacked[2].dequantize()[40:])


@pytest.mark.parametrize("family", ["ernie4.5", "glm4"])
def test_products_whose_rows_were_sorted_are_stored_as_they_were(family: str, tiny_models: Any) -> None:
    # Given q, k and v as a decoder computes them, their rows in the order of its rotation
    spec = spec_of(family, tiny_models)
    order = qkv_order(spec, 0)
    assert order is not None
    stored = round_to_nearest(weight(64), Rounding("int4", group=32))
    # When they go back into a checkpoint, then each row is at its own place
    modules = by_module([stored.take(order), None, None, None], spec, "model.")
    again = torch.cat([modules[f"model.layers.0.self_attn.{part}_proj"].dequantize() for part in "qkv"])
    assert torch.equal(again, stored.dequantize())


def test_stacked_modules_stay_stacked(tiny_models: Any) -> None:
    stacked = [round_to_nearest(weight(n), Rounding("int4", group=32)) for n in (64, 32, 80, 32)]
    modules = by_module(stacked, spec_of("phi3", tiny_models), "model.")
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert list(modules) == [f"model.layers.0.{part}" for part in parts]
