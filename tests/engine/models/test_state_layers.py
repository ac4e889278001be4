"""Models whose layers have states: what is read from their files, what is refused, and quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CorruptWeights, UnsupportedModel
from engine.models.decoder import FusedDecoder
from engine.models.decoder_builder import TorchBuilder
from engine.models.families.registry import fused_family
from engine.models.hf_check import DenseAttend
from engine.models.load import load_model, open_model
from engine.models.native import NativeBuilder
from engine.native.linear import NativeLinear
from engine.parallel.sharding import Share
from engine.quant.linear import QuantizedLinear
from engine.quant.quantize import gptq_weights, smoothing_factors, write_quantized
from engine.quant.weight import QWeight
from engine.quant.writing import Scheme
from tests.native_paths import native_path

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "shared_intermediate_size": 32, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_n_groups": 2,
}  # fmt: skip
NEMOTRON_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
FAMILIES_AND_SIZES = [
    ("qwen3.5-moe", SIZES), ("granite4-mamba-moe", MAMBA_SIZES), ("nemotron-h-dense", NEMOTRON_SIZES),
]  # fmt: skip
IDS = (torch.arange(24) * 7919 + 3) % 257


def logits(model: Any) -> Tensor:
    """Of one prompt, in two chunks."""
    attend, found = DenseAttend(model.spec), []
    for start, stop in ((0, 17), (17, 24)):
        attend.ranges = [(start, stop)]
        hidden = model.forward(IDS[start:stop], torch.arange(start, stop), attend, None)
        found.append(model.logits(hidden))
    return torch.cat(found)


def relative_error(ours: Tensor, wanted: Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_layers_that_predict_further_tokens_are_not_read(tiny_models: Any, tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_model("qwen3.5", tmp_path / "m")
    before = logits(load_model(folder, dtype=torch.float32, device=CPU))
    edit(folder, lambda tensors: tensors.update({"mtp.layers.0.mlp.up_proj.weight": torch.ones(3, 3)}))
    assert torch.equal(logits(load_model(folder, dtype=torch.float32, device=CPU)), before)


@pytest.mark.parametrize("name", ["conv1d.weight", "A_log", "dt_bias", "norm.weight", "in_proj_z.weight"])
def test_a_part_that_is_missing_is_named(name: str, tiny_models: Any, tmp_path: Path) -> None:
    folder, whole = tiny_models.make_tiny_model("qwen3.5", tmp_path / "m"), f"model.layers.1.linear_attn.{name}"
    edit(folder, lambda tensors: tensors.pop(whole))
    with pytest.raises(CorruptWeights, match=f"{whole} is missing"):
        load_model(folder, dtype=torch.float32, device=CPU)


def test_decays_that_are_not_finite_are_refused(tiny_models: Any, tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_model("qwen3.5", tmp_path / "m")
    edit(folder, lambda tensors: tensors["model.layers.1.linear_attn.A_log"].fill_(100))
    with pytest.raises(CorruptWeights, match="A_log"):
        load_model(folder, dtype=torch.float32, device=CPU)


REFUSED = {
    "linear_num_key_heads is 0": {"linear_num_key_heads": 0},
    "linear_value_head_dim is 65537": {"linear_value_head_dim": 65537},
    "must be a multiple of linear_num_key_heads, 4": {"linear_num_key_heads": 4},
    "linear_conv_kernel_dim is 1,": {"linear_conv_kernel_dim": 1},
    "hidden_act is 'gelu_new', but must be silu": {"hidden_act": "gelu_new"},
    "layer_types has no layer of full_attention": {"layer_types": ["linear_attention"] * 4},
    "layers of type 'sliding_attention'": {"layer_types": ["sliding_attention", *["full_attention"] * 3]},
    "layer_types describes 4 layers": {"num_hidden_layers": 3},
    "partial_rotary_factor is 0.2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}
    },
}


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5"])
@pytest.mark.parametrize("said", REFUSED)
def test_what_would_change_the_result_is_refused_by_name(said: str, family: str, tiny_models: Any) -> None:
    config = tiny_models.make_config(family)
    for name, value in REFUSED[said].items():
        setattr(config, name, value)
    family_function = fused_family(config)
    assert family_function is not None
    with pytest.raises(UnsupportedModel, match=said):
        family_function(config)


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("conv_L_cache is 1,", {"conv_L_cache": 1}),
        ("layer_types has no layer of full_attention", {"layer_types": ["conv"] * 3}),
        ("layer_types describes 3 layers", {"num_hidden_layers": 2}),
        ("block_multiple_of is 0", {"block_multiple_of": 0}),
    ],
)
def test_short_convolutions_that_cannot_be_are_refused_by_name(said: str, changes: Any, tiny_models: Any) -> None:
    config = tiny_models.make_config("lfm2")
    for name, value in changes.items():
        setattr(config, name, value)
    family_function = fused_family(config)
    assert family_function is not None
    with pytest.raises(UnsupportedModel, match=said):
        family_function(config)


MAMBA_REFUSED = {
    "mamba_d_state is 0": {"mamba_d_state": 0},
    "6 Mamba heads can't share 4 groups": {"mamba_n_groups": 4},
    "mamba_n_heads of mamba_d_head are 48, but mamba_expand gives 96": {"mamba_n_heads": 3, "mamba_n_groups": 1},
    "mamba_d_conv is 1,": {"mamba_d_conv": 1},
    "time_step_limit is": {"time_step_limit": (0.5, 0.1)},
    "hidden_act is 'gelu_new', but must be silu": {"hidden_act": "gelu_new"},
    "layer_types has no layer of full_attention": {"layer_types": ["linear_attention"] * 3},
    "layer_types describes 3 layers": {"num_hidden_layers": 2},
}


NEMOTRON_REFUSED = {
    "mamba_num_heads is 0": {"mamba_num_heads": 0},
    "conv_kernel is 1,": {"conv_kernel": 1},
    "moe_latent_size=16 is not supported": {"moe_latent_size": 16},
    "attention_bias=True is not supported": {"attention_bias": True},
    "sliding_window=8 is not supported": {"sliding_window": 8},
    "mamba_hidden_act is 'gelu'": {"mamba_hidden_act": "gelu"},
    "activation 'gelu' is not supported": {"mlp_hidden_act": "gelu"},
    "layer_types has no layer of full_attention": {"layers_block_type": ["linear_attention", "mlp"]},
    "layers of type 'sliding_attention'": {"layers_block_type": ["full_attention", "sliding_attention"]},
}


@pytest.mark.parametrize(
    ("family", "said", "changes"),
    [
        *(("granite4-mamba", *item) for item in MAMBA_REFUSED.items()),
        *(("nemotron-h", *item) for item in NEMOTRON_REFUSED.items()),
    ],
)
def test_mamba_layers_that_cannot_be_are_refused_by_name(
    family: str, said: str, changes: Any, tiny_models: Any
) -> None:
    config = tiny_models.make_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    family_function = fused_family(config)
    assert family_function is not None
    with pytest.raises(UnsupportedModel, match=said):
        family_function(config)


def test_states_are_not_shared_by_several_devices(tiny_model: Callable[[str], Path]) -> None:
    spec = open_model(tiny_model("qwen3.5")).decoder
    assert spec is not None
    with pytest.raises(UnsupportedModel, match="layers with states can't be shared by several devices"):
        Share(spec, rank=0, size=2)


class KeepFormBuilder(TorchBuilder):
    """Retains every form."""

    def runs(self, weight: QWeight, use: Any) -> bool:
        return True


@pytest.mark.parametrize("target", ["int4", "fp8"])
@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "bamba", "nemotron-h"])
@pytest.mark.slow
def test_a_quantized_checkpoint_computes_the_rounded_weights(
    family: str, target: Any, tiny_models: Any, tmp_path: Path
) -> None:
    # Given a checkpoint that was written quantized, and products that retain the form
    sizes = {"bamba": MAMBA_SIZES, "nemotron-h": NEMOTRON_SIZES}.get(family)
    folder = tiny_models.make_tiny_model(family, tmp_path / "plain", **(sizes or SIZES))
    (tmp_path / "made").mkdir()
    write_quantized(folder, tmp_path / "made", Scheme(target))
    native = NativeBuilder(native_path("avx2", 1))
    dense, packed, ours = (
        load_model(tmp_path / "made", dtype=torch.float32, device=CPU, builder=builder)
        for builder in (TorchBuilder("dense"), KeepFormBuilder(), native)
    )
    # When its layers are read in the order in which they are computed
    for model, kind in ((packed, QuantizedLinear), (ours, NativeLinear)):
        assert isinstance(model, FusedDecoder)
        for layer in model._layers:
            assert layer.output is None or isinstance(layer.output, kind)
        part: Any = model._layers[0].attention
        assert isinstance(part.product if sizes else part.qkvz, kind)
    # Then the model is that of the rounded weights, and rates and decays are not rounded, unless they are stored so
    wanted = logits(dense)
    assert relative_error(logits(packed), wanted) < 1e-3
    assert relative_error(logits(ours), wanted) < 1e-3
    plain = load_model(folder, dtype=torch.float32, device=CPU)
    wide, rounded, exact = (model._layers[0].attention.gates.weight for model in (plain, dense, packed))
    assert torch.equal(exact, rounded)
    assert torch.equal(exact, wide.bfloat16().float()) == (sizes is None)
    assert relative_error(wanted, logits(plain)) > 1e-3


@pytest.mark.parametrize("quantize", ["int8", "int8-weight-only", "int4"])
@pytest.mark.parametrize(("family", "sizes"), FAMILIES_AND_SIZES)
def test_weights_are_quantized_at_load(
    family: str, sizes: Any, quantize: Any, tiny_models: Any, tmp_path: Path
) -> None:
    folder = tiny_models.make_tiny_model(family, tmp_path / "m", **sizes)
    plain = logits(load_model(folder, dtype=torch.float32, device=CPU))
    for builder in (TorchBuilder(quantize), NativeBuilder(native_path("avx2", 1), quantize)):
        model: Any = load_model(folder, dtype=torch.float32, device=CPU, builder=builder)
        assert 0 < relative_error(logits(model), plain) < (0.5 if quantize == "int4" else 0.1)


def test_calibration_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModel, match="can't be smoothed: some of their layers have states"):
        smoothing_factors(tiny_model("qwen3.5"), [[3, 4]], torch.float32)
    with pytest.raises(UnsupportedModel, match="can't be calibrated product by product: some of their layers"):
        gptq_weights(tiny_model("qwen3.5"), [[3, 4]], Scheme("int4"))
