"""The engine's code for CUDA on a fake device: the same answers, and the host does not wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig
from engine.config import LoraConfig, SpeculationConfig
from engine.device_transfer import PinnedTransfer, make_transfer
from engine.errors import EngineError, EngineLost
from engine.quant.int8_linear import Int8Linear, Int8WeightLinear
from engine.quant.linear import QuantizedLinear, fast_kernel, int8_weight_only
from engine.quant.weight import Activations, QWeight
from engine.request import as_token_ids
from engine.runner import block_transfer
from engine.sampling.sampler import Sampler
from tests.engine.quant.test_fp8_product import BY_ROWS
from tests.engine.runner.fake_cuda import DEVICE, DeviceTensor, FakeCuda, compiler, fake_cuda
from tests.engine.runner.test_async_loop import answers, check_idle, plain_work, prompt, workload

pytest.importorskip("triton", reason="NOT TESTED HERE: a fake CUDA device; triton is not installed")

from engine.attention import triton_paged

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
    pytest.mark.skipif(compiler() is None, reason="NOT TESTED HERE: a fake CUDA device; there is no C++ compiler"),
]

TinyModel = Callable[[str], Path]


def load(path: Path, device: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"max_model_len": 96, "threads": 1, "max_graph_tokens": 8, **changes}
    return Engine.load(
        path,
        EngineConfig(
            dtype="float32", device=device, cache=CacheConfig(block_size=16, num_blocks=60),  # type: ignore[arg-type]
            schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=24), **settings,
        ),
    )  # fmt: skip


@pytest.mark.slow
def test_the_fake_device_refuses_the_same_calls_as_a_device() -> None:
    with fake_cuda() as device:
        there = torch.arange(6.0, device=DEVICE).view(2, 3)
        with pytest.raises(AssertionError, match="add: tensors of the host and of the device together"):
            there + torch.ones(2, 3)
        with pytest.raises((TypeError, RuntimeError)):
            there.numpy()
        there[0].mul_(2)
        assert device.waits == []
        assert there.sum().item() == 18
        assert there.cpu().tolist() == [[0, 2, 4], [3, 4, 5]]
        assert there[there > 3].cpu().tolist() == [4, 4, 5]
        assert device.waits == ["_local_scalar_dense", "_to_copy", "index", "_to_copy"]
        device.recording = True
        with pytest.raises(AssertionError, match="_to_copy needs the host while a graph is recorded"):
            there.cpu()


@pytest.mark.slow
def test_a_copy_to_the_host_is_complete_once_it_was_waited_for_and_not_before() -> None:
    with fake_cuda() as device:
        transfer = make_transfer(DEVICE)
        (there,) = transfer.up(np.arange(4, dtype=np.int64))
        assert isinstance(there, DeviceTensor)
        down: Any = transfer.down(there * 3)
        there.zero_()
        assert down.values.tolist() != [0, 3, 6, 9]
        assert down.numpy().tolist() == [0, 3, 6, 9]
        assert device.waits == []


@pytest.mark.exhaustive
def test_graphs_and_steps_ahead_give_the_same_answers_and_wait_for_nothing(tiny_model: TinyModel) -> None:
    """By Triton's kernels: decoding and mixed steps, stops of all kinds, several choices, seeds and filters."""
    path, work = tiny_model("llama"), list(islice(plain_work(), 8))
    want = answers(load(path, "cpu"), work)
    with fake_cuda(fused_layers=True) as device:
        engine = load(path, "cuda")
        assert engine.attention_name == "triton"
        device.waits.clear()
        assert answers(engine, work) == want
        assert device.waits == []
        check_idle(engine)
        stats = engine.stats()
        assert stats.steps_recorded > stats.steps / 3
        assert stats.steps_ahead >= stats.steps - 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("phi3", marks=pytest.mark.exhaustive)])
def test_adapters_in_graphs_give_the_same_answers_and_wait_for_nothing(
    family: str, tiny_model: TinyModel, adapters: ModuleType, tmp_path: Path
) -> None:
    # Given adapters of other ranks and modules, one more than there are places, and the answers by torch's operators:
    path = tiny_model(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    every, some = (*adapters.ALL, "qkv_proj", "gate_up_proj"), ("q_proj", "v_proj", "qkv_proj", "down_proj")
    for i, (rank, modules) in enumerate([(4, every), (17, some), (2, every)]):
        adapters.make_adapter(model, tmp_path / f"a{i}", i, rank=rank, modules=modules)
    lora = LoraConfig(tuple((f"a{i}", str(tmp_path / f"a{i}")) for i in range(3)), max_loras=2)
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    names = ("a0", "a1", None, "a2", "a0", "a1", "a2")
    work = [
        Request(str(i), prompt(i, 3 + 5 * i % 17, shared=3), params, adapter=name, expected_tokens=1)
        for i, name in enumerate(names)
    ]
    without = [replace(request, adapter=None) for request in work]
    reference = load(path, "cpu", attention="paged-sdpa", lora=lora)
    want = answers(reference, work)
    assert all(one != other for one, other, name in zip(want, answers(reference, without), names, strict=True) if name)

    # when the kernels compute them, in steps that are recorded, launched, and ahead of their results,
    with fake_cuda() as device:
        engine = load(path, "cuda", attention="triton", lora=lora)
        device.waits.clear()
        device.launches.clear()
        got = answers(engine, work)

        # then the answers are the same, and the host waited for nothing, when adapters changed places, either.
        assert got == want
        assert device.waits == []
        assert {"_multiply_a", "_add_b"} < set(device.launches)
        check_idle(engine)
        stats = engine.stats()
        assert 0 < stats.steps_recorded < stats.steps
        assert stats.steps_ahead > 0
        # A row without an adapter is that of the model without adapters, to the bit.
        assert answers(engine, without) == answers(load(path, "cuda", attention="triton"), without)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "speculation"),
    [
        ("gemma3", "off"),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("llama", "ngram"), ("qwen3", "off"))),
    ],
)
def test_all_request_options_give_the_same_answers(family: str, speculation: Any, tiny_model: TinyModel) -> None:
    """Masks, penalties, log-probabilities, scored prompts; each family by torch's operators."""
    path, work = tiny_model(family), list(workload())
    want = answers(load(path, "cpu", attention="paged-sdpa"), work)
    with fake_cuda():
        engine = load(path, "cuda", attention="paged-sdpa", speculation=SpeculationConfig(speculation))
        assert answers(engine, work) == want
        check_idle(engine)


def preempting(path: Path, host_bytes: int | None, num_blocks: int = 14, **changes: Any) -> Engine:
    """An engine whose pool is too small for its rows."""
    return Engine.load(
        path,
        EngineConfig(
            dtype="float32", device="cuda", max_model_len=96, threads=1, max_graph_tokens=8,
            cache=CacheConfig(block_size=8, num_blocks=num_blocks, host_bytes=host_bytes),
            schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=24), **changes,
        ),
    )  # fmt: skip


def check_preempted(path: Path, work: list[Request], **changes: Any) -> None:
    """Preempted rows load their blocks from host memory, nothing waits for that, and the answers are the same."""
    with fake_cuda() as device:
        without = preempting(path, None, **changes)
        device.waits.clear()
        want = answers(without, work)
        waits = set(device.waits)
        engine = preempting(path, 1 << 20, **changes)
        device.waits.clear()
        assert answers(engine, work) == want
        assert set(device.waits) <= waits
        check_idle(engine)
        stats = engine.stats()
        assert stats.host_tier is not None
        assert stats.host_tier.hits > 0
        assert without.stats().preemptions > 0
        assert stats.recomputed < without.stats().recomputed
        assert (stats.steps_ahead > 0) == ("speculation" not in changes)
        assert (stats.steps_recorded > 0) == ("attention" not in changes)


def long_work(count: int) -> list[Request]:
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=1, ignore_eos=True)
    return [Request(str(i), prompt(i, 20 + i), params, expected_tokens=1) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention": "paged-sdpa"}),
        ("llama", {}),
        ("gemma3", {"attention": "paged-sdpa", "num_blocks": 20}),
        ("llama", {"attention": "paged-sdpa", "speculation": SpeculationConfig("ngram")}),
    ],
)
@pytest.mark.exhaustive
def test_preempted_rows_load_their_blocks_from_page_locked_memory(
    family: str, changes: dict[str, Any], tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_transfer, "BUFFER_BYTES", 1)  # a block at a time
    check_preempted(tiny_model(family), long_work(5), **changes)


@pytest.mark.exhaustive
def test_a_folder_of_blocks_is_written_and_read_and_nothing_waits_for_that(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path, prefix = tiny_model("llama"), prompt(1, 48)

    def answer(ends: tuple[int, ...], folder: Path | None) -> tuple[Engine, list[list[int]], list[list[str]]]:
        """The answers behind the prefix and each of these tokens, and what each waited for."""
        engine = Engine.load(
            path,
            EngineConfig(
                dtype="float32", device="cuda", attention="paged-sdpa", max_model_len=96, threads=1,
                cache=CacheConfig(16, num_blocks=60, tier_folder=None if folder is None else str(folder)),
                schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64),
            ),
            model_digest=lambda: "sha256:00",
        )  # fmt: skip
        found, waits = [], []
        for end in ends:
            device.waits.clear()
            params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0)
            (done,) = engine.run([Request(str(end), np.append(prefix, [end, end]).astype(np.int32), params)])
            found.append(done.choices[0].token_ids.tolist())
            waits.append(list(device.waits))
        engine.close()
        return engine, found, waits

    with fake_cuda() as device:
        _, expected, own_waits = answer((5, 6), None)
        _, stored, waits = answer((5, 6), tmp_path)
        assert (stored, waits) == (expected, own_waits)
        engine, loaded, waits = answer((6,), tmp_path)
        assert (loaded, waits) == (expected[1:], own_waits[1:])
        stats = engine.stats()
        assert stats.prompt == 2
        assert stats.tier is not None
        assert (stats.tier.hits, stats.tier.rejected) == (3, 0)


@pytest.mark.slow
def test_a_prompt_is_pooled(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    requests = [
        Request(mode, prompt(1, 40), SamplingParams(max_tokens=0), pooling=mode)  # type: ignore[arg-type]
        for mode in ("mean", "last", "cls", "max", "weightedmean", "mean_sqrt_len")
    ]
    want = {done.request_id: done.pooled for done in load(path, "cpu", attention="reference").run(requests)}
    with fake_cuda():
        for done in load(path, "cuda", attention="paged-sdpa").run(requests):
            np.testing.assert_allclose(done.pooled, want[done.request_id], atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantize",
    [
        "int8",
        pytest.param("int8-weight-only", marks=pytest.mark.exhaustive),
        pytest.param("int4", marks=pytest.mark.exhaustive),
        pytest.param("fp8", marks=[BY_ROWS, pytest.mark.exhaustive]),
    ],
)
def test_quantized_weights_are_multiplied_where_they_lie(quantize: str, tiny_model: TinyModel) -> None:
    path, work = tiny_model("llama"), list(islice(plain_work(), 2))
    want = answers(load(path, "cpu", attention="paged-sdpa", quantize=quantize), work)
    with fake_cuda() as device:
        engine = load(path, "cuda", attention="paged-sdpa", quantize=quantize)
        device.waits.clear()
        got = answers(engine, work)
        if quantize == "fp8":  # whose inputs are rounded on a device, and on a CPU are not
            assert [error for *_, error, _ in got] == [None, None]
        else:
            assert got == want
        assert set(device.waits) <= {"_to_copy"}, "torch's attention copies its ranges; nothing else waits"


@pytest.mark.parametrize("scale", [None, 0.03])
def test_int8_weights_with_int8_inputs_are_multiplied_as_they_are(scale: float | None) -> None:
    """Checkpoints of W8A8; outputs that are no multiple of 8 have no kernel, and are dequantized at load."""
    made = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (24, 32), generator=made, dtype=torch.int8)
    factors, x = torch.rand(24, 1, generator=made), torch.randn(3, 32, generator=made)
    weight = QWeight("int8", codes, 24, 32, 32, factors, activations=Activations("int8", scale))
    want = Int8Linear.of(codes, factors[:, 0], input_scale=scale)(x)
    with fake_cuda() as device:
        there = weight.to(DEVICE)
        kernel = fast_kernel(there, torch.bfloat16)
        assert kernel is not None
        assert kernel.name == "int8"
        device.waits.clear()
        device.recording = True
        got = kernel.prepare(there, None)(DeviceTensor(x))
        device.recording = False
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)
        assert fast_kernel(there.rows(0, 20), torch.bfloat16) is None
    with fake_cuda((7, 0)):
        assert fast_kernel(weight.to(DEVICE), torch.bfloat16) is None


def test_int8_weights_alone_go_through_the_small_product() -> None:
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    with fake_cuda():
        linear = int8_weight_only(weight.to(DEVICE))
        assert isinstance(linear, QuantizedLinear)
        assert linear.kernel.name == "triton"
        got = linear(torch.eye(32, device=DEVICE)).cpu()
    torch.testing.assert_close(got.t(), weight, rtol=0, atol=0.02)
    assert isinstance(int8_weight_only(weight), Int8WeightLinear)


@pytest.mark.slow
def test_attention_is_compiled_before_the_first_step(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """For layers with and without a window, whole and split, and with shared keys where there is no window."""
    compiled_for = ("QUERIES", "COLUMNS", "SPLIT", "WINDOW", "num_stages", "SHARED")
    launched: set[tuple[Any, ...]] = set()

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def launch(*args: Any, **kwargs: Any) -> Any:
                launched.add(tuple(kwargs[name] for name in compiled_for))
                return self._kernel[grid](*args, **kwargs)

            return launch

    with fake_cuda(), monkeypatch.context() as patch:  # undone before the fake device is
        patch.setattr(triton_paged, "attend_tiles", Recorded(triton_paged.attend_tiles))
        engine = load(tiny_model("gemma3"), "cuda", attention="triton", cuda_graphs=False)
        at_start = set(launched)
        launched.clear()
        request = Request("a", prompt(1, 9), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        assert [error for *_, error, _ in answers(engine, [request])] == [None]
        assert len(launched) == 4, "a chunk and a row, with and without a window"
        assert launched < at_start
        assert len(at_start) == 9


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4"])
@pytest.mark.exhaustive
def test_a_prefix_is_read_once_for_the_rows_that_share_it(
    family: str, graphs: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decoding steps and beside prompts, with graphs and without, by one launch more in each layer that sees all
    keys; steps of other rows have none."""
    monkeypatch.setattr(triton_paged, "LAUNCHES_BYTES", -(1 << 40))
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    work = [Request(str(i), prompt(i, 3 + 4 * i, shared=40 if i < 4 else 0), params) for i in range(6)]
    path = tiny_model(family)
    want = answers(load(path, "cpu", attention="paged-sdpa"), work)
    found: list[bool] = []
    filled: list[bool] = []
    find_shared = triton_paged.TritonPagedAttention.find_shared
    refill_shared = triton_paged.TritonPagedAttention.refill_shared

    def counted(self: Any, batch: Any) -> Any:
        shared = find_shared(self, batch)
        if self.can_share:
            found.append(shared is not None)
        return shared

    def fill(self: Any, step: Any, batch: Any, shared: Any) -> None:
        refill_shared(self, step, batch, shared)
        filled.append(shared is not None)

    monkeypatch.setattr(triton_paged.TritonPagedAttention, "find_shared", counted)
    monkeypatch.setattr(triton_paged.TritonPagedAttention, "refill_shared", fill)
    with fake_cuda() as device:
        engine = load(path, "cuda", cuda_graphs=graphs)
        device.launches.clear()
        device.waits.clear()
        found.clear()
        filled.clear()
        assert answers(engine, work) == want
        assert device.waits == []
        stats = engine.stats()
        assert (stats.steps_recorded > stats.steps / 2) == graphs
        assert len(found) == stats.steps
        assert 0.2 < sum(found) / len(found) < 0.8
        assert (sum(filled) > sum(found) / 2) == graphs
        layers = {"llama": 3, "gemma3": 2, "gemma4": 2}[family]
        assert device.launches.count("attend_shared") == layers * sum(found)
        assert device.launches.count("join_splits") == layers * sum(found)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_cache_is_stored_in_fp8(tiny_model: TinyModel) -> None:
    path, work = tiny_model("llama"), list(islice(plain_work(), 2))
    with fake_cuda(fused_layers=True) as device:
        engine = load(path, "cuda", kv_dtype="fp8")
        device.waits.clear()
        assert [error for *_, error, _ in answers(engine, work)] == [None, None]
        assert device.waits == []
        assert engine.stats().steps_recorded > 0


def test_memory_is_measured_before_the_cache_is_made(tiny_model: TinyModel) -> None:
    with fake_cuda():
        engine = Engine.load(
            tiny_model("llama"),
            EngineConfig(
                dtype="float32", device="cuda", attention="paged-sdpa", max_model_len=96,
                cache=CacheConfig(block_size=16, gpu_memory_utilization=0.05, sequences=2, tokens_per_sequence=64),
            ),
        )  # fmt: skip
        assert engine.stats().total_blocks == 10


@pytest.mark.parametrize("is_device_lost", [True, False])
def test_a_step_that_breaks_the_device_ends_the_engine_and_any_other_one_does_not(
    is_device_lost: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal address every call of the process fails: no row is to blame, and none would get through."""
    message = "CUDA error: an illegal memory access was encountered"
    with fake_cuda():
        engine = load(tiny_model("llama"), "cuda", attention="paged-sdpa")

        def fails(*arguments: Any) -> Any:
            raise RuntimeError(message)

        for request in islice(plain_work(), 2):
            engine.add(request)
        engine._runner.submit = fails  # type: ignore[attr-defined]
        if is_device_lost:
            monkeypatch.setattr(torch.cuda, "synchronize", fails)
        with pytest.raises(EngineError, match=message) as raised:
            engine.step()
        assert (raised.type is EngineLost) == is_device_lost
        monkeypatch.undo()


def test_a_tensor_left_on_the_host_fails_the_step(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in a step it is used."""
    with fake_cuda():
        engine = load(tiny_model("llama"), "cuda", attention="paged-sdpa")
        monkeypatch.setattr(PinnedTransfer, "up", lambda self, *arrays: tuple(map(torch.from_numpy, arrays)))
        with pytest.raises(Exception, match="tensors of the host and of the device together"):
            answers(engine, list(islice(plain_work(), 1)))


def test_the_device_is_gone_afterwards() -> None:
    with fake_cuda() as device:
        assert isinstance(device, FakeCuda)
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()
    assert type(torch.ones(2) + 1) is torch.Tensor


@pytest.mark.slow
def test_a_draw_is_one_launch_and_the_host_does_not_wait() -> None:
    """Besides the copy of the parameters to the device, and three small operations that pack the result."""
    params = [
        SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=2),
        SamplingParams(temperature=0.8, top_p=0.6, seed=3), SamplingParams(top_k=5, top_p=0.9, min_p=0.1, seed=4),
    ]  # fmt: skip
    rows = np.arange(len(params), dtype=np.int32)
    values = torch.randn(len(params), 300, generator=torch.Generator().manual_seed(3))

    def sampler_of(device: torch.device) -> Sampler:
        sampler = Sampler(len(params), 300, (), device)
        for row, each in enumerate(params):
            sampler.assign(row, Request(str(row), as_token_ids([1]), each), 0, as_token_ids([1]), 1)
        return sampler

    want = sampler_of(torch.device("cpu")).sample(values.clone(), rows, rows, rows)
    with fake_cuda(fused_draws=True) as device:
        sampler, there = sampler_of(DEVICE), values.to(DEVICE)
        device.waits.clear()
        device.launches.clear()
        packed = sampler.draw(there, rows, rows, rows)
        assert device.waits == []
        assert device.launches == ["_to_copy", "_draw_rows", "_to_copy", "_to_copy", "stack"]
        assert sampler.unpack(packed.cpu().numpy(), rows).token_ids.tolist() == want.token_ids.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.exhaustive) for family in ("gemma3",))]
)
def test_exported_blocks_are_copied_beside_the_steps_and_continued_by_another_engine(
    family: str, tiny_model: TinyModel
) -> None:
    path, work = tiny_model(family), long_work(4)

    def exchanging() -> Engine:
        config = EngineConfig(
            dtype="float32", device="cuda", max_model_len=96, threads=1, attention="paged-sdpa",
            cache=CacheConfig(block_size=8, num_blocks=60, exchange_bytes=1 << 24),
            schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=24),
        )  # fmt: skip
        return Engine.load(path, config, model_digest=lambda: "sha256:00")

    with fake_cuda() as device:
        want = answers(exchanging(), work)
        prefill, decode = exchanging(), exchanging()
        assert prefill.block_exchange is not None
        assert decode.block_exchange is not None
        for request in work:
            prefill.add(request)
        exported, handed_over = [], []
        while len(handed_over) < len(work):
            prefill.step()
            for request in work:
                if request.request_id not in [one.request_id for one in handed_over] and (
                    begun := prefill.partial(request)
                ):
                    device.waits.clear()
                    exported += prefill.block_exchange.export_blocks(request.request_id)
                    assert not device.waits, "neither the host nor a step waits for the copies"
                    prefill.cancel(request.request_id)
                    handed_over.append(replace(request, partial=begun))
        decode.block_exchange.import_blocks([(block.key, block.content()) for block in exported])
        assert answers(decode, handed_over) == want
        stats = decode.stats()
        assert stats.imported is not None
        assert stats.imported.hits == len(exported)
        assert stats.prompt < 8 * len(work)
        while prefill.has_work:
            prefill.step()
        check_idle(prefill)
        check_idle(decode)
