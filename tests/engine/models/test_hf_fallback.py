"""Architectures without a fused decoder run through transformers' code, exactly, or are refused by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from engine import Engine, EngineConfig
from engine.checkpoints.config import usable
from engine.errors import CorruptWeights, UnsupportedModel
from engine.models.hf import TransformersModel
from engine.models.hf_check import check_against_eager
from engine.models.load import describe_model, load_model
from tests.engine.oracle import check_equal, engine_answers, greedy_answer

CPU = torch.device("cpu")
FALLBACK = ("gpt2", "phi", "phi3", "gpt-neox", "opt", "cohere", "granite", "jetmoe")


def load(path, **options):
    """A model as transformers' code computes it, also of a family that the fused decoder knows."""
    return load_model(path, dtype=torch.float32, device=CPU, own_models=False, **options)


def test_every_fallback_family_is_covered(tiny_models):
    assert tiny_models.FALLBACK == FALLBACK


@pytest.mark.parametrize("family", FALLBACK)
@pytest.mark.slow
def test_logits_equal_transformers_over_flat_chunked_batches(family, tiny_model, prompts, run, steps_over, oracle):
    # Given an architecture that only transformers knows
    model = load(tiny_model(family))
    assert isinstance(model, TransformersModel)
    wanted = oracle(tiny_model(family), prompts)
    for chunk in (1, 7, 64):
        # When three prompts advance together, in chunks of their own
        got = run(model, prompts, steps_over([len(p) for p in prompts], chunk))
        # Then each has the logits that it has alone
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", FALLBACK)
def test_the_spec_describes_the_model(family, tiny_model, tiny_models):
    config = AutoConfig.from_pretrained(tiny_model(family))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model(family))
    description = describe_model(tiny_model(family), dtype=torch.float32, own_models=False)
    spec = description.spec
    assert not description.fused
    assert spec == load(tiny_model(family)).spec
    assert spec.num_parameters == sum(p.numel() for p in reference.parameters())
    assert spec.head_dim == getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert spec.max_position == 512
    slides = family in ("phi3", "mixtral")
    assert spec.windows == ((tiny_models.WINDOW if slides else None),) * 3


def test_two_models_do_not_share_a_step(tiny_model, prompts, run, oracle):
    # Given two models, one of whose steps runs inside the other's
    first, second = load(tiny_model("gpt2")), load(tiny_model("phi"))
    inner = []

    def attend(layer, q, k, v, scale):
        if layer == 1:
            inner.extend(run(second, prompts[1:2], [[(0, 0, 6)]]))
        return q

    first.forward(prompts[1], torch.arange(6), attend, None)
    torch.testing.assert_close(inner[0], oracle(tiny_model("phi"), prompts[1:2])[0], atol=1e-4, rtol=1e-5)


def test_no_mask_is_built(tiny_model, prompts):
    # transformers builds no mask for an attention that its mask interface does not know.
    model = load(tiny_model("phi3"))
    assert model._base.config._attn_implementation not in AttentionMaskInterface._global_mapping
    seen = []
    attention = model._base.layers[0].self_attn
    attention.register_forward_pre_hook(lambda m, a, k: seen.append(k["attention_mask"]), with_kwargs=True)
    model.forward(prompts[0], torch.arange(45), lambda layer, q, k, v, scale: q, None)
    assert seen == [None]


@pytest.mark.parametrize(
    ("class_name", "named", "changes"),
    [
        ("Gemma2Config", "attn_logit_softcapping", {"head_dim": 16, "query_pre_attn_scalar": 16}),
        ("GptOssConfig", "s_aux", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 8}),
        ("StableLmConfig", "attention can't be replaced", {}),
        ("FalconConfig", "attention can't be replaced", {}),
        ("AXK1Config", "kv_lora_rank", {"n_routed_experts": 4, "kv_lora_rank": 16}),
        ("Gemma4TextConfig", "layers differ in head_dim", {"head_dim": 16, "hidden_size_per_layer_input": 0}),
        ("Qwen3NextConfig", "linear_attention|keeps a state", {"head_dim": 16, "num_experts": 4}),
    ],
)
def test_attention_that_can_not_be_replaced_is_refused_by_name(class_name, named, changes, tiny_models, tmp_path):
    config = getattr(transformers, class_name)(**{**tiny_models._SHAPE, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path)


def test_keys_that_a_model_repeats_itself_are_cached_as_it_makes_them(tiny_model, prompts):
    # Given JetMoE, whose attention gets as many key-value heads as queries, more than its config names
    model = AutoModelForCausalLM.from_pretrained(tiny_model("jetmoe"), dtype=torch.float32).eval()
    token_lists = [ids.tolist() for ids in prompts]
    want = [greedy_answer(model, prompt, 4, (2,)) for prompt in token_lists]
    # When the paged cache holds them, then the answers are transformers'
    engine = Engine.load(tiny_model("jetmoe"), EngineConfig(dtype="float32", max_model_len=64, threads=1))
    assert engine.spec.num_kv_heads == 4
    assert check_equal(want, engine_answers(engine, token_lists, 4)) == 0


@pytest.mark.parametrize("said", [2, 8])
def test_heads_that_the_config_does_not_declare_are_refused(said, tmp_path):
    # Given a model of one key-value head whose config says more
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64, "n_inner": 80, "num_key_value_heads": said}
    config = transformers.GPTBigCodeConfig(vocab_size=257, bos_token_id=1, eos_token_id=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    # When it is loaded, then the line says both
    named = rf"GPTBigCodeAttention 0 makes 8 query and 1 key-value heads of 8, but its config says 8 and {said} of 8"
    with pytest.raises(UnsupportedModel, match=named):
        load(tmp_path)


def test_models_whose_config_or_code_raises_are_refused_in_one_line(tiny_models, tmp_path):
    # Given a config with a value that differs by layer (Gemma 4's)
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    sizes = {**tiny_models._SHAPE, **layers, "head_dim": 12, "global_head_dim": 24, "hidden_size_per_layer_input": 0}
    AutoModelForCausalLM.from_config(transformers.Gemma4TextConfig(**sizes)).save_pretrained(tmp_path / "gemma4")
    # When it is read or loaded, then it is refused, and so is a model without a decoder beneath its head
    for read in (partial(describe_model, own_models=False), load):
        with pytest.raises(UnsupportedModel, match=r"Gemma4ForCausalLM .* its layers differ in head_dim") as caught:
            read(tmp_path / "gemma4")
        assert "\n" not in str(caught.value)
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]}
    sizes = {**tiny_models._SHAPE, **layers, "head_dim": 12, "num_local_experts": 2, "intermediate_size_mlp": 64}
    AutoModelForCausalLM.from_config(transformers.Llama4TextConfig(**sizes)).save_pretrained(tmp_path / "llama4")
    with pytest.raises(UnsupportedModel, match="Llama4ForCausalLM is not supported: its decoder can't be called"):
        load(tmp_path / "llama4")


@pytest.mark.parametrize("error", [AttributeError("no\nsuch"), KeyError("x"), RuntimeError("two\nlines"), OSError()])
def test_what_reading_a_config_raises_is_one_line(error, tmp_path):
    with pytest.raises(UnsupportedModel) as caught, usable(tmp_path):
        raise error
    assert str(caught.value).startswith(f"{tmp_path} can't be used: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), CorruptWeights("x")]
)
def test_failed_allocations_and_own_errors_pass(error, tmp_path):
    with pytest.raises(type(error)) as caught, usable(tmp_path):
        raise error
    assert caught.value is error


def test_rotation_by_length_is_capped_at_the_original_context(tiny_models, tmp_path, prompts, run, oracle):
    # Given a Phi 3 whose rotary frequencies switch at 32 tokens
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.5] * 6,
        "long_factor": [3.0] * 6,
        "original_max_position_embeddings": 32,
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 32, "sliding_window": None}
    folder = tiny_models.make_tiny_model("phi3", tmp_path, **changes)
    # When it is loaded, its context ends there
    model = load(folder)
    assert model.spec.max_position == 32
    assert describe_model(folder, own_models=False).spec.max_position == 32
    [ours] = run(model, prompts[2:], [[(0, 0, 23)]])
    torch.testing.assert_close(ours, oracle(folder, prompts[2:])[0], atol=1e-4, rtol=1e-5)
    # And a longer one is refused
    with pytest.raises(UnsupportedModel, match=r"longrope.*up to 32 tokens, not 64"):
        load(folder, max_positions=64)


def test_a_model_that_disagrees_with_transformers_is_refused(tiny_model):
    # Given a model that passes the check at load
    model = load(tiny_model("cohere"))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model("cohere"))
    check_against_eager(model, reference)
    # When it forgets a scale of its logits, or attends over less than transformers does
    model._logits_factor, factor = 1.0, model._logits_factor
    with pytest.raises(UnsupportedModel, match="CohereForCausalLM can't be run over flat batches"):
        check_against_eager(model, reference)
    model._logits_factor = factor
    model._spec = replace(model.spec, windows=(4, 4, 4))
    with pytest.raises(UnsupportedModel, match="CohereForCausalLM can't be run over flat batches"):
        check_against_eager(model, reference)


def test_a_window_that_the_config_does_not_declare_is_refused(tiny_model, prompts):
    model = load(tiny_model("phi3"))
    model._slot.spec = replace(model.spec, windows=(None, None, None))
    with pytest.raises(UnsupportedModel, match="Phi3Attention 0 has a window of 8, but its config says None"):
        model.forward(prompts[0], torch.arange(45), lambda layer, q, k, v, scale: q, None)


@pytest.mark.parametrize("family", ["gpt2", "phi", "jetmoe"])
@pytest.mark.slow
def test_bfloat16_passes_the_check_and_stays_close(family, tiny_model, prompts, run, oracle):
    model = load_model(tiny_model(family), dtype=torch.bfloat16, device=CPU)
    truth = oracle(tiny_model(family), prompts[:1])[0]
    peer = oracle(tiny_model(family), prompts[:1], torch.bfloat16)[0]
    [ours] = run(model, prompts[:1], [[(0, 0, 20)], [(0, 20, 45)]])
    assert (ours - truth).norm() < 1.5 * (peer - truth).norm()


def test_missing_and_unexpected_tensors_are_named(tiny_models, tmp_path):
    folder = tiny_models.make_tiny_model("phi", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    extra = {**tensors, "model.layers.0.surprise.weight": torch.ones(3)}
    save_file(extra, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptWeights, match=r"layers\.0\.surprise\.weight"):
        load(folder)
    del tensors["model.layers.1.mlp.fc1.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptWeights, match=r"layers\.1\.mlp\.fc1\.weight"):
        load(folder)
