"""Any model is quantized with nothing but its weights: near to what it was, smaller, and never silently left as is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from engine.errors import UnsupportedModel
from engine.models.decoder_builder import DecoderBuilder, TorchBuilder
from engine.models.hf_check import DenseAttend, check_against_eager, check_quantized
from engine.models.hf_quant import QuantizedModule, quantize_linears
from engine.models.load import load_model
from engine.models.native import NativeBuilder
from engine.native.linear import NativeLinear
from engine.native.structs import ElementKind
from engine.quant.int8_linear import Int8Linear, Int8WeightLinear, quantize_rows
from tests.native_paths import native_path

CPU = torch.device("cpu")
LINEAR = ("gpt2", "phi", "phi3", "gpt-neox", "opt", "cohere", "granite")
EXPERTS = ("jetmoe",)
FUSED = ("llama", "llama-bias", "qwen3", "gemma3")
KINDS = {"int8": (Int8Linear, ElementKind.I8, 0.08), "int8-weight-only": (Int8WeightLinear, ElementKind.W8, 0.05)}
"""quantize -> torch's linear, the kernels' kind, and how far the tiny models' logits may be off."""


class Int8AlwaysFaster:
    """The table of a machine on which int8 is faster for every shape."""

    def int8_is_faster(self, n: int, k: int) -> bool:
        return True


def builder(of: str, quantize: str) -> DecoderBuilder:
    if of == "torch":
        return TorchBuilder(quantize)
    return NativeBuilder(native_path("avx2", 1), quantize, Int8AlwaysFaster())


def load(path: Any, made_by: DecoderBuilder | None = None, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(path, dtype=dtype, device=CPU, builder=made_by, own_models=path.name in FUSED)


def logits(model: Any) -> torch.Tensor:
    """The logits of one prompt of 24 tokens."""
    attend = DenseAttend(model.spec)
    attend.ranges = [(0, 24)]
    ids = (torch.arange(24) * 7919 + 3) % model.spec.vocab_size
    return model.logits(model.forward(ids, torch.arange(24), attend, None))


def relative_error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


@pytest.mark.slow
@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("of", ["torch", "native"])
def test_transformers_code_computes_with_quantized_layers(family: str, quantize: str, of: str, tiny_model: Any) -> None:
    # Given a model that transformers' code computes, when it is loaded with its weights quantized
    plain = load(tiny_model(family))
    model = load(tiny_model(family), builder(of, quantize))
    # Then every linear layer but the head is ours, of the requested kind, and its weights take a quarter of float32
    torchs, kind, most = KINDS[quantize]
    replaced = [module for module in model._base.modules() if isinstance(module, QuantizedModule)]
    before = [module for module in plain._base.modules() if type(module) in (nn.Linear, Conv1D)]
    assert len(replaced) == len(before) > 0
    assert not [module for module in model._base.modules() if type(module) in (nn.Linear, Conv1D)]
    for module in replaced:
        if of == "torch":
            assert isinstance(module.linear, torchs)
        else:
            assert isinstance(module.linear, NativeLinear)
            assert module.linear.kind == kind
    if of == "torch":
        assert sum(m.linear.num_bytes for m in replaced) < 0.35 * sum(m.weight.nbytes for m in before)
    assert type(model._head) is nn.Linear
    # and the answers are near
    assert 0 < relative_error(logits(model), logits(plain)) < most


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.slow
def test_int8_weights_alone_compute_the_model_whose_weights_are_rounded_so(family: str, tiny_model: Any) -> None:
    # Given transformers' model with each weight rounded to int8 and back
    rounded = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
    head = rounded.get_output_embeddings()
    for module in rounded.modules():
        if type(module) in (nn.Linear, Conv1D) and module is not head:
            flip = isinstance(module, Conv1D)
            whole, scale = quantize_rows(module.weight.data.t() if flip else module.weight.data)
            module.weight.data = (whole * scale).t() if flip else whole * scale
    ids = (torch.arange(24) * 7919 + 3) % rounded.config.vocab_size
    with torch.no_grad():
        wanted = rounded(input_ids=ids[None]).logits[0]
    # Then ours has its logits, whichever operators serve
    for of in ("torch", "native"):
        ours = logits(load(tiny_model(family), builder(of, "int8-weight-only")))
        assert relative_error(ours, wanted) < 1e-3  # a weight halfway between two numbers may be rounded to either


@pytest.mark.parametrize("family", LINEAR)
def test_both_ways_to_quantize_rows_agree(family: str, tiny_model: Any) -> None:
    ours = [logits(load(tiny_model(family), builder(of, "int8"))) for of in ("torch", "native")]
    assert relative_error(*ours) < 0.01  # a sum's last bit may round to another whole number


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_decoder_of_torchs_operators_is_quantized(
    family: str, quantize: str, dtype: torch.dtype, tiny_model: Any
) -> None:
    plain, model = load(tiny_model(family)), load(tiny_model(family), TorchBuilder(quantize), dtype)
    torchs, _, most = KINDS[quantize]
    for layer in model._layers:
        assert all(
            isinstance(part, torchs) for part in (layer.attention.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
        )
    assert not isinstance(model._head, torchs)
    assert 0 < relative_error(logits(model), logits(plain)) < most + (0.04 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("quantize", KINDS)
def test_a_model_whose_weights_would_stay_as_they_are_is_refused(family: str, quantize: str, tiny_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"can't be quantized: \d+% of its weights are in linear layers"):
        load(tiny_model(family), TorchBuilder(quantize))


def test_a_module_that_reads_its_weights_itself_is_refused(tiny_model: Any) -> None:
    # Given a quantized model, and a module of it that reads a layer's weight as well as calling it
    model = load(tiny_model("phi"), TorchBuilder("int8"))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model("phi"), dtype=torch.float32).eval()
    with pytest.raises(UnsupportedModel, match="logits are off by"):  # it is not the model that it was
        check_against_eager(model, reference)
    model._base.layers[1].mlp.register_forward_pre_hook(lambda mlp, x: (x[0].to(mlp.fc1.weight.dtype),))
    with pytest.raises(UnsupportedModel, match=r"PhiForCausalLM can't be quantized: .*'weight'"):
        check_quantized(model, reference)


def test_weights_that_two_modules_share_stay_as_they_are(tmp_path: Any, tiny_models: Any) -> None:
    # Given a tied head, when the model is quantized, then neither it nor the embedding is
    folder = tiny_models.make_tiny_model("phi", tmp_path, tie_word_embeddings=True)
    model = load(folder, TorchBuilder("int8"))
    assert model._head.weight is model._base.embed_tokens.weight
    plain = load(folder)
    assert torch.equal(model._head.weight, plain._head.weight)
    assert relative_error(logits(model), logits(plain)) < 0.08


def test_layers_that_share_a_weight_and_the_head_stay_wherever_they_are(tiny_model: Any) -> None:
    # Given a model two of whose layers share a weight, and whose head is no further out than its layers
    model = AutoModelForCausalLM.from_pretrained(tiny_model("phi"), dtype=torch.float32)
    layers = model.model.layers
    layers[0].mlp.fc1.weight = layers[1].mlp.fc1.weight
    model.base_model_prefix = ""
    assert model.base_model is model
    # When its layers are quantized, then those are not
    quantize_linears(model, TorchBuilder("int8"))
    assert type(layers[0].mlp.fc1) is type(layers[1].mlp.fc1) is type(model.lm_head) is nn.Linear
    assert isinstance(layers[2].mlp.fc1, QuantizedModule)
