"""`--quantize int4` and `fp8` compute the model whose weights were rounded so, whichever operators serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine import Engine
from engine.models.decoder_builder import DecoderBuilder, TorchBuilder
from engine.models.hf_check import DenseAttend
from engine.models.load import load_model
from engine.models.native import NativeBuilder
from engine.quant.fp8_linear import multiplies_rowwise
from engine.quant.linear import QuantizedLinear, fast_at_load
from engine.quant.rtn import AT_LOAD, at_load, round_to_nearest
from engine.quant.weight import Activations
from tests.engine.oracle import Setting, check_equal, engine_answers, greedy_answer, make_prompts
from tests.native_paths import native_path

CPU = torch.device("cpu")


def builder(of: str, quantize: Any) -> DecoderBuilder:
    return TorchBuilder(quantize) if of == "torch" else NativeBuilder(native_path("avx2", 1), quantize)


def rounded(folder: Path, quantize: str) -> Any:
    """transformers' model with each linear layer's weight rounded, but for the head's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for module in model.base_model.modules():
        if type(module) is nn.Linear:
            module.weight.data = round_to_nearest(module.weight.data, AT_LOAD[quantize]).dequantize()
    return model


@pytest.mark.parametrize("family", ["llama-bias", "qwen3", "gemma3"])
@pytest.mark.parametrize("quantize", AT_LOAD)
@pytest.mark.slow
def test_a_decoder_answers_as_transformers_with_rounded_weights(
    family: str, quantize: str, tiny_model: Callable[[str], Path]
) -> None:
    prompts = make_prompts(seed=3, count=6, vocab_size=257, shared=10, longest=40)
    want = [greedy_answer(rounded(tiny_model(family), quantize), prompt, 6, (2,)) for prompt in prompts]
    for attention in ("reference", "auto"):
        with capture_logs() as said:
            engine = Engine.load(
                tiny_model(family), Setting(7, 64, 16, True).config(quantize=quantize, attention=attention)
            )
        assert check_equal(want, engine_answers(engine, prompts, 6)) < len(prompts)
        slow = [entry for entry in said if "dequantized at each product" in entry["event"]]
        assert len(slow) == (not engine.attention_name.startswith("native"))


@pytest.mark.parametrize("of", ["torch", "native"])
@pytest.mark.parametrize("quantize", AT_LOAD)
def test_a_model_of_transformers_code_computes_with_rounded_layers(
    of: str, quantize: str, tiny_model: Callable[[str], Path]
) -> None:
    model = load_model(tiny_model("phi"), dtype=torch.float32, device=CPU, builder=builder(of, quantize))
    ids = torch.arange(3, 27)
    attend = DenseAttend(model.spec)
    attend.ranges = [(0, 24)]
    found = model.logits(model.forward(ids, torch.arange(24), attend, None))
    with torch.inference_mode():
        wanted: Tensor = rounded(tiny_model("phi"), quantize)(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_rounded_weights_are_small(tiny_model: Callable[[str], Path]) -> None:
    model: Any = load_model(tiny_model("llama"), dtype=torch.float32, device=CPU, builder=TorchBuilder("int4"))
    for layer in model._layers:
        for linear in (layer.attention.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
            assert isinstance(linear, QuantizedLinear)
            assert linear.weight.form == "int4"
            assert linear.num_bytes <= 0.75 * linear.in_features * linear.out_features


def test_where_there_are_units_for_fp8_inputs_are_rounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, cuda = torch.randn(32, 64), torch.device("cuda")
    for capability, activations in (((8, 9), Activations("fp8")), ((8, 6), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, of=capability: of)
        rounding = at_load("fp8", cuda)
        assert rounding == replace(AT_LOAD["fp8"], activations=activations)
        assert multiplies_rowwise(round_to_nearest(weight, rounding)) == (activations is not None)
        assert fast_at_load("fp8", cuda) == (activations is not None), "else it is said that this is slow"
    assert at_load("fp8", CPU) == AT_LOAD["fp8"]
    assert at_load("int4", cuda) == AT_LOAD["int4"]
    assert not fast_at_load("fp8", CPU)
    assert not fast_at_load("int4", CPU)
