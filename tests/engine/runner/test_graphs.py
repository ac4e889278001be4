"""Steps that take a graph: the same answers as steps that don't.

The graphs here run again what was recorded, on the same buffers and into memory that all of them share, so a buffer
that was not filled anew, a row that was not padded or a hidden state that was read too late shows in the answers. What
only fills a shape is NaN as soon as attention has seen it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig
from engine.attention import AttentionBatch, KVLayout
from engine.attention.by_shape import attention_by_shape
from engine.attention.choice import _TORCH_BACKENDS as BACKENDS
from engine.attention.reference import ReferenceAttention, ReferenceStep
from engine.errors import EngineError, EngineLost
from engine.models.base import KVShape
from engine.plan import CacheGroup
from engine.runner.buckets import NO_SLOT, GraphBuckets, GraphShape, decode_sizes, mixed_sizes, padded
from engine.runner.graphs import CudaRecorder, Graphs, make_graphs
from tests.engine.runner.test_async_loop import answers, plain_work, prompt, workload

TinyModel = Callable[[str], Path]


class FakeRecorder:
    """Records by storing the function, and replays it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._shared: Tensor | None = None

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        first = run()
        self.sizes.append(len(first))
        if self._shared is None:
            self._shared = torch.empty_like(first)
        shared = self._shared[: len(first)]

        def replay() -> Tensor:
            out = run()
            assert self._shared is not None
            self._shared.fill_(float("nan"))
            return shared.copy_(out)

        return replay


class PoisonedPadding(ReferenceAttention):
    """The oracle, which leaves NaN where no sequence has a token."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, step: ReferenceStep,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = super().attend(layer, q, k, v, scale, step, sinks)
        out[int(step.batch.counts.sum()) :] = float("nan")
        return out


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    made = FakeRecorder()
    monkeypatch.setattr("engine.runner.graphs.make_recorder", lambda device: made)
    monkeypatch.setitem(BACKENDS, "reference", PoisonedPadding)
    return made


def load(
    path: Path, graphs: bool | None, *, rows: int = 5, tokens: int = 24, blocks: int = 90, **changes: Any
) -> Engine:
    settings: dict[str, Any] = {"attention": "reference", "max_graph_tokens": 16, **changes}
    return Engine.load(
        path,
        EngineConfig(
            dtype="float32", threads=1, max_model_len=96, cuda_graphs=graphs,
            cache=CacheConfig(block_size=4, num_blocks=blocks),
            schedule=ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=tokens), **settings,
        ),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_graph_gives_the_same_answers(
    family: str, ahead: bool, recorder: FakeRecorder, tiny_model: TinyModel
) -> None:
    """Decode steps, mixed ones, windows, preemption; scored and pooled prompts and larger steps run without."""
    path = tiny_model(family)
    for work, blocks in ((plain_work, 30), (workload, 90)):
        want = answers(load(path, False), list(work()))
        engine = load(path, True, blocks=blocks, async_scheduling=ahead)
        assert answers(engine, list(work())) == want
        stats = engine.stats()
        assert stats.steps / 3 < stats.steps_recorded < stats.steps
        assert blocks == 90 or stats.preemptions > 0


@pytest.mark.slow
def test_it_does_with_the_triton_kernels(recorder: FakeRecorder, tiny_model: TinyModel) -> None:
    pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    requests = [Request(str(i), prompt(i, length, shared=5), params) for i, length in enumerate((9, 7, 2))]
    path = tiny_model("gemma3")
    want = answers(load(path, False, rows=2), requests)
    engine = load(path, True, rows=2, attention="triton", async_scheduling=True, max_graph_tokens=8, device=device)
    assert answers(engine, requests) == want
    assert 3 < engine.stats().steps_recorded < engine.stats().steps


def test_the_largest_is_recorded_first_and_all_at_the_start(recorder: FakeRecorder, tiny_model: TinyModel) -> None:
    engine = load(tiny_model("llama"), True)
    assert recorder.sizes == [16, 5, 4, 2, 1]
    shapes = GraphBuckets(5, 24, 16).shapes
    assert [shape.tokens for shape in shapes] == recorder.sizes
    list(engine.run(plain_work()))
    assert len(recorder.sizes) == 5


def test_scored_or_pooled_rows_use_no_graph(recorder: FakeRecorder, tiny_model: TinyModel) -> None:
    engine = load(tiny_model("llama"), True)
    score = Request("score", prompt(1, 9), SamplingParams(max_tokens=0, prompt_logprobs=1))
    pool = Request("pool", prompt(1, 9), SamplingParams(max_tokens=0), pooling="mean")
    want = load(tiny_model("llama"), False)
    pooled = [next(iter(one.run([pool]))).pooled for one in (engine, want)]
    np.testing.assert_array_equal(pooled[0], pooled[1])
    assert answers(engine, [score]) == answers(want, [score])
    assert engine.stats().steps_recorded == 0
    list(engine.run([Request("a", prompt(2, 5), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))]))
    assert engine.stats().steps_recorded == 4


def test_a_device_without_graphs_raises_an_error(recorder: FakeRecorder, tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    with pytest.raises(EngineError, match="attention 'paged-sdpa' has no fixed places for its ranges"):
        load(path, True, attention="paged-sdpa")
    with pytest.raises(EngineError, match="the model's forward pass looks at its input on the host"):
        load(tiny_model("gpt2"), True)
    with pytest.raises(ValueError, match="max_graph_tokens is 0"):
        load(path, None, max_graph_tokens=0)
    assert recorder.sizes == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device with graphs")
def test_a_cpu_has_none(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    for attention in ("auto", "reference"):
        with pytest.raises(EngineError, match=r"^cuda_graphs needs a CUDA device, not cpu; leave it out$"):
            load(path, True, attention=attention)
    assert load(path, None).stats().steps_recorded == 0


@pytest.mark.parametrize("shapes", [(), (KVShape(1, 8), KVShape(1, 16))], ids=["one shape", "two"])
def test_on_a_cuda_device_the_oracle_is_launched_without_graphs(
    shapes: tuple[KVShape, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runner.graphs.make_recorder", lambda device: None)
    groups = tuple(CacheGroup((layer,), None, 4) for layer in range(len(shapes) or 1))
    layout = KVLayout(groups, block_size=4, num_kv_heads=1, head_dim=8, shapes=shapes)
    make = partial(ReferenceAttention, dtype=torch.float32, device=torch.device("cpu"))
    oracle = attention_by_shape(layout, make) if shapes else make(layout)
    model: Any = SimpleNamespace(recordable=True)

    assert make_graphs(EngineConfig(), model, oracle, 4, torch.device("cuda")) is None
    with pytest.raises(EngineError, match="attention 'reference' reads its ranges on the host"):
        make_graphs(EngineConfig(cuda_graphs=True), model, oracle, 4, torch.device("cuda"))


def test_a_forward_pass_that_can_not_be_recorded_names_its_size(
    monkeypatch: pytest.MonkeyPatch, tiny_model: TinyModel
) -> None:
    class Refuses:
        def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("engine.runner.graphs.make_recorder", lambda device: Refuses())
    with pytest.raises(
        EngineError,
        match="steps of 16 tokens can't be recorded as a graph; leave graphs out with cuda_graphs=false: op",
    ):
        load(tiny_model("llama"), True)


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("no room")])
def test_where_graphs_were_not_requested_an_engine_starts_without_them(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a CUDA device whose library or driver can't record graphs."""

    def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise error

    monkeypatch.setattr("engine.runner.graphs.make_recorder", lambda device: SimpleNamespace(record=record))
    layout = KVLayout((CacheGroup((0,), None, 4),), block_size=4, num_kv_heads=1, head_dim=8)
    attention = PoisonedPadding(layout, torch.float32, torch.device("cpu"))
    model: Any = SimpleNamespace(recordable=True)
    monkeypatch.setattr(attention, "name", "not the oracle")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **rest: torch.empty(*size, **rest).zero_())

    assert make_graphs(EngineConfig(), model, attention, 4, torch.device("cuda")) is None
    assert str(error) in capsys.readouterr().out
    with pytest.raises(EngineError, match=str(error)):
        make_graphs(EngineConfig(cuda_graphs=True), model, attention, 4, torch.device("cuda"))


def test_an_engine_whose_ranks_are_lost_does_not_start_without_graphs(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*arguments: Any) -> Graphs:
        raise EngineLost("the engine lost a rank")

    layout = KVLayout((CacheGroup((0,), None, 4),), block_size=4, num_kv_heads=1, head_dim=8)
    attention = PoisonedPadding(layout, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(attention, "name", "not the oracle")
    model: Any = SimpleNamespace(recordable=True)
    with pytest.raises(EngineLost):
        make_graphs(EngineConfig(), model, attention, 4, torch.device("cuda"), lose)


class SharesAtWill(ReferenceAttention):
    """The oracle, which finds what a test says, and logs how it is filled."""

    can_share = True

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout, torch.float32, torch.device("cpu"))
        self.found: Any = None
        self.filled: list[tuple[int, Any]] = []
        self.reserve_shared = self.reserve

    def find_shared(self, batch: AttentionBatch) -> Any:
        return self.found

    def refill_shared(self, step: ReferenceStep, batch: AttentionBatch, shared: Any) -> None:
        self.filled.append((len(step.slots[0]), shared))
        super().refill(step, batch)

    def refill(self, step: ReferenceStep, batch: AttentionBatch) -> None:
        self.filled.append((len(step.slots[0]), "plain"))
        super().refill(step, batch)


@pytest.mark.parametrize("here", ["a prefix", None])
@pytest.mark.parametrize("there", ["a prefix", None])
def test_another_ranks_choice_of_a_graph_decides_its_size(here: str | None, there: str | None) -> None:
    """Collective operations of different sizes would wait for ever, or sum what doesn't belong together."""
    layout = KVLayout((CacheGroup((0,), None, 4),), block_size=4, num_kv_heads=1, head_dim=8)
    model: Any = SimpleNamespace(forward=lambda ids, positions, attend, lengths: (ids * 10.0 + positions)[:, None])
    buckets, ids = GraphBuckets(6, 24, 16, shared=True), torch.arange(1, 3)
    ones = np.ones(2, dtype=np.int32)
    batch = AttentionBatch(ones, ones, 2, (np.ones((2, 2), np.int32),), (np.arange(2),))
    ranks = []
    for found in (here, there):
        attention = SharesAtWill(layout)
        graphs = Graphs(model, attention, buckets, 2, FakeRecorder(), torch.device("cpu"))
        for shape in graphs.shapes:
            graphs.record(shape)
        attention.found = found
        attention.filled.clear()
        ranks.append((graphs, attention))
    (leader, own), (other, others) = ranks
    shape = leader.pick(rows=2, num_tokens=2, num_decodes=2)
    assert shape is not None
    chosen = shape if here is None else buckets.sharing(shape)
    assert chosen.tokens == (2 if here is None else 4)
    wanted = leader.forward(shape, ids, ids, batch)
    assert own.filled == [(chosen.tokens, "plain" if here is None else here)]
    assert other.replay_chosen(other.shapes.index(chosen), ids, ids, batch).tolist() == wanted.tolist()
    assert others.filled == [(chosen.tokens, "plain" if here is None else there)]


@pytest.mark.parametrize("most", [1, 3, 8, 100, 128, 300, 1000, 4096])
def test_sizes_go_up_to_the_most_and_waste_little(most: int) -> None:
    for sizes in (decode_sizes(most), mixed_sizes(most)):
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
        for below, size in pairwise(sizes):
            assert size - below <= max(8, size / 4)


def test_large_batches_have_sixteen_shapes_for_a_doubling() -> None:
    for rows, count in ((256, 35), (1024, 67), (4096, 99)):
        assert len(decode_sizes(rows)) == count
    assert decode_sizes(4096)[-3:] == [3840, 3968, 4096]


def test_the_smallest_shape_that_holds_a_step() -> None:
    buckets = GraphBuckets(20, 64, 40)
    assert buckets.pick(rows=3, num_tokens=3, num_decodes=3) == GraphShape(4, 4, 4, False)
    assert buckets.pick(rows=20, num_tokens=20, num_decodes=20) == GraphShape(20, 20, 20, False)
    assert buckets.pick(rows=3, num_tokens=17, num_decodes=2) == GraphShape(20, 21, 20, True)
    assert buckets.pick(rows=1, num_tokens=41, num_decodes=0) is None


def test_a_mixed_shape_has_no_more_sequences_than_tokens_and_one_of_padding() -> None:
    buckets = GraphBuckets(1024, 8192, 2048)
    assert buckets.pick(rows=3, num_tokens=17, num_decodes=2) == GraphShape(20, 21, 20, True)
    assert buckets.pick(rows=900, num_tokens=1800, num_decodes=2) == GraphShape(2048, 1025, 1024, True)


def test_decoding_steps_of_any_number_of_rows_have_a_shape() -> None:
    buckets = GraphBuckets(1024, 8192, 512)
    assert buckets.pick(rows=1000, num_tokens=1000, num_decodes=1000) == GraphShape(1024, 1024, 1024, False)
    assert buckets.pick(rows=1000, num_tokens=1001, num_decodes=999) is None


@pytest.mark.parametrize("max_rows", [2, 5, 40, 128, 300, 4096])
def test_each_shape_has_one_that_shares_prefixes(max_rows: int) -> None:
    buckets, plain = (GraphBuckets(max_rows, 8192, 512, shared=shared) for shared in (True, False))
    assert [shape for shape in buckets.shapes if not shape.shared] == plain.shapes
    largest = buckets.shapes[0]
    for shape in plain.shapes:
        sharing = buckets.sharing(shape)
        assert sharing.shared
        assert sharing.mixed == shape.mixed
        assert shape.tokens <= sharing.tokens <= largest.tokens
        assert shape.sequences <= sharing.sequences
        assert shape.mixed or shape.tokens < 4 or sharing.tokens < 2 * shape.tokens
        assert not shape.mixed or sharing.tokens == max(64, shape.tokens)
    assert len(buckets.shapes) < 2 * len(plain.shapes)
    assert not any(shape.shared for shape in GraphBuckets(1, 1024, 512, shared=True).shapes)


def test_all_graphs_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    captured: list[tuple[object, object]] = []

    def make_stream(device: torch.device) -> SimpleNamespace:
        made.append(SimpleNamespace(wait_stream=lambda other: None))
        return made[-1]  # type: ignore[return-value]

    def capture(graph: object, *, pool: object, stream: object, **_: object) -> nullcontext[None]:
        captured.append((pool, stream))
        return nullcontext()

    fakes: dict[str, Any] = {
        "Stream": make_stream, "current_stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
        "stream": lambda stream: nullcontext(), "synchronize": lambda device: None, "graph": capture,
        "CUDAGraph": SimpleNamespace, "graph_pool_handle": lambda: "the pool",
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorder = CudaRecorder(torch.device("cuda", 0))
    for size in (4, 2, 1):
        recorder.record(partial(torch.zeros, size))

    assert len(made) == 1
    assert captured == [("the pool", made[0])] * 3


def test_padding_has_no_tokens_no_keys_and_no_slot() -> None:
    ints = np.array([3, 0], dtype=np.int32)
    batch = AttentionBatch(ints, np.array([1, 2], dtype=np.int32), 1, (np.ones((2, 3), np.int32),), (np.arange(3),))
    whole = padded(batch, GraphShape(5, 4, 3, True))
    assert whole.starts.tolist() == [3, 0, 0, 0]
    assert whole.counts.tolist() == [1, 2, 0, 0]
    assert whole.block_tables[0].tolist() == [[1] * 3, [1] * 3, [0] * 3, [0] * 3]
    assert whole.slot_mapping[0].tolist() == [0, 1, 2, NO_SLOT, NO_SLOT]
    assert whole.num_decodes == 1
