"""The fused decoder computes what transformers computes, whatever the batch and the chunks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    SiglipVisionConfig,
)

from engine import Engine, EngineConfig, Request, SamplingParams, ScheduleConfig
from engine.errors import UnsupportedModel
from engine.models.decoder import FusedDecoder
from engine.models.families.registry import fused_family
from engine.models.load import describe_model, load_model

CPU = torch.device("cpu")
FUSED = (
    "llama", "llama-tied", "llama-bias", "llama3-rope", "llama-linear", "llama-yarn", "mistral", "qwen2", "qwen3",
    "qwen3-sliding", "gemma", "gemma3", "gemma3-softcap", "ministral", "cwm", "seed-oss", "smollm3", "ernie4.5",
    "helium", "granite", "phi3", "phi3-partial", "glm", "glm4", "olmo2", "olmo3", "exaone4", "cohere", "cohere-norms",
    "cohere2", "hyperclovax", "internlm3", "ministral3", "hunyuan", "youtu", "minicpm3", "granite4", "arcee",
    "nemotron", "starcoder2", "gemma4", "gemma4-small", "gemma4-moe", "mixtral",
    "qwen2-moe", "qwen3-moe", "qwen3-moe-mixed", "olmoe", "granite-moe", "dots1", "ernie4.5-moe", "glm4-moe",
    "glm4-moe-grouped", "gpt-oss", "llama4", "llama4-yarn", "llama4-plain", "hunyuan-moe", "hy-v3", "minimax-m2",
    "exaone-moe", "solar-open", "mellum", "flex-olmo", "cohere2-moe", "cohere2-moe-sigmoid", "deepseek-v2",
    "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-halves", "glm4-moe-lite", "granite-moe-shared", "granite4-nope",
    "sarvam-mla",
)  # fmt: skip


WITH_STATES = (
    "qwen3-next", "qwen3.5", "qwen3.5-moe", "lfm2", "lfm2-moe", "granite4-mamba", "granite4-mamba-moe", "bamba",
    "nemotron-h", "nemotron-h-dense",
)  # fmt: skip


def tolerance_of(family):
    # Rounding is large behind the norm of a head's output near zero.
    return 1e-4 if family in WITH_STATES else 5e-5


def test_every_fused_family_is_covered(tiny_models):
    assert tiny_models.FUSED == FUSED
    assert tiny_models.WITH_STATES == WITH_STATES


@pytest.mark.parametrize("family", [*FUSED, *WITH_STATES])
@pytest.mark.slow
def test_logits_equal_transformers_over_flat_chunked_batches(family, tiny_model, prompts, run, steps_over, oracle):
    # Given three prompts, two of them longer than the model's window
    model = load_model(tiny_model(family), dtype=torch.float32, device=CPU)
    wanted = oracle(tiny_model(family), prompts)
    for chunk in (1, 7, 64):
        # When they advance together, in chunks of their own
        got = run(model, prompts, steps_over([len(p) for p in prompts], chunk))
        # Then each has the logits that it has alone
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=tolerance_of(family), rtol=1e-5)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "gemma3", "olmo2", "olmo3", "granite", "glm4", "phi3-partial", "ministral3"],
)
def test_bfloat16_stays_close_to_transformers(family, tiny_model, prompts, run, steps_over, oracle):
    # (Cohere is left out: transformers rotates its heads in float32, torch's operators here don't.)
    model = load_model(tiny_model(family), dtype=torch.bfloat16, device=CPU)
    truth = oracle(tiny_model(family), prompts)
    theirs = oracle(tiny_model(family), prompts, torch.bfloat16)
    for ours, peer, exact in zip(run(model, prompts, steps_over([45, 6, 23], 7)), theirs, truth, strict=True):
        # Rounding differs from kernel to kernel, but ours must not be worse than theirs.
        assert (ours - exact).norm() < 1.5 * (peer - exact).norm()


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3"])
def test_windows_come_from_the_config_and_matter(family, tiny_model, tiny_models, prompts, run, steps_over):
    model = load_model(tiny_model(family), dtype=torch.float32, device=CPU)
    window = tiny_models.WINDOW
    expected = {
        "mistral": (window, window, window),
        "qwen2": (None, window, window),
        "gemma3": (window, None, window, None),
    }
    assert model.spec.windows == expected[family]
    steps = steps_over([len(p) for p in prompts], 64)
    sliding = run(model, prompts, steps)
    model._spec = replace(model.spec, windows=(None,) * model.spec.num_layers)
    full = run(model, prompts, steps)
    torch.testing.assert_close(sliding[0][:window], full[0][:window])
    assert not torch.allclose(sliding[0][window:], full[0][window:], atol=1e-2)


@pytest.mark.parametrize("family", [*FUSED, *WITH_STATES])
def test_the_spec_describes_the_model(family, tiny_model, tiny_models):
    config = AutoConfig.from_pretrained(tiny_model(family))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model(family))
    description = describe_model(tiny_model(family), dtype=torch.float32)
    spec = description.spec
    assert description.fused
    assert spec == load_model(tiny_model(family), dtype=torch.float32, device=CPU).spec
    corrections = sum(
        b.numel() for name, b in reference.named_buffers() if name.endswith(("correction_bias", "expert_bias"))
    )
    assert spec.num_parameters == sum(p.numel() for p in reference.parameters()) + corrections
    sparse = ("num_experts_per_tok", "top_k_experts", "hidden_size_per_layer_input")
    mixes = any(getattr(config, name, None) for name in sparse) and family != "nemotron-h-dense"
    assert (spec.num_active_parameters is None) == (not mixes)
    assert spec.num_active_parameters is None or spec.num_active_parameters < spec.num_parameters
    assert (spec.num_layers, spec.num_heads) == (config.num_hidden_layers, config.num_attention_heads)
    latent = family in tiny_models.LATENT
    heads = config.per_layer_config[0].num_key_value_heads
    assert (spec.num_kv_heads, spec.vocab_size) == (1 if latent else heads, config.vocab_size)
    assert (spec.head_dim, spec.latent_dim) == (28, 20) if latent else spec.latent_dim == 0
    assert spec.eos_token_ids == (2,)
    assert spec.architecture == type(reference).__name__


def test_layers_that_store_no_keys_compute_only_tokens_that_are_read(tiny_model, prompts, monkeypatch):
    # Given a model whose last three layers read the keys of others, and prompts in chunks
    rows, through = Counter(), FusedDecoder._through

    def watched(self, layers, residual, step, states):
        rows.update(dict.fromkeys(layers, len(residual.joined())))
        through(self, layers, residual, step, states)

    monkeypatch.setattr(FusedDecoder, "_through", watched)
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=16)
    config = EngineConfig(dtype="float32", max_model_len=64, attention="paged-sdpa", schedule=schedule)
    engine = Engine.load(tiny_model("gemma4-small"), config)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    # When they are answered, then these layers compute the sampled positions alone
    list(engine.run(Request(str(i), prompt.int().numpy(), params) for i, prompt in enumerate(prompts)))
    computed = engine.stats().computed
    assert rows == {0: computed, 1: computed, 2: computed, 3: 15, 4: 15, 5: 15}


def test_tied_embeddings_share_storage(tiny_model):
    model = load_model(tiny_model("llama-tied"), dtype=torch.float32, device=CPU)
    assert model._head.weight.data_ptr() == model._embedding.data_ptr()


def test_a_tied_checkpoint_that_stores_another_head_uses_that_head(tiny_models, tmp_path, prompts, run, oracle):
    # Given a checkpoint whose config says tied, but whose stored head differs (transformers then unties them)
    folder = tiny_models.make_tiny_model("llama", tmp_path / "m")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    model = load_model(folder, dtype=torch.float32, device=CPU)
    [ours] = run(model, prompts[1:2], [[(0, 0, 6)]])
    torch.testing.assert_close(ours, oracle(folder, prompts[1:2])[0], atol=5e-5, rtol=1e-5)


def test_the_text_half_of_an_image_model_is_loaded(tmp_path, tiny_models, prompts, run, oracle):
    # Given a Gemma 3 checkpoint with an image encoder
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    text = tiny_models.make_config("gemma3")
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4)
    torch.manual_seed(0)
    full = Gemma3ForConditionalGeneration(config).eval()
    for parameter in full.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    full.save_pretrained(tmp_path)
    # When it is loaded and given text
    model = load_model(tmp_path, dtype=torch.float32, device=CPU)
    [ours] = run(model, prompts[:1], [[(0, 0, 45)]])
    # Then it answers as the whole model does
    with torch.inference_mode():
        theirs = full(input_ids=prompts[0][None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)


_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_CLIP = {**_VISION, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 16, "num_heads": 2}
_HALF_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_MIXTURE = {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_routed_experts": 6, "num_experts": 6}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "attention_k_eq_v": True,
    "rope_parameters": None,
}
IMAGE_MODELS = {
    "internvl": ("qwen2", {"model_type": "internvl_vision", **_VISION, "image_size": [28, 28], "patch_size": [14, 14]}),
    "llava": ("llama", {"model_type": "clip_vision_model", **_CLIP}),
    "mistral3": ("mistral", {"model_type": "pixtral", **_CLIP}),
    "mistral3 around ministral3": ("ministral3", {"model_type": "pixtral", **_CLIP}),
    "mistral3 around mistral4": ("mistral4", {"model_type": "pixtral", **_CLIP}),
    "llama4": ("llama4", {**_CLIP, **dict.fromkeys(("vision_output_dim", "projector_output_dim"), 32)}),
    "llava_next": ("mistral", {"model_type": "clip_vision_model", **_CLIP}),
    "llava_onevision": ("qwen2", {"model_type": "siglip_vision_model", **_CLIP}),
    "gemma4": ("gemma4", {"model_type": "gemma4_vision", **_VISION, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma4 with inputs of its layers": (
        "gemma4-small",
        {"model_type": "gemma4_vision", **_VISION, "num_key_value_heads": 2, "head_dim": 8},
    ),
    "gemma4_unified": ({**_GEMMA4, "use_bidirectional_attention": "vision"}, {"mm_posemb_size": 8}),
    "idefics3": ("llama", _CLIP),
    "smolvlm": ("llama", _CLIP),
    "glm4v": ({}, {**_QWEN_VISION, "out_hidden_size": 64, **_CLIP}),
    "glm4v_moe": (
        _MIXTURE | {"first_k_dense_replace": 1, "rope_parameters": _HALF_ROPE},
        {**_QWEN_VISION, "out_hidden_size": 64, **_CLIP},
    ),
    "qwen3_vl_moe": (
        _MIXTURE | {"decoder_sparse_step": 2},
        {**_QWEN_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen2_vl": ({}, {**_QWEN_VISION, "hidden_size": 64}),
    "qwen2_5_vl": ({}, {**_QWEN_VISION, "out_hidden_size": 64, "fullatt_block_indexes": [0]}),
    "qwen3_vl": (
        {},
        {**_QWEN_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen3_5": ("qwen3.5", {**_QWEN_VISION, "out_hidden_size": 48, "num_position_embeddings": 16}),
    "qwen3_5_moe": ("qwen3.5-moe", {**_QWEN_VISION, "out_hidden_size": 48, "num_position_embeddings": 16}),
}
"""Image model -> the family of its text half, or what differs in its own, and its vision tower."""


@pytest.mark.parametrize("outer", IMAGE_MODELS)
@pytest.mark.slow
def test_the_text_half_of_another_image_model_is_loaded(outer, tmp_path, tiny_models, prompts, run):
    # Given an image model whose text half is of a family that the decoder knows
    family, vision = IMAGE_MODELS[outer]
    if isinstance(family, dict):
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        text = {**tiny_models._SHAPE, "rope_parameters": rope, "hidden_size": 64, **family}
    else:
        text = tiny_models.make_config(family).to_dict()
    config = AutoConfig.for_model(
        outer.split()[0], text_config=text, vision_config=vision, tie_word_embeddings=False, image_token_id=257
    )
    torch.manual_seed(0)
    full = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in full.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    full.save_pretrained(tmp_path)
    # When it is loaded and given text, then it answers as the whole model does
    model = load_model(tmp_path, dtype=torch.float32, device=CPU)
    assert describe_model(tmp_path, dtype=torch.float32).spec == model.spec
    assert model.spec.architecture == type(full).__name__
    [ours] = run(model, prompts[:1], [[(0, 0, 20)], [(0, 20, 45)]])
    whole = full.language_model if outer == "llama4" else full  # its outer forward lacks an output of the inner one
    with torch.inference_mode():
        theirs = whole(input_ids=prompts[0][None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=tolerance_of(family), rtol=1e-5)


def test_an_image_model_of_another_text_half_is_left_to_others():
    config = Mistral3Config(text_config={"model_type": "gpt2"})
    assert fused_family(config) is None


def test_contexts_beyond_a_chunk_of_attention_are_refused_by_name(tiny_model):
    # Within one chunk each token sees all before it; in the next one it would not.
    spec = describe_model(tiny_model("llama4")).spec
    assert spec.max_position == spec.context(None) == 128
    with pytest.raises(UnsupportedModel, match=r"max_model_len 129 .* of 128 \(attention_chunk_size=128: more is not"):
        spec.context(129)


REFUSED = {
    "alpha is -2": (
        "hunyuan",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": -2.0, "factor": 1.0}},
    ),
    "rope parameter 'alpha'": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 2.0, "factor": 1.0}},
    ),
    "position_embedding_type is 'learned'": ("granite4", {"position_embedding_type": "learned"}),
    "attn_scale is -0.5": ("llama4", {"attn_scale": -0.5}),
    "floor_scale is 0,": ("llama4", {"floor_scale": 0}),
    "attention_chunk_size is 0": ("llama4", {"attention_chunk_size": 0}),
    r"moe_layers is \[3\], but there are 3 layers": ("llama4", {"moe_layers": [3]}),
    "attn_logit_softcapping": ("gemma3", {"attn_logit_softcapping": 50.0}),
    "use_bidirectional_attention": ("gemma3", {"use_bidirectional_attention": True}),
    "is_causal=False": ("gemma4", {"use_bidirectional_attention": "all"}),
    "layers that differ in intermediate_size": ("gemma4", {"per_layer_config": {"0": {"intermediate_size": 40}}}),
    "num_key_value_heads of full_attention layers is 0": ("gemma4", {"num_global_key_value_heads": 0}),
    "4 attention heads can't share 3": ("gemma4", {"num_global_key_value_heads": 3}),
    "final_logit_softcapping": ("llama", {"final_logit_softcapping": 30.0}),
    "clip_qkv": ("llama", {"clip_qkv": 8.0}),
    "no_rope_layers": ("llama", {"no_rope_layers": [1, 0, 1]}),
    "num_local_experts": ("mistral", {"num_local_experts": 8}),
    "attention_sinks": ("llama", {"attention_sinks": 4}),
    "swiglu_alpha is 1.5": ("gpt-oss", {"swiglu_alpha": 1.5}),
    "swiglu_limit is 6.0": ("gpt-oss", {"swiglu_limit": 6.0}),
    "activation 'relu'": ("llama", {"hidden_act": "relu"}),
    "partial_rotary_factor": ("llama", {"partial_rotary_factor": 0.5}),
    "residual_multiplier": ("llama", {"residual_multiplier": 0.5}),
    "logits scale of -0.25": ("cohere", {"logit_scale": -0.25}),
    "residual scale of inf": ("granite", {"residual_multiplier": float("inf")}),
    "logit_scale": ("qwen3", {"logit_scale": 0.25}),
    "llama_4_scaling_beta is -1": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": -1,
            }
        },
    ),
    "partial_rotary_factor is 0.4": ("glm4", {"partial_rotary_factor": 0.4, "head_dim": 8}),
    "mrope_section": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2]}}),
    "linear_attention": ("qwen3", {"layer_types": ["linear_attention", "full_attention", "full_attention"]}),
    "ministral": ("mistral", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    "4 attention heads": ("llama", {"num_key_value_heads": 3}),
}


def test_configs_of_gpt_oss_need_not_name_what_older_ones_lack(tiny_models):
    config = tiny_models.make_config("gpt-oss")
    del config.swiglu_alpha
    assert fused_family(config)(config).activation == "clamped_swiglu"


@pytest.mark.parametrize("named", REFUSED)
def test_what_would_change_the_result_is_refused_by_name(named, tiny_models):
    family, changes = REFUSED[named]
    config = tiny_models.make_config(family, **changes)
    family_function = fused_family(config)
    assert family_function is not None
    with pytest.raises(UnsupportedModel, match=named):
        family_function(config)
