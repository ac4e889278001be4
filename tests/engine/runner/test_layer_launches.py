"""How many kernels a layer of the fused decoder launches on a GPU, counted on the fake one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.adapters.targets import Product
from engine.attention import AttentionBatch, AttentionStep, KVLayout, make_backend
from engine.models.decoder import FusedDecoder
from engine.models.decoder_builder import TorchBuilder
from engine.models.load import load_model
from engine.plan import CacheGroup
from tests.engine.quant.test_fp8_product import BY_ROWS
from tests.engine.runner.fake_cuda import DEVICE, compiler, fake_cuda

pytest.importorskip("triton", reason="NOT TESTED HERE: a fake CUDA device; triton is not installed")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
    pytest.mark.skipif(compiler() is None, reason="NOT TESTED HERE: a fake CUDA device; there is no C++ compiler"),
]

BF16 = [
    "_add_norm", "mm", "_rotate_and_store", "attend_tiles", "mm",
    "_add_norm", "mm", "_activate", "mm",
]  # fmt: skip
FP8 = [
    "_add_norm", "_scaled_mm", "_rotate_and_store", "attend_tiles", "_quantize_rows", "_scaled_mm",
    "_add_norm", "_scaled_mm", "_activate", "_scaled_mm",
]  # fmt: skip
PARALLEL = [
    "_add_norm", "mm", "_rotate_and_store", "attend_tiles", "mm",
    "mm", "_activate", "mm", "_add_norm",
]  # fmt: skip
PARALLEL_FP8 = [
    "_add_norm", "_quantize_rows", "_scaled_mm", "_rotate_and_store", "attend_tiles", "_quantize_rows", "_scaled_mm",
    "_quantize_rows", "_scaled_mm", "_activate", "_scaled_mm", "_add_norm",
]  # fmt: skip
"""Attention and MLP read one norm, so it is a tensor."""

ADAPTED = [
    "_add_norm", "mm", "_multiply_a", "_add_b", "_rotate_and_store", "attend_tiles", "mm",
    "_add_norm", "mm", "_activate", "mm", "_multiply_a", "_add_b",
]  # fmt: skip
"""By adapters of q_proj and down_proj; that other products have places would cost their launches."""


def launches(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    quantize: Any = "none",
    fused: bool = True,
    max_ranks: Mapping[Product, int] | None = None,
) -> tuple[list[str], int]:
    """Of all layers in a step of one decoding token, in bfloat16; and how many layers there are."""
    found: list[str] = []
    through = FusedDecoder._through
    with fake_cuda(fused_layers=True) as device:

        def counted(self: FusedDecoder, *arguments: Any) -> None:
            before = len(device.launches)
            through(self, *arguments)
            found.extend(device.launches[before:])

        monkeypatch.setattr(FusedDecoder, "_through", counted)
        builder = TorchBuilder(quantize, torch.bfloat16)
        model = load_model(path, dtype=torch.bfloat16, device=DEVICE, max_positions=16, builder=builder)
        assert isinstance(model, FusedDecoder)
        if not fused:
            model._ops = model._torch_ops
        if max_ranks is not None:
            model.add_places(2, max_ranks)
        groups = tuple(CacheGroup(own, window, 2) for window, own in model.spec.window_layers.items())
        attention = make_backend("triton", KVLayout.of(model.spec, groups, 8), torch.bfloat16, DEVICE)
        one, table, times = np.ones(1, np.int32), np.ones((1, 1), np.int32), len(groups)
        batch = AttentionBatch(0 * one, one, 1, (table,) * times, (np.array([8]),) * times)
        adapters = None if max_ranks is None else np.zeros(1, np.int32)
        step = AttentionStep(attention, attention.prepare(batch), adapters=adapters)
        ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        device.waits.clear()
        model.forward(ids, ids, step, None)
        assert device.waits == []
    return found, model.spec.num_layers


@pytest.mark.parametrize(
    ("family", "quantize", "layer"),
    [
        ("llama", "none", BF16),
        ("qwen3", "none", BF16),
        ("gemma3", "none", BF16),
        ("cohere2", "none", PARALLEL),
        pytest.param("llama", "fp8", FP8, marks=BY_ROWS),
        pytest.param("qwen3", "fp8", FP8, marks=BY_ROWS),
        pytest.param("cohere2", "fp8", PARALLEL_FP8, marks=BY_ROWS),
    ],
)
@pytest.mark.slow
def test_a_layer_launches_this(
    family: str, quantize: str, layer: list[str], tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, num_layers = launches(tiny_model(family), monkeypatch, quantize=quantize)
    assert found == layer * num_layers, "a layer's last sum is a part of the norm behind it"


def test_each_product_that_an_adapter_changes_launches_two_more(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    max_ranks: dict[Product, int] = {"qkv": 6, "output": 0, "gate_up": 0, "down": 2}
    found, num_layers = launches(tiny_model("llama"), monkeypatch, max_ranks=max_ranks)
    assert found == ADAPTED * num_layers


def test_torchs_form_launches_more_than_twice_as_many(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU computes an RMSNorm, from its squares on, by six operators; CUDA by one."""
    found, num_layers = launches(tiny_model("llama"), monkeypatch, fused=False)
    assert (len(found) - 5 * found.count("pow")) / num_layers > 2 * len(BF16)
