"""GPTQ, AWQ and fp8 checkpoints, packed by their specifications, load as the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import Engine
from engine.checkpoints.checkpoint import folder_weights
from engine.models.decoder_builder import TorchBuilder
from engine.models.load import load_model
from engine.quant.linear import DequantizingKernel, QuantizedLinear
from engine.quant.weight import Activations, QWeight, stack
from tests.engine.oracle import Setting, check_equal, engine_answers, greedy_answer, make_prompts
from tests.engine.quant.packing import Packed, pack_awq, pack_fp8, pack_gptq, write

CPU = torch.device("cpu")
Pack = Callable[[str, Tensor], Packed | None]


def but_head(pack: Callable[[Tensor], Packed]) -> Pack:
    return lambda module, weight: None if module == "lm_head" else pack(weight)


def gptq(bits: int = 4, group: int = 16, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "GEMM"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
V2 = {"checkpoint_format": "gptq_v2"}
DYNAMIC = {"+:.*down_proj": {"bits": 8, "group_size": 32}, "-:.*[.]1[.].*": {}}


def some_of_eight(module: str, weight: Tensor) -> Packed | None:
    if ".layers.1." in module:
        return None
    return pack_gptq(weight, bits=8, group=32) if "down_proj" in module else pack_gptq(weight)


CASES: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (gptq(), but_head(pack_gptq)),
    "gptq-head": (gptq(lm_head=True), lambda module, weight: pack_gptq(weight)),
    "gptq-asymmetric": (gptq(sym=False), but_head(lambda w: pack_gptq(w, symmetric=False))),
    "gptq-rows": (gptq(group=-1), but_head(lambda w: pack_gptq(w, group=-1))),
    "gptq-desc-act": (gptq(desc_act=True), but_head(lambda w: pack_gptq(w, shuffled=True, symmetric=False))),
    "gptq-8": (gptq(bits=8, group=32), but_head(lambda w: pack_gptq(w, bits=8, group=32))),
    "gptq-8-asymmetric": (gptq(bits=8), but_head(lambda w: pack_gptq(w, bits=8, symmetric=False, shuffled=True))),
    "gptq-v2": (gptq(**V2), but_head(lambda w: pack_gptq(w, version=2, symmetric=False))),
    "gptq-dynamic": (
        gptq(dynamic={r"+:.*down_proj": {"bits": 8, "group_size": 32}, r"-:.*[.]1[.].*": {}}),
        some_of_eight,
    ),
    "awq": (AWQ, but_head(pack_awq)),
    "awq-rows": ({**AWQ, "group_size": -1, "version": "gemm"}, but_head(lambda w: pack_awq(w, group=-1))),
    "fp8": (FP8, but_head(pack_fp8)),
    "fp8-odd-blocks": ({**FP8, "weight_block_size": [40, 48]}, but_head(lambda w: pack_fp8(w, block=(40, 48)))),
    "fp8-default-blocks": (
        {"quant_method": "fp8", "fmt": "e4m3"},
        but_head(lambda w: pack_fp8(w, block=(128, 128))),
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        but_head(lambda w: pack_fp8(w, block=None, static=True)),
    ),
}


@pytest.fixture(scope="module")
def folder(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed") / "llama"
    made: Path = tiny_models.make_tiny_model("llama-bias", root, vocab_size=264, hidden_size=64, intermediate_size=96)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_weights_and_answers_are_those_of_what_it_stands_for(case: str, folder: Path, tmp_path: Path) -> None:
    # Given a checkpoint, and what it stands for
    settings, pack = CASES[case]
    plain = write(folder, tmp_path / "made", settings, pack)
    source, dense = folder_weights(tmp_path / "made"), load_file(plain / "model.safetensors")
    # Then it has the same weights
    assert set(source.names) == set(dense)
    num_quantized = 0
    for name, wanted in dense.items():
        assert source.shape(name) == tuple(wanted.shape)
        ours = torch.empty_like(wanted)
        source.read(name, ours)
        assert torch.equal(ours, wanted), name
        if (weight := source.quantized(name)) is not None:
            num_quantized += 1
            assert weight.codes.is_contiguous()
    assert num_quantized == {"gptq-head": 22, "gptq-dynamic": 15}.get(case, 21)
    # and answers as transformers does with them
    prompts = make_prompts(seed=3, count=6, vocab_size=257, shared=10, longest=40)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    want = [greedy_answer(model, prompt, 6, (2,)) for prompt in prompts]
    for attention in ("reference", "auto"):
        engine = Engine.load(tmp_path / "made", Setting(7, 64, 16, True).config(attention=attention))
        assert check_equal(want, engine_answers(engine, prompts, 6)) < len(prompts)


class KeepFormBuilder(TorchBuilder):
    """Retains every form, and computes with the kernel that dequantizes at each product."""

    def runs(self, weight: QWeight, use: Any) -> bool:
        return True


@pytest.mark.parametrize("case", CASES)
def test_products_with_the_small_form_are_those_of_the_dense_one(case: str, folder: Path, tmp_path: Path) -> None:
    # Given a checkpoint that is loaded so that all its forms are retained: q, k and v stacked, gate and up stacked
    settings, pack = CASES[case]
    write(folder, tmp_path / "made", settings, pack)
    packed = load_model(tmp_path / "made", dtype=torch.float32, device=CPU, builder=KeepFormBuilder())
    dense = load_model(tmp_path / "made", dtype=torch.float32, device=CPU, builder=TorchBuilder("dense"))
    apart = "desc-act" in case or case == "gptq-8-asymmetric"  # each module has an order of its own
    small = 0
    for ours, theirs in zip(packed._layers, dense._layers, strict=True):
        for linear, wanted in (
            (ours.attention.qkv, theirs.attention.qkv), (ours.output, theirs.output),
            (ours.mlp.gate_up, theirs.mlp.gate_up), (ours.mlp.down, theirs.mlp.down),
        ):  # fmt: skip
            x = torch.randn(5, linear.in_features)
            torch.testing.assert_close(linear(x), wanted(x), rtol=1e-5, atol=1e-5)
            if isinstance(linear, QuantizedLinear):
                small += 1
                assert isinstance(linear.kernel, DequantizingKernel)
                assert linear.num_bytes < 4 * linear.in_features * linear.out_features / 2
    assert small == (8 if case == "gptq-dynamic" else 9 if apart else 12)


def test_biases_of_zeros_that_packers_add_are_passed_over(folder: Path, tiny_models: Any, tmp_path: Path) -> None:
    # Given a model without biases, packed by something that stores zeros for them
    plain = tiny_models.make_tiny_model("llama", tmp_path / "plain", hidden_size=64, intermediate_size=96)

    def add(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1], dtype=torch.float16)

    settings, pack = CASES["gptq"]
    write(plain, tmp_path / "made", settings, pack, add)
    load_model(tmp_path / "made", dtype=torch.float32, device=CPU)

    # but one that is not zero would change the answers
    def damage(tensors: dict[str, Tensor]) -> None:
        add(tensors)
        tensors["model.layers.1.mlp.up_proj.bias"][3] = 1

    write(plain, tmp_path / "damaged", settings, pack, damage)
    with pytest.raises(Exception, match=r"model\.layers\.1\.mlp\.up_proj\.bias, which this architecture has no use"):
        load_model(tmp_path / "damaged", dtype=torch.float32, device=CPU)


def test_stacked_inputs_share_the_largest_calibrated_scale() -> None:
    # Given q, k and v in fp8 or int8, each calibrated apart, when they become one product, then its inputs are cut off
    # where the widest of them is
    def uniform_weight(form: Any, scale: float | None) -> QWeight:
        codes = torch.ones(2, 4).to(torch.float8_e4m3fn if form == "fp8" else torch.int8)
        return QWeight(form, codes, 2, 4, 4, torch.ones(2, 1), activations=Activations(form, scale))

    for form in ("int8", "fp8"):
        whole = stack([uniform_weight(form, 0.5), uniform_weight(form, 2.0), uniform_weight(form, 1.0)])
        assert whole is not None
        assert whole.activations == Activations(form, 2.0)
        assert stack([uniform_weight(form, 0.5), uniform_weight(form, None)]) is None
    assert stack([uniform_weight("int8", 0.5), uniform_weight("fp8", 0.5)]) is None
