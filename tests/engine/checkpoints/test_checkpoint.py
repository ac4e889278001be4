"""Weights are read whole and exactly once; what is wrong with a checkpoint is said by name."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.errors import CorruptWeights, ModelNotFound, UnsupportedModel
from engine.models.load import describe_model, load_model

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def load(path, **options):
    return load_model(path, dtype=torch.float32, device=CPU, **options)


@pytest.fixture
def whole(tiny_models, tmp_path):
    """A llama in one file, free to be damaged."""
    return tiny_models.make_tiny_model("llama", tmp_path / "whole")


@pytest.fixture
def sharded(tiny_models, tmp_path):
    """The same llama in several files with an index."""
    return tiny_models.make_tiny_model("llama", tmp_path / "sharded", max_shard_size="60KB")


def rewrite(folder, change):
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reindex(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_sharded_and_whole_checkpoints_are_the_same_model(whole, sharded, prompts, run):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, several = (run(load(p), prompts[:1], [[(0, 0, 45)]])[0] for p in (whole, sharded))
    assert torch.equal(one, several)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_converted_from_the_dtype_they_are_stored_in(stored, whole, prompts, run):
    before = run(load(whole), prompts[1:2], [[(0, 0, 6)]])[0]
    rewrite(whole, lambda t: t.update({k: v.to(stored) for k, v in t.items()}))
    after = run(load(whole), prompts[1:2], [[(0, 0, 6)]])[0]
    assert (after - before).norm() / before.norm() < (1e-6 if stored == torch.float64 else 0.05)


def test_a_missing_tensor_is_named(whole):
    rewrite(whole, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CorruptWeights, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(whole)


def test_a_tensor_of_another_shape_is_named(whole):
    rewrite(whole, lambda t: t.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(CorruptWeights, match=r"model\.norm\.weight has shape \[47\].*\[48\]"):
        load(whole)


def test_a_config_that_asks_for_more_than_there_is_takes_no_memory_for_it(whole):
    edit_config(whole, vocab_size=10**7)
    with pytest.raises(CorruptWeights, match=r"embed_tokens\.weight has shape \[257, 48\]"):
        load(whole)


def test_a_tensor_that_nothing_reads_is_named(whole):
    # A bias that the config does not declare would change the result if it were read.
    rewrite(whole, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}))
    with pytest.raises(CorruptWeights, match=r"layers\.0\.self_attn\.q_proj\.bias"):
        load(whole)


def test_what_follows_from_the_config_may_be_stored_too(whole):
    before = load(whole).spec
    rewrite(whole, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    assert load(whole).spec == before, "it is passed over"


def test_integers_are_no_weights(whole):
    rewrite(whole, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight.* is I8"):
        load(whole)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_file_is_named(keep, whole):
    file = whole / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(CorruptWeights, match=r"model\.safetensors is not a whole safetensors file"):
        load(whole)


def test_a_header_larger_than_the_file_is_refused(whole):
    file = whole / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 40) + file.read_bytes()[8:])
    with pytest.raises(CorruptWeights, match=r"model\.safetensors is not a whole"):
        load(whole)


def test_a_missing_shard_is_named(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CorruptWeights, match=rf"{victim.name} is missing"):
        load(sharded)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "deeper/file.safetensors", ".."])
def test_an_index_that_points_outside_its_folder_is_refused(file, sharded):
    reindex(sharded, lambda m: m.update({"model.norm.weight": file}))
    with pytest.raises(CorruptWeights, match=r"outside its folder.*model\.norm\.weight"):
        load(sharded)


def test_an_index_with_a_wrong_file_for_a_tensor_is_refused(sharded):
    other = sorted(p.name for p in sharded.glob("*.safetensors"))
    reindex(
        sharded, lambda m: m.update({"model.norm.weight": other[0] if m["model.norm.weight"] != other[0] else other[1]})
    )
    with pytest.raises(CorruptWeights, match=r"model\.norm\.weight.* not there"):
        load(sharded)


def test_an_index_that_is_no_json_is_refused(sharded):
    (sharded / INDEX).write_text("[1, 2")
    with pytest.raises(CorruptWeights, match="not a safetensors index"):
        load(sharded)


def test_a_tensor_in_two_files_is_refused(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    with safe_open(first, framework="pt") as file:
        name = next(iter(file.keys()))
        extra = file.get_tensor(name)
    save_file({**load_file(second), name: extra}, second)
    with pytest.raises(CorruptWeights, match=rf"{name} is in both"):
        load(sharded)


def test_several_files_without_an_index_are_refused(sharded):
    (sharded / INDEX).unlink()
    with pytest.raises(CorruptWeights, match=r"no model\.safetensors\.index\.json"):
        load(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_by_name_and_never_opened(name, whole, tmp_path):
    # Given a folder whose weights are a pickle that would run code
    (whole / "model.safetensors").unlink()
    (whole / name).write_bytes(f"cos\nsystem\n(S'touch {tmp_path}/ran'\ntR.".encode())
    with pytest.raises(UnsupportedModel, match=rf"{name} is pickled.*convert it to safetensors"):
        load(whole)
    assert not (tmp_path / "ran").exists()


def test_a_path_that_leads_nowhere_is_said_in_one_line(tmp_path, whole):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "notes.txt", tmp_path / "empty"):
        with pytest.raises(ModelNotFound, match=path.name) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    (whole / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="holds no weights"):
        load(whole)
    (whole / "model.Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="name one of them"):
        load(whole)


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("read", [load, describe_model])
@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("awq", {"quantization_config": {"quant_method": "awq", "bits": 4}}),
        ("LlamaForTokenClassification", {"architectures": ["LlamaForTokenClassification"]}),
        ("no_such_model", {"model_type": "no_such_model"}),
        ("T5ForConditionalGeneration", {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}),
        ("MambaForCausalLM", {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}),
        ("BloomForCausalLM", {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}),
        ("LongcatFlashForCausalLM", {"model_type": "longcat_flash", "architectures": ["LongcatFlashForCausalLM"]}),
        (
            "AriaForConditionalGeneration",
            {"model_type": "aria", "architectures": ["AriaForConditionalGeneration"]},
        ),
    ],
)
def test_configs_that_can_not_run_are_refused_by_name(read, named, changes, whole):
    edit_config(whole, **changes)
    with pytest.raises(UnsupportedModel, match=named) as caught:
        read(whole)
    assert "\n" not in str(caught.value)


def test_code_that_comes_with_a_model_is_never_run(whole, tmp_path):
    # Given a model whose config asks for its own code
    marker = tmp_path / "ran"
    (whole / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    auto = {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilModel"}
    edit_config(whole, model_type="evil", auto_map=auto, architectures=["EvilForCausalLM"])
    with pytest.raises(UnsupportedModel):
        load(whole)
    assert not marker.exists()


def test_end_tokens_of_both_configs_count(whole):
    edit_config(whole, eos_token_id=[2, 9])
    (whole / "generation_config.json").write_text('{"eos_token_id": [9, 5]}')
    assert describe_model(whole).spec.eos_token_ids == (2, 5, 9)
    assert load(whole).spec.eos_token_ids == (2, 5, 9)
