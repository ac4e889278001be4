"""GGUF files are read as llama.cpp wrote them: names, layouts and metadata mean what they meant there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.checkpoints.gguf_file import GGUFFile, SkippedArray
from engine.errors import CorruptWeights, ModelNotFound, UnsupportedModel
from engine.models.decoder_builder import TorchBuilder
from engine.models.load import describe_model, load_model
from engine.models.native import NativeBuilder
from tests.engine.oracle import prompt_scores, scores_of_logits
from tests.native_paths import native_path

CPU = torch.device("cpu")
F32, F16, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0"))

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
EXPERTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
LLAMA_NAMES = NAMES | {"post_attention_layernorm": "ffn_norm"}
NORMS_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
STACKED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
NAMES_OF = {
    "gemma3": NAMES | NORMS_BEHIND | {"pre_feedforward_layernorm": "ffn_norm"},
    "olmo2": NAMES | NORMS_BEHIND,
    "phi3": LLAMA_NAMES | STACKED,
    "glm4": LLAMA_NAMES
    | STACKED
    | {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    "seed_oss": NAMES | {"post_attention_layernorm": "post_attention_norm"},
    "glm4moe": NAMES | {"post_attention_layernorm": "post_attention_norm"},
    "gpt-oss": NAMES | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
}
"""Architecture -> transformers' modules as llama.cpp names them; others as Llama."""

ARCHITECTURE_OF = {
    "gemma3_text": "gemma3", "mistral": "llama", "mixtral": "llama", "cohere": "command-r", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe", "ernie4_5_moe": "ernie4_5-moe", "gpt_oss": "gpt-oss",
}  # fmt: skip
SORTED_PAIRS = ("llama", "smollm3", "granite", "granitemoe")
MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def stored_name(name: str, architecture: str) -> str:
    if match := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.sinks", name):
        return f"blk.{match[1]}.attn_sinks.weight"
    if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.(?:gate|moe_statics)\.e_score_correction_bias", name):
        return f"blk.{match[1]}.exp_probs_b.bias"
    module, kind = name.rsplit(".", 1)
    names = NAMES_OF.get(architecture, LLAMA_NAMES)
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
        return f"blk.{match[1]}.{names[match[2]]}.{kind}"
    return f"{names[module]}.{kind}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of Llama's q and k rows: the two halves of a head take turns."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def stack_experts(tensors: dict[str, torch.Tensor], fuse: bool) -> dict[str, np.ndarray]:
    """The experts of each layer in three tensors [experts, n, k], by their names there; taken out of `tensors`.
    `fuse`: in two, gate above up."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for name in [name for name in tensors if name.endswith("put_linear.weight")]:  # Granite's are stacked already
        layer, stack = name.split(".")[2], tensors.pop(name).float().numpy()
        parts = (
            {"gate": np.split(stack, 2, 1)[0], "up": np.split(stack, 2, 1)[1]} if "input" in name else {"down": stack}
        )
        found |= {f"blk.{layer}.ffn_{part}_exps.weight": dict(enumerate(each)) for part, each in parts.items()}
    for name in [name for name in tensors if re.search(r"\.experts\.(gate_up|down)_proj", name)]:  # so are gpt-oss's
        layer, stack = name.split(".")[2], tensors.pop(name).float()
        kind = "bias" if name.endswith("_bias") else "weight"
        stack = (stack if kind == "bias" else stack.transpose(1, 2)).numpy()
        parts = {"gate": stack[:, ::2], "up": stack[:, 1::2]} if "gate_up" in name else {"down": stack}
        found |= {f"blk.{layer}.ffn_{part}_exps.{kind}": dict(enumerate(each)) for part, each in parts.items()}
    for name in [name for name in tensors if ".experts." in name]:
        layer, _, expert, module = re.fullmatch(
            r"model\.layers\.(\d+)\.(.+)\.experts\.(\d+)\.(\w+)\.weight", name
        ).groups()
        stack = found.setdefault(f"blk.{layer}.ffn_{EXPERTS[module]}_exps.weight", {})
        stack[int(expert)] = tensors.pop(name).float().numpy()
    stacks = {name: np.stack([stack[expert] for expert in range(len(stack))]) for name, stack in found.items()}
    if fuse:
        for gate in [name for name in stacks if "_gate_exps" in name]:
            both = [stacks.pop(gate), stacks.pop(gate.replace("_gate_", "_up_"))]
            stacks[gate.replace("_gate_", "_gate_up_")] = np.concatenate(both, axis=1)
    return stacks


def write_gguf(folder: Path, path: Path, *, kind=F32, metadata=None, tensors=None, fuse_experts=False) -> Path:
    """Convert a Hugging Face folder as llama.cpp's converter does."""
    config = AutoConfig.from_pretrained(folder)
    architecture = ARCHITECTURE_OF.get(config.model_type, config.model_type)
    gemma = architecture == "gemma3"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    further = getattr(config, "num_nextn_predict_layers", 0)
    writer.add_block_count(config.num_hidden_layers + further)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if architecture in ("command-r", "cohere2"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope["full_attention"] if gemma else rope)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    if architecture in ("granite", "granitemoe"):
        for key, ours in MULTIPLIERS.items():
            writer.add_float32(f"{architecture}.{key}", getattr(config, ours))
    if (part := rope.get("partial_rotary_factor")) is not None:
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        writer.add_rope_dimension_count(int(head_dim * part))
    if hasattr(config, "head_dim") and architecture not in ("llama", "cohere2", "qwen2moe"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if hasattr(config, "num_experts_per_tok"):
        experts = next(key for key in ("num_experts", "num_local_experts") if hasattr(config, key))
        writer.add_expert_count(getattr(config, experts))
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "ernie4_5-moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(32.0)
        writer.add_rope_scaling_yarn_beta_slow(1.0)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture in ("glm4moe", "dots1"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if architecture == "glm4moe":
        writer.add_nextn_predict_layers(further)
    for key, add in (metadata or {}).items():
        getattr(writer, add[0])(f"{architecture}.{key}", add[1])
    stored = load_file(folder / "model.safetensors")
    for name, weight in stack_experts(stored, fuse_experts).items():
        of_bias = F32 if name.endswith("bias") else kind
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(weight), of_bias), raw_dtype=of_bias)
    for name, tensor in stored.items():
        weight = tensor.float().numpy()
        if architecture in SORTED_PAIRS and ".q_proj." in name:
            weight = interleave(weight, config.num_attention_heads)
        elif architecture in SORTED_PAIRS and ".k_proj." in name:
            weight = interleave(weight, config.num_key_value_heads)
        elif "gemma" in architecture and name.endswith("norm.weight"):
            weight = weight + 1
        if name.endswith("shared_expert_gate.weight"):
            weight = weight[0]
        quantized = kind if weight.ndim == 2 and not re.search(r"\.(gate|router|moe_statics)\.", name) else F32
        writer.add_tensor(stored_name(name, architecture), gguf.quants.quantize(weight, quantized), raw_dtype=quantized)
    for name, weight in (tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path, dtype=torch.float32):
    return load_model(path, dtype=dtype, device=CPU)


GEMMA_AS_GGUF = {
    "num_hidden_layers": 7,
    "layer_types": None,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
"""The settings of Gemma 3 that a GGUF file can hold: every sixth layer is global, the scale follows from head_dim."""


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama-tied", {}),
        ("llama-bias", {"head_dim": 12}),
        ("mistral", {"head_dim": 12}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {}),
        ("gemma", {}),
        ("gemma3", GEMMA_AS_GGUF),
        ("mixtral", {"head_dim": 12, "sliding_window": None}),
        ("qwen2-moe", {"use_sliding_window": False, "norm_topk_prob": False}),
        ("qwen3-moe", {}),
        ("smollm3", {"no_rope_layers": None, "num_hidden_layers": 5, "sliding_window": None}),
        ("ernie4.5", {}),
        ("seed-oss", {}),
        ("granite", {}),
        ("olmo2", {}),
        ("phi3", {}),
        ("phi3-partial", {}),
        ("glm4", {}),
        ("cohere", {}),
        ("cohere-norms", {}),
        ("cohere2", {"layer_types": None, "num_hidden_layers": 5}),
        ("olmoe", {"attention_bias": False}),
        ("granite-moe", {}),
        ("glm4-moe", {"head_dim": 16}),
        ("glm4-moe-grouped", {}),
        ("dots1", {"sliding_window": None}),
        ("ernie4.5-moe", {"head_dim": 12}),
        ("ernie4.5-moe", {"moe_layer_interval": 2, "num_hidden_layers": 4}),
        ("gpt-oss", {"layer_types": None}),
    ],
)
def test_a_gguf_file_is_the_model_it_was_made_from(family, changes, tiny_models, tmp_path, prompts, run, steps_over):
    # Given a checkpoint, and the GGUF file that llama.cpp's converter would make of it
    folder = tiny_models.make_tiny_model(family, tmp_path / "model", **changes)
    path = write_gguf(folder, tmp_path / "model.gguf")
    original, model = load(folder), load(path)
    # Then both are the same model
    assert model.spec.windows == original.spec.windows
    assert model.spec.num_parameters == original.spec.num_parameters
    assert model.spec.eos_token_ids == (2, 7)
    assert describe_model(path, dtype=torch.float32).spec == model.spec
    steps = steps_over([45, 6, 23], 7)
    for ours, theirs in zip(run(model, prompts, steps), run(original, prompts, steps), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_longropes_factors_are_tensors(tiny_models, tmp_path, prompts, run):
    # Given a Phi 3 that was trained on 20 tokens, and the GGUF file that llama.cpp's converter would make of it
    short, long = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], [2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    factors = {"short_factor": short, "long_factor": long}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 20, **factors}
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 20}
    folder = tiny_models.make_tiny_model("phi3", tmp_path / "model", **changes)
    tensors = {
        f"rope_factors_{name}.weight": np.array(values, np.float32)
        for name, values in (("short", short), ("long", long))
    }
    metadata = {"rope.scaling.original_context_length": ("add_uint32", 20)}
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=metadata, tensors=tensors)
    # Then both have the same frequencies, in long contexts and in short ones
    for positions in (20, 512):
        models = (load_model(p, dtype=torch.float32, device=CPU, max_positions=positions) for p in (path, folder))
        [ours], [theirs] = (run(model, prompts[1:2], [[(0, 0, 6)]]) for model in models)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    # and a file that lacks some of them is refused
    del tensors["rope_factors_long.weight"]
    lacking = write_gguf(folder, tmp_path / "lacking.gguf", metadata=metadata, tensors=tensors)
    with pytest.raises(CorruptWeights, match="must hold rope_factors_long"):
        load(lacking)


def test_gate_and_up_in_one_stack_are_read(tiny_models, tmp_path, prompts, run):
    folder = tiny_models.make_tiny_model("qwen3-moe", tmp_path / "model")
    path = write_gguf(folder, tmp_path / "model.gguf", fuse_experts=True)
    assert "blk.0.ffn_gate_up_exps.weight" in GGUFFile(path).tensors
    [ours], [theirs] = (run(load(p), prompts[:1], [[(0, 0, 45)]]) for p in (path, folder))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_layers_that_predict_further_tokens_are_passed_over(tiny_models, tmp_path, prompts, run):
    folder = tiny_models.make_tiny_model("glm4-moe", tmp_path / "model", head_dim=16, num_nextn_predict_layers=1)
    further = {
        "blk.3.nextn.eh_proj.weight": np.ones((48, 96), np.float32),
        "blk.3.attn_norm.weight": np.ones(48, np.float32),
        "blk.3.ffn_up_exps.weight": np.ones((6, 24, 48), np.float32),
    }
    path = write_gguf(folder, tmp_path / "model.gguf", tensors=further)
    [ours], [theirs] = (run(load(p), prompts[:1], [[(0, 0, 45)]]) for p in (path, folder))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    path = write_gguf(folder, tmp_path / "more.gguf", tensors={"blk.4.attn_norm.weight": np.ones(48, np.float32)})
    with pytest.raises(CorruptWeights, match=r"model\.layers\.4\.input_layernorm"):
        load(path)


@pytest.mark.parametrize("kind", [Q8_0, gguf.GGMLQuantizationType.Q4_0])
def test_quantized_experts_stay_as_they_are_stored(kind, tiny_models, tmp_path, prompts, run):
    # Given a file of small experts, when the kernels multiply with them
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    path = write_gguf(tiny_models.make_tiny_model("qwen3-moe", tmp_path / "m", **sizes), tmp_path / "m.gguf", kind=kind)
    small = load_model(path, dtype=torch.float32, device=CPU, builder=NativeBuilder(native_path("avx2", 1)))
    forms = {linear.form for layer in small._layers for linear in layer.mlp.gate_up.linears}
    # Then they are what they were dequantized to
    assert forms == {"int8" if kind == Q8_0 else "int4"}
    ours = prompt_scores(path, prompts[0].tolist(), attention="native", instruction_set="avx2")
    [theirs] = run(load(path), prompts[:1], [[(0, 0, 45)]])
    torch.testing.assert_close(ours, scores_of_logits(theirs, prompts[0]), atol=1e-4, rtol=1e-4)


def test_gpt_oss_in_mxfp4_is_what_its_blocks_stand_for(tiny_models, tmp_path, prompts, run):
    # Given a file whose experts are in MXFP4, and one of what that rounds them to
    sizes = {"hidden_size": 64, "intermediate_size": 96, "layer_types": None}
    folder = tiny_models.make_tiny_model("gpt-oss", tmp_path / "m", **sizes)
    kind = gguf.GGMLQuantizationType.MXFP4
    path = write_gguf(folder, tmp_path / "m.gguf", kind=kind)
    small = load_model(path, dtype=torch.float32, device=CPU, builder=NativeBuilder(native_path("avx2", 1)))
    # Then the kernels multiply with eight bits of each number, and to the same result
    assert {linear.form for layer in small._layers for linear in layer.mlp.gate_up.linears} == {"int8"}
    dense = load_model(path, dtype=torch.float32, device=CPU, builder=TorchBuilder("dense"))
    ours = prompt_scores(path, prompts[0].tolist(), attention="native", instruction_set="avx2")
    [theirs] = run(dense, prompts[:1], [[(0, 0, 45)]])
    torch.testing.assert_close(ours, scores_of_logits(theirs, prompts[0]), atol=1e-4, rtol=1e-4)


def test_a_folder_of_one_gguf_file_means_that_file(tiny_model, tmp_path):
    write_gguf(tiny_model("llama"), tmp_path / "model.gguf")
    assert describe_model(tmp_path).spec == describe_model(tmp_path / "model.gguf").spec
    write_gguf(tiny_model("llama"), tmp_path / "other.gguf")
    with pytest.raises(ModelNotFound, match="2 GGUF files"):
        describe_model(tmp_path)


def test_gemma_scaling_stretches_the_global_layers_only(tiny_models, tmp_path, prompts, run):
    rope = {**GEMMA_AS_GGUF["rope_parameters"]}
    rope["full_attention"] = {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0}
    folder = tiny_models.make_tiny_model("gemma3", tmp_path / "model", **{**GEMMA_AS_GGUF, "rope_parameters": rope})
    scaling = {"rope.scaling.type": ("add_string", "linear"), "rope.scaling.factor": ("add_float32", 8.0)}
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=scaling)
    [ours], [theirs] = (run(load(p), prompts[:1], [[(0, 0, 45)]]) for p in (path, folder))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_yarn_scaling_is_read(tiny_models, tmp_path, prompts, run):
    folder = tiny_models.make_tiny_model("llama-yarn", tmp_path / "model")
    metadata = {
        "rope.scaling.type": ("add_string", "yarn"),
        "rope.scaling.factor": ("add_float32", 4.0),
        "rope.scaling.original_context_length": ("add_uint32", 64),
    }
    path = write_gguf(folder, tmp_path / "model.gguf", metadata=metadata)
    [ours], [theirs] = (run(load(p), prompts[:1], [[(0, 0, 45)]]) for p in (path, folder))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_frequency_factors_are_llama3_scaling(tiny_models, tmp_path, prompts, run):
    # Given a Llama 3.1 checkpoint, whose scaling llama.cpp stores as a divisor for each frequency
    folder = tiny_models.make_tiny_model("llama3-rope", tmp_path / "model")
    scaled = load(folder)._decoder.ropes[0].inverse_frequencies
    plain = 10_000.0 ** -(torch.arange(0, 12, 2) / 12)
    factors = (plain / scaled).numpy()
    assert factors.max() > 2
    path = write_gguf(folder, tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors})
    [ours], [theirs] = (run(load(p), prompts[:1], [[(0, 0, 45)]]) for p in (path, folder))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [F16, Q8_0, *(gguf.GGMLQuantizationType[k] for k in ("Q4_0", "Q4_1", "BF16"))])
def test_quantized_tensors_are_dequantized(kind, tiny_models, tmp_path, prompts, run):
    # Given a GGUF file of quantized weights, and a checkpoint of what they stand for
    folder = tiny_models.make_tiny_model("qwen3", tmp_path / "model", hidden_size=64, intermediate_size=96)
    path = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if weight.dim() == 2:
            stored = gguf.quants.quantize(weight.numpy(), kind)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind).copy())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    [ours], [theirs] = (run(load(p), prompts[:1], [[(0, 0, 45)]]) for p in (path, folder))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_the_header_is_read_as_the_gguf_package_reads_it(tiny_model, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf")
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert ours.metadata["tokenizer.ggml.tokens"] == SkippedArray(257)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF.") and not isinstance(ours.metadata[key], SkippedArray):
            assert ours.metadata[key] == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].start == tensor.data_offset
        assert ours.tensors[tensor.name].shape == tuple(int(n) for n in reversed(tensor.shape))


@pytest.mark.parametrize("keep", [0, 3, 8, 20, 300, 0.3, 0.6, 0.999])
def test_a_truncated_file_is_refused(keep, tiny_model, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(CorruptWeights, match=r"model\.gguf") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(CorruptWeights):
        describe_model(path)


def test_counts_that_the_file_can_not_hold_are_refused(tiny_model, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    data[8:16] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(CorruptWeights, match="claims"):
        load(path)


def test_another_format_under_the_name_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(CorruptWeights, match="not a GGUF file"):
        load(path)


@pytest.mark.parametrize(
    ("named", "metadata"),
    [
        ("attn_logit_softcapping", {"attn_logit_softcapping": ("add_float32", 50.0)}),
        ("expert_weights_scale", {"expert_weights_scale": ("add_float32", 2.5)}),
        ("rope.dimension_count", {"rope.dimension_count": ("add_uint32", 6)}),
        ("longrope", {"rope.scaling.type": ("add_string", "longrope")}),
        ("yarn_log_multiplier", {"rope.scaling.yarn_log_multiplier": ("add_float32", 0.1)}),
    ],
)
def test_metadata_that_is_not_computed_is_refused_by_name(named, metadata, tiny_model, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(UnsupportedModel, match=named):
        load(path)


def test_a_mixture_without_its_sizes_or_with_other_stacks_is_refused(tiny_model, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "few.gguf", metadata={"expert_count": ("add_uint32", 8)})
    with pytest.raises(CorruptWeights, match="lacks expert_used_count"):
        load(path)
    path = write_gguf(
        tiny_model("qwen3-moe"),
        tmp_path / "odd.gguf",
        tensors={"blk.7.ffn_up_exps.weight": np.zeros((3, 32, 48), np.float32)},
    )
    with pytest.raises(CorruptWeights, match=r"blk\.7\.ffn_up_exps\.weight has shape \[3, 32, 48\], not \[4, "):
        load(path)


def test_split_files_and_other_architectures_are_refused_by_name(tmp_path):
    for architecture, count, named in (("llama", 3, "one of 3 parts"), ("falcon", 1, "'falcon'")):
        writer = gguf.GGUFWriter(tmp_path / "part.gguf", architecture)
        writer.add_uint16("split.count", count)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedModel, match=named):
            load(tmp_path / "part.gguf")


def test_missing_and_unexpected_tensors_are_named(tiny_models, tmp_path):
    folder = tiny_models.make_tiny_model("llama", tmp_path / "model")
    path = write_gguf(folder, tmp_path / "more.gguf", tensors={"blk.0.surprise.weight": np.ones(4, np.float32)})
    with pytest.raises(CorruptWeights, match=r"blk\.0\.surprise\.weight"):
        load(path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptWeights, match=r"layers\.2\.mlp\.down_proj\.weight is missing"):
        load(write_gguf(folder, tmp_path / "less.gguf"))


REAL_MODELS = {"SmolLM2-135M-Instruct.Q4_1.gguf": 48, "gemma-3-270m-q4_k_m.gguf": 600}
"""File -> length of the prompt; Gemma's window is 512."""


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_real_file_answers_as_transformers_does(name, run):
    # Given the files in the folder that TOKENMILL_TEST_MODELS names
    path = Path(os.environ.get("TOKENMILL_TEST_MODELS", ".")) / name
    if not path.is_file():
        pytest.skip(f"NOT TESTED HERE: a real file; TOKENMILL_TEST_MODELS names no folder with {name}")
    length = REAL_MODELS[name]
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=name, dtype=torch.float32).eval()
    ids = torch.randint(100, 40_000, (length,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = reference(input_ids=ids[None]).logits[0]
    del reference
    [ours] = run(load(path), [ids], [[(0, 0, length // 2)], [(0, length // 2, length)]])
    assert (ours - theirs).norm() / theirs.norm() < 1e-5
    assert (ours - theirs).abs().max() < 1e-3
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
