"""`attention auto` on a CUDA device: what was measured there decides. Libraries are stand-ins with planted times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from engine import CacheConfig, Engine, EngineConfig, ScheduleConfig
from engine.attention import AttentionChoice, choice, choose_attention, measured
from engine.attention.flash import LIBRARIES, version_of
from engine.models.base import KVShape, ModelSpec
from tests.engine.attention.test_flash import flash2_varlen, flash_attn_with_kvcache, module, varlen_attn
from tests.engine.runner.fake_cuda import DEVICE, DeviceTensor, compiler, fake_cuda, host_tensor
from tests.engine.runner.test_async_loop import answers, plain_work

pytest.importorskip("triton", reason="NOT TESTED HERE: a fake CUDA device; triton is not installed")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
    pytest.mark.skipif(compiler() is None, reason="NOT TESTED HERE: a fake CUDA device; there is no C++ compiler"),
]

FUNCTIONS = {
    "flash2": ("flash_attn_varlen_func", flash2_varlen),
    "flash3": ("flash_attn_with_kvcache", flash_attn_with_kvcache),
    "torch-varlen": ("varlen_attn", varlen_attn),
}
SPEC = ModelSpec(
    architecture="tiny", num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64, vocab_size=100,
    max_position=128, windows=(None, 8, 8, None), eos_token_ids=(), num_parameters=1, dtype=torch.float16,
)  # fmt: skip
ROWS = 4
SLOW, FAST, FASTEST = 1e-3, 5e-4, 2e-4
Compute = Callable[..., Tensor]


@dataclass
class Installed:
    """Stand-ins of libraries on the fake device.

    Attributes:
        has_triton: it is the reference, in its interpreter, which takes a second; else torch's operators are.
        seconds: by name, of a layer's decoding and of its prompts.
        called: names, in order; the reference is none of them.
        timed: number of times that were asked for.
    """

    folder: Path
    has_triton: bool = False
    seconds: dict[str, tuple[float, float]] = field(default_factory=lambda: {"reference": (SLOW, SLOW)})
    called: list[str] = field(default_factory=list)
    timed: int = 0
    modules: dict[str, ModuleType] = field(default_factory=dict)

    def add(self, name: str, decode: float, prompt: float, spoil: Callable[[Tensor], Tensor] = lambda out: out) -> None:
        """Install a library that computes by definition, in these times; `spoil` modifies its results."""
        function, by_definition = FUNCTIONS[name]

        @wraps(by_definition)
        def compute(*args: Any, **kwargs: Any) -> Tensor:
            self.called.append(name)
            args, kwargs = tuple(map(_on_host, args)), {key: _on_host(value) for key, value in kwargs.items()}
            return DeviceTensor(spoil(by_definition(*args, **kwargs).half()))

        self.seconds[name] = (decode, prompt)
        self.modules[name] = module(**{function: compute})

    def time(self, call: Callable[[], Tensor], device: torch.device) -> float:
        self.timed += 1
        before = len(self.called)
        decodes = len(call()) == ROWS
        name = self.called[-1] if len(self.called) > before else "reference"
        return self.seconds[name][0 if decodes else 1]

    def choose(self, name: str = "auto", spec: ModelSpec = SPEC, **options: Any) -> AttentionChoice:
        """Choose on the fake device, and forget the calls before."""
        self.called.clear()
        self.timed = 0
        return choose_attention(name, spec, spec.dtype, DEVICE, **options)

    @property
    def file(self) -> Path:
        """Of the measurements."""
        (file,) = self.folder.iterdir()
        return file


def _on_host(value: Any) -> Any:
    there = host_tensor(value)
    return there.float() if isinstance(there, Tensor) and there.is_floating_point() else there


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    made = Installed(tmp_path / "cache")
    monkeypatch.setenv("TOKENMILL_NATIVE_CACHE", str(made.folder))
    sizes = {"CONTEXT": 32, "DECODE_ROWS": ROWS, "PROMPT_ROWS": 2, "PROMPT_TOKENS": 12}
    for name, value in sizes.items():
        monkeypatch.setattr(measured, name, value)
    monkeypatch.setattr(measured, "device_seconds", made.time)

    def find(name: str) -> Any:
        def find_installed(download: bool) -> Any:
            assert not download, "it was searched for before"
            return (made.modules[name], f"{name} 1.0") if name in made.modules else None

        return find_installed

    libraries = {name: replace(library, find=find(name)) for name, library in LIBRARIES.items()}
    monkeypatch.setattr(choice, "LIBRARIES", libraries)
    monkeypatch.setattr(choice, "find_spec", lambda name: None if name == "triton" and not made.has_triton else name)
    with fake_cuda():
        yield made


def refusals(logs: Any) -> dict[str, str]:
    return {log["backend"]: log["reason"] for log in logs if log["event"] == "an attention backend is left out"}


@pytest.mark.slow
def test_the_fastest_one_is_chosen_with_its_module_and_block_size(installed: Installed) -> None:
    installed.has_triton = True
    for name, seconds in (("flash2", FASTEST), ("flash3", FAST), ("torch-varlen", FAST)):
        installed.add(name, seconds, seconds)
    with capture_logs() as logs:
        chosen = installed.choose()
    assert chosen == AttentionChoice("flash2", 256, (installed.modules["flash2"], "flash2 1.0"))
    assert not refusals(logs)
    (log,) = (log for log in logs if "microseconds" in log["event"])
    assert log["flash3"] == [round(4 * 1e6 * FAST)] * 2, "of all four layers"
    installed.file.unlink()
    installed.seconds |= dict.fromkeys(("flash2", "flash3", "torch-varlen"), (SLOW, SLOW))
    assert installed.choose() == AttentionChoice("triton", 32)


@pytest.mark.parametrize(
    ("decode", "prompt", "launch", "has_graphs", "chosen"),
    [
        (0.5, 0.5, 0.0, True, "flash3"),
        (0.5, 0.5, 0.75, True, "triton"),  # graphs save more than attention takes: two layers are launched
        (0.5, 0.5, 0.25, True, "flash3"),  # launches are hidden behind attention
        (0.5, 0.5, 0.75, False, "flash3"),  # neither has graphs
        (1.0, 0.5, 0.6, True, "flash3"),
        (0.5, 1.0, 0.6, True, "triton"),
        (1.1, 0.85, 0.0, True, "triton"),  # little less on the whole
    ],
)
def test_one_without_graphs_pays_for_launches_in_decoding(
    decode: float, prompt: float, launch: float, has_graphs: bool, chosen: str
) -> None:
    reference = measured.AttentionTimes("triton", 1.0, 1.0, has_graphs, None)
    others = [
        measured.AttentionTimes("flash2", 0.0, 0.0, False, "its results are wrong"),
        measured.AttentionTimes("torch-varlen", 1.0, 1.2, False, None),
        measured.AttentionTimes("flash3", decode, prompt, False, None),
    ]
    assert measured.fastest([reference, *others], 2, launch) == chosen
    assert measured.fastest([reference, others[0]], 2, launch) == "triton"


def _raise(out: Tensor) -> Tensor:
    raise TypeError("flash_attn_varlen_func() got an unexpected keyword argument 'block_table'\nand more")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_raise, "TypeError: flash_attn_varlen_func() got an unexpected keyword argument 'block_table'"),
        (lambda out: out.roll(1, 0), "EngineError: its results are wrong"),
        (lambda out: out.index_fill(0, torch.tensor([1]), float("nan")), "EngineError: its results are wrong"),
        (lambda out: out * 1.02, "EngineError: its results are wrong"),
        (lambda out: out * 1.001, None),
    ],
)
@pytest.mark.slow
def test_one_that_raises_or_is_wrong_is_left_out_by_name(
    spoil: Callable[[Tensor], Tensor], reason: str | None, installed: Installed
) -> None:
    installed.add("flash2", FASTEST, FASTEST, spoil)
    installed.add("flash3", FAST, FAST)
    for _ in range(2):  # measured, then read
        with capture_logs() as logs:
            chosen = installed.choose()
        assert chosen.name == ("flash2" if reason is None else "flash3")
        assert refusals(logs) == ({} if reason is None else {"flash2": reason})


def test_an_error_of_the_reference_is_not_hidden(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed.add("flash2", FAST, FAST)
    monkeypatch.setattr("engine.attention.paged_sdpa.PagedSdpaAttention.prepare", lambda *_: _raise(torch.ones(1)))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        installed.choose()
    assert not installed.folder.exists()


@pytest.mark.slow
def test_what_was_measured_is_read_again(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed.add("flash2", FAST, FAST)
    first = installed.choose()
    assert installed.timed == 2 * 2 * 2, "two backends, steps and windows"
    assert (installed.choose(), installed.timed, installed.called) == (first, 0, [])
    # Whatever makes a difference is measured.
    assert installed.choose(spec=replace(SPEC, windows=(None,) * 4)).name == "flash2"
    assert installed.timed == 2 * 2
    installed.add("flash3", FASTEST, FASTEST)
    assert installed.choose().name == "flash3"
    monkeypatch.setattr(choice, "version_of", lambda found: "2.0")
    installed.choose()
    assert installed.timed > 0
    properties = torch.cuda.get_device_properties(DEVICE)
    other = SimpleNamespace(**{**vars(properties), "name": "Another"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: other)
    installed.choose()
    assert installed.timed > 0
    assert len(list(installed.folder.iterdir())) == 5


def _spoiled(stored: dict[str, Any], **changes: Any) -> str:
    stored["measurements"][1] |= changes
    return json.dumps(stored)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stored: "",
        lambda stored: "[]",
        lambda stored: json.dumps(stored)[:-20],
        lambda stored: json.dumps({**stored, "key": {**stored["key"], "device": "Another"}}),
        lambda stored: json.dumps({**stored, "measurements": stored["measurements"][:1]}),
        lambda stored: json.dumps({**stored, "measurements": [[], {}]}),
        lambda stored: _spoiled(stored, decode_seconds=0.0),
        lambda stored: _spoiled(stored, prompt_seconds=float("nan")),
        lambda stored: _spoiled(stored, decode_seconds=None),
        lambda stored: _spoiled(stored, name="flash3"),
        lambda stored: _spoiled(stored, has_graphs="no"),
        lambda stored: _spoiled(stored, refusal=1),
    ],
)
@pytest.mark.slow
def test_a_file_of_something_else_is_reported_and_measured_again(
    spoil: Callable[[dict[str, Any]], str], installed: Installed
) -> None:
    installed.add("flash2", FAST, FAST)
    first = installed.choose()
    stored = installed.file.read_text()
    installed.file.write_text(spoil(json.loads(stored)))
    with capture_logs() as logs:
        assert installed.choose() == first
    assert [log["file"] for log in logs if log["log_level"] == "warning"] == [str(installed.file)]
    assert installed.timed > 0
    assert installed.file.read_text() == stored


def test_a_folder_that_can_not_be_written_is_reported(installed: Installed) -> None:
    installed.add("flash2", FAST, FAST)
    installed.folder.write_text("a file")
    with capture_logs() as logs:
        assert installed.choose().name == "flash2"
    assert "attention's measurements can't be stored" in [log["event"] for log in logs]


@pytest.mark.slow
def test_a_given_block_size_leaves_out_those_that_do_not_take_it(installed: Installed) -> None:
    installed.add("flash2", FASTEST, FASTEST)
    installed.add("flash3", FAST, FAST)
    chosen = installed.choose(block_size=48)
    assert (chosen.name, chosen.block_size) == ("flash3", 48)
    assert "flash2" not in installed.called
    chosen = installed.choose(block_size=512)
    assert (chosen.name, chosen.block_size) == ("flash2", 512)
    installed.modules.pop("flash3")
    assert installed.choose(block_size=8) == AttentionChoice("auto", 8)
    assert installed.timed == 0


@pytest.mark.parametrize(
    ("name", "block_size"), [("flash2", 256), ("torch-varlen", 256), ("flash3", 32), ("triton", 32)]
)
def test_a_named_backend_is_not_measured(name: str, block_size: int, installed: Installed) -> None:
    installed.add("flash2", FASTEST, FASTEST)
    assert installed.choose(name) == AttentionChoice(name, block_size)
    assert installed.choose(name, block_size=64) == AttentionChoice(name, 64)
    assert (installed.timed, installed.called, installed.folder.exists()) == (0, [], False)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (SPEC, {"fp8": True}),
        (SPEC, {"requires_graphs": True}),
        (replace(SPEC, dtype=torch.float32), {}),
        (replace(SPEC, has_sinks=True), {}),
        (replace(SPEC, kv_shapes=(KVShape(2, 16), KVShape(1, 32)) * 2), {}),
    ],
)
def test_nothing_is_measured_where_no_library_can_be_chosen(
    spec: ModelSpec, options: dict[str, bool], installed: Installed
) -> None:
    assert installed.choose() == AttentionChoice("auto", 32), "Triton alone"
    installed.add("flash2", FASTEST, FASTEST)
    assert installed.choose(spec=spec, **options) == AttentionChoice("auto", 32)
    assert choose_attention("auto", SPEC, torch.float16, torch.device("cpu")) == AttentionChoice("auto", 32)
    assert (installed.timed, installed.called, installed.folder.exists()) == (0, [], False)


def test_little_memory_is_measured_with_fewer_rows_and_too_little_not_at_all(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("flash2", FASTEST, FASTEST)
    sequence = (
        measured.CONTEXT * 2 * 2 * 16 * 2 * 3
    )  # keys and values, two heads of 16, two bytes; two caches, contents
    seen: list[int] = []
    make_work = measured._make_work
    monkeypatch.setattr(measured, "_make_work", lambda *given: _see(seen, make_work(*given)))
    for sequences, rows in ((2.5, 2), (1.5, None)):
        free = int(measured.MEMORY_SHARE * sequences * sequence)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None, free=free: (free, 80 << 30))
        with capture_logs() as logs:
            chosen = installed.choose(spec=SPEC if rows else replace(SPEC, num_layers=3, windows=(None, 8, 8)))
        assert (chosen.name == "auto") == (rows is None)
        assert bool(seen) == (rows is not None)
        assert [log["log_level"] for log in logs] == ["info" if rows else "warning"]
        assert seen == ([] if rows is None else [rows])
        seen.clear()
    assert len(list(installed.folder.iterdir())) == 1, "that there was too little memory is not stored"


def _see(seen: list[int], work: Any) -> Any:
    seen.append(len(work.steps[0].starts))
    return work


def test_a_time_is_of_one_call() -> None:
    calls: list[int] = []
    with fake_cuda():
        assert measured.device_seconds(lambda: calls.append(1), DEVICE) == pytest.approx(1e-3 / measured.CALLS)
    assert len(calls) == measured.CALLS * measured.REPEATS


def test_a_library_has_another_version_when_it_is_built_again(tmp_path: Path) -> None:
    library = module()
    library.__file__ = str(tmp_path / "library.py")
    versions = set()
    for text, origin in (("1", "here"), ("2", "here"), ("2", "there")):
        Path(library.__file__).write_text(text)
        versions.add(version_of((library, origin)))
        library.__version__ = text
        versions.add(version_of((library, origin)))
    assert len(versions) >= 4
    assert version_of((module(), "here")) == version_of((module(), "here"))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_engine_has_the_block_size_of_its_choice(installed: Installed, tiny_model: Callable[[str], Path]) -> None:
    """And computes with the module that was measured, which is not searched for again, as that might download one."""
    installed.has_triton = True
    installed.add("flash2", 5e-5, 9e-5)
    installed.seconds["reference"] = (1e-4, 1e-4)
    config = EngineConfig(
        dtype="float16", device="cuda", max_model_len=96, threads=1, cuda_graphs=False, cache=CacheConfig(num_blocks=9),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=24),
    )  # fmt: skip
    engine = Engine.load(tiny_model("qwen3-sliding"), config)
    assert (engine.attention_name, engine.config.cache.block_size) == ("flash2", 256)
    assert engine.config.attention == "auto"
    installed.called.clear()
    assert [error for *_, error, _ in answers(engine, list(islice(plain_work(), 3)))] == [None] * 3
    assert set(installed.called) == {"flash2"}
    # With graphs, of which this time is a part, launches would take longer.
    engine = Engine.load(tiny_model("qwen3-sliding"), replace(config, cuda_graphs=None, max_graph_tokens=8))
    assert (engine.attention_name, engine.config.cache.block_size) == ("triton", 32)
