"""Files made to do harm, or broken: refused in one line that names them, at once, and without taking memory."""

from __future__ import annotations

import json
import random
import shutil
import struct

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig
from engine.checkpoints.gguf_file import GGUFFile
from engine.errors import CorruptWeights, EngineError, UnsupportedModel
from engine.models.load import describe_model, load_model

CPU = torch.device("cpu")


def load(path):
    return load_model(path, dtype=torch.float32, device=CPU)


@pytest.fixture
def copy(tiny_model, tmp_path):
    """A function family -> a copy of its tiny model, with these changes to its config."""

    def copy(family, /, **changes):
        folder = shutil.copytree(tiny_model(family), tmp_path / family, dirs_exist_ok=True)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return folder

    return copy


LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
    "original_max_position_embeddings": 32,
}  # fmt: skip

PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 1e12}

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("read", [load, describe_model])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_hidden_layers": 10**8}),
        ("llama", {"num_hidden_layers": 0}),
        ("llama", {"num_attention_heads": 0}),
        ("qwen3", {"num_attention_heads": 10**8}),
        ("qwen3", {"num_key_value_heads": -1}),
        ("gemma3", {"head_dim": 10**12}),
        ("gemma3", {"head_dim": -1}),
        ("llama", {"hidden_size": 1e400}),
        ("llama", {"max_position_embeddings": 0}),
        ("llama", {"max_position_embeddings": 10**12}),
        ("llama", {"vocab_size": True}),
        ("gpt2", {"n_layer": 10**8}),
        ("gpt2", {"n_head": 0}),
        ("gpt2", {"n_head": 7}),
        ("gpt2", {"n_embd": -1}),
        ("llama", {"architectures": 7}),
        ("llama", {"architectures": [7]}),
        ("llama", {"rms_norm_eps": float("nan")}),
        ("mistral", {"sliding_window": 0}),
        ("gemma3", {"sliding_window": -3}),
        ("mistral", {"sliding_window": 2**32 + 3}),
        ("glm", {"head_dim": 17}),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 10**12}, "3": {"head_dim": 10**12}}}),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 40}}}),
        ("gemma4", {"rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": PROPORTIONAL}}),
        *(
            ("llama", {"rope_parameters": YARN | {"attention_factor": factor}})
            for factor in ("x", {}, 0, 1e30, float("nan"))
        ),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}),
        ("llama", {"eos_token_id": "stop"}),
        ("smollm3", {"no_rope_layers": [1]}),
        ("smollm3", {"no_rope_layers": 3}),
        ("smollm3", {"no_rope_layer_interval": 0, "no_rope_layers": None}),
        ("granite", {"residual_multiplier": float("nan")}),
        ("granite", {"logits_scaling": 0}),
        ("granite", {"embedding_multiplier": -1.0}),
        ("cohere", {"logit_scale": 0.0}),
        ("cohere", {"layer_norm_eps": None}),
        ("cohere2", {"layer_types": ["sliding_attention"]}),
        ("exaone4", {"layer_types": [7, 7, 7]}),
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 0}}}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0}}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e30}}),
        ("phi3", {"rope_parameters": {**LONG_ROPE, "long_factor": [0.0] * 6}}),
        ("phi3", {"rope_parameters": {**LONG_ROPE, "long_factor": [2.0] * 7}}),
        ("phi3", {"rope_parameters": {**LONG_ROPE, "short_factor": "short"}}),
        ("glm4", {"partial_rotary_factor": float("nan"), "rope_parameters": None}),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": [1]}}),
    ],
)
def test_sizes_and_values_that_no_model_has_are_refused(read, family, changes, copy):
    with pytest.raises(UnsupportedModel) as caught:
        read(copy(family, **changes))
    assert "\n" not in str(caught.value)


def test_configs_and_indexes_that_nest_without_end_are_refused(copy):
    folder = copy("llama")
    (folder / "model.safetensors.index.json").write_text("[" * 200_000)
    with pytest.raises(CorruptWeights, match=r"index\.json is not a safetensors index"):
        load(folder)
    (folder / "config.json").write_text('{"a":' * 200_000)
    with pytest.raises(UnsupportedModel, match=r"config\.json can't be used"):
        describe_model(folder)


def test_end_tokens_that_the_model_can_not_produce_are_left_out(copy):
    engine = Engine.load(copy("llama", eos_token_id=[2, -7, 257, 2**40]), EngineConfig(dtype="float32"))
    assert engine.spec.eos_token_ids == (2,)


def test_a_tensor_of_another_shape_is_named_by_transformers_models_too(copy):
    folder = copy("gpt2")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("h.0.ln_1.weight"))
    tensors[name] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptWeights, match=r"h\.0\.ln_1\.weight.* among the mismatched ones"):
        load(folder)


def write_header(path, **metadata):
    """A GGUF file of one tensor with this metadata, written by the gguf package."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, (add, value) in metadata.items():
        getattr(writer, add)(key.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", torch.ones(8, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SIZES = {
    "llama__context_length": ("add_uint32", 64),
    "llama__embedding_length": ("add_uint32", 32),
    "llama__block_count": ("add_uint32", 1),
    "llama__feed_forward_length": ("add_uint32", 64),
    "llama__attention__head_count": ("add_uint32", 4),
    "llama__attention__layer_norm_rms_epsilon": ("add_float32", 1e-5),
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general__alignment", ("add_uint32", 0)),
        ("general__alignment", ("add_string", "page")),
        ("split__count", ("add_string", "two")),
        ("tokenizer__ggml__eos_token_id", ("add_string", "two")),
        ("llama__attention__head_count", ("add_uint32", 0)),
        ("llama__attention__head_count", ("add_string", "four")),
        ("llama__attention__head_count_kv", ("add_array", [4, 4])),
        ("llama__attention__key_length", ("add_uint32", 0)),
        ("llama__block_count", ("add_uint64", 10**12)),
        ("llama__expert_count", ("add_string", "none")),
        ("llama__rope__freq_base", ("add_string", "fast")),
    ],
)
def test_metadata_of_the_wrong_kind_or_size_is_refused(key, value, tmp_path):
    path = write_header(tmp_path / "model.gguf", **(SIZES | {key: value}))
    with pytest.raises((UnsupportedModel, CorruptWeights), match=r"model\.gguf") as caught:
        describe_model(path)
    assert "\n" not in str(caught.value)


def test_a_string_longer_than_any_address_is_refused(tmp_path):
    path = write_header(tmp_path / "model.gguf", **SIZES, words=("add_array", ["alpha", "beta"]))
    data = path.read_bytes()
    at = data.index(b"alpha") - 8
    path.write_bytes(data[:at] + struct.pack("<Q", 2**64 - 1) + data[at + 8 :])
    with pytest.raises(CorruptWeights, match="breaks inside its header"):
        describe_model(path)


def test_a_tensor_without_rows_is_refused(tmp_path):
    path = write_header(tmp_path / "model.gguf", **SIZES)
    data = path.read_bytes()
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4
    path.write_bytes(data[: at + 8] + struct.pack("<Q", 0) + data[at + 16 :])
    with pytest.raises(CorruptWeights, match="tensor token_embd"):
        GGUFFile(path)


@pytest.mark.slow
def test_any_damage_to_a_header_is_an_error_of_ours_or_none(tmp_path):
    # Given a header, when bytes of it are overwritten with extremes, then nothing but an EngineError is raised
    path = write_header(tmp_path / "model.gguf", **SIZES, words=("add_array", ["alpha", "beta"]))
    data, rng = path.read_bytes(), random.Random(1)
    end = data.index(b"token_embd.weight") + 64
    extremes = [2**64 - 1, 2**63, 2**63 - 1, 2**62, 2**40, 2**31, 9, 8, 1, 0]
    refused = 0
    for _ in range(600):
        damaged, at = bytearray(data), rng.randrange(4, end)
        width = rng.choice([1, 4, 8])
        damaged[at : at + width] = rng.choice(extremes).to_bytes(8, "little")[:width]
        path.write_bytes(damaged)
        try:
            describe_model(path)
        except EngineError:
            refused += 1
    assert refused > 300
