"""Mixtures of experts: routing by its definition, weights under every name, and models that a dense one predicts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engine import Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.checkpoints.checkpoint import WeightSource
from engine.errors import CorruptWeights, UnsupportedModel
from engine.models.decoder import FusedDecoder
from engine.models.decoder_builder import TorchBuilder, _report_slow_experts, build_decoder
from engine.models.experts import ExpertRows, Experts, ExpertSpec, GroupedLinear, LinearPerExpert, weighted_sum
from engine.models.families.registry import fused_family
from engine.models.load import load_model, open_model
from engine.models.native import NativeBuilder
from engine.quant.base import DenseLinear
from engine.quant.int8_linear import quantize_rows
from engine.quant.rtn import AT_LOAD, round_to_nearest
from engine.quant.weight import QWeight
from engine.quant.writing import Scheme, module_tensors
from tests.engine.oracle import make_prompts, prompt_scores, scores_of_logits
from tests.engine.quant.packing import pack_awq, pack_fp8, pack_gptq, write
from tests.native_paths import native_path

CPU = torch.device("cpu")
PLAIN = ExpertSpec(num_experts=8, top_k=3, intermediate_size=4, layers=(True,))
SPECS = {
    "softmax": PLAIN,
    "softmax, renormalized": replace(PLAIN, renormalize=True),
    "sigmoid, scaled": replace(PLAIN, scoring="sigmoid", renormalize=True, scale=2.5),
    "corrected groups": replace(PLAIN, scoring="sigmoid", num_groups=4, top_groups=2, has_correction=True),
    "groups by their best": replace(PLAIN, num_groups=4, top_groups=2, group_scores=1),
}


def load(path: Path) -> Any:
    return load_model(path, dtype=torch.float32, device=CPU, builder=TorchBuilder())


def routed(spec: ExpertSpec, logits: list[float], correction: list[float]) -> dict[int, float]:
    """A token's experts, best first, with their weights; one number at a time."""
    exact = torch.tensor(logits, dtype=torch.float64)
    scores = (exact.softmax(0) if spec.scoring == "softmax" else exact.sigmoid()).tolist()
    ranked = [s + c for s, c in zip(scores, correction, strict=True)]
    width = spec.num_experts // spec.num_groups
    groups = [range(g * width, (g + 1) * width) for g in range(spec.num_groups)]
    if spec.num_groups > 1:
        groups.sort(key=lambda group: -sum(sorted((ranked[e] for e in group), reverse=True)[: spec.group_scores]))
    allowed = sorted(e for group in groups[: spec.top_groups] for e in group)
    chosen = sorted(allowed, key=lambda e: -ranked[e])[: spec.top_k]
    total = sum(scores[e] for e in chosen) if spec.renormalize else 1.0
    return {e: spec.scale * scores[e] / total for e in chosen}


@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_routed_by_the_definition(name: str) -> None:
    spec, generator = SPECS[name], torch.Generator().manual_seed(3)
    logits = torch.randn(200, 8, generator=generator).mul(2).round(decimals=1)  # equal scores are frequent
    correction = torch.randn(8, generator=generator) if spec.has_correction else torch.zeros(8)
    weights, experts = spec.route(logits, correction if spec.has_correction else None)
    for token in range(200):
        wanted = routed(spec, logits[token].tolist(), correction.tolist())
        assert experts[token].tolist() == list(wanted)
        torch.testing.assert_close(weights[token], torch.tensor(list(wanted.values())))


def test_equal_scores_go_to_the_lowest_experts_and_nan_to_real_ones() -> None:
    weights, experts = PLAIN.route(torch.tensor([[0.0] * 8, [float("nan")] * 8]), None)
    assert experts[0].tolist() == [0, 1, 2]
    assert bool(((experts >= 0) & (experts < 8)).all())
    assert bool(weights[1].isnan().all())


def test_rows_are_sorted_by_expert_and_put_back() -> None:
    chosen = torch.tensor([[5, 0], [2, 5], [0, 7]])
    rows = ExpertRows.of(chosen, 8)
    assert rows.ends.tolist() == [2, 2, 3, 3, 3, 5, 5, 6]
    x = torch.arange(3.0)[:, None]
    assert rows.take(x, 2).flatten().tolist() == [0, 2, 1, 0, 1, 2]
    assert rows.restore(rows.take(x, 2), 3, 2).flatten(1).tolist() == [[0, 0], [1, 1], [2, 2]]


def test_only_rows_of_held_experts_are_taken_and_the_others_are_zeros() -> None:
    chosen = torch.tensor([[5, 0], [2, 5], [0, 7]])
    index = torch.tensor([2, 2, 0, 2, 2, 1, 2, 2])  # experts 2 and 5
    rows = ExpertRows.of_held(chosen, index, 2)
    assert rows.ends.tolist() == [1, 3]
    x = torch.arange(1.0, 4.0)[:, None]
    assert rows.take(x, 2).flatten().tolist() == [2, 1, 2]
    assert rows.restore(rows.take(x, 2), 3, 2).flatten(1).tolist() == [[1, 0], [2, 2], [0, 0]]


def test_a_step_without_rows_of_held_experts_is_empty() -> None:
    rows = ExpertRows.of_held(torch.tensor([[1, 2]]), torch.tensor([0, 1, 1]), 1)
    x = torch.ones(1, 4)
    for product in (LinearPerExpert([DenseLinear(torch.ones(3, 4))]), GroupedLinear(torch.ones(1, 3, 4))):
        assert rows.restore(product(rows.take(x, 2), rows.ends), 1, 2).tolist() == [[[0.0] * 3] * 2]


def test_a_tokens_experts_are_added_in_their_order() -> None:
    outputs, weights = torch.randn(5, 7, 33), torch.rand(5, 7)
    for token in range(5):
        total = outputs[token, 0] * weights[token, 0]
        for rank in range(1, 7):
            total = torch.addcmul(total, outputs[token, rank], weights[token, rank])
        assert torch.equal(weighted_sum(outputs, weights)[token], total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_each_expert(dtype: torch.dtype) -> None:
    # Given rows of three experts of five, on the CPU, where torch has the same operator
    weight, x = torch.randn(5, 24, 16).to(dtype), torch.randn(9, 16).to(dtype)
    ends = torch.tensor([0, 4, 4, 5, 9], dtype=torch.int32)
    each = LinearPerExpert([DenseLinear(matrix) for matrix in weight])
    torch.testing.assert_close(GroupedLinear(weight)(x, ends), each(x, ends))
    # and with biases, of which each row has its expert's
    bias = torch.randn(5, 24).to(dtype)
    rows = torch.tensor([1] * 4 + [3] + [4] * 4)
    torch.testing.assert_close(GroupedLinear(weight, bias)(x, ends), each(x, ends) + bias[rows])


def test_a_mixture_of_grouped_products_reads_nothing_on_the_host(tiny_model: Callable[[str], Path]) -> None:
    # Given a decoder's mixture of six experts whose products are grouped
    model = load(tiny_model("qwen2-moe"))
    assert not model.recordable
    gate_up, down, router = torch.randn(6, 48, 48), torch.randn(6, 48, 24), torch.randn(6, 48)
    x = torch.randn(5, 48).bfloat16()
    grouped = Experts(router, GroupedLinear(gate_up.bfloat16()), GroupedLinear(down.bfloat16()))
    # When it computes tensors without data, then nothing asks for any
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model._mlp(grouped, torch.empty(5, 48, dtype=torch.bfloat16)).shape == (5, 48)
    # and with data it computes what the experts do one by one
    apart = Experts(
        router,
        LinearPerExpert([DenseLinear(matrix) for matrix in gate_up.bfloat16()]),
        LinearPerExpert([DenseLinear(matrix) for matrix in down.bfloat16()]),
    )
    torch.testing.assert_close(model._mlp(grouped, x), model._mlp(apart, x))
    with pytest.raises(RuntimeError), FakeTensorMode(allow_non_fake_inputs=True):
        model._mlp(apart, torch.empty(5, 48, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("capability", "recordable"), [((9, 0), True), ((10, 3), True), ((8, 0), False), ((12, 0), False)]
)
def test_a_decoder_is_recordable_where_torch_has_a_grouped_kernel(
    capability: tuple[int, int], recordable: bool, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    model = load(tiny_model("qwen3-moe"))
    assert not model.recordable
    weight: Any = SimpleNamespace(device=torch.device("cuda"))
    grouped = replace(model._layers[0].mlp, gate_up=GroupedLinear(weight), down=GroupedLinear(weight))
    for layers in (model._layers, tuple(replace(layer, mlp=grouped) for layer in model._layers)):
        model._layers = layers
        with capture_logs() as said:
            _report_slow_experts(layers, torch.device("cuda"))
        assert len(said) == (not model.recordable)  # what is slow is said
    assert model.recordable == recordable


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "olmoe", "glm4-moe"])
def test_bfloat16_stays_as_close_as_transformers(
    family: str, tiny_model: Any, prompts: Any, run: Any, steps_over: Any, oracle: Any
) -> None:
    model = load_model(tiny_model(family), dtype=torch.bfloat16, device=CPU, builder=TorchBuilder(dtype=torch.bfloat16))
    exact = torch.cat(oracle(tiny_model(family), prompts))
    theirs = torch.cat(oracle(tiny_model(family), prompts, torch.bfloat16))
    ours = torch.cat(run(model, prompts, steps_over([45, 6, 23], 7)))
    # A token between two experts may go to either; most are not.
    assert (ours - exact).norm(dim=1).median() < 1.5 * (theirs - exact).norm(dim=1).median()


def upcycle(dense: Path, folder: Path, router_scale: float) -> Path:
    """A Mixtral whose eight experts are all the MLP of a dense Llama, of which two compute each token."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    config = json.loads((dense / "config.json").read_text())
    for name, tensor in load_file(dense / "model.safetensors").items():
        if ".mlp." not in name:
            tensors[name] = tensor
            continue
        layer, _, module = name.removesuffix(".weight").partition(".mlp.")
        own = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[module]
        for expert in range(8):
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{own}.weight"] = tensor.clone()
        router = torch.randn(8, config["hidden_size"], generator=generator)
        tensors[f"{layer}.block_sparse_moe.gate.weight"] = router * router_scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    config |= {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("router_scale", [0.0, 0.3])
def test_a_dense_model_copied_into_eight_experts_is_the_dense_model(
    router_scale: float, tiny_model: Any, tmp_path: Path, prompts: Any, run: Any, steps_over: Any
) -> None:
    dense, mixture = load(tiny_model("llama")), load(upcycle(tiny_model("llama"), tmp_path / "m", router_scale))
    assert isinstance(mixture, FusedDecoder)
    steps = steps_over([45, 6, 23], 7)
    for ours, wanted in zip(run(mixture, prompts, steps), run(dense, prompts, steps), strict=True):
        assert torch.equal(ours.argmax(-1), wanted.argmax(-1))
        if router_scale == 0:  # half of the output, twice, is the output
            assert torch.equal(ours, wanted)
        else:
            torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-5)


class Upcycled:
    """A `WeightSource`: each MLP of a dense model as eight experts, with random routers."""

    def __init__(self, dense: WeightSource, hidden: int) -> None:
        self._dense = dense
        self._hidden = hidden
        self._experts: dict[str, str] = {}
        self._routers: set[str] = set()
        self.names: set[str] = {name for name in dense.names if ".mlp." not in name}
        for name in set(dense.names) - self.names:
            block, module = name.split(".mlp.")
            self._experts |= {f"{block}.mlp.experts.{expert}.{module}": name for expert in range(8)}
            self._routers.add(f"{block}.mlp.gate.weight")
        self.names |= self._experts.keys() | self._routers

    def shape(self, name: str) -> tuple[int, ...]:
        return (8, self._hidden) if name in self._routers else self._dense.shape(self._experts.get(name, name))

    def read(self, name: str, into: Tensor) -> None:
        if name in self._routers:
            into.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
        else:
            self._dense.read(self._experts.get(name, name), into)

    def quantized(self, name: str) -> QWeight | None:
        return None if name in self._routers else self._dense.quantized(self._experts.get(name, name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("quantize", ["dense", "none"], ids=["float32", "as stored"])
@pytest.mark.parametrize("attention", ["native", "paged-sdpa"])
def test_a_real_model_copied_into_eight_experts_answers_as_it_does(
    quantize: Any, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    path = Path(os.environ.get("TOKENMILL_TEST_MODELS", ".")) / name
    if not path.is_file():
        pytest.skip(f"NOT TESTED HERE: a real file; TOKENMILL_TEST_MODELS names no folder with {name}")
    prompts = make_prompts(seed=5, count=4, vocab_size=40_000, shared=20, longest=40)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    requests = [Request(str(i), as_token_ids(prompt), params) for i, prompt in enumerate(prompts)]
    config = EngineConfig(
        dtype="float32", device="cpu", attention=attention, quantize=quantize,
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )  # fmt: skip

    def answers(engine: Engine) -> dict[str, list[int]]:
        return {done.request_id: done.choices[0].token_ids.tolist() for done in engine.run(requests)}

    wanted = answers(Engine.load(path, config))

    def copied(path: Path, *, dtype: torch.dtype, device: torch.device, builder: Any, **_: Any) -> Any:
        opened = open_model(path)
        assert opened.decoder is not None
        inner, layers = opened.decoder.intermediate_size, opened.decoder.num_layers
        spec = replace(opened.decoder, experts=ExpertSpec(8, 2, inner, (True,) * layers, renormalize=True))
        weights = Upcycled(opened.weights, spec.hidden_size)
        return build_decoder(spec, weights, dtype=dtype, device=device, builder=builder)

    monkeypatch.setattr("engine.engine.load_model", copied)
    mixture = Engine.load(path, config)
    assert ("native" in mixture.attention_name) == (attention == "native")
    assert answers(mixture) == wanted
    if attention == "native":
        assert mixture.expert_load() is not None


def stack(folder: Path, out: Path) -> Path:
    """The checkpoint with each layer's experts in two tensors, as transformers' modules hold them."""
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    blocks = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for block in blocks:
        count = len({n.split(".experts.")[1].split(".")[0] for n in tensors if n.startswith(f"{block}.experts.")})

        def all_of(module: str, block: str = block, count: int = count) -> Tensor:
            return torch.stack([tensors.pop(f"{block}.experts.{e}.{module}.weight") for e in range(count)])

        tensors[f"{block}.experts.gate_up_proj"] = torch.cat((all_of("gate_proj"), all_of("up_proj")), dim=1)
        tensors[f"{block}.experts.down_proj"] = all_of("down_proj")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


def test_experts_in_one_tensor_are_read(tiny_model: Any, tmp_path: Path, prompts: Any, run: Any) -> None:
    folder = stack(tiny_model("qwen3-moe-mixed"), tmp_path / "stacked")
    names = load_file(folder / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    assert not any(".experts.0." in name for name in names)
    steps = [[(0, 0, 45)]]
    ours, wanted = (run(load(path), prompts[:1], steps) for path in (folder, tiny_model("qwen3-moe-mixed")))
    assert torch.equal(ours[0], wanted[0])


def test_an_expert_that_is_stored_twice_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    folder = stack(tiny_model("qwen3-moe-mixed"), tmp_path / "stacked")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    tensors[name] = torch.zeros(tensors["model.layers.1.mlp.experts.down_proj"].shape[1:])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptWeights, match=rf"{name} is stored twice, one of them in the stack .*experts\.down_proj"):
        load(folder)


def all_but_routers(pack: Callable[[Tensor], Any]) -> Callable[[str, Tensor], Any]:
    return lambda module, weight: None if module.endswith(("lm_head", ".gate", "expert_gate")) else pack(weight)


ROUNDED: dict[Any, Callable[[Tensor], Tensor]] = {
    "int4": lambda weight: round_to_nearest(weight, AT_LOAD["int4"]).dequantize(),
    "fp8": lambda weight: round_to_nearest(weight, AT_LOAD["fp8"]).dequantize(),
    "int8-weight-only": lambda weight: math.prod(quantize_rows(weight)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "glm4-moe"])
@pytest.mark.parametrize("quantize", ROUNDED)
def test_mixtures_quantized_at_load_are_those_of_rounded_weights(
    quantize: Any, family: str, tiny_model: Any, tmp_path: Path, prompts: Any, run: Any
) -> None:
    # Given a mixture, and the same with all weights rounded but those of head and routers
    pack = all_but_routers(lambda weight: ({"weight": weight}, ROUNDED[quantize](weight)))
    rounded = load(write(tiny_model(family), tmp_path / "made", {}, pack))
    # When it is quantized as it is loaded, then each expert is, and the logits are those of the other
    small: Any = load_model(tiny_model(family), dtype=torch.float32, device=CPU, builder=TorchBuilder(quantize))
    for layer in small._layers:
        if isinstance(layer.mlp, Experts):
            assert not any(isinstance(e, DenseLinear) for e in (*layer.mlp.gate_up.linears, *layer.mlp.down.linears))
    [ours], [wanted] = (run(model, prompts[:1], [[(0, 0, 45)]]) for model in (small, rounded))
    torch.testing.assert_close(ours, wanted, atol=1e-3, rtol=1e-3)


INT4 = Scheme("int4", group=16, dtype=torch.float16)
PACKED: dict[str, tuple[dict[str, Any], Callable[[Tensor], Any]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}, pack_gptq),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        pack_awq,
    ),
    "fp8 blocks": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}, pack_fp8),
    "compressed-tensors": (INT4.settings(["lm_head", "re:.*gate$"]), lambda weight: compressed(weight)),
}


def compressed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rounded = round_to_nearest(weight, INT4.rounding)
    return module_tensors(rounded, INT4), rounded.dequantize()


@pytest.mark.parametrize("of", ["torch", "native"])
@pytest.mark.parametrize(
    "family",
    ["mixtral", pytest.param("qwen2-moe", marks=pytest.mark.slow), pytest.param("glm4-moe", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.slow
def test_quantized_checkpoints_of_mixtures_are_what_they_stand_for(
    name: str, family: str, of: str, tiny_models: Any, tmp_path: Path, prompts: Any, run: Any
) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96, "vocab_size": 264}
    if family == "qwen2-moe":
        sizes["shared_expert_intermediate_size"] = 64
    folder = tiny_models.make_tiny_model(family, tmp_path / "model", **sizes)
    settings, pack = PACKED[name]
    plain = write(folder, tmp_path / "made", settings, all_but_routers(pack))
    builder = TorchBuilder() if of == "torch" else NativeBuilder(native_path("avx2", 1))
    model: Any = load_model(tmp_path / "made", dtype=torch.float32, device=CPU, builder=builder)
    if of == "native":
        linears = [
            linear for layer in model._layers if isinstance(layer.mlp, Experts) for linear in layer.mlp.gate_up.linears
        ]
        assert {linear.form for linear in linears} == {"fp8" if name == "fp8 blocks" else "int4"}
    [wanted] = run(load(plain), prompts[:1], [[(0, 0, 45)]])
    if of == "native":
        scores = prompt_scores(tmp_path / "made", prompts[0].tolist(), attention="native", instruction_set="avx2")
        torch.testing.assert_close(scores, scores_of_logits(wanted, prompts[0]), atol=2e-3, rtol=1e-3)
    else:
        torch.testing.assert_close(run(model, prompts[:1], [[(0, 0, 45)]])[0], wanted, atol=2e-3, rtol=1e-3)


def edited(folder: Path, out: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


EXPERT = "model.layers.1.mlp.experts"
ODD: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    f"tensor {EXPERT}.3.up_proj.weight is missing": lambda t: t.pop(f"{EXPERT}.3.up_proj.weight"),
    "tensor model.layers.1.mlp.gate.weight has shape": lambda t: t.update(
        {"model.layers.1.mlp.gate.weight": torch.zeros(5, 48)}
    ),
    f"holds tensor {EXPERT}.4.up_proj.weight": lambda t: t.update({f"{EXPERT}.4.up_proj.weight": torch.ones(32, 48)}),
    f"tensor {EXPERT}.gate_up_proj has shape .3, 64, 48., but the config asks for 4 experts": lambda t: t.update(
        {f"{EXPERT}.gate_up_proj": torch.ones(3, 64, 48)}
    ),
}


@pytest.mark.parametrize("said", ODD)
def test_missing_and_odd_tensors_are_named(said: str, tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(CorruptWeights, match=said):
        load(edited(tiny_model("qwen3-moe"), tmp_path / "odd", ODD[said]))


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "num_local_experts is 0, but must be from 1 to 4096": ("mixtral", {"num_local_experts": 0}),
    "num_experts is 100000, but must be from 1": ("qwen3-moe", {"num_experts": 100_000}),
    "num_experts_per_tok is 5, but must be from 1 to num_experts, 4": ("qwen3-moe", {"num_experts_per_tok": 5}),
    "num_experts_per_tok is 0": ("mixtral", {"num_experts_per_tok": 0}),
    "n_group=0 and topk_group=1 do not fit n_routed_experts=6": ("glm4-moe", {"n_group": 0}),
    "n_group=4 and": ("glm4-moe", {"n_group": 4}),
    "n_group=6 and": ("glm4-moe", {"n_group": 6}),
    "n_group=1 and topk_group=3": ("dots1", {"topk_group": 3}),
    "num_experts_per_tok is 3, but topk_group=1 groups have fewer": ("glm4-moe", {"n_group": 3}),
    "routed_scaling_factor is nan": ("glm4-moe", {"routed_scaling_factor": float("nan")}),
    "moe_layer_interval is 0": ("ernie4.5-moe", {"moe_layer_interval": 0}),
    "moe_norm_min is 0.1": ("ernie4.5-moe", {"moe_norm_min": 0.1}),
    "shared_expert_combination_strategy is 'average'": ("cohere2-moe", {"num_shared_experts": 1}),
    "expert_selection_fn is 'top'": ("cohere2-moe", {"expert_selection_fn": "top"}),
    "mlp_layer_types describes 2 layers, not 3": ("hy-v3", {"mlp_layer_types": ["dense", "sparse"]}),
    r"moe_topk is \[3, 3, 3\], but must be one number": ("hunyuan-moe", {"moe_topk": [3, 3, 3]}),
    "decoder_sparse_step is 0": ("qwen2-moe", {"decoder_sparse_step": 0}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_routing_that_can_not_be_is_refused_by_name(said: str, tiny_models: Any) -> None:
    family, changes = REFUSED[said]
    config = tiny_models.make_config(family, **changes)
    function = fused_family(config)
    assert function is not None
    with pytest.raises(UnsupportedModel, match=said):
        function(config)
