"""Quantized checkpoints made to do harm, or broken: refused in one line that names the key or the tensor, at once."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import Engine, EngineConfig, Request, SamplingParams, as_token_ids
from engine.errors import CorruptWeights, EngineError, UnsupportedModel
from engine.models.load import describe_model, load_model
from tests.engine.quant.packing import Packed, pack_awq, pack_fp8, pack_gptq, quantized, words, write

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32]}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": W4}},
    "ignore": ["lm_head"],
}


def pack_ct(weight: Tensor) -> Packed:
    """compressed-tensors' packed form, four bits in groups of 16."""
    codes, scales, _, dense = quantized(weight, 4, 16, symmetric=True)
    return {
        "weight_packed": words(codes, 4),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor(weight.shape),
    }, dense


METHODS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "gptq": (GPTQ, pack_gptq),
    "awq": (AWQ, pack_awq),
    "fp8": (FP8, pack_fp8),
    "ct": (CT, pack_ct),
}


@pytest.fixture(scope="module")
def plain(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "llama"
    sizes = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    made: Path = tiny_models.make_tiny_model("llama", folder, **sizes)
    return made


@pytest.fixture
def make(plain: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function method, settings, edit of tensors -> a checkpoint."""

    def make(method: str, settings: Any = None, edit: Callable[[dict[str, Tensor]], None] = lambda t: None) -> Path:
        said, pack = METHODS[method]
        write(
            plain,
            tmp_path / method,
            said if settings is None else settings,
            lambda module, weight: None if module == "lm_head" else pack(weight),
            edit,
        )
        return tmp_path / method

    return make


def load(path: Path) -> Any:
    return load_model(path, dtype=torch.float32, device=CPU)


def refused(path: Path, kind: type[EngineError], named: str) -> None:
    with pytest.raises(kind) as caught:
        load(path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def ct(weights: Any = None, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": W4 if weights is None else W4 | weights}
    return CT | {"config_groups": {"group_0": group}} | changes


@pytest.mark.parametrize("method", METHODS)
def test_the_checkpoints_of_this_file_load_when_nothing_is_wrong(method: str, make: Callable[..., Path]) -> None:
    load(make(method))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings", "named"),
    [
        ("gptq", "gptq", "quantization_config is a str"),
        ("gptq", [GPTQ], "quantization_config is a list"),
        ("gptq", {"bits": 4}, "quantization_config.quant_method is 'None'"),
        ("gptq", {"quant_method": "bitsandbytes"}, "quantization_config.quant_method is 'bitsandbytes'"),
        ("gptq", {"quant_method": ["gptq"]}, "quantization_config.quant_method"),
        ("gptq", GPTQ | {"bits": 3}, "quantization_config.bits is 3"),
        ("gptq", GPTQ | {"bits": "four"}, "quantization_config.bits is 'four'"),
        ("gptq", GPTQ | {"bits": 10**400}, "quantization_config.bits"),
        ("gptq", GPTQ | {"bits": {"a": 1}}, "quantization_config.bits"),
        ("gptq", GPTQ | {"group_size": 0}, "quantization_config.group_size is 0"),
        ("gptq", GPTQ | {"group_size": -7}, "quantization_config.group_size is -7"),
        ("gptq", GPTQ | {"group_size": 16.5}, "quantization_config.group_size is 16.5"),
        ("gptq", GPTQ | {"group_size": 2**70}, "quantization_config.group_size"),
        ("gptq", GPTQ | {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format is 'marlin'"),
        ("gptq", GPTQ | {"dynamic": {"(": {"bits": 8}}}, "quantization_config.dynamic holds '('"),
        ("gptq", GPTQ | {"dynamic": {".*": {"bits": 5}}}, "quantization_config.dynamic"),
        ("awq", AWQ | {"bits": 8}, "quantization_config.bits is 8"),
        ("awq", AWQ | {"version": "gemv"}, "quantization_config.version is 'gemv'"),
        ("awq", AWQ | {"version": 5}, "quantization_config.version is 5"),
        ("awq", {"quant_method": "awq", "bits": 4}, "quantization_config.group_size"),
        ("fp8", FP8 | {"weight_block_size": [0, 32]}, "quantization_config.weight_block_size.0 is 0"),
        ("fp8", FP8 | {"weight_block_size": [16]}, "quantization_config.weight_block_size"),
        ("fp8", FP8 | {"weight_block_size": "16x32"}, "quantization_config.weight_block_size"),
        ("fp8", FP8 | {"fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        ("fp8", FP8 | {"activation_scheme": None}, "quantization_config.activation_scheme"),
        ("ct", ct(format="marlin-24"), "quantization_config.format is 'marlin-24'"),
        ("ct", ct(config_groups=[1]), "quantization_config.config_groups"),
        ("ct", ct(config_groups={"W4A16": ["Linear"]}), "quantization_config.config_groups.W4A16"),
        ("ct", ct({"num_bits": 3}), "num_bits 3"),
        ("ct", ct({"num_bits": "4"}), "quantization_config.config_groups.group_0.weights.num_bits is '4'"),
        ("ct", ct({"type": "complex"}), "quantization_config.config_groups.group_0.weights.type"),
        ("ct", ct({"group_size": None}), "group_size None"),
        ("ct", ct({"group_size": 24}), "group_size 24"),
        ("ct", ct(ignore="lm_head"), "quantization_config.ignore"),
        ("ct", ct(ignore=["re:["]), "quantization_config.ignore holds '['"),
        ("ct", ct(ignore=["re:(?:x{65535}){65535}"]), "which repeats parts too often"),
        ("ct", ct(ignore=["re:" + "(" * 600 + ")" * 600]), "no regular expression"),
        ("ct", ct(ignore=["re:" + "a" * 5000]), "quantization_config.ignore.0"),
        ("ct", ct(sparsity_config={"format": "sparse-24-bitmask"}), "quantization_config.sparsity_config.format"),
        ("ct", ct(transform_config={"config_groups": {"u": {}}}), "quantization_config.transform_config"),
        ("ct", ct(kv_cache_scheme={"num_bits": 4}), "quantization_config.kv_cache_scheme.num_bits"),
        ("ct", ct(kv_cache_scheme="int8"), "quantization_config.kv_cache_scheme"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_key(
    method: str, settings: Any, named: str, make: Callable[..., Path]
) -> None:
    path = make(method, settings)
    if isinstance(settings, dict) and "kv_cache_scheme" in settings:
        with pytest.raises(UnsupportedModel, match=named):
            Engine.load(path)
        return
    refused(path, UnsupportedModel, named)


def test_settings_that_nest_without_end_are_refused(make: Callable[..., Path]) -> None:
    path = make("ct")
    file = path / "config.json"
    for deep in ('{"a":' * 300 + "1" + "}" * 300, '{"a":' * 100_000):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": "HERE"}))
        file.write_text(file.read_text().replace('"HERE"', deep))
        with pytest.raises(UnsupportedModel) as caught:
            load(path)
        assert "\n" not in str(caught.value)
        file.write_text(json.dumps({"model_type": "llama"}))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["ignore", "targets", "dynamic"])
def test_an_expression_that_explodes_is_refused_in_time(where: str, make: Callable[..., Path]) -> None:
    bomb = r"((?:\w|.)+)+\d\d"
    settings = {
        "ignore": ct(ignore=[f"re:{bomb}"]),
        "targets": ct(config_groups={"group_0": {"targets": [f"re:{bomb}"], "weights": W4}}),
        "dynamic": GPTQ | {"dynamic": {bomb: {"bits": 8}}},
    }[where]
    path = make("gptq" if where == "dynamic" else "ct", settings)
    refused(path, UnsupportedModel, "takes too long to match")


def change(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        assert name in tensors
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor

    return edit


INT = torch.int32


@pytest.mark.parametrize(
    ("method", "part", "tensor"),
    [
        ("gptq", "scales", None),
        ("gptq", "qzeros", None),
        ("gptq", "qweight", torch.zeros(12, dtype=INT)),
        ("gptq", "qweight", torch.zeros(0, 64, dtype=INT)),
        ("gptq", "qweight", torch.zeros(12, 64, dtype=torch.int64)),
        ("gptq", "scales", torch.zeros(3, 64, dtype=torch.float16)),
        ("gptq", "scales", torch.zeros(6, 64, dtype=INT)),
        ("gptq", "qzeros", torch.zeros(6, 9, dtype=INT)),
        ("gptq", "g_idx", torch.zeros(95, dtype=INT)),
        ("gptq", "g_idx", torch.zeros(96, dtype=INT)),
        ("gptq", "g_idx", torch.full((96,), 10**9, dtype=INT)),
        ("gptq", "g_idx", torch.full((96,), -1, dtype=INT)),
        ("awq", "scales", torch.zeros(64, 6, dtype=torch.float16)),
        ("awq", "qzeros", torch.zeros(6, 64, dtype=INT)),
        ("awq", "qweight", torch.zeros(96, 8, dtype=torch.float32)),
        ("fp8", "weight_scale_inv", torch.ones(4, 4)),
        ("fp8", "weight_scale_inv", torch.ones(4)),
        ("fp8", "weight", torch.zeros(64, 96)),
        ("fp8", "weight", torch.zeros(64, 96, dtype=torch.int8)),
        ("fp8", "weight", torch.zeros(64, dtype=torch.float8_e4m3fn)),
        ("fp8", "weight", None),
        ("ct", "weight_scale", None),
        ("ct", "weight_shape", None),
        ("ct", "weight_shape", torch.tensor([2**62, 2**62])),
        ("ct", "weight_shape", torch.tensor([64, -96])),
        ("ct", "weight_shape", torch.tensor([64, 96, 1])),
        ("ct", "weight_scale", torch.zeros(64, 5)),
        ("ct", "weight_packed", torch.zeros(64, 12, dtype=torch.uint8)),
        ("ct", "weight_packed", torch.zeros(64, 12, 2, dtype=INT)),
    ],
)
def test_tensors_that_are_missing_or_wrong_are_named(
    method: str, part: str, tensor: Tensor | None, make: Callable[..., Path]
) -> None:
    refused(make(method, None, change(f"{DOWN}.{part}", tensor)), CorruptWeights, f"{DOWN}.")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (ct(ignore=["re:.*down_proj"]), "quantization_config.ignore names it"),
        (ct(config_groups={"g": {"targets": ["re:.*attn.*"], "weights": W4}}), "no target of quantization_config"),
        (ct(config_groups={"g": {"targets": ["Linear"]}}), "no weights of its group are"),
        (ct({"symmetric": False}), "weight_zero_point is missing"),
        (ct({"num_bits": 8}), "weight_shape says"),
    ],
)
def test_other_things_that_a_config_and_its_tensors_disagree_on(
    settings: Any, named: str, make: Callable[..., Path]
) -> None:
    refused(make("ct", settings), CorruptWeights, named)


def test_a_packed_weight_without_a_config_is_refused(make: Callable[..., Path]) -> None:
    path = make("gptq")
    file = path / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    refused(path, CorruptWeights, "model.layers.0.self_attn.q_proj.weight is missing")


@pytest.mark.parametrize("method", METHODS)
def test_files_that_are_cut_off_or_lie_about_their_header(method: str, make: Callable[..., Path]) -> None:
    file = make(method) / "model.safetensors"
    data = file.read_bytes()
    for broken in (data[:7], data[:1000], data[:-1], (2**63 - 1).to_bytes(8, "little") + data[8:], data[8:]):
        file.write_bytes(broken)
        tracemalloc.start()
        refused(file.parent, CorruptWeights, "model.safetensors")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 32 << 20


def test_pickles_are_not_opened(make: Callable[..., Path]) -> None:
    path = make("gptq")
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    refused(path, UnsupportedModel, "pytorch_model.bin is pickled")


@pytest.mark.parametrize("model_type", ["llama", "phi", "unknown-type"])
def test_code_that_a_config_names_is_not_run(model_type: str, make: Callable[..., Path], tmp_path: Path) -> None:
    # Given a config that names classes in files next to it, which would leave a trace
    path, trace = make("gptq"), tmp_path / "trace"
    code = f"open({str(trace)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n"
    (path / "modeling_own.py").write_text(code)
    file = path / "config.json"
    names = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type, "auto_map": names}))
    if model_type == "llama":
        load(path)  # as what it says it is, by our code
    else:
        with pytest.raises(EngineError) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(EngineError) if model_type == "unknown-type" else nullcontext():
        describe_model(path)
    assert not trace.exists()


@pytest.mark.slow
def test_scales_that_are_not_finite_load_but_are_never_answers(make: Callable[..., Path]) -> None:
    # Given a scale of NaN: the weights are as broken as the file says, and the engine fails the row
    scales = torch.full((6, 64), torch.nan, dtype=torch.float16)
    path = make("gptq", None, change(f"{DOWN}.scales", scales))
    engine = Engine.load(path, EngineConfig(dtype="float32"))
    [done] = engine.run([Request("a", as_token_ids([3, 4, 5]), SamplingParams(max_tokens=4, temperature=0.0))])
    assert done.error is not None


@pytest.mark.slow
def test_every_part_may_be_replaced_by_any_other(make: Callable[..., Path]) -> None:
    # Given each tensor of a module in place of each other one, then loading ends with an error of ours, or not
    refusals = 0
    for method in METHODS:
        path = make(method)
        file = path / "model.safetensors"
        tensors = load_file(file)
        names = [name for name in tensors if name.startswith(DOWN)]
        for one in names:
            for other in names:
                if one == other:
                    continue
                save_file(tensors | {one: tensors[other].clone()}, file, metadata={"format": "pt"})
                try:
                    load(path)
                except EngineError:
                    refusals += 1
    assert refusals > 15
