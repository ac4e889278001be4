"""Stages of a pipeline answer as one process does: the same tokens at float32, however steps are divided.

One pair of processes, two stages, serves most of the file; each test loads its own model into it. The models have five
layers, so that the division is uneven.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, SpeculationConfig
from engine import as_token_ids as ids
from engine.errors import EngineError, EngineLost, UnsupportedModel
from engine.parallel.leader import _measured
from engine.parallel.messages import Forward
from engine.parallel.rank_group import RankGroupProcesses
from tests.engine.oracle import engine_answers, make_prompts
from tests.engine.parallel import rank_with_recorder
from tests.engine.parallel.rank_with_recorder import fake_device
from tests.engine.parallel.test_two_ranks import (
    CUT,
    FAMILIES,
    MAX_TOKENS,
    PLAIN,
    all_tokens,
    alone,
    settings_of,
    weights_for,
)
from tests.engine.quant.packing import pack_gptq, write
from tests.engine.runner.test_async_loop import answers, check_idle, plain_work, workload
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

SOONER = ("llama", "gemma3", "latent attention")

STAGED = {**FAMILIES, "norms over all heads, which ranks of a layer can't share": ("olmoe", {})}

REFUSED = ("gemma4, inputs of layers, and layers without keys",)
"""`test_pipeline` tests these."""


def ranks(size: int, stages: int) -> RankGroupProcesses:
    return RankGroupProcesses(size, torch.device("cpu"), threads=size, timeout=HANG_SECONDS, stages=stages)


@pytest.fixture(scope="module")
def two_stages() -> Iterator[RankGroupProcesses]:
    made = ranks(2, 2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(seed=11, count=14, vocab_size=250, shared=40, longest=90)


@pytest.fixture
def five_layers(tiny_models: Any, tmp_path: Path) -> Path:
    path: Path = tiny_models.make_tiny_model("llama", tmp_path / "model", num_hidden_layers=5)
    return path


def staged(path: Path, rank_group: RankGroupProcesses, setting: Any = PLAIN, **changes: Any) -> Engine:
    stages = rank_group.groups.num_stages
    given = {"tensor_parallel": rank_group.size // stages, "pipeline_parallel": stages, "micro_batches": 3, **changes}
    return Engine.load(path, setting.config(max_model_len=256, **given), rank_group)


@pytest.fixture
def sent(two_stages: RankGroupProcesses, monkeypatch: pytest.MonkeyPatch) -> list[Forward]:
    """The steps that are sent to the second stage."""
    found: list[Forward] = []
    send = two_stages.send

    def logged(message: Any, **to: Any) -> None:
        if isinstance(message, Forward):
            found.append(message)
        send(message, **to)

    monkeypatch.setattr(two_stages, "send", logged)
    return found


@pytest.mark.parametrize("micro_batches", [None, 1, 3])
def test_two_stages_answer_as_one_process_does(
    micro_batches: int | None,
    two_stages: RankGroupProcesses,
    sent: list[Forward],
    prompts: list[list[int]],
    five_layers: Path,
) -> None:
    """With chunks, preemption and hits in the prefix cache."""
    wanted = all_tokens(engine_answers(alone(five_layers), prompts, MAX_TOKENS))
    engine = staged(five_layers, two_stages, CUT, micro_batches=micro_batches)
    assert all_tokens(engine_answers(engine, prompts, MAX_TOKENS, expected_tokens=1)) == wanted
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached > 0
    assert stats.free_blocks == stats.total_blocks
    counts = [len(forward.ends) for forward in sent]
    assert max(counts) == (micro_batches or 1), "24 tokens are computed as fast at once"
    assert sum(counts) > len(counts) or micro_batches != 3
    assert len({tuple(tokens) for tokens in wanted}) > len(prompts) // 2, "answers must depend on the prompts"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each in SOONER else pytest.mark.exhaustive)
        for each in STAGED
        if each not in REFUSED
    ],
)
def test_every_family_answers_in_stages_as_one_process_does(
    name: str, two_stages: RankGroupProcesses, prompts: list[list[int]], tiny_models: Any, tmp_path: Path
) -> None:
    family, changes = STAGED[name]
    path = tiny_models.make_tiny_model(family, tmp_path / "model", **changes)
    wanted = all_tokens(engine_answers(alone(path), prompts, MAX_TOKENS))
    engine = staged(path, two_stages, CUT)
    assert all_tokens(engine_answers(engine, prompts, MAX_TOKENS, expected_tokens=1)) == wanted
    assert engine.stats().cached > 0


@pytest.mark.parametrize(
    ("size", "stages"),
    [
        pytest.param(4, 2, id="two stages of two", marks=pytest.mark.exhaustive),
        pytest.param(4, 4, id="four", marks=pytest.mark.exhaustive),
    ],
)
def test_four_ranks_answer_as_one_process_does(
    size: int, stages: int, prompts: list[list[int]], five_layers: Path, tiny_models: Any, tmp_path: Path
) -> None:
    """The layers of four stages are 1, 1, 1 and 2, or of two windows one each, so that stages lack one of them. Stages
    of two ranks have parts of experts."""
    other = tiny_models.make_tiny_model("gemma3-softcap" if stages == 4 else "glm4-moe-grouped", tmp_path / "other")
    four = ranks(size, stages)
    try:
        for path in (five_layers, other):
            wanted = all_tokens(engine_answers(alone(path), prompts, MAX_TOKENS))
            engine = staged(path, four, CUT, micro_batches=4)
            assert all_tokens(engine_answers(engine, prompts, MAX_TOKENS, expected_tokens=1)) == wanted
    finally:
        four.close()


@pytest.mark.parametrize("work", [plain_work, workload])
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_all_kinds_of_requests_are_answered_alike(
    work: Callable[[], Any], ahead: bool, two_stages: RankGroupProcesses, five_layers: Path
) -> None:
    """Greedy and sampled, stops of all kinds, several choices, masks, penalties, log-probabilities, scored prompts."""
    config = EngineConfig(
        dtype="float32", threads=1, max_model_len=96, attention="reference", async_scheduling=ahead,
        cache=CacheConfig(block_size=4, num_blocks=90),
        schedule=ScheduleConfig(max_num_seqs=5, max_num_batched_tokens=24),
    )  # fmt: skip
    want = answers(Engine.load(five_layers, config), list(work()))
    engine = Engine.load(five_layers, replace(config, pipeline_parallel=2, micro_batches=3), two_stages)
    assert answers(engine, list(work())) == want
    assert (engine.stats().steps_ahead > 0) == ahead
    check_idle(engine)


@pytest.mark.exhaustive
def test_weights_in_activation_order_need_no_division(
    two_stages: RankGroupProcesses, prompts: list[list[int]], tiny_models: Any, tmp_path: Path
) -> None:
    """Which ranks that share a layer refuse."""
    folder, packed = weights_for(tiny_models, tmp_path / "plain"), tmp_path / "packed"
    settings = {**settings_of("gptq"), "desc_act": True}
    write(folder, packed, settings, lambda _, weight: pack_gptq(weight, shuffled=True))
    wanted = all_tokens(engine_answers(alone(packed), prompts, MAX_TOKENS))
    assert all_tokens(engine_answers(staged(packed, two_stages), prompts, MAX_TOKENS)) == wanted


def test_rows_that_share_blocks_in_one_step_are_answered_alike(
    two_stages: RankGroupProcesses, sent: list[Forward], five_layers: Path
) -> None:
    """Each of the first steps has a row that writes a prompt's blocks, and rows with one token behind them, which come
    first in the step."""
    prompts = [[3 + at % 7, *range(20, 52)] for at in range(3) for _ in range(4)]
    setting = replace(PLAIN, block_size=16, prefix_caching=True)
    wanted = all_tokens(engine_answers(alone(five_layers, setting), prompts, MAX_TOKENS))
    engine = staged(five_layers, two_stages, setting, micro_batches=12)
    assert all_tokens(engine_answers(engine, prompts, MAX_TOKENS)) == wanted
    assert engine.stats().cached > 0
    assert any(forward.batch.num_decodes and len(forward.batch.counts) > forward.batch.num_decodes for forward in sent)


def test_drafted_tokens_do_not_change_answers(two_stages: RankGroupProcesses, five_layers: Path) -> None:
    prompts = [[5, 6, 7, 8] * 12, [9, 10, 11] * 9]
    wanted = all_tokens(engine_answers(alone(five_layers), prompts, 24))
    engine = staged(five_layers, two_stages, speculation=SpeculationConfig("ngram"))
    assert all_tokens(engine_answers(engine, prompts, 24)) == wanted
    assert engine.stats().speculation.sources["ngram"].num_drafted > 0


def test_pooled_states_are_the_same(
    two_stages: RankGroupProcesses, prompts: list[list[int]], five_layers: Path
) -> None:
    params = SamplingParams(max_tokens=0, temperature=0.0)
    requests = [Request(str(i), ids(p), params, pooling="mean") for i, p in enumerate(prompts[:5])]
    engines = alone(five_layers), staged(five_layers, two_stages, CUT)
    one, two = ({done.request_id: done.pooled for done in engine.run(requests)} for engine in engines)
    for name, wanted in one.items():
        got = two[name]
        assert wanted is not None
        assert got is not None
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_each_stage_holds_its_layers_and_no_more(
    two_stages: RankGroupProcesses, tiny_models: Any, tmp_path: Path
) -> None:
    """The first stage: two of five layers, embedding and head."""
    path = tiny_models.make_tiny_model(
        "llama", tmp_path / "large", vocab_size=4_000, hidden_size=384, intermediate_size=1536, num_hidden_layers=5
    )
    engine = staged(path, two_stages, PLAIN)
    runner = engine._runner._inner  # type: ignore[attr-defined]
    own, storage = runner._model.own, runner._attention.inner.storage
    assert len(own._layers) == 2
    assert [layer for layer, keys in enumerate(storage.keys) if keys.numel()] == [0, 1]
    layer = 4 * (2 * 384 * 384 + 2 * 384 * 192 + 3 * 384 * 1536)  # bytes
    resident = runner._model.resident[1]
    assert 2.6 * layer < resident < 3.6 * layer, f"{resident} bytes, {layer} a layer"


def test_the_memory_limit_is_the_total_of_all_stages(two_stages: RankGroupProcesses, five_layers: Path) -> None:
    config = EngineConfig(
        dtype="float32", max_model_len=64, cache=CacheConfig(memory_bytes=1 << 20, prefix_caching=False)
    )
    one = Engine.load(five_layers, config)
    two = Engine.load(five_layers, replace(config, pipeline_parallel=2), two_stages)
    # Each has memory in proportion to its layers.
    assert two.stats().total_blocks == one.stats().total_blocks


def test_all_stages_compute_the_largest_step_together(
    two_stages: RankGroupProcesses, prompts: list[list[int]], five_layers: Path
) -> None:
    """As on GPUs before the cache is made; the stages are synchronized afterwards."""
    engine = staged(five_layers, two_stages)
    own = engine._runner._inner._model.own  # type: ignore[attr-defined]
    uses = _measured(own, EngineConfig(schedule=ScheduleConfig(5, 70)), two_stages)
    assert len(uses) == 2
    wanted = all_tokens(engine_answers(alone(five_layers), prompts[:3], MAX_TOKENS))
    assert all_tokens(engine_answers(engine, prompts[:3], MAX_TOKENS)) == wanted


@pytest.mark.exhaustive
def test_on_cuda_devices_steps_are_ahead_and_no_stage_waits_for_its_device(
    five_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake ones, with Triton's kernels in their interpreter. There are no graphs."""
    pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")
    config = EngineConfig(
        dtype="float32", threads=1, max_model_len=96, cache=CacheConfig(block_size=4, num_blocks=90),
        schedule=ScheduleConfig(max_num_seqs=5, max_num_batched_tokens=24),
    )  # fmt: skip
    work = list(islice(plain_work(), 4))
    want = answers(Engine.load(five_layers, replace(config, attention="reference")), work)
    monkeypatch.setattr("engine.parallel.rank_group.RANK_MODULE", rank_with_recorder.MODULE)
    monkeypatch.setenv(rank_with_recorder.DEVICE, "cuda")
    with fake_device() as device:
        size, kind = 2, torch.device("cuda")
        rank_group = RankGroupProcesses(size, kind, threads=size, timeout=HANG_SECONDS, stages=2)
        try:
            config = replace(config, device="cuda", pipeline_parallel=2, micro_batches=2)
            engine = Engine.load(five_layers, config, rank_group)
            assert engine.attention_name == "triton"
            device.waits.clear()
            assert answers(engine, work) == want
            assert device.waits == []
            stats = engine.stats()
            assert stats.steps_ahead >= stats.steps - 2
            assert stats.steps_recorded == 0
        finally:
            rank_group.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel": 0}, "pipeline_parallel is 0, but must be 1 or more"),
        ({"pipeline_parallel": 2, "micro_batches": 0}, "micro_batches is 0, but must be 1 or more"),
        ({"micro_batches": 2}, "micro_batches is set, but pipeline_parallel is 1"),
        ({"pipeline_parallel": 2, "expert_parallel": True}, r"expert_parallel doesn't run under pipeline par.* \(2 st"),
        ({"pipeline_parallel": 2, "cuda_graphs": True}, "cuda_graphs doesn't run under pipeline parallelism"),
        ({"pipeline_parallel": 2, "max_graph_tokens": 64}, "max_graph_tokens is set, but graphs don't run under pipel"),
        ({"pipeline_parallel": 2, "kv_dtype": "int8"}, "don't run under pipeline parallelism"),
        ({"pipeline_parallel": 2, "speculation": SpeculationConfig("draft", "x")}, "speculate 'draft' doesn't run und"),
        ({"pipeline_parallel": 2, "cache": CacheConfig(host_bytes=1 << 20)}, "doesn't run under pipeline parallelism"),
    ],
)
def test_settings_that_stages_can_not_follow_are_refused(changes: Any, message: str, five_layers: Path) -> None:
    with pytest.raises(EngineError, match=message):
        Engine.load(five_layers, EngineConfig(**changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 1}, "1 layers can't be divided into 2 stages"),
        ("phi", {}, "phi models are computed by transformers' code, which can't be shared"),
    ],
)
def test_models_that_can_not_be_divided_are_refused_when_they_are_loaded(
    family: str, changes: Any, message: str, two_stages: RankGroupProcesses, tiny_models: Any, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        staged(tiny_models.make_tiny_model(family, tmp_path / "model", **changes), two_stages)


def test_a_step_in_which_a_stage_dies_gives_no_tokens(five_layers: Path) -> None:
    """No stage waits for it: not those that it sends to, either."""
    rank_group = ranks(2, 2)
    engine = staged(five_layers, rank_group)
    for name in "abc":
        params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
        engine.add(Request(name, ids([3, 4, 5]), params))
    engine.step()
    (pid,) = rank_group.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=rf"rank 1 \(process {pid}\) was killed by SIGKILL"):
        engine.step()


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_stage_of_four_is_named(victim: int, five_layers: Path) -> None:
    four = ranks(4, 4)
    engine = staged(five_layers, four)
    for name in "abc":
        params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
        engine.add(Request(name, ids([3, 4, 5]), params))
    engine.step()
    pid = four.pids[victim]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=rf"rank {victim + 1} \(process {pid}\) was killed by SIGKILL"):
        engine.step()
    assert not any(Path(f"/proc/{pid}").exists() for pid in four.pids)


@pytest.mark.exhaustive
def test_a_stage_that_hangs_ends_the_engine_when_its_time_is_over(five_layers: Path) -> None:
    rank_group = RankGroupProcesses(2, torch.device("cpu"), threads=2, timeout=8, stages=2)
    engine = staged(five_layers, rank_group)
    engine.add(Request("a", ids([3, 4, 5]), SamplingParams(max_tokens=50, temperature=0.0)))
    engine.step()
    (pid,) = rank_group.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineLost, match=r"the engine lost a rank: .*[Tt]im"):
        engine.step()
    assert not Path(f"/proc/{pid}").exists()
