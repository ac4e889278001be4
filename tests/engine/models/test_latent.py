"""Latent attention is loaded as its checkpoint and its config say, in every form of its weights, or refused by name.
That it computes what transformers does is tested with all families (test_decoder.py, test_exactness.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import Engine
from engine.attention import make_backend
from engine.attention.base import KVLayout
from engine.checkpoints.checkpoint import folder_weights
from engine.errors import CorruptWeights, EngineError, UnsupportedModel
from engine.models.decoder_builder import DecoderBuilder, TorchBuilder
from engine.models.families.registry import fused_family
from engine.models.latent import BatchedProduct, LatentAttention
from engine.models.load import describe_model, load_model
from engine.models.native import NativeBuilder
from engine.models.native_parts import NativeHeadProduct
from engine.native.build import INSTRUCTION_SETS
from engine.plan import CacheGroup
from engine.quant.int8_linear import Int8Linear
from engine.quant.quantize import gptq_weights, smoothing_factors, write_quantized
from engine.quant.writing import Scheme
from tests.engine.oracle import Setting, check_equal, engine_answers, greedy_answer, make_prompts, prompt_scores
from tests.engine.quant.packing import pack_awq, pack_fp8, write
from tests.native_paths import native_path

CPU = torch.device("cpu")
TinyModel = Callable[[str], Path]

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "kv_lora_rank is 0": ("deepseek-v2", {"kv_lora_rank": 0}),
    "kv_lora_rank is -4": ("deepseek-v3", {"kv_lora_rank": -4}),
    "kv_lora_rank is 1000000": ("youtu", {"kv_lora_rank": 10**6}),
    "q_lora_rank is 0": ("deepseek-v3", {"q_lora_rank": 0}),
    "qk_nope_head_dim is 0": ("deepseek-v2", {"qk_nope_head_dim": 0}),
    "qk_rope_head_dim is -8": ("minicpm3", {"qk_rope_head_dim": -8}),
    "v_head_dim is 100000": ("glm4-moe-lite", {"v_head_dim": 100_000}),
    "attention_bias=True without q_lora_rank": ("deepseek-v3-halves", {"attention_bias": True}),
    "topk_method='noaux_tc'": ("deepseek-v2", {"topk_method": "noaux_tc"}),
    "topk_method='greedy'": ("deepseek-v3", {"topk_method": "greedy"}),
    "scoring_func='softmax'": ("deepseek-v3", {"scoring_func": "softmax"}),
    "norm_topk_prob=True": ("deepseek-v2", {"norm_topk_prob": True}),
    "mlp_bias=True": ("deepseek-v2", {"mlp_bias": True}),
    "dim_model_base is 0": ("minicpm3", {"dim_model_base": 0}),
    "embedding scale of -12": ("minicpm3", {"scale_emb": -12}),
    "residual scale of 0": ("minicpm3", {"scale_depth": 0}),
    "n_group=None and topk_group=2": ("deepseek-v3", {"n_group": None}),
    "n_group=4 and topk_group=2": ("deepseek-v2", {"n_group": 4}),
    "mlp_layer_types describes 2 layers": ("glm4-moe-lite", {"mlp_layer_types": ["dense", "sparse"]}),
    "mscale_all_dim is 1e": (
        "deepseek-v3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale_all_dim": 1e200,
                "attention_factor": 1.0,
            }
        },
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_settings_that_are_not_computed_are_refused_by_name(named: str, tiny_models: Any) -> None:
    family, changes = REFUSED[named]
    config = tiny_models.make_config(family, **changes)
    function = fused_family(config)
    assert function is not None
    with pytest.raises(UnsupportedModel, match=named):
        function(config)


def edited(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a model with changes to its config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_lora_rank": "many"}, "kv_lora_rank"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"q_lora_rank": 1.5}, "q_lora_rank"),
        ({"qk_nope_head_dim": [12]}, "qk_nope_head_dim"),
        ({"v_head_dim": None}, "v_head_dim"),
    ],
)
def test_sizes_of_the_wrong_kind_are_refused(
    changes: dict[str, Any], named: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = edited(tiny_model("deepseek-v3"), tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModel, match=named) as caught:
        describe_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"kv_lora_rank": 24}, r"kv_a_proj_with_mqa\.weight has shape \[28, 48\].* \[32, 48\]|kv_b_proj"),
        ({"q_lora_rank": 8}, r"q_a_proj|q_a_layernorm"),
        ({"q_lora_rank": None}, r"q_proj\.weight is missing"),
        ({"v_head_dim": 12}, r"kv_b_proj\.weight has shape \[88, 20\].* \[96, 20\]"),
    ],
)
def test_weights_of_another_shape_are_named(
    changes: dict[str, Any], tensor: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = edited(tiny_model("deepseek-v3"), tmp_path / "model", **changes)
    with pytest.raises(CorruptWeights, match=tensor):
        load_model(folder, dtype=torch.float32, device=CPU)


def test_layers_that_predict_further_tokens_are_not_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = edited(tiny_model("deepseek-v3"), tmp_path / "model", num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert describe_model(folder).spec.num_layers == 3
    load_model(folder, dtype=torch.float32, device=CPU)
    with pytest.raises(CorruptWeights, match=r"model\.layers\.3\.eh_proj"):
        load_model(edited(folder, tmp_path / "other", num_nextn_predict_layers=0), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_multiply_with_their_own_weights_and_the_same_bits_in_any_batch(
    dtype: torch.dtype, instruction_set: str
) -> None:
    library = native_path(instruction_set)  # or skip
    for heads, made, size, out in ((1, 2, 2, 1), (5, 24, 16, 33), (3, 21, 9, 70), (7, 512, 192, 64)):
        weight = torch.randn(heads, size, out).to(dtype)
        product, wanted = NativeHeadProduct(library, weight), BatchedProduct(weight.double())
        # Given the first elements of each head, as those of a query that don't turn, and more rows than a pass takes
        x = torch.randn(150, heads, made).to(dtype)[..., :size]
        y = product(x)
        assert y.dtype == dtype
        torch.testing.assert_close(
            y.double(), wanted(x.double()), rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
        )
        for first, end in ((0, 1), (7, 20), (149, 150)):
            assert torch.equal(product(x[first:end]), y[first:end])


@pytest.mark.parametrize("of", ["torch", "native"])
def test_all_products_but_the_absorbed_ones_are_quantized(of: str, tiny_model: TinyModel) -> None:
    # Given a model that is quantized at load
    builder: DecoderBuilder = (
        TorchBuilder("int8") if of == "torch" else NativeBuilder(native_path("avx2", 1), "int8-weight-only")
    )
    path = tiny_model("deepseek-v2")
    model: Any = load_model(path, dtype=torch.float32, device=CPU, builder=builder)
    # Then W_UK and W_UV have the model's dtype, and the products around them are int8
    for layer in model._layers:
        part = layer.attention
        assert isinstance(part, LatentAttention)
        if of == "torch":
            assert part.keys.weight.dtype == part.values.weight.dtype == torch.float32
            assert all(isinstance(linear, Int8Linear) for linear in (part.down, part.queries, layer.output))
        else:
            assert {linear.form for linear in (*part.keys.linears, *part.values.linears)} == {"float32"}
            assert {linear.form for linear in (part.down, part.queries, layer.output)} == {"int8"}
    # and its scores are near to what they were
    prompt = make_prompts(seed=5, count=2, vocab_size=257, shared=10, longest=60)[1]
    plain = prompt_scores(path, prompt, attention="paged-sdpa")
    attention = "paged-sdpa" if of == "torch" else "native"
    small = prompt_scores(path, prompt, attention=attention, quantize="int8-weight-only")
    assert 0 < (small - plain).abs().mean() < 0.1


@pytest.mark.parametrize("form", ["awq", "fp8"])
@pytest.mark.slow
def test_a_checkpoint_with_packed_weights_answers_as_what_it_stands_for(
    form: str, tiny_models: Any, tmp_path: Path
) -> None:
    # Given a checkpoint in which every product is packed, W_UK and W_UV together
    folder = tiny_models.make_tiny_model(
        "youtu", tmp_path / "plain", vocab_size=264, hidden_size=64, intermediate_size=96, q_lora_rank=32,
        kv_lora_rank=32, v_head_dim=16, qk_nope_head_dim=16, num_hidden_layers=2,
    )  # fmt: skip
    settings: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}
    if form == "fp8":
        settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        return None if module == "lm_head" else pack_awq(weight) if form == "awq" else pack_fp8(weight)

    dense = write(folder, tmp_path / "made", settings, pack)
    assert folder_weights(tmp_path / "made").quantized("model.layers.1.self_attn.kv_b_proj.weight") is not None
    # When it answers
    prompts = make_prompts(seed=3, count=6, vocab_size=257, shared=10, longest=40)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    want = [greedy_answer(model, prompt, 6, (2,)) for prompt in prompts]
    for attention in ("paged-sdpa", "auto"):
        engine = Engine.load(tmp_path / "made", Setting(7, 64, 16, True).config(attention=attention))
        # Then its answers are those of the dense weights
        assert check_equal(want, engine_answers(engine, prompts, 6)) < len(prompts)


def test_calibration_is_refused_and_a_checkpoint_written_without_it_is_read(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tiny_model("youtu")
    with pytest.raises(UnsupportedModel, match="can't be smoothed: their attention is latent"):
        smoothing_factors(folder, [[3, 4]], torch.float32)
    with pytest.raises(UnsupportedModel, match="can't be calibrated product by product: their attention is latent"):
        gptq_weights(folder, [[3, 4]], Scheme("int8"))
    (tmp_path / "int8").mkdir()
    write_quantized(folder, tmp_path / "int8", Scheme("int8"))
    prompt = make_prompts(seed=5, count=2, vocab_size=257, shared=10, longest=60)[1]
    plain, small = (prompt_scores(path, prompt, attention="paged-sdpa") for path in (folder, tmp_path / "int8"))
    assert 0 < (small - plain).abs().mean() < 0.1


def test_an_int8_cache_stays_close(tiny_model: TinyModel) -> None:
    prompt = make_prompts(seed=5, count=2, vocab_size=257, shared=10, longest=90)[1]
    plain = prompt_scores(tiny_model("deepseek-v3"), prompt, attention="native")
    small = prompt_scores(tiny_model("deepseek-v3"), prompt, attention="native", kv_dtype="int8")
    assert 0 < (small - plain).abs().mean() < 0.05


@pytest.mark.parametrize("name", ["flash2", "flash3", "torch-varlen"])
def test_libraries_without_latent_attention_say_so(name: str) -> None:
    layout = KVLayout((CacheGroup((0,), None, 4),), 256, 1, 28, 4, False, 20)
    with pytest.raises(EngineError, match=f"attention '{name}' does not compute latent attention.*paged-sdpa"):
        make_backend(name, layout, torch.bfloat16, CPU)
