"""The weights that each rank reads: joined, they are the whole tensor, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CorruptWeights, UnsupportedModel
from engine.models.load import open_model
from engine.parallel.sharding import Share
from engine.parallel.weight_slicing import ShareOfWeights, columns
from engine.quant.formats.base import halves
from engine.quant.weight import QWeight, TwoLevel

LAYER = "model.layers.1"
BY_ROWS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
BY_COLUMNS = ("self_attn.o_proj", "mlp.down_proj")


def read(source: Any, name: str) -> torch.Tensor:
    into = torch.empty(source.shape(name))
    source.read(name, into)
    return into


def test_joined_parts_equal_the_whole(tiny_model: Callable[[str], Path]) -> None:
    opened = open_model(tiny_model("llama-bias"))
    assert opened.decoder is not None
    ranks = [ShareOfWeights(opened.weights, Share(opened.decoder, rank, 2)) for rank in range(2)]

    def parts(name: str) -> list[torch.Tensor]:
        return [read(rank, name) for rank in ranks]

    for axis, modules in ((0, BY_ROWS), (1, BY_COLUMNS)):
        for module in modules:
            name = f"{LAYER}.{module}.weight"
            assert torch.equal(torch.cat(parts(name), axis), read(opened.weights, name)), name
    for module in BY_ROWS:
        name = f"{LAYER}.{module}.bias"
        assert torch.equal(torch.cat(parts(name)), read(opened.weights, name)), name
    for module in BY_COLUMNS:  # the sum over the ranks has it once
        name = f"{LAYER}.{module}.bias"
        assert torch.equal(torch.stack(parts(name)).sum(0), read(opened.weights, name)), name
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # 257 tokens
        assert torch.equal(torch.cat(parts(name)), read(opened.weights, name)), name
    for name in (f"{LAYER}.input_layernorm.weight", "model.norm.weight"):
        for part in parts(name):
            assert torch.equal(part, read(opened.weights, name)), name


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "glm4-moe", "llama4", "granite-moe-shared"])
def test_joined_parts_of_experts_equal_the_whole(family: str, tiny_model: Callable[[str], Path]) -> None:
    opened = open_model(tiny_model(family))
    assert opened.decoder is not None
    ranks = [ShareOfWeights(opened.weights, Share(opened.decoder, rank, 2)) for rank in range(2)]
    names = [name for name in opened.weights.names if name.startswith(f"{LAYER}.") and "self_attn" not in name]
    assert any(".experts.3." in name for name in names)
    assert any(".shared_expert" in name for name in names) == (family != "mixtral")
    for name in names:
        parts = [read(rank, name) for rank in ranks]
        whole = read(opened.weights, name)
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module in ("gate_proj", "up_proj", "w1", "w3"):
            assert torch.equal(torch.cat(parts, 0), whole), name
        elif module in ("down_proj", "w2"):
            assert torch.equal(torch.cat(parts, 1), whole), name
        else:
            assert all(torch.equal(part, whole) for part in parts), name


def test_whole_experts_are_each_on_one_rank(tiny_model: Callable[[str], Path]) -> None:
    opened = open_model(tiny_model("qwen2-moe"))
    assert opened.decoder is not None
    shares = [Share(opened.decoder, rank, 2, expert_parallel=True) for rank in range(2)]
    ranks = [ShareOfWeights(opened.weights, share) for share in shares]
    names = [name for name in opened.weights.names if ".experts." in name]
    parts = [[name for name in rank.names if ".experts." in name] for rank in ranks]
    assert sorted(parts[0] + parts[1]) == sorted(names)
    for rank, share, own in zip(ranks, shares, parts, strict=True):
        assert share.local.experts is not None
        assert share.local.experts.held is not None
        assert {int(name.split(".experts.")[1].split(".")[0]) for name in own} == set(share.local.experts.held[1])
        for name in own:
            assert torch.equal(read(rank, name), read(opened.weights, name)), name
    name = f"{LAYER}.mlp.shared_expert.gate_proj.weight"
    assert torch.equal(torch.cat([read(rank, name) for rank in ranks]), read(opened.weights, name))


def test_ranks_that_are_more_than_kv_heads_share_one(tiny_models: Any, tmp_path: Path) -> None:
    opened = open_model(tiny_models.make_tiny_model("llama", tmp_path / "model", num_key_value_heads=2))
    assert opened.decoder is not None
    name, head = f"{LAYER}.self_attn.k_proj.weight", opened.decoder.head_dim
    whole = read(opened.weights, name)
    for rank, kv_head in enumerate((0, 0, 1, 1)):
        share = Share(opened.decoder, rank, 4)
        assert share.local.num_kv_heads == 1
        part = read(ShareOfWeights(opened.weights, share), name)
        assert torch.equal(part, whole[kv_head * head : (kv_head + 1) * head])


def test_a_tensor_of_another_shape_is_still_named(tiny_model: Callable[[str], Path]) -> None:
    from dataclasses import replace  # noqa: PLC0415

    opened = open_model(tiny_model("llama"))
    assert opened.decoder is not None
    share = Share(replace(opened.decoder, intermediate_size=64), 0, 2)
    with pytest.raises(CorruptWeights, match=r"gate_proj.weight has shape \[80, 48\]"):
        ShareOfWeights(opened.weights, share).shape(f"{LAYER}.mlp.gate_proj.weight")


def weight(form: str, k: int, group: int, two_level: bool = False) -> QWeight:
    generator = torch.Generator().manual_seed(k * group)
    n, groups = 6, -(-k // group)
    if form == "int4":
        codes = halves(torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8))
    else:
        codes = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    scale: Any = torch.rand(n, groups, generator=generator)
    low: Any = torch.rand(n, groups, generator=generator)
    if two_level:
        small = torch.randint(0, 64, (n, groups), generator=generator, dtype=torch.uint8)
        scale = TwoLevel(small, torch.rand(n, -(-groups // 4), generator=generator).half(), 4)
        low = None
    return QWeight(form, codes, n, k, group, scale, low)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize(
    ("k", "group"), [(64, 16), (64, 64), (96, 32), (60, 20), (70, 10), (72, 24), (50, 16), (30, 30)]
)
def test_columns_are_what_they_were(form: str, two_level: bool, k: int, group: int) -> None:
    whole = weight(form, k, group, two_level)
    half = k // 2
    for first, end in ((0, half), (half, k)):
        part = columns(whole, first, end, "w")
        assert (part.n, part.k) == (whole.n, end - first)
        assert torch.equal(part.dequantize(), whole.dequantize()[:, first:end])


def test_sizes_that_a_model_can_be_cut_into_are_named(tiny_model: Callable[[str], Path]) -> None:
    opened = open_model(tiny_model("llama"))
    assert opened.decoder is not None
    with pytest.raises(UnsupportedModel, match=r"4 attention heads can't .* by 3 devices; .* sizes allow: 1, 2, 4$"):
        Share(opened.decoder, 0, 3)


@pytest.mark.parametrize(("experts", "sizes"), [(6, "1, 2"), (2, "1, 2")])
def test_numbers_of_ranks_that_can_hold_whole_experts_are_named(
    experts: int, sizes: str, tiny_models: Any, tmp_path: Path
) -> None:
    opened = open_model(tiny_models.make_tiny_model("qwen3-moe", tmp_path / "model", num_experts=experts))
    assert opened.decoder is not None
    with pytest.raises(UnsupportedModel, match=rf"{experts} experts can't .* by 4 devices; .* sizes allow: {sizes}$"):
        Share(opened.decoder, 0, 4, expert_parallel=True)


def test_columns_in_an_order_of_their_own_are_refused() -> None:
    from dataclasses import replace  # noqa: PLC0415

    shuffled = replace(weight("int4", 64, 16), order=torch.randperm(64))
    with pytest.raises(UnsupportedModel, match="down_proj is stored in activation order"):
        columns(shuffled, 0, 32, "down_proj")
