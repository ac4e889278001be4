"""Triton's attention against the float32 oracle: mixed steps, windows, shared heads, splits, fp8, poisoned blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention import KVLayout, make_backend
from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.request import Request, SamplingParams, as_token_ids

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

from engine.attention import triton_paged
from engine.attention.triton_paged import TritonPagedAttention
from tests.engine.attention.test_paged_attention import Sequences, poison

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def compare(
    device: torch.device,
    upcast: bool,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    window: int | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    longest: int = 90,
    chunks: tuple[int, ...] = (1, 1, 2, 33, 40),
    steps: int = 3,
    cache: torch.dtype | None = None,
    processors: int = 8,
) -> set[int]:
    """Steps cut at random from growing sequences, layer by layer; the numbers of splits that were met."""
    rng = np.random.default_rng(seed)
    made = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    sequences = Sequences(rng, count=4, longest=longest, block_size=block_size, window=window)
    layout = KVLayout(sequences.groups, block_size, kv_heads, head_dim, num_heads)
    fast = TritonPagedAttention(layout, cache or dtype, device, upcast=upcast, processors=processors)
    oracle = make_backend("reference", layout, torch.float32, torch.device("cpu"))
    if cache is None:
        poison(fast, layout)
    met = set()
    for _ in range(steps):
        members = [int(i) for i in rng.permutation(4)[: rng.integers(1, 5)]]
        counts = [min(longest - int(sequences.lengths[m]), int(rng.choice(chunks))) for m in members]
        members, counts = [m for m, c in zip(members, counts, strict=True) if c], [c for c in counts if c]
        if not members:
            continue
        batch = sequences.batch(members, counts)
        mine, theirs = fast.prepare(batch), oracle.prepare(batch)
        met |= {tiles.splits for tiles in mine.launches}
        for layer in range(2):
            fused = torch.randn(sum(counts), num_heads + 2 * kv_heads, head_dim, generator=made).to(dtype)
            if cache is not None and device.type == "cpu":  # the interpreter rounds 1.95 to 1.0: it forgets to carry
                fused = fused.to(cache).to(dtype)
            q, k, v = fused.to(device).split([num_heads, kv_heads, kv_heads], dim=1)
            got = fast.attend(layer, q, k, v, 0.3, mine)
            q, k, v = fused.float().split([num_heads, kv_heads, kv_heads], dim=1)
            if cache is not None:
                k, v = k.to(cache).float(), v.to(cache).float()
            want = oracle.attend(layer, q, k, v, 0.3, theirs)
            assert got.dtype == dtype
            torch.testing.assert_close(got.cpu().float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return met


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_agrees_with_the_oracle(dtype: torch.dtype, device: torch.device, upcast: bool) -> None:
    compare(device, upcast, seed=1, dtype=dtype)


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 16), ((9, 3), 24), ((6, 1), 64)])
def test_heads_share_keys_in_any_number(
    heads: tuple[int, int], head_dim: int, device: torch.device, upcast: bool
) -> None:
    compare(device, upcast, seed=2, heads=heads, head_dim=head_dim)


@pytest.mark.parametrize("window", [1, 5, 37])
def test_windows_hide_what_is_behind_them(window: int, device: torch.device, upcast: bool) -> None:
    compare(device, upcast, seed=3, window=window)


@pytest.mark.parametrize("block_size", [1, 4, 96])
def test_blocks_have_any_size(block_size: int, device: torch.device, upcast: bool) -> None:
    compare(device, upcast, seed=4, block_size=block_size, window=20)


@pytest.mark.parametrize("window", [None, 100])
def test_keys_of_few_long_sequences_are_split(
    window: int | None, device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_paged, "SPLIT_KEYS", 16)
    met = compare(device, upcast, seed=5, window=window, longest=200, chunks=(1, 1, 90), steps=4, processors=24)
    assert max(met) >= 4


def test_a_cache_of_fp8(device: torch.device, upcast: bool) -> None:
    compare(device, upcast, seed=4, dtype=torch.bfloat16, cache=FP8, window=37)


def test_fp8_cuts_off_what_it_can_not_hold(device: torch.device, upcast: bool) -> None:
    sequences = Sequences(np.random.default_rng(1), count=1, longest=8, block_size=4, window=None)
    layout = KVLayout(sequences.groups, 4, 1, 16, 1)
    backend = TritonPagedAttention(layout, FP8, device, upcast=upcast, processors=1)
    step = backend.prepare(sequences.batch([0], [2]))
    v = torch.full((2, 1, 16), 1e4, device=device)
    out = backend.attend(0, torch.zeros_like(v), torch.zeros_like(v), v, 1.0, step)
    assert out.unique().tolist() == [448.0]


def test_rows_that_only_fill_a_graph_write_nothing_and_stay_finite(device: torch.device, upcast: bool) -> None:
    """Slot -1, no queries, no keys: what a captured launch has beyond the batch."""
    sequences = Sequences(np.random.default_rng(1), count=2, longest=8, block_size=4, window=None)
    layout = KVLayout(sequences.groups, 4, 1, 16, 1)
    backend = TritonPagedAttention(layout, torch.float32, device, upcast=upcast, processors=1)
    batch = sequences.batch([0, 1], [1, 1])
    step = backend.prepare(batch)
    step.slots[0][1] = -1
    step.counts[1] = 0
    before = backend.storage.keys[0].clone()
    q = torch.ones(2, 1, 16, device=device)
    out = backend.attend(0, q, q, q, 1.0, step)
    changed = (backend.storage.keys[0] != before).view(-1, 16).any(1).nonzero().flatten().tolist()
    assert changed == [int(batch.slot_mapping[0][0])]
    assert out[0, 0].tolist() == [1.0] * 16


def test_an_engine_with_it_gives_the_oracles_tokens(tiny_model: Callable[[str], Path], device: torch.device) -> None:
    """Chunks, a prefix that is found again, and decoding rows of one model, through the whole engine."""
    cache = CacheConfig(num_blocks=64, block_size=4)
    schedule = ScheduleConfig(max_num_seqs=3, max_num_batched_tokens=16)
    told = []
    for attention in ("triton", "reference"):
        engine = Engine.load(
            tiny_model("gemma3"),
            EngineConfig(
                dtype="float32", device=device.type, threads=1, attention=attention, cache=cache, schedule=schedule
            ),
        )
        assert engine.attention_name == attention
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        prompts = [[*range(5, 20)], [*range(5, 17), 40, 41], [9]]
        requests = [Request(str(i), as_token_ids(ids), params) for i, ids in enumerate(prompts)]
        done = {each.request_id: each.choices[0].token_ids for each in engine.run(requests)}
        told.append([list(done[str(i)]) for i in range(3)])
    assert told[0] == told[1]


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(EngineError, match=r"^attention 'triton' runs on CUDA devices, not on cpu$"):
        make_backend("triton", KVLayout((), 16, 1, 8), torch.float32, torch.device("cpu"))
