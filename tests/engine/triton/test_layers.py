"""A layer's fused kernels against torch's form of the same operations, one by one and in whole models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig
from engine.attention import AttentionBatch, AttentionStep, KVLayout
from engine.attention.by_shape import attention_by_shape
from engine.attention.reference import ReferenceAttention, ReferenceStep
from engine.models.base import LayerCache
from engine.models.decoder import FusedDecoder
from engine.models.decoder_builder import TorchBuilder
from engine.models.layer_ops import HeadLayout, Residual, Update, make_layer_ops
from engine.models.layer_ops.torch_ops import TorchLayerOps
from engine.models.load import load_model
from engine.models.rope import Rotation
from engine.parallel.decoder import SummedLinear
from engine.parallel.leader import LeaderAttention
from engine.plan import CacheGroup
from engine.quant.base import Fp8Input, Fp8Rows, fp8_input, product
from engine.quant.fp8_linear import Fp8Kernel, Fp8Product, quantize_rows_fp8
from engine.quant.linear import QuantizedLinear
from engine.request import as_token_ids
from engine.runner.buckets import NO_SLOT
from tests.engine.models.test_decoder import FUSED
from tests.engine.quant.test_fp8_product import BY_ROWS, weight
from tests.tiny_models import LATENT  # whose attention has operations of its own

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

import triton.language as tl
from triton.runtime import interpreter

from engine.models.layer_ops.triton_ops import TritonLayerOps
from engine.triton_kernels import layers

TinyModel = Callable[[str], Path]
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def bfloat16_is_rounded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts off what a GPU rounds to the nearest."""
    if device.type != "cpu":
        return
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding(self: Any, src: Any, to: Any) -> Any:
        if src.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            rounded = torch.from_numpy(src.data).to(torch.bfloat16).view(torch.uint16).numpy()
            return interpreter.TensorHandle(rounded, tl.bfloat16)
        return cast(self, src, to)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding)


def ops_of(device: torch.device, *, layer_norm: bool = False) -> tuple[TorchLayerOps, TritonLayerOps]:
    reference = TorchLayerOps(1e-5, layer_norm=layer_norm)
    return reference, TritonLayerOps(reference, interpreted=device.type == "cpu")


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got.cpu(), want.cpu(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("layer_norm", "norm", "made_norm", "scale", "factor"),
    [
        (False, (40,), None, 1.0, 1.0),
        (False, None, None, 1.0, 1.0),
        (False, (40,), (40,), 0.22, 1.0),
        (False, None, (40,), 1.0, 0.3),
        (True, (40,), None, 1.0, 1.0),
        (True, (2, 40), (2, 40), 1.0, 1.0),
    ],
)
def test_a_sum_and_its_norm(
    layer_norm: bool, norm: tuple[int, ...] | None, made_norm: tuple[int, ...] | None, scale: float, factor: float,
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    reference, ops = ops_of(device, layer_norm=layer_norm)
    hidden, made = 3 * random(5, 40, seed=1, dtype=dtype) + 1, random(5, 40, seed=2, dtype=dtype) + 2
    of_sum, of_made = (None if shape is None else random(*shape, seed=3) for shape in (norm, made_norm))
    mine, theirs = hidden.clone().to(device), hidden.clone()
    there = None if of_sum is None else of_sum.to(device)
    update = Update(made.to(device), None if of_made is None else of_made.to(device), scale, factor)
    got = ops.add_norm(mine, update, there)
    want = reference.add_norm(theirs, Update(made, of_made, scale, factor), of_sum)
    close(mine, theirs)
    assert isinstance(got, Tensor)
    close(got, want)
    assert (got is mine) == (norm is None)
    close(ops.add_norm(mine, None, there), reference.add_norm(theirs, None, of_sum))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [None, 0.01])
def test_the_codes_of_a_norm_and_of_an_activation_are_those_of_the_tensor(
    scale: float | None, device: torch.device
) -> None:
    """To the bit, also of zeros and of rows that are not finite."""
    hidden = random(6, 96, seed=1, dtype=torch.bfloat16).to(device)
    hidden[1], hidden[2, 3], hidden[3, 90] = 0, float("nan"), float("inf")
    norm, form, interpreted = random(96, seed=2).to(device), Fp8Input(scale), device.type == "cpu"
    for make in (
        lambda how: layers.add_norm(hidden, None, norm, 1e-5, how, interpreted=interpreted),
        lambda how: layers.activate("silu", hidden, how, interpreted=interpreted),
    ):
        rows, values = make(form), make(None)
        assert isinstance(rows, Fp8Rows)
        assert isinstance(values, Tensor)
        codes, scales = quantize_rows_fp8(values, scale)
        assert rows.dtype == torch.bfloat16
        assert torch.equal(rows.scales.nan_to_num(nan=-1), scales.nan_to_num(nan=-1))
        assert torch.equal(rows.codes.float(), codes.float())


@BY_ROWS
def test_a_product_in_fp8_is_given_the_codes_that_it_would_make(device: torch.device) -> None:
    reference, ops = ops_of(device)
    linear = QuantizedLinear(weight(k=48).to(device), Fp8Kernel())
    x, norm = random(5, 48, seed=1, dtype=torch.bfloat16).to(device), random(48, seed=2).to(device)
    rows = ops.add_norm(x, None, norm, linear)
    assert isinstance(rows, Fp8Rows)
    torch.testing.assert_close(
        product(linear, rows), linear(reference.normed(x, norm)), rtol=2**-5, atol=2**-5
    )  # a value that the reference rounds to its neighbour has another code
    assert isinstance(ops.add_norm(x, None, norm), Tensor), "others read it"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "activation", ["silu", "gelu_tanh", "clamped_swiglu", "plain_silu", "plain_gelu_tanh", "plain_relu2"]
)
def test_activations(
    activation: Any, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_ACTIVATION_COLUMNS", 16)  # several programs a row
    reference, ops = ops_of(device)
    made = 5 * random(3, 2 * 26, seed=4, dtype=dtype)
    got = ops.activate(activation, made.to(device))
    assert isinstance(got, Tensor)
    close(got, reference.activate(activation, made))


HEADS = {
    "plain": HeadLayout(6, 2, 16),
    "many heads": HeadLayout(5, 5, 12),
    "each head is normed": HeadLayout(4, 2, 16, "head"),
    "all heads are normed as one": HeadLayout(3, 2, 16, "projection"),
    "normed when rotated": HeadLayout(4, 1, 16, "heads", late_qk_norm=True),
    "values are keys": HeadLayout(4, 2, 16, "head", values_are_keys=True, value_norm=True),
    "the keys of another layer": HeadLayout(4, 0, 16, "head"),
}


@pytest.mark.parametrize(("dtype", "cached"), [(torch.float32, None), (torch.bfloat16, FP8)], ids=str)
@pytest.mark.parametrize("layout", HEADS)
def test_queries_and_the_cache(
    layout: str, cached: torch.dtype | None, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens without a slot are stored nowhere; so are gates behind the values."""
    monkeypatch.setattr(layers, "_HEAD_ELEMENTS", 32)  # several programs a token
    heads = HEADS[layout]
    count, dim, keys = 5, heads.head_dim, heads.num_kv_heads
    reference, ops = ops_of(device, layer_norm=layout == "normed when rotated")
    qkv = random(count, heads.first_value + keys + 2, dim, seed=5, dtype=dtype)
    norm = random(heads.num_heads + keys, dim, seed=6) if heads.qk_norm else None
    angles = random(count, dim // 2, seed=7)
    cos, sin = (torch.cat((part, part), -1)[:, None].to(dtype) for part in (angles.cos(), angles.sin()))
    sin = torch.cat((-sin[..., : dim // 2], sin[..., dim // 2 :]), -1)
    growth = random(count, 1, 1, seed=8) if layout == "plain" else None
    slots, rows = torch.tensor([7, -1, 0, 3, -1], dtype=torch.int32), 9
    stored = [torch.full((rows, keys, dim), 7.0).to(device, cached or dtype) for _ in range(2)]
    scales = [torch.full((rows, keys), 7.0, device=device) if cached else None for _ in range(2)]
    attend: Any = FakeAttend(LayerCache(*stored, *scales, slots.to(device)))  # type: ignore[arg-type]
    there = [None if x is None else x.to(device) for x in (qkv, norm, cos, sin, growth)]
    got = ops.rotate(heads, there[0], there[1], Rotation(*there[2:4]), there[4], attend, 0)  # type: ignore[arg-type]
    assert got[1:] == (None, None)
    q, k, v = reference.rotate(heads, qkv, norm, Rotation(cos, sin), growth, attend, 0)
    close(got[0], q)
    for made, into, scale in zip((k, v), stored, scales, strict=True):
        if made is None:
            continue
        used = slots[slots >= 0].long()
        values = into.cpu().float() if scale is None else into.cpu().float() * scale.cpu()[..., None]
        peak = made[slots >= 0].float().abs().amax(-1, keepdim=True)
        off = (values[used] - made[slots >= 0].float()).abs()
        assert bool((off <= (TOLERANCE[dtype] if scale is None else 2**-4) * peak + 1e-6).all())
        if scale is not None:
            torch.testing.assert_close(scale.cpu()[used], peak[..., 0] / 448, rtol=2**-6, atol=0)
        unused = torch.ones(rows, dtype=torch.bool)
        unused[used] = False
        assert bool((into.cpu()[unused].float() == 7).all())
        assert scale is None or bool((scale.cpu()[unused] == 7).all())


class FakeAttend:
    """An `Attend` that has a cache and does not attend."""

    def __init__(self, cache: LayerCache | None) -> None:
        self._cache = cache

    def cache(self, layer: int) -> LayerCache | None:
        return self._cache


def test_keys_that_are_not_finite_make_their_scale_nan_and_harm_no_other(device: torch.device) -> None:
    _, ops = ops_of(device)
    heads, qkv = HeadLayout(1, 2, 4), torch.ones(2, 5, 4, device=device)
    qkv[0, 1, 3], qkv[1, 4, 0] = float("nan"), float("inf")
    stored = [torch.zeros(2, 2, 4, device=device).to(FP8) for _ in range(2)]
    scales = [torch.zeros(2, 2, device=device) for _ in range(2)]
    one = torch.ones(2, 1, 4, device=device)
    attend: Any = FakeAttend(LayerCache(*stored, *scales, torch.arange(2, device=device)))
    ops.rotate(heads, qkv, None, Rotation(one, 0 * one), None, attend, 0)
    assert scales[0].isnan().tolist() == [[True, False], [False, False]]
    assert scales[1].isnan().tolist() == [[False, False], [False, True]]
    assert all(bool(part.float().isfinite().all()) for part in stored)


@BY_ROWS
def test_ranks_take_codes_and_have_caches_of_their_own(device: torch.device) -> None:
    part, group = QuantizedLinear(weight(k=48).to(device), Fp8Kernel()), SimpleNamespace(sum=lambda x: 2 * x)
    summed, x = SummedLinear(part, group), random(3, 48, seed=1, dtype=torch.bfloat16).to(device)  # type: ignore[arg-type]
    rows = Fp8Rows(*quantize_rows_fp8(x), x.dtype)
    assert fp8_input(summed) == fp8_input(part) == Fp8Input(None)
    assert torch.equal(product(summed, rows), 2 * part(x))
    inner = CachedReference(KVLayout((CacheGroup((0,), None, 2),), 4, 1, 8), torch.float32, device)
    leader, one = LeaderAttention(inner, group), np.ones(1, np.int32)  # type: ignore[arg-type]
    step = inner.prepare(AttentionBatch(0 * one, one, 1, (one[None],), (np.array([4]),)))
    cache = leader.layer_cache(0, step)
    assert cache is not None
    assert cache.keys is inner.storage.keys[0]
    assert cache.slots.tolist() == [4]


def test_where_attention_stores_keys_itself_they_are_passed_to_it(device: torch.device) -> None:
    reference, ops = ops_of(device)
    heads, qkv, one = HeadLayout(2, 1, 4), torch.ones(3, 4, 4, device=device), torch.ones(3, 1, 4, device=device)
    attend: Any = FakeAttend(None)
    made = [each.rotate(heads, qkv, None, Rotation(one, one), None, attend, 0) for each in (ops, reference)]
    for mine, theirs in zip(*made, strict=True):
        assert torch.equal(mine, theirs)  # type: ignore[arg-type]


def test_the_residual_is_summed_when_it_is_read() -> None:
    ops = TorchLayerOps(1e-5, layer_norm=False)
    residual = Residual(ops, torch.ones(2, 4), 0.5)
    residual.add(torch.full((2, 4), 2.0))
    residual.add(torch.full((2, 4), 4.0))
    residual.multiply(3.0)
    assert residual.normed(None) is residual.joined()
    assert residual.joined().tolist() == [[12.0] * 4] * 2
    residual.multiply(0.5)
    assert residual.joined().tolist() == [[6.0] * 4] * 2


def test_a_gpu_has_the_kernels_and_where_they_can_not_be_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []
    log = SimpleNamespace(warning=lambda event, reason: reasons.append(reason))
    monkeypatch.setattr("engine.models.layer_ops.choice.logger", log)
    cuda = torch.device("cuda")
    assert isinstance(make_layer_ops(64, 1e-5, cuda, layer_norm=False), TritonLayerOps)
    assert isinstance(make_layer_ops(64, 1e-5, torch.device("cpu"), layer_norm=False), TorchLayerOps)
    assert reasons == []
    assert isinstance(make_layer_ops(40_000, 1e-5, cuda, layer_norm=False), TorchLayerOps)
    assert "hidden states have 40000 elements" in reasons.pop()
    monkeypatch.setattr("engine.models.layer_ops.choice.find_spec", lambda name: None)
    assert isinstance(make_layer_ops(64, 1e-5, cuda, layer_norm=False), TorchLayerOps)
    assert "triton is not installed" in reasons.pop()


STEPS = (((0, 0), (9, 2)), ((2, 9), (1, 1)))
"""Starts and counts of two sequences, whose order changes: longer than a window, and decoding."""


def load(path: Path, dtype: torch.dtype, device: torch.device, builder: TorchBuilder | None = None) -> FusedDecoder:
    model = load_model(path, dtype=dtype, device=device, max_positions=64, builder=builder)
    assert isinstance(model, FusedDecoder)
    return model


class CachedReference(ReferenceAttention):
    """The oracle, whose cache may be written by others. It is NaN where nothing was written."""

    def __init__(self, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, dtype, device)
        stored = (self.storage.keys, self.storage.values)
        self.stored = [each[layer] for group in layout.groups for layer in group.layers for each in stored]
        for each in self.stored:
            each.fill_(float("nan"))

    def prepare(self, batch: AttentionBatch) -> ReferenceStep:
        step = super().prepare(batch)
        self.slots = step.slots
        return replace(step, slots=tuple(slots.clamp(min=0) for slots in step.slots))

    def layer_cache(self, layer: int, step: object) -> LayerCache:  # type: ignore[override]
        return self.storage.layer_cache(layer, self.slots[self.storage.group_of[layer]])


def logits_of(model: FusedDecoder, device: torch.device, *, by_kernels: bool) -> Tensor:
    """Of all tokens of `STEPS`. Each step has padding tokens, which write nothing."""
    reference = model._torch_ops
    model._ops = TritonLayerOps(reference, interpreted=device.type == "cpu") if by_kernels else reference
    spec, size, width, padding = model.spec, 4, 3, 1
    groups = tuple(CacheGroup(own, window, 1 + 2 * width) for window, own in spec.window_layers.items())
    backends: list[CachedReference] = []

    def make(layout: KVLayout) -> CachedReference:
        backends.append(CachedReference(layout, spec.dtype, device))
        return backends[-1]

    layout = KVLayout.of(spec, groups, size)
    attention: Any = attention_by_shape(layout, make) if layout.shapes else make(layout)
    tables, logits = np.arange(1, 1 + 2 * width, dtype=np.int32).reshape(2, width), []
    for step, (starts, counts) in enumerate(STEPS):
        table = tables[::-1] if step == 1 else tables
        positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        slots = [own[at // size] * size + at % size for own, at in zip(table, positions, strict=True)]
        padded = np.concatenate([*slots, [NO_SLOT] * padding]).astype(np.int64)
        batch = AttentionBatch(
            np.array(starts, np.int32), np.array(counts, np.int32), counts.count(1), (table,) * len(groups),
            (padded,) * len(groups),
        )  # fmt: skip
        at = torch.from_numpy(np.concatenate([*positions, [0] * padding]))
        ids = (31 * at + 11) % spec.vocab_size
        hidden = model.forward(ids.to(device), at.to(device), AttentionStep(attention, attention.prepare(batch)), None)
        logits.append(model.logits(hidden[: sum(counts)].clone()).cpu())
    for each in (each for backend in backends for each in backend.stored):
        of_slots = each.view((1 + 2 * width) * size, -1)
        assert int((~of_slots[size:].isnan()).all(1).sum()) == sum(sum(counts) for _, counts in STEPS)
        assert not by_kernels or bool(of_slots[:size].isnan().all())
    return torch.cat(logits)


FIRST = ("qwen3", "gemma3")


@pytest.mark.parametrize(
    "family",
    [*FIRST, *(pytest.param(f, marks=pytest.mark.exhaustive) for f in FUSED if f not in {*FIRST, *LATENT})],
)
@pytest.mark.slow
def test_whole_models_have_the_logits_of_torchs_form(family: str, tiny_model: TinyModel, device: torch.device) -> None:
    model = load(tiny_model(family), torch.float32, device)
    got, want = (logits_of(model, device, by_kernels=by_kernels) for by_kernels in (True, False))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert torch.equal(got.argmax(1), want.argmax(1))


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_bfloat16_rounds_no_worse_than_torchs_form(family: str, tiny_model: TinyModel, device: torch.device) -> None:
    exact = logits_of(load(tiny_model(family), torch.float32, device), device, by_kernels=False)
    model = load(tiny_model(family), torch.bfloat16, device)
    mine, theirs = (logits_of(model, device, by_kernels=by_kernels) for by_kernels in (True, False))
    assert (mine - exact).norm() < 1.2 * (theirs - exact).norm()


@BY_ROWS
@pytest.mark.slow
def test_a_model_with_fp8_weights_makes_codes_where_one_product_reads_them(
    tiny_model: TinyModel, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("fp8_linear", "rtn"):
        monkeypatch.setattr(f"engine.quant.{module}.multiplies_fp8", lambda device: True)
    model = load(tiny_model("qwen3"), torch.bfloat16, device, TorchBuilder("fp8", torch.bfloat16))
    calls = []
    call = Fp8Product.__call__
    monkeypatch.setattr(Fp8Product, "__call__", lambda self, x: (calls.append(x), call(self, x))[1])
    mine = logits_of(model, device, by_kernels=True)
    assert len(calls) == len(STEPS) * model.spec.num_layers, "attention's output alone is quantized by its product"
    theirs = logits_of(model, device, by_kernels=False)
    assert len(calls) == (1 + 4) * len(STEPS) * model.spec.num_layers
    exact = logits_of(load(tiny_model("qwen3"), torch.float32, device), device, by_kernels=False)
    assert (mine - exact).norm() < 1.2 * (theirs - exact).norm()


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", *FIRST, "mistral"])
def test_an_engine_gives_the_tokens_of_torchs_form(
    family: str, tiny_model: TinyModel, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        dtype="float32", device=device.type, threads=1, attention="triton",
        cache=CacheConfig(num_blocks=64, block_size=4), schedule=ScheduleConfig(3, 16),
    )  # fmt: skip
    requests = [
        Request(
            str(i), as_token_ids([*range(5, 9 + 7 * i)]), SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        )
        for i in range(3)
    ]
    tokens = []
    for by_kernels in (True, False):

        def make(size: int, epsilon: float, on: Any, *, layer_norm: bool, fused: bool = by_kernels) -> Any:
            reference = TorchLayerOps(epsilon, layer_norm=layer_norm)
            return TritonLayerOps(reference, interpreted=on.type == "cpu") if fused else reference

        monkeypatch.setattr("engine.models.decoder.make_layer_ops", make)
        done = Engine.load(tiny_model(family), config).run(requests)
        tokens.append({each.request_id: each.choices[0].token_ids.tolist() for each in done})
    assert tokens[0] == tokens[1]
