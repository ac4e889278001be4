"""Checkpoints that we write are read by ourselves and by compressed-tensors as what was rounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import Engine, EngineConfig, Request, SamplingParams, as_token_ids
from engine.checkpoints.checkpoint import folder_weights
from engine.errors import UnsupportedModel
from engine.models.hf_check import DenseAttend
from engine.models.load import load_model, open_model
from engine.quant.quantize import gptq_weights, smoothing_factors, write_quantized
from engine.quant.rtn import round_to_nearest
from engine.quant.writing import Scheme

CPU = torch.device("cpu")
TARGETS = ("int8", "int4", "fp8")
SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def plain(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function family -> a tiny model whose layers can be cut into groups of 32."""

    def plain(family: str) -> Path:
        folder: Path = tmp_path_factory.getbasetemp() / f"to-quantize-{family}"
        if not folder.exists():
            tiny_models.make_tiny_model(family, folder, **SIZES)
        return folder

    return plain


def write(folder: Path, out: Path, scheme: Scheme, by: Any = None, ready: Any = None) -> Any:
    out.mkdir()
    return write_quantized(folder, out, scheme, by, ready)


def logits(folder: Path, ids: Tensor) -> Tensor:
    """The logits of one prompt, by a dense decoder at float32."""
    model = load_model(folder, dtype=torch.float32, device=CPU)
    attend = DenseAttend(model.spec)
    attend.ranges = [(0, len(ids))]
    return model.logits(model.forward(ids, torch.arange(len(ids)), attend, None))


@pytest.mark.parametrize("target", [*TARGETS, "int4-asymmetric"])
@pytest.mark.parametrize("family", ["llama-bias", "gemma3", "phi"])
def test_the_written_weights_are_the_rounded_ones(target: Any, family: str, plain: Any, tmp_path: Path) -> None:
    scheme = Scheme("int4", symmetric=False) if target == "int4-asymmetric" else Scheme(target)
    done = write(plain(family), tmp_path / "made", scheme)
    source = folder_weights(tmp_path / "made")
    # Given a written checkpoint, then each linear layer but the head is what rounding made of it
    modules = 0
    for name, tensor in load_file(plain(family) / "model.safetensors").items():
        found = torch.empty(tensor.shape)
        source.read(name, found)
        if source.quantized(name) is None:
            assert torch.equal(found, tensor.bfloat16().float()), name
        else:
            modules += 1
            assert torch.equal(found, round_to_nearest(tensor, scheme.rounding).dequantize()), name
    layers = 4 if family == "gemma3" else 3
    assert (modules, done.modules, done.kept) == ((6 if family == "phi" else 7) * layers,) * 2 + ((),)
    assert done.num_bytes == sum(t.nbytes for t in load_file(tmp_path / "made" / "model.safetensors").values())
    assert done.num_bytes < done.dense_bytes
    assert 0 < done.error < {"int4": 0.12, "int4-asymmetric": 0.1}.get(target, 0.04)
    load_model(tmp_path / "made", dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "glm4-moe"])
@pytest.mark.slow
def test_experts_are_written_small_and_routers_whole(
    target: Any, family: str, tiny_models: Any, tmp_path: Path
) -> None:
    # Given a mixture's checkpoint that was written quantized
    sizes = {"moe_intermediate_size": 32, "intermediate_size": 64}
    if family == "qwen2-moe":
        sizes["shared_expert_intermediate_size"] = 64
    folder = tiny_models.make_tiny_model(family, tmp_path / "plain", hidden_size=64, **sizes)
    scheme = Scheme(target)
    done = write(folder, tmp_path / "made", scheme)
    source, modules = folder_weights(tmp_path / "made"), 0
    # Then each expert's matrix is what rounding made of it, and what routes is as it was
    for name, tensor in load_file(folder / "model.safetensors").items():
        found = torch.empty(tensor.shape)
        source.read(name, found)
        whole = tensor.dim() < 2 or name.endswith(
            (".gate.weight", "expert_gate.weight", "head.weight", "tokens.weight")
        )
        assert (source.quantized(name) is None) == whole, name
        modules += not whole
        wanted = tensor.bfloat16().float() if whole else round_to_nearest(tensor, scheme.rounding).dequantize()
        assert torch.equal(found, wanted), name
    assert (done.modules, done.kept) == (modules, ())
    said = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in said
    assert sum(name.endswith(".gate") for name in said) == (2 if family == "glm4-moe" else 3)
    load_model(tmp_path / "made", dtype=torch.float32, device=CPU)
    with pytest.raises(UnsupportedModel, match="can't be smoothed: they are mixtures of experts"):
        smoothing_factors(folder, [[3, 4]], torch.float32)


def test_routers_that_are_layers_of_their_own_are_ignored(tiny_models: Any, tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_model("granite-moe", tmp_path / "plain", hidden_size=64, intermediate_size=64)
    write(folder, tmp_path / "made", Scheme("int8"))
    said = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]["ignore"]
    assert sum(name.endswith(".router.layer") for name in said) == 3


def test_experts_with_biases_are_written_one_by_one(tiny_models: Any, tmp_path: Path) -> None:
    # Given gpt-oss, whose experts are stacked, and the same written quantized
    folder = tiny_models.make_tiny_model("gpt-oss", tmp_path / "plain", hidden_size=64, intermediate_size=96)
    scheme = Scheme("int4")
    done = write(folder, tmp_path / "made", scheme)
    # Then each expert's matrix is what rounding made of it, and biases, sinks and routers are as they were
    before, after = open_model(folder).weights, open_model(tmp_path / "made").weights
    assert {*after.names} == {*before.names}
    modules = 0
    for name in before.names:
        tensor, found = torch.empty(before.shape(name)), torch.empty(after.shape(name))
        before.read(name, tensor)
        after.read(name, found)
        rounded = name.endswith("_proj.weight")
        modules += rounded
        assert (after.quantized(name) is not None) == rounded, name
        wanted = round_to_nearest(tensor, scheme.rounding).dequantize() if rounded else tensor.bfloat16().float()
        assert torch.equal(found, wanted), name
    assert (done.modules, done.kept) == (modules, ())
    said = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]["ignore"]
    assert sum(name.endswith(".router") for name in said) == 3
    load_model(tmp_path / "made", dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("target", TARGETS)
def test_transformers_reads_it_with_the_formats_library(target: Any, plain: Any, tmp_path: Path) -> None:
    # Given a checkpoint of ours, when transformers loads it with compressed-tensors, then its weights are ours
    reason = "NOT TESTED HERE: the library of the format is not installed"
    library: Any = pytest.importorskip("compressed_tensors.compressors", reason=reason)
    write(plain("llama-bias"), tmp_path / "made", Scheme(target))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.bfloat16)
    settings = model.hf_quantizer.quantization_config.quantization_config
    library.ModelCompressor(quantization_config=settings).decompress_model(model)
    source = folder_weights(tmp_path / "made")
    for name, theirs in model.state_dict().items():
        if name.endswith(("proj.weight", "norm.weight", "bias")):
            ours = torch.empty_like(theirs)
            source.read(name, ours)
            assert torch.equal(ours, theirs), name
    ids = torch.arange(3, 20)
    with torch.inference_mode():
        wanted = model(input_ids=ids[None]).logits[0].float()
    found = logits(tmp_path / "made", ids)
    # (theirs computes in bfloat16, with inputs quantized where the target has it so)
    assert float((found - wanted).norm() / wanted.norm()) < {"int4": 0.08, "int8": 0.15, "fp8": 0.25}[target]


@pytest.mark.parametrize("family", ["llama-bias", "gemma3", "qwen3", "phi3", "glm4", "cohere2", "nemotron"])
def test_smoothing_changes_no_product(family: str, plain: Any, tmp_path: Path) -> None:
    # Given a model, and factors from a run over it
    folder = plain(family)
    ids = torch.arange(3, 40)
    by = smoothing_factors(folder, [ids.tolist(), [5, 6, 7]], torch.float32)
    assert max(float(factor.max() / factor.min()) for factor in by.values()) > 2
    # When nothing is rounded (float32, groups that no weight fits), then it computes what it did
    write(folder, tmp_path / "made", Scheme("int4", group=100_000, dtype=torch.float32), by)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    module = "mlp.gate_up_proj" if family in ("phi3", "glm4") else "mlp.up_proj"
    assert not torch.equal(tensors[f"model.layers.1.{module}.weight"], _weight(folder, module))
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(tmp_path / "made", ids), logits(folder, ids), rtol=1e-3, atol=1e-3)


def _weight(folder: Path, part: str) -> Tensor:
    found: Tensor = load_file(folder / "model.safetensors")[f"model.layers.1.{part}.weight"]
    return found


def test_smoothing_helps_where_inputs_have_outliers(tiny_models: Any, tmp_path: Path) -> None:
    # Given a model some of whose channels are a hundred times as large as others after each norm
    def widen(model: Any) -> None:
        for layer in model.model.layers:
            for norm, linears in (
                (layer.input_layernorm, (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
                (layer.post_attention_layernorm, (layer.mlp.gate_proj, layer.mlp.up_proj)),
            ):
                norm.weight.data[::16] *= 100
                for linear in linears:
                    linear.weight.data[:, ::16] /= 100

    folder = tiny_models.make_tiny_model("llama", tmp_path / "wide", edit=widen, **SIZES)
    ids = torch.arange(3, 40)
    wanted = logits(folder, ids)
    by = smoothing_factors(folder, [list(range(40, 90)), list(range(100, 160))], torch.float32)
    off = {}
    for name, factors in (("plain", None), ("smooth", by)):
        write(folder, tmp_path / name, Scheme("int8", dtype=torch.float32), factors)
        off[name] = float((logits(tmp_path / name, ids) - wanted).norm() / wanted.norm())
    assert off["smooth"] < 0.5 * off["plain"]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("family", ["phi3", "glm4", "ernie4.5", "cohere2", "olmo2"])
def test_stacked_and_sorted_weights_are_computed_as_stored(
    family: str, symmetric: bool, plain: Any, tmp_path: Path
) -> None:
    # Given a quantized checkpoint of products that are stored stacked, or whose rows are sorted at load
    write(plain(family), tmp_path / "made", Scheme("int4", symmetric=symmetric, dtype=torch.float32))

    def scores(**settings: Any) -> Any:
        engine = Engine.load(tmp_path / "made", EngineConfig(dtype="float32", threads=1, **settings))
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        (done,) = engine.run([Request("a", as_token_ids(range(3, 40)), params)])
        assert done.prompt_logprobs is not None
        return torch.from_numpy(done.prompt_logprobs.chosen[1:].copy())

    # When its weights stay small, by torch's operators or the kernels, then the model is the same
    wanted = scores(attention="paged-sdpa", quantize="dense")
    torch.testing.assert_close(scores(attention="paged-sdpa"), wanted, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(scores(attention="native"), wanted, atol=2e-3, rtol=2e-3)


def test_layers_that_fill_no_group_stay_and_are_named(plain: Any, tmp_path: Path) -> None:
    done = write(plain("llama-bias"), tmp_path / "made", Scheme("int4", group=64))
    # 64 columns fill groups of 64 and 96 do not
    parts = ("mlp.down_proj", "self_attn.o_proj")
    assert done.kept == tuple(f"model.layers.{i}.{part}" for i in range(3) for part in parts)
    ignored = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignored) == {"lm_head", *done.kept}
    load_model(tmp_path / "made", dtype=torch.float32, device=CPU)


def test_many_files_have_an_index(plain: Any, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    write_quantized(plain("llama-bias"), tmp_path / "made", Scheme("int8"), file_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "made").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    load_model(tmp_path / "made", dtype=torch.float32, device=CPU)


def test_a_quantized_checkpoint_is_quantized_anew(plain: Any, tmp_path: Path) -> None:
    write(plain("llama-bias"), tmp_path / "one", Scheme("int8"))
    write(tmp_path / "one", tmp_path / "two", Scheme("int4"))
    settings = json.loads((tmp_path / "two" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "pack-quantized"
    load_model(tmp_path / "two", dtype=torch.float32, device=CPU)


def test_experts_beside_mlps_are_written_small_and_their_router_whole(tiny_models: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    folder = tiny_models.make_tiny_model("gemma4-moe", tmp_path / "plain", **sizes)
    done = write(folder, tmp_path / "made", Scheme("int8"))
    assert done.modules == 4 * (3 * 6 + 3 + 4) - 2  # of experts, MLPs and attention, whose full layers make no values
    said = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]["ignore"]
    assert said == ["lm_head", *(f"model.layers.{layer}.router.proj" for layer in range(4))]
    assert done.error < 0.02
    ids = torch.arange(3, 40)
    wanted = logits(folder, ids)
    # (a few of the tokens have other experts)
    assert float((logits(tmp_path / "made", ids) - wanted).norm() / wanted.norm()) < 0.4


def test_models_that_can_not_be_written_are_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="can't be quantized"):
        write(tiny_model("gpt2"), tmp_path / "a", Scheme("int8"))  # its layers are Conv1D
    with pytest.raises(UnsupportedModel, match="phi models can't be smoothed"):
        smoothing_factors(tiny_model("phi"), [[3, 4]], torch.float32)
    with pytest.raises(UnsupportedModel, match="olmo2 can't be smoothed: no norms feed its products"):
        smoothing_factors(tiny_model("olmo2"), [[3, 4]], torch.float32)
    with pytest.raises(UnsupportedModel, match="gemma4_text models can't be smoothed: their layers differ"):
        smoothing_factors(tiny_model("gemma4"), [[3, 4]], torch.float32)


@pytest.mark.parametrize("family", ["llama-bias", "gemma3", "glm4"])
@pytest.mark.slow
def test_gptq_brings_the_model_closer_to_what_it_was(family: str, plain: Any, tmp_path: Path) -> None:
    folder, scheme = plain(family), Scheme("int4")
    make = torch.Generator().manual_seed(3)
    sequences = [torch.randint(3, 60, (40,), generator=make).tolist() for _ in range(24)]
    counts: list[tuple[int, int]] = []
    ready = gptq_weights(folder, sequences[:20], scheme, lambda done, of: counts.append((done, of)))
    assert counts[-1][0] == counts[-1][1] == len(counts)
    made, nearest = write(folder, tmp_path / "gptq", scheme, ready=ready), write(folder, tmp_path / "rtn", scheme)
    assert made.modules == nearest.modules == len(ready)
    assert made.num_bytes == nearest.num_bytes
    assert made.error > nearest.error, "weight by weight nothing is nearer than the nearest"
    wrong = {}
    for name in ("gptq", "rtn"):
        wrong[name] = sum(
            float((logits(tmp_path / name, torch.tensor(ids)) - logits(folder, torch.tensor(ids))).square().mean())
            for ids in sequences[20:]
        )
    assert wrong["gptq"] < 0.8 * wrong["rtn"]


def test_a_family_without_a_fused_decoder_cant_be_calibrated(plain: Any) -> None:
    with pytest.raises(UnsupportedModel, match="phi models can't be calibrated"):
        gptq_weights(plain("phi"), [[1, 2, 3]], Scheme("int4"))
