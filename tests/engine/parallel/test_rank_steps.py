"""Two ranks with steps ahead and with graphs: the answers of eager steps, and the same graphs on both."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig
from engine.config import LoraConfig
from engine.errors import EngineError, EngineLost
from engine.parallel.messages import Done, DropGraphs, RecordGraph
from engine.parallel.rank import RankWorker
from engine.parallel.rank_group import RankGroupProcesses
from engine.runner.buckets import GraphBuckets
from tests.adapter_files import make_adapter
from tests.engine.parallel import rank_with_recorder
from tests.engine.parallel.rank_with_recorder import fake_device, recorder_of
from tests.engine.runner.test_async_loop import answers, check_idle, plain_work, prompt, workload
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

TinyModel = Callable[[str], Path]


def ranks(size: int = 2, device: str = "cpu") -> RankGroupProcesses:
    return RankGroupProcesses(size, torch.device(device), threads=size, timeout=HANG_SECONDS)


@pytest.fixture(scope="module")
def rank_group() -> Iterator[RankGroupProcesses]:
    made = ranks()
    yield made
    made.close()


def load(path: Path, rank_group: RankGroupProcesses | None, *, blocks: int = 90, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"max_graph_tokens": 16, "attention": "reference", **changes}
    config = EngineConfig(
        dtype="float32", threads=1, max_model_len=96, tensor_parallel=1 if rank_group is None else rank_group.size,
        cache=CacheConfig(block_size=4, num_blocks=blocks),
        schedule=ScheduleConfig(max_num_seqs=5, max_num_batched_tokens=24), **settings,
    )  # fmt: skip
    return Engine.load(path, config, rank_group)


def logged_logits(engine: Engine) -> list[bytes]:
    """The bits of each step's logits, from now on."""
    model, found = engine._runner._inner._model, []  # type: ignore[attr-defined]
    logits = model.logits

    def logged(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = logits(hidden)
        found.append(out.numpy().tobytes())
        return out

    model.logits = logged
    return found


def equal_lengths() -> list[Request]:
    """Greedy and sampled requests that have rows at once and end by their lengths: steps ahead are the same steps."""
    return [
        Request(
            str(i), prompt(i, 3 + 5 * i % 23, shared=9 if i % 3 else 0),
            SamplingParams(max_tokens=8 + 5 * i, temperature=0.9 * (i % 2), seed=i, ignore_eos=True),
        )
        for i in range(5)
    ]  # fmt: skip


def test_steps_ahead_compute_the_bits_of_eager_steps(rank_group: RankGroupProcesses, tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    eager = load(path, rank_group)
    eager_logits = logged_logits(eager)
    want = answers(eager, equal_lengths())
    ahead = load(path, rank_group, async_scheduling=True)
    ahead_logits = logged_logits(ahead)
    assert answers(ahead, equal_lengths()) == want
    assert len(eager_logits) > 10
    assert ahead_logits == eager_logits
    assert ahead.stats().steps_ahead >= ahead.stats().steps - 2
    assert eager.stats().steps_ahead == 0


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.exhaustive)])
def test_steps_ahead_give_the_answers_of_one_process(
    family: str, rank_group: RankGroupProcesses, tiny_model: TinyModel
) -> None:
    """Stops of all kinds, preemption, several choices, masks, penalties, log-probabilities and scored prompts."""
    path = tiny_model(family)
    for work, blocks in ((plain_work, 30), (workload, 90)):
        want = answers(load(path, None), list(work()))
        engine = load(path, rank_group, blocks=blocks, async_scheduling=True)
        assert answers(engine, list(work())) == want
        assert blocks == 90 or engine.stats().preemptions > 0
        assert engine.stats().steps_ahead > 0
        check_idle(engine)


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Processes of ranks that record graphs on a CPU; this one's events."""
    monkeypatch.setattr("engine.parallel.rank_group.RANK_MODULE", rank_with_recorder.MODULE)
    monkeypatch.setenv(rank_with_recorder.EVENTS, str(tmp_path / "events"))
    found: list[str] = []
    with recorder_of(found):
        yield found


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_each_rank_records_and_replays_the_leaders_graphs(
    ahead: bool, events: list[str], tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("llama")
    want = answers(load(path, None), list(plain_work()))
    events.clear()
    rank_group = ranks()
    try:
        engine = load(path, rank_group, blocks=30, cuda_graphs=True, async_scheduling=ahead)
        assert [event for event in events if event.startswith("record")] == [f"record {n}" for n in (16, 5, 4, 2, 1)]
        assert answers(engine, list(plain_work())) == want
        stats = engine.stats()
        assert stats.steps / 3 < stats.steps_recorded < stats.steps
        assert stats.preemptions > 0
        assert (stats.steps_ahead > 0) == ahead
        assert sum(event.startswith("replay") for event in events) == stats.steps_recorded
        assert sum(event.startswith("refill") for event in events) == stats.steps_recorded + 5
        assert (tmp_path / "events").read_text().splitlines() == events
    finally:
        rank_group.close()


@pytest.mark.parametrize("who", ["the leader", "rank 1"])
@pytest.mark.exhaustive
def test_where_a_rank_can_not_capture_no_rank_has_graphs(
    who: str, events: list[str], tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all are in step, so that another engine can compute with them."""
    path = tiny_model("llama")
    want = answers(load(path, None), list(plain_work()))
    monkeypatch.setenv(rank_with_recorder.FAILURE, "after 3" if who == "rank 1" else "")
    rank_group = ranks()
    sent: list[Any] = []
    send = rank_group.send
    monkeypatch.setattr(rank_group, "send", lambda message, **to: (sent.append(message), send(message, **to)))
    try:
        with recorder_of(events, "" if who == "rank 1" else "after 3"):
            said = "rank 1: EngineError: " if who == "rank 1" else ""
            with pytest.raises(EngineError, match=rf"^{said}steps of 4 tokens can't be recorded as a graph; leave gr"):
                load(path, rank_group, cuda_graphs=True)
        assert events[-1] == "record 4"
        assert sent[-2:] == [RecordGraph(2), DropGraphs()]
        engine = load(path, rank_group, cuda_graphs=False)
        assert answers(engine, list(plain_work())) == want
        assert engine.stats().steps_recorded == 0
    finally:
        rank_group.close()


def test_a_rank_drops_its_graphs() -> None:
    group: Any = SimpleNamespace(device=torch.device("cpu"))
    worker, graphs = RankWorker(group), SimpleNamespace(shapes=[None], record=lambda shape: None)
    worker._graphs = graphs  # type: ignore[assignment]
    assert worker.execute(RecordGraph(0)) == Done()
    assert worker.execute(DropGraphs()) is None
    with pytest.raises(AssertionError, match="graphs are made before they are recorded"):
        worker.execute(RecordGraph(0))


@pytest.mark.parametrize("who", ["the leader", "rank 1"])
@pytest.mark.exhaustive
def test_a_rank_that_fails_while_the_others_wait_for_its_part_ends_the_engine(
    who: str, events: list[str], tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rank_with_recorder.FAILURE, "before 2" if who == "rank 1" else "")
    rank_group = ranks()
    with recorder_of(events, "" if who == "rank 1" else "before 2"):
        said = "rank 1: OutOfMemory: " if who == "rank 1" else "OutOfMemory: "
        with pytest.raises(EngineLost, match=rf"the engine lost a rank: {said}no memory is left to record graphs of 5"):
            load(tiny_model("llama"), rank_group, cuda_graphs=True)
    assert not any(Path(f"/proc/{pid}").exists() for pid in rank_group.pids)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.exhaustive
def test_a_rank_that_is_killed_between_steps_ahead_ends_the_engine(
    graphs: bool, events: list[str], tiny_model: TinyModel
) -> None:
    rank_group = ranks()
    engine = load(tiny_model("llama"), rank_group, cuda_graphs=graphs, async_scheduling=True)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    for i in range(8):  # some wait for a row
        engine.add(Request(str(i), prompt(i, 9), params))
    for _ in range(4):
        engine.step()
    assert engine.stats().steps_ahead > 0
    (pid,) = rank_group.pids
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EngineLost, match=rf"rank 1 \(process {pid}\) was killed by SIGKILL"):
            engine.step()


@pytest.mark.exhaustive
def test_the_last_step_ahead_gives_no_tokens_when_a_rank_died_meanwhile(tiny_model: TinyModel) -> None:
    """No other step is sent, so that only the check of its results can find it."""
    rank_group = ranks()
    engine = load(tiny_model("llama"), rank_group, async_scheduling=True)
    engine.add(Request("a", prompt(1, 9), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))
    assert engine.step() == []
    assert engine.stats().steps_ahead == 1
    (rank,) = rank_group._ranks
    rank.process.kill()
    rank.process.wait()
    with pytest.raises(EngineLost, match="was killed by SIGKILL"):
        engine.step()


def test_a_step_ahead_that_raises_on_one_rank_ends_the_engine_with_its_reason(
    events: list[str], tiny_model: TinyModel
) -> None:
    """Though the results of the step before are waited for after that."""
    engine = load(tiny_model("llama"), rank_group := ranks(), cuda_graphs=True, async_scheduling=True)
    engine.add(Request("a", prompt(1, 9), SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    graphs = engine._runner._inner._graphs  # type: ignore[attr-defined]
    graphs._numbers = dict.fromkeys(graphs.shapes, len(graphs))  # which the other rank doesn't have
    with pytest.raises(EngineLost, match="the engine lost a rank: rank 1: IndexError: tuple index out of range"):
        engine.step()
    assert not any(Path(f"/proc/{pid}").exists() for pid in rank_group.pids)


@pytest.mark.exhaustive
def test_four_ranks_replay_the_same_graphs_ahead(events: list[str], tiny_models: Any, tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("llama", tmp_path / "model", num_attention_heads=4, num_key_value_heads=4)
    want = answers(load(path, None), list(plain_work()))
    four = ranks(4)
    try:
        engine = load(path, four, cuda_graphs=True, async_scheduling=True)
        assert answers(engine, list(plain_work())) == want
        assert engine.stats().steps_recorded > engine.stats().steps / 3
    finally:
        four.close()


@pytest.mark.exhaustive
def test_on_cuda_devices_steps_are_ahead_and_replay_graphs_where_all_ranks_have_them(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fake ones, with Triton's kernels in their interpreter: on each rank, nothing that is recorded needs the host. The
    other rank can't record the second engine's second graph."""
    pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")
    path, work = tiny_model("llama"), list(islice(plain_work(), 4))
    want = answers(load(path, None), work)
    refused = len(GraphBuckets(5, 24, 8, shared=True).shapes) + 2
    monkeypatch.setattr("engine.parallel.rank_group.RANK_MODULE", rank_with_recorder.MODULE)
    monkeypatch.setenv(rank_with_recorder.DEVICE, "cuda")
    monkeypatch.setenv(rank_with_recorder.FAILURE, str(refused))
    with fake_device() as device:
        rank_group = ranks(device="cuda")
        try:
            for graphs in (True, False):
                engine = load(path, rank_group, device="cuda", attention="auto", max_graph_tokens=8)
                assert engine.attention_name == "triton"
                device.waits.clear()
                assert answers(engine, work) == want
                assert device.waits == []
                stats = engine.stats()
                assert (stats.steps_recorded > stats.steps / 3) == graphs
                assert stats.steps_ahead >= stats.steps - 2
            assert stats.steps_recorded == 0
            assert "rank 1: EngineError: steps of" in capsys.readouterr().out
        finally:
            rank_group.close()


@pytest.mark.exhaustive
def test_on_cuda_devices_graphs_add_each_ranks_shard_of_the_steps_adapters(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")
    path = tiny_model("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for n in range(3):
        make_adapter(model, tmp_path / f"a{n}", n, rank=2 + 7 * n)
    lora = LoraConfig(tuple((f"a{n}", str(tmp_path / f"a{n}")) for n in range(3)), max_loras=2)
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    names = (None, "a0", "a1", "a2", "a0")
    work = [Request(str(n), prompt(n, 3 + 4 * n, 0), params, adapter=name) for n, name in enumerate(names)]
    want = answers(load(path, None, lora=lora), work)
    monkeypatch.setattr("engine.parallel.rank_group.RANK_MODULE", rank_with_recorder.MODULE)
    monkeypatch.setenv(rank_with_recorder.DEVICE, "cuda")
    with fake_device() as device:
        rank_group = ranks(device="cuda")
        try:
            engine = load(path, rank_group, device="cuda", attention="triton", max_graph_tokens=8, lora=lora)
            device.waits.clear()
            assert answers(engine, work) == want
            assert device.waits == []
            stats = engine.stats()
            assert 0 < stats.steps_recorded < stats.steps
        finally:
            rank_group.close()
