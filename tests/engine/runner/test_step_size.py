"""The size of a step on a CUDA device: chosen by memory and model, given, and halved where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.config import SloConfig
from engine.errors import EngineLost, OutOfMemory
from engine.models.base import KVShape, ModelSpec
from engine.parallel import leader
from engine.parallel.messages import Done, Failed, Loaded
from engine.parallel.pipeline import stage_specs
from engine.runner.device_memory import MemoryUse, choose_for_device
from engine.runner.memory import sequence_bytes
from engine.runner.step_size import StepSize, choose_step_size, fit_step_size, with_step_size
from engine.states import StateShape
from tests.engine.runner.fake_cuda import DEVICE, compiler, fake_cuda

GIB = 1 << 30
H200, H100, A100, A10G, T4 = 139.8, 79.1, 79.3, 22.1, 14.6
CAPABILITIES = {H200: (9, 0), H100: (9, 0), A100: (8, 0), A10G: (8, 6), T4: (7, 5)}


def shape(layers: int, kv_heads: int, head_dim: int, hidden: int, vocab: int, parameters: float) -> ModelSpec:
    return ModelSpec(
        "llama", layers, hidden // head_dim, kv_heads, head_dim, hidden, vocab, 131_072, (None,) * layers, (2,),
        int(parameters), torch.bfloat16,
    )  # fmt: skip


SMOL_135M = shape(30, 3, 64, 576, 49_152, 134.5e6)
LLAMA_1B = shape(16, 8, 64, 2048, 128_256, 1.24e9)
LLAMA_8B = shape(32, 8, 128, 4096, 128_256, 8.03e9)
LLAMA_70B = shape(80, 8, 128, 8192, 128_256, 70.6e9)
QWEN_30B_A3B = ModelSpec(
    "qwen3-moe", 48, 32, 4, 128, 2048, 151_936, 40_960, (None,) * 48, (2,), 30_500_000_000, torch.bfloat16,
    num_active_parameters=3_300_000_000,
)  # fmt: skip


def chosen(device: float, spec: ModelSpec, bytes_per_parameter: float = 2.0, **given: Any) -> StepSize:
    """On a device of so many GiB, of which nine tenths are used."""
    free = device * 0.9 * GIB - spec.num_parameters * bytes_per_parameter
    return choose_step_size(spec, int(device * GIB), int(free), capability=CAPABILITIES[device], **given)


@pytest.mark.parametrize(
    ("device", "spec", "bytes_per_parameter", "rows", "tokens", "graph_tokens"),
    [
        (H200, SMOL_135M, 2, 4096, 16384, 4096),
        (H100, SMOL_135M, 2, 2048, 16384, 4096),
        (A10G, SMOL_135M, 2, 1024, 16384, 4096),
        (T4, SMOL_135M, 2, 512, 16384, 2048),
        (H100, LLAMA_1B, 2, 1024, 16384, 4096),
        (A10G, LLAMA_1B, 2, 256, 4096, 512),
        (T4, LLAMA_1B, 2, 128, 2048, 512),
        (H200, LLAMA_8B, 2, 2048, 8192, 1024),
        (H100, LLAMA_8B, 2, 1024, 8192, 1024),
        (A100, LLAMA_8B, 2, 1024, 2048, 512),
        (A10G, LLAMA_8B, 2, 128, 2048, 512),
        (A10G, LLAMA_8B, 0.6, 256, 2048, 512),
        (T4, LLAMA_8B, 0.6, 128, 2048, 512),
        (H200, LLAMA_70B, 1, 512, 2048, 512),
        (H100, LLAMA_70B, 1, 128, 2048, 512),
        (H100, QWEN_30B_A3B, 2, 256, 8192, 4096),
    ],
)
def test_the_size_follows_from_memory_and_model(
    device: float, spec: ModelSpec, bytes_per_parameter: float, rows: int, tokens: int, graph_tokens: int
) -> None:
    assert chosen(device, spec, bytes_per_parameter) == (rows, tokens, graph_tokens)


@pytest.mark.parametrize(
    ("device", "spec", "rows", "tokens"),
    [
        (H100, SMOL_135M, 2048, 16384),
        (H100, LLAMA_1B, 1024, 16384),
        (A100, LLAMA_1B, 1024, 8192),
        (A10G, LLAMA_1B, 256, 2048),
        (H200, LLAMA_8B, 1024, 2048),
        (H100, LLAMA_8B, 1024, 2048),
        (H200, QWEN_30B_A3B, 1024, 8192),
    ],
)
def test_steps_are_shorter_where_streams_have_an_objective(
    device: float, spec: ModelSpec, rows: int, tokens: int
) -> None:
    size = chosen(device, spec, step_seconds=0.1)
    assert (size.rows, size.tokens) == (rows, tokens)
    peak = {H200: 990e12, H100: 990e12, A100: 312e12, A10G: 70e12}[device]
    assert 2 * (spec.num_active_parameters or spec.num_parameters) * tokens / (0.6 * peak) < 0.13


def test_planned_work_and_a_given_cache_change_the_rows() -> None:
    assert chosen(H200, LLAMA_70B, 1, sequence_tokens=4096).rows == 128
    assert chosen(H100, QWEN_30B_A3B, 2, sequence_tokens=128).rows == 256, "no more logits"
    assert chosen(A100, LLAMA_8B, cache_bytes=4 * GIB).rows == 128


def test_ranks_share_the_work_of_a_step() -> None:
    part = shape(80, 2, 128, 8192, 128_256, 70.6e9)
    free = int(H200 * 0.9 * GIB - 70.6e9 / 4)
    assert choose_step_size(part, int(H200 * GIB), free, ranks=4) == (2048, 4096, 1024)


def test_a_sequence_takes_its_windows_and_its_states() -> None:
    spec = ModelSpec(
        "mixed", 3, 4, 2, 8, 32, 100, 1000, (None, 16, None), (2,), 1, torch.bfloat16,
        states=((), (), (StateShape((4, 8), torch.float32),)), kv_shapes=(KVShape(2, 8), KVShape(1, 16), KVShape(2, 8)),
    )  # fmt: skip
    assert sequence_bytes(spec, 100) == 100 * 2 * 2 * 8 * 2 + 16 * 2 * 16 * 2 + 3 * 4 * 8 * 4
    assert sequence_bytes(spec, 100, "fp8") == 100 * 2 * 2 * (8 + 4) + 16 * 2 * (16 + 4) + 3 * 4 * 8 * 4


def test_given_limits_are_never_changed() -> None:
    size = StepSize(1024, 8192, 2048)
    config = with_step_size(EngineConfig(schedule=ScheduleConfig(300)), size)
    assert (config.schedule.rows, config.schedule.tokens, config.graph_tokens) == (300, 8192, 2048)
    config = with_step_size(EngineConfig(schedule=ScheduleConfig(None, 500), max_graph_tokens=64), size)
    assert (config.schedule.rows, config.schedule.tokens, config.graph_tokens) == (500, 500, 64)
    config = with_step_size(EngineConfig(schedule=ScheduleConfig(needed_seqs=48)), size)
    assert (config.schedule.rows, config.schedule.tokens) == (48, 8192)


class Memory:
    """A device on which steps of more than so many tokens, or rows, do not fit."""

    def __init__(self, tokens: int, rows: int = 1 << 30) -> None:
        self.tokens, self.rows, self.tried = tokens, rows, list[tuple[int, int]]()

    def plan(self, config: EngineConfig) -> str:
        schedule = config.schedule
        self.tried.append((schedule.rows, schedule.tokens))
        if schedule.tokens > self.tokens or schedule.rows > self.rows:
            raise OutOfMemory(f"{schedule.tokens} tokens are too many; lower max_num_batched_tokens or max_num_seqs")
        return "planned"


def test_a_chosen_size_that_does_not_fit_is_halved_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    memory = Memory(3000)
    config, planned = fit_step_size(EngineConfig(), StepSize(1024, 8192, 512), memory.plan)
    assert planned == "planned"
    assert memory.tried == [(1024, 8192), (512, 4096), (256, 2048)]
    assert (config.schedule.rows, config.schedule.tokens) == (256, 2048)
    logged = capsys.readouterr().out
    assert logged.count("the step does not fit the device, and is halved") == 2
    assert "rows=512 tokens=4096" in logged
    assert "graph_tokens=512 rows=256 tokens=2048" in logged


@pytest.mark.parametrize(
    ("schedule", "memory", "tried"),
    [
        (ScheduleConfig(1024), Memory(tokens=2048), [(1024, 8192), (1024, 4096), (1024, 2048)]),
        (ScheduleConfig(None, 8192), Memory(tokens=8192, rows=300), [(1024, 8192), (512, 8192), (256, 8192)]),
    ],
)
def test_only_the_limit_that_was_chosen_is_halved(
    schedule: ScheduleConfig, memory: Memory, tried: list[tuple[int, int]]
) -> None:
    fit_step_size(EngineConfig(schedule=schedule), StepSize(1024, 8192, 512), memory.plan)
    assert memory.tried == tried


def test_given_limits_that_do_not_fit_are_an_error() -> None:
    memory = Memory(2048)
    with pytest.raises(OutOfMemory, match="lower max_num_batched_tokens"):
        fit_step_size(EngineConfig(schedule=ScheduleConfig(64, 4096)), StepSize(1024, 8192, 512), memory.plan)
    assert memory.tried == [(64, 4096)]


@pytest.mark.parametrize(
    ("cache", "last"), [(CacheConfig(), (32, 128)), (CacheConfig(memory_bytes=1 << 30), (4096, 16384))]
)
def test_halving_ends(cache: CacheConfig, last: tuple[int, int]) -> None:
    """With a cache of a given size it would not help: what the step leaves is not the cache's."""
    memory = Memory(1)
    with pytest.raises(OutOfMemory, match=f"{last[1]} tokens are too many"):
        fit_step_size(EngineConfig(cache=cache), StepSize(4096, 16384, 512), memory.plan)
    assert memory.tried[-1] == last


needs_fake_cuda = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
    pytest.mark.skipif(compiler() is None, reason="NOT TESTED HERE: a fake CUDA device; there is no C++ compiler"),
]


class TestOnADevice:
    pytestmark = needs_fake_cuda

    def load(self, path: Path, schedule: ScheduleConfig, **changes: Any) -> Engine:
        return Engine.load(
            path,
            EngineConfig(
                dtype="float32", device="cuda", attention="paged-sdpa", max_model_len=96, schedule=schedule,
                cache=CacheConfig(block_size=16, sequences=2, tokens_per_sequence=64), **changes,
            ),
        )  # fmt: skip

    @pytest.mark.slow
    def test_an_engine_has_the_size_that_is_chosen_for_the_device(
        self, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with fake_cuda():
            engine = self.load(tiny_model("llama"), ScheduleConfig())
            assert engine.max_num_seqs == 4096
            assert (engine.config.schedule.tokens, engine.config.graph_tokens) == (16384, 4096)
            assert "graph_tokens=4096 rows=4096 tokens=16384" in capsys.readouterr().out
            params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            (done,) = engine.run([Request("a", as_token_ids([3, 4, 5]), params)])
            assert len(done.choices[0].token_ids) == 2

    @pytest.mark.parametrize(
        ("config", "given", "want"),
        [
            (EngineConfig(), {}, (1024, 8192)),
            (EngineConfig(schedule=ScheduleConfig(slo=SloConfig())), {}, (1024, 2048)),
            (EngineConfig(schedule=ScheduleConfig(slo=SloConfig(itl_seconds=0.2))), {}, (1024, 4096)),
            (EngineConfig(cache=CacheConfig(tokens_per_sequence=4096)), {}, (128, 8192)),
            (EngineConfig(cache=CacheConfig(memory_bytes=8 * GIB)), {}, (256, 8192)),
            (EngineConfig(cache=CacheConfig(memory_bytes=8 * GIB)), {"ranks": 2}, (128, 16384)),
            (EngineConfig(cache=CacheConfig(memory_bytes=60 * GIB)), {}, (128, 2048)),
            (EngineConfig(cache=CacheConfig(tokens_per_sequence=4096)), {"kv_dtype": "fp8"}, (256, 8192)),
            (EngineConfig(), {"free_bytes": 14 * GIB}, (128, 2048)),
            (EngineConfig(cache=CacheConfig(gpu_memory_utilization=0.3)), {}, (128, 2048)),
        ],
    )
    @pytest.mark.slow
    def test_settings_and_free_memory_change_the_choice(
        self, config: EngineConfig, given: dict[str, Any], want: tuple[int, int]
    ) -> None:
        with fake_cuda():
            size = choose_for_device(config, LLAMA_8B, DEVICE, **{"free_bytes": 64 * GIB, **given})
        assert (size.rows, size.tokens) == want

    @pytest.mark.slow
    def test_a_start_that_does_not_fit_is_tried_with_half(
        self, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engine.runner.device_memory.largest_step", self.step_of_at_most(5000))
        with fake_cuda():
            engine = self.load(tiny_model("llama"), ScheduleConfig())
            assert (engine.max_num_seqs, engine.config.schedule.tokens) == (1024, 4096)
            with pytest.raises(OutOfMemory, match=r"16384 tokens and 9 rows does not fit .* lower max_num_b"):
                self.load(tiny_model("llama"), ScheduleConfig(9, 16384))

    @pytest.mark.parametrize("stages", [1, 2])
    def test_the_leader_chooses_for_all_ranks_by_the_one_with_the_least_memory(
        self, stages: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What they measure is the size that the leader then has; it is halved until the cache gets something."""
        measured: list[tuple[int, int]] = []
        groups = SimpleNamespace(device=DEVICE, num_stages=stages, stage=SimpleNamespace(size=2 // stages))
        group = SimpleNamespace(groups=groups, size=2, send=lambda message: None, receive_all=lambda: [Done()])

        def measure(own: object, config: EngineConfig, ranks: object) -> list[MemoryUse]:
            measured.append((config.schedule.rows, config.schedule.tokens))
            peak = (64 if config.schedule.tokens > 2048 else 20) * GIB
            return [MemoryUse(80 * GIB, 0, 20 * GIB), MemoryUse(80 * GIB, 10 * GIB, peak)]

        specs = stage_specs(LLAMA_8B, stages)
        share = SimpleNamespace(spec=specs[0], whole=LLAMA_8B, stage_specs=specs)
        loaded = [Loaded(60 * GIB, 0), Loaded(24 * GIB, 0)]
        monkeypatch.setattr(leader, "_load_shares", lambda *arguments: (share, loaded))
        monkeypatch.setattr(leader, "_measured", measure)
        monkeypatch.setattr(leader, "make_backend", lambda *arguments: SimpleNamespace(name="triton"))
        with fake_cuda():
            made = leader._load(Path("model"), EngineConfig(max_model_len=4096), torch.bfloat16, group)  # type: ignore[arg-type]
        assert measured == [(256, 4096), (128, 2048)]
        assert (made.config.schedule.rows, made.config.schedule.tokens) == (128, 2048)

    def test_a_rank_that_ran_out_of_memory_is_not_asked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has ended, so half of the step can't be tried."""
        failed = Failed("OutOfMemory: a step of 8192 tokens does not fit; lower max_num_batched_tokens")
        group = SimpleNamespace(
            groups=SimpleNamespace(device=DEVICE), send=lambda message: None, receive_all=lambda: [failed],
            collective=nullcontext,
        )  # fmt: skip
        monkeypatch.setattr(leader, "measure", lambda *arguments: MemoryUse(1, 1, 1))
        with pytest.raises(EngineLost, match=r"rank 1: .* lower max_num_batched_tokens"):
            leader._measured(None, EngineConfig(), group)  # type: ignore[arg-type]

    def step_of_at_most(self, tokens: int) -> Callable[..., None]:
        def largest_step(model: object, schedule: ScheduleConfig, device: torch.device) -> None:
            assert device == DEVICE
            if schedule.tokens > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory")

        return largest_step


def test_on_a_cpu_the_size_is_constant(tiny_model: Callable[[str], Path]) -> None:
    engine = Engine.load(tiny_model("llama"), EngineConfig(dtype="float32", device="cpu", max_model_len=96, threads=1))
    assert engine.max_num_seqs == 128
    assert (engine.config.schedule.tokens, engine.config.graph_tokens) == (2048, 512)
