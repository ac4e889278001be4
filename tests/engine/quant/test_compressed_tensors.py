"""Checkpoints that compressed-tensors made load, stand for what it says, and answer as transformers does with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from engine import Engine
from engine.checkpoints.checkpoint import folder_weights
from engine.models.hf_check import DenseAttend
from engine.models.load import describe_model, load_model
from engine.quant.linear import QuantizedLinear
from engine.quant.weight import QWeight
from tests.engine.oracle import Setting, check_equal, engine_answers, greedy_answer, make_prompts
from tests.engine.quant.library import (
    FP8_STATIC,
    FP8_TOKENS,
    INT8_ROWS,
    INT8_STATIC,
    INT8_TOKENS,
    compress,
    fp8,
    group,
    packed,
)

CPU = torch.device("cpu")
PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
W4_AND_W8 = {
    "group_0": group(packed(4, 16), targets=["re:.*mlp[.].*"]) | {"format": PACKED},
    "group_1": group(INT8_ROWS, INT8_TOKENS) | {"format": INT},
    "group_2": group(packed(8, None, False), targets=["model.layers.2.mlp.down_proj"]) | {"format": PACKED},
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "w4-groups": ({"group_0": group(packed(4, 32))}, PACKED),
    "w4-asymmetric": ({"group_0": group(packed(4, 16, False))}, PACKED),
    "w4-rows": ({"group_0": group(packed(4, None))}, PACKED),
    "w8-groups": ({"group_0": group(packed(8, 32))}, PACKED),
    "w8-asymmetric": ({"group_0": group(packed(8, None, False))}, PACKED),
    "w8a8": ({"group_0": group(INT8_ROWS, INT8_TOKENS)}, INT),
    "w8a8-static": ({"group_0": group(INT8_ROWS, INT8_STATIC)}, INT),
    "fp8-rows": ({"group_0": group(fp8("channel"), FP8_TOKENS)}, FLOAT),
    "fp8-tensor": ({"group_0": group(fp8("tensor"), FP8_STATIC)}, FLOAT),
    "fp8-blocks": ({"group_0": group(fp8("block", (24, 32)), FP8_TOKENS)}, FLOAT),
    "mixed": (W4_AND_W8, "mixed-precision"),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def folder(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tiny_models.make_tiny_model("llama-bias", tmp_path_factory.mktemp("ct") / "llama", **SIZES)
    return made


def answers(model: Any, prompts: list[list[int]]) -> Any:
    return [greedy_answer(model, prompt, 6, (2,)) for prompt in prompts]


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits of one prompt."""
    attend = DenseAttend(model.spec)
    attend.ranges = [(0, len(ids))]
    found: torch.Tensor = model.logits(model.forward(ids, torch.arange(len(ids)), attend, None))
    return found


def inputs_quantized(model: Any, quantized: bool) -> Any:
    """The library's model, with its inputs quantized or not."""
    for module in model.modules():
        module.quantization_enabled = quantized
    return model


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_librarys_to_the_bit(case: str, folder: Path, tmp_path: Path) -> None:
    # Given a checkpoint of bfloat16 scales, as most are
    model = compress(folder, tmp_path / "made", *CASES[case], dtype=torch.bfloat16)
    source = folder_weights(tmp_path / "made")
    # Then each weight, dequantized to bfloat16, is what the library makes of it, and nothing is left over
    theirs = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(("weight", "bias"))}
    assert set(source.names) == set(theirs)
    num_quantized = 0
    for name, wanted in theirs.items():
        assert source.shape(name) == tuple(wanted.shape)
        ours = torch.empty_like(wanted)
        source.read(name, ours)
        assert torch.equal(ours, wanted), name
        num_quantized += source.quantized(name) is not None
    assert num_quantized == 3 * 7


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_answers_are_transformers_of_the_dequantized_model(case: str, folder: Path, tmp_path: Path) -> None:
    # Given a checkpoint, and transformers' model of its weights as the library dequantizes them
    model = compress(folder, tmp_path / "made", *CASES[case])
    prompts = make_prompts(seed=3, count=6, vocab_size=257, shared=10, longest=40)
    want = answers(inputs_quantized(model, False), prompts)
    # When it is loaded dense, then it answers the same tokens
    with capture_logs() as logs:
        engine = Engine.load(
            tmp_path / "made", Setting(7, 64, 16, True).config(quantize="dense", attention="reference")
        )
    assert check_equal(want, engine_answers(engine, prompts, 6)) < len(prompts)
    assert not logs  # it was requested


@pytest.mark.parametrize("case", ["w8a8", "w8a8-static"])
def test_inputs_are_quantized_as_the_checkpoint_asks(case: str, folder: Path, tmp_path: Path) -> None:
    # Given W8A8, when it is loaded as it is
    model = inputs_quantized(compress(folder, tmp_path / "made", *CASES[case]), True)
    ours = load_model(tmp_path / "made", dtype=torch.float32, device=CPU)
    assert all(isinstance(layer.attention.qkv, QuantizedLinear) for layer in ours._layers)
    # Then its products are the library's, which rounds inputs by a scale of 127.5, ours by 127
    ids = torch.arange(3, 40)
    with torch.inference_mode():
        wanted = model(input_ids=ids[None]).logits[0]
        plain = inputs_quantized(model, False)(input_ids=ids[None]).logits[0]
    found = logits(ours, ids)
    off = float((found - wanted).norm() / wanted.norm())
    assert off < (1e-3 if case == "w8a8-static" else 0.08)
    assert float((plain - wanted).norm() / wanted.norm()) > 0.03


def test_a_form_without_a_kernel_is_dequantized_and_logged(folder: Path, tmp_path: Path) -> None:
    # Given a mixed checkpoint, when it is loaded on a device that has a kernel for W8A8 only
    compress(folder, tmp_path / "made", *CASES["mixed"])
    with capture_logs() as logs:
        load_model(tmp_path / "made", dtype=torch.float32, device=CPU)
    # Then the log names the retained forms, the dequantized ones, and their bytes
    by_form = {entry["form"]: entry for entry in logs}
    retained = by_form["int8, a factor a row, int8 activations"]
    assert (retained["log_level"], retained["weights"]) == ("info", 6)  # qkv and output of three layers
    dense = by_form["int4, groups of 16"]
    assert (dense["log_level"], dense["weights"], dense["dense_bytes"]) == ("warning", 8, 4 * 64 * 96 * 8)
    assert dense["stored_bytes"] < dense["dense_bytes"] / 3
    assert by_form["int8, a factor a row"]["weights"] == 1


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "gemma3"])
@pytest.mark.slow
def test_other_families_and_tied_heads(family: str, tiny_models: Any, tmp_path: Path) -> None:
    plain = tiny_models.make_tiny_model(family, tmp_path / "plain", **SIZES)
    model = compress(plain, tmp_path / "made", *CASES["w4-groups"])
    prompts = make_prompts(seed=3, count=6, vocab_size=257, shared=10, longest=40)
    want = answers(model, prompts)
    engine = Engine.load(tmp_path / "made", Setting(7, 64, 16, True).config(attention="reference"))
    assert check_equal(want, engine_answers(engine, prompts, 6)) < len(prompts)
    spec = describe_model(tmp_path / "made").spec
    assert spec.num_parameters == describe_model(plain).spec.num_parameters


@pytest.mark.slow
def test_an_embedding_and_a_head_that_are_quantized(folder: Path, tmp_path: Path) -> None:
    # Given a checkpoint in which all that has a weight is quantized
    groups = {"group_0": group(packed(8, 32), targets=["Linear", "Embedding"])}
    model = compress(folder, tmp_path / "made", groups, PACKED, ignore=())
    prompts = make_prompts(seed=3, count=6, vocab_size=257, shared=10, longest=40)
    want = answers(model, prompts)
    # Then the embedding stays small (rows are looked up), and the answers are the same
    ours = load_model(tmp_path / "made", dtype=torch.float32, device=CPU)
    assert isinstance(ours._embedding, QWeight)
    engine = Engine.load(tmp_path / "made", Setting(7, 64, 16, True).config(attention="reference"))
    assert check_equal(want, engine_answers(engine, prompts, 6)) < len(prompts)


@pytest.mark.parametrize("case", ["w4-asymmetric", "w8a8-static", "fp8-tensor"])
@pytest.mark.slow
def test_models_of_transformers_code(case: str, tiny_models: Any, tmp_path: Path) -> None:
    # Given a checkpoint of a family that transformers' code computes
    plain = tiny_models.make_tiny_model("phi", tmp_path / "plain", **SIZES)
    model = compress(plain, tmp_path / "made", *CASES[case])
    prompts = make_prompts(seed=3, count=6, vocab_size=257, shared=10, longest=40)
    want = answers(inputs_quantized(model, False), prompts)
    # Then dense it answers the same; and as it is, products of W8A8 run in int8
    for quantize in ("dense", "none"):
        with capture_logs() as logs:
            config = Setting(7, 64, 16, True).config(quantize=quantize, attention="reference")
            engine = Engine.load(tmp_path / "made", config)
        if quantize == "none":
            level, form = ("info", "int8") if case == "w8a8-static" else ("warning", "")
            assert [entry["log_level"] for entry in logs] == [level]
            assert logs[0]["form"].startswith(form)
        if quantize == "dense" or case != "w8a8-static":
            assert check_equal(want, engine_answers(engine, prompts, 6)) < len(prompts)
    assert describe_model(tmp_path / "made").spec.num_parameters == describe_model(plain).spec.num_parameters


def test_a_scheme_for_the_cache_is_taken_or_said_to_be_ignored(folder: Path, tmp_path: Path) -> None:
    compress(folder, tmp_path / "made", *CASES["w4-groups"])
    file = tmp_path / "made" / "config.json"
    config = json.loads(file.read_text())
    for kind, attention in (("int", "reference"), ("float", "auto"), ("int", "auto")):
        scheme = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False, "symmetric": True}
        config["quantization_config"]["kv_cache_scheme"] = scheme
        file.write_text(json.dumps(config))
        with capture_logs() as logs:
            Engine.load(tmp_path / "made", Setting(7, 64, 16, True).config(attention=attention))
        events = [entry["event"] for entry in logs if "KV cache" in entry["event"]]
        taken = kind == "int" and "torch's operators serve" not in str(logs) and attention == "auto"
        assert events == [
            "the KV cache is int8, as in the model's config"
            if taken
            else "the KV cache is not quantized as in the model's config: no kernel here supports it"
        ]
