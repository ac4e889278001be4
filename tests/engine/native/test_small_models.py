"""A checkpoint in its small form is the dequantized model to the bit, and takes as much memory as its file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.models.load import load_model
from engine.models.native import NativeBuilder, NativeDecoder
from engine.native.build import INSTRUCTION_SETS
from tests.engine.models.test_gguf_checkpoint import GEMMA_AS_GGUF, write_gguf
from tests.engine.oracle import make_prompts
from tests.engine.quant.packing import Packed, pack_awq, pack_fp8, pack_gptq, write
from tests.native_paths import native_path

SIZES = {"hidden_size": 64, "intermediate_size": 96}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
FOLDERS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "gptq": (GPTQ, lambda w: pack_gptq(w, symmetric=False)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        pack_awq,
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}, pack_fp8),
}
FILES = {"Q4_0": "llama", "Q4_1": "llama-tied", "Q5_1": "qwen2", "Q8_0": "gemma3"}
"""Kind of blocks -> family."""


@pytest.fixture(scope="module")
def checkpoint(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> a tiny checkpoint of that format, made once."""
    root = tmp_path_factory.mktemp("small")
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name in FOLDERS:
            plain = tiny_models.make_tiny_model("llama-bias", root / f"{name}-plain", vocab_size=264, **SIZES)
            settings, pack = FOLDERS[name]
            write(plain, root / name, settings, lambda module, w: None if module == "lm_head" else pack(w))
            return root / name
        changes = GEMMA_AS_GGUF if FILES[name] == "gemma3" else {}
        if FILES[name] == "qwen2":
            changes = {"use_sliding_window": False}
        plain = tiny_models.make_tiny_model(FILES[name], root / f"{name}-plain", **SIZES, **changes)
        return write_gguf(plain, root / f"{name}.gguf", kind=GGMLQuantizationType[name])

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return checkpoint


class LogitsRecorder:
    """Records the logits that native decoders compute, in the order of the steps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps: list[Tensor] = []
        logits = NativeDecoder.logits

        def seen(decoder: NativeDecoder, hidden: Tensor) -> Tensor:
            found = logits(decoder, hidden)
            self.steps.append(found.clone())
            return found

        patch.setattr(NativeDecoder, "logits", seen)


def run(path: Path, quantize: Any, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    engine = Engine.load(
        path,
        EngineConfig(
            attention="native",
            quantize=quantize,
            max_model_len=256,
            cache=CacheConfig(block_size=16, num_blocks=200),
            schedule=ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=150),
            **settings,
        ),
    )
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    done = {
        c.request_id: c for c in engine.run(Request(str(i), as_token_ids(p), params) for i, p in enumerate(prompts))
    }
    return [done[str(i)].choices[0].token_ids.tolist() for i in range(len(prompts))]


def assert_same_logits(path: Path, prompts: list[list[int]], patch: pytest.MonkeyPatch, **settings: Any) -> None:
    seen = LogitsRecorder(patch)
    answers = run(path, "none", prompts, **settings)
    small, seen.steps = seen.steps, []
    assert answers == run(path, "dense", prompts, **settings)
    assert len(small) == len(seen.steps)
    for ours, theirs in zip(small, seen.steps, strict=True):
        assert torch.equal(ours, theirs)
    assert sum(map(len, small)) > sum(map(len, prompts))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_logits_are_those_of_the_dequantized_model(
    name: str, dtype: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(seed=4, count=7, vocab_size=257, shared=20, longest=60)
    assert_same_logits(checkpoint(name), prompts, monkeypatch, dtype=dtype, threads=2)
    assert_same_logits(checkpoint(name), prompts[:1], monkeypatch, dtype=dtype, threads=1)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", ["awq", "Q4_1"])
@pytest.mark.slow
def test_every_instruction_set_gives_the_dequantized_models_logits(
    name: str, instruction_set: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    native_path(instruction_set)  # or skip
    prompts = make_prompts(seed=5, count=3, vocab_size=257, shared=20, longest=60)
    settings: dict[str, Any] = {"instruction_set": instruction_set, "dtype": "bfloat16", "threads": 1}
    assert_same_logits(checkpoint(name), prompts, monkeypatch, **settings)


@pytest.mark.slow
def test_columns_in_an_order_of_their_own_give_nearly_the_same_logits(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a GPTQ checkpoint with activation order, whose sums run in another order than the dequantized model's
    plain = tiny_models.make_tiny_model("llama", tmp_path / "plain", vocab_size=264, **SIZES)

    def pack(module: str, weight: Tensor) -> Packed | None:
        return None if module == "lm_head" else pack_gptq(weight, symmetric=False, shuffled=True)

    write(plain, tmp_path / "made", {**GPTQ, "desc_act": True}, pack)
    prompts = make_prompts(seed=4, count=7, vocab_size=257, shared=20, longest=60)
    for dtype in ("bfloat16", "float32"):
        seen = LogitsRecorder(monkeypatch)
        settings: dict[str, Any] = {"dtype": dtype, "threads": 2}
        run(tmp_path / "made", "none", prompts, **settings)
        small, seen.steps = seen.steps[0], []
        run(tmp_path / "made", "dense", prompts, **settings)
        off = (small - seen.steps[0]).norm() / seen.steps[0].norm()
        assert (off < 0.03) if dtype == "bfloat16" else (0 < off < 1e-5)


def small(path: Path, dtype: torch.dtype) -> NativeDecoder:
    builder = NativeBuilder(native_path("avx2"))
    model = load_model(path, dtype=dtype, device=torch.device("cpu"), builder=builder)
    assert isinstance(model, NativeDecoder)
    return model


def test_weights_are_counted_by_their_form_and_a_tied_head_once(checkpoint: Callable[[str], Path]) -> None:
    # Given a tied model in four bits and two factors for each 32, then its embedding is stored once
    found = small(checkpoint("Q4_1"), torch.bfloat16).weight_bytes()
    layers = 3 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96)
    assert set(found) == {"int4", "float32"}
    assert found["float32"] == 4 * (3 * 2 + 1) * 64
    assert found["int4"] == pytest.approx((layers + 257 * 64) * 5 / 8, rel=0.05)
    # and one whose head is its own has two
    untied = small(checkpoint("Q4_0"), torch.bfloat16).weight_bytes()
    assert untied["int4"] == pytest.approx(found["int4"] + 264 * 64 * 5 / 8, rel=0.1)
    dense = small(checkpoint("fp8"), torch.bfloat16).weight_bytes()
    assert set(dense) == {"fp8", "bfloat16", "float32"}  # embedding and head, which it leaves as they are


REAL_MODELS = ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf")

MEASURED = """
import sys, torch
from pathlib import Path
from engine.models.load import load_model
from engine.models.native import NativeBuilder
from engine.native.library import load_library

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

library = load_library("auto", 1)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
model = load_model(Path(sys.argv[1]), dtype=torch.bfloat16, device=torch.device("cpu"), builder=NativeBuilder(library))
print(sum(model.weight_bytes().values()), resident("VmHWM") - before)
"""


@pytest.fixture(params=REAL_MODELS)
def real(request: pytest.FixtureRequest) -> Path:
    path = Path(os.environ.get("TOKENMILL_TEST_MODELS", ".")) / request.param
    if not path.is_file():
        pytest.skip(f"NOT TESTED HERE: a real file; TOKENMILL_TEST_MODELS names no folder with {request.param}")
    return path


@pytest.mark.slow
def test_a_real_file_takes_little_more_memory_than_it_is_long(real: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURED, str(real)], capture_output=True, text=True, check=True)
    live, rise = map(int, done.stdout.split()[-2:])
    size, largest = real.stat().st_size, 4 * (49152 * 576 if "SmolLM2" in real.name else 262144 * 640)
    assert live <= 1.15 * size, live / size
    assert rise <= 1.15 * size + largest, (rise - largest) / size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_real_file_gives_its_dequantized_models_logits(
    real: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1)
    prompts = [random.integers(100, 40_000, size).tolist() for size in (40, 3)]
    assert_same_logits(real, prompts, monkeypatch, dtype=dtype, threads=2)
