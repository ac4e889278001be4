"""Measuring attention with Triton's kernels, at real sizes on a GPU, else at small ones on the fake device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

from engine.attention import choose_attention, make_backend, measured
from engine.attention.flash import LIBRARIES
from engine.models.base import ModelSpec
from tests.engine.runner.fake_cuda import DEVICE, compiler, fake_cuda

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and compiler() is None,
    reason="NOT TESTED HERE: a fake CUDA device; there is no C++ compiler",
)
SPEC = ModelSpec(
    architecture="small", num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512, vocab_size=100,
    max_position=1024, windows=(None, 24, 24), eos_token_ids=(), num_parameters=1, dtype=torch.float16,
)  # fmt: skip


@pytest.fixture
def there(device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[torch.device]:
    """The device to measure on."""
    monkeypatch.setenv("TOKENMILL_NATIVE_CACHE", str(tmp_path))
    with ExitStack() as stack:
        if device.type != "cuda":
            for name, value in {"CONTEXT": 40, "DECODE_ROWS": 4, "PROMPT_ROWS": 2, "PROMPT_TOKENS": 20}.items():
                monkeypatch.setattr(measured, name, value)
            monkeypatch.setattr(measured, "CALLS", 1)
            monkeypatch.setattr(measured, "REPEATS", 1)
            stack.enter_context(fake_cuda())
        yield device if device.type == "cuda" else DEVICE


@pytest.mark.slow
@pytest.mark.exhaustive
def test_triton_agrees_with_itself_over_other_blocks_and_with_torchs_operators(there: torch.device) -> None:
    candidates = [
        measured.Candidate(
            f"{name} {size}", size, "", lambda layout, name=name: make_backend(name, layout, SPEC.dtype, there)
        )
        for name, size in (("triton", 32), ("triton", 256), ("paged-sdpa", 24))
    ]
    times = measured.measure_backends(candidates, SPEC, SPEC.dtype, there)
    assert times is not None
    assert [(one.name, one.refusal, one.has_graphs) for one in times] == [
        ("triton 32", None, True), ("triton 256", None, True), ("paged-sdpa 24", None, False)
    ]  # fmt: skip
    assert all(seconds > 0 for one in times for seconds in (one.decode_seconds, one.prompt_seconds))


@pytest.mark.slow
def test_installed_libraries_are_measured_or_left_out(there: torch.device) -> None:
    if there is DEVICE:
        pytest.skip("NOT TESTED HERE: libraries' own kernels; there is no GPU")
    for _ in range(2):
        chosen = choose_attention("auto", SPEC, SPEC.dtype, there)
        assert chosen.name in ("auto", "triton", *LIBRARIES)
        assert (chosen.found is not None) == (chosen.name in LIBRARIES)
