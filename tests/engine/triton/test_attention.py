"""Triton's attention against the float32 oracle: mixed steps, windows, shared heads, splits, fp8, poisoned blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import AttentionBatch, KVLayout, make_backend
from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.models.base import KVShape
from engine.plan import CacheGroup
from engine.request import Request, SamplingParams, as_token_ids
from engine.runner.buckets import GraphShape, padded

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

from engine.attention import choice, triton_paged, triton_tiling
from engine.attention.base import WARM_UP_TOKENS, CompiledAttention
from engine.attention.by_shape import attention_by_shape
from engine.attention.reference import ReferenceAttention
from engine.attention.triton_paged import TritonPagedAttention
from tests.engine.attention.test_paged_attention import Sequences, store

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
DTYPES = (torch.bfloat16, *(pytest.param(other, marks=pytest.mark.slow) for other in (torch.float16, torch.float32)))


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of x [T, heads, dim] by torch's own rounding, their scales [T, heads, 1], and what they stand for."""
    scales = x.abs().amax(2, keepdim=True).float() * (1 / 448)
    scales = torch.where(scales > 0, scales, 1.0)
    codes = (x.float() / scales).clamp(-448, 448).to(FP8)
    return codes, scales, codes.float() * scales


def poison_all(backend: TritonPagedAttention) -> None:
    """Fill the whole cache with NaN: what is read before it was written spoils all that it meets."""
    storage = backend.storage
    for stored in (*storage.keys, *storage.values, *storage.key_scales, *storage.value_scales):
        if stored.dtype == FP8:
            stored.view(torch.uint8).fill_(0x7F)
        else:
            stored.fill_(float("nan"))


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
    has_sinks: bool = False,
    latent_dim: int = 0,
) -> list[set[int]]:
    """Steps cut at random from growing sequences, layer by layer; the numbers of splits that were met, for decoding
    sequences and for chunks. Blocks without an owner are NaN."""
    rng = np.random.default_rng(seed)
    made = torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    sequences = Sequences(rng, count=4, longest=longest, block_size=block_size, window=window)
    layout = KVLayout(sequences.groups, block_size, kv_heads, head_dim, num_heads, latent_dim=latent_dim)
    fast = TritonPagedAttention(layout, cache or dtype, device, upcast=upcast, processors=processors)
    oracle = make_backend("reference", layout, torch.float32, torch.device("cpu"))
    poison_all(fast)
    met: list[set[int]] = [set(), set()]
    for _ in range(steps):
        members = [int(i) for i in rng.permutation(4)[: rng.integers(1, 5)]]
        counts = [min(longest - int(sequences.lengths[m]), int(rng.choice(chunks))) for m in members]
        members, counts = [m for m, c in zip(members, counts, strict=True) if c], [c for c in counts if c]
        if not members:
            continue
        batch = sequences.batch(members, counts)
        mine, theirs = fast.prepare(batch), oracle.prepare(batch)
        for tiles in mine.launches:
            met[tiles.first_token > 0 or tiles.tile.queries > 16 // (num_heads // kv_heads)].add(tiles.splits)
        for layer in range(2):
            fused = torch.randn(sum(counts), num_heads + 2 * kv_heads, head_dim, generator=made).to(dtype)
            q, k, v = fused.to(device).split([num_heads, kv_heads, kv_heads], dim=1)
            sinks = 4 * torch.randn(num_heads, generator=made) if has_sinks else None
            of_sinks = None if sinks is None else sinks.to(device)
            if layer == 0 or cache is not None or latent_dim:
                got = fast.attend(layer, q, k, v, 0.3, mine, of_sinks)
            else:
                store(fast.layer_cache(layer, mine), k, v)
                got = fast.attend(layer, q, None, None, 0.3, mine, of_sinks)
            q, k, v = fused.float().split([num_heads, kv_heads, kv_heads], dim=1)
            if cache is not None:
                k, v = (scaled(part)[2] for part in (k, v))
            if latent_dim:
                v = k[..., :latent_dim]
            want = oracle.attend(layer, q, k, v, 0.3, theirs, sinks)
            assert got.dtype == dtype
            torch.testing.assert_close(got.cpu().float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return met


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.slow
def test_agrees_with_the_oracle(dtype: torch.dtype, device: torch.device, upcast: bool) -> None:
    compare(device, upcast, seed=1, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "head_dim", "latent_dim", "dtype", "cache"),
    [
        (5, 28, 20, torch.float32, None),
        pytest.param(20, 40, 32, torch.bfloat16, None, marks=pytest.mark.exhaustive),
        pytest.param(6, 40, 32, torch.bfloat16, FP8, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("split_keys", [pytest.param(16, marks=pytest.mark.exhaustive), 1 << 20])
def test_values_may_be_the_first_elements_of_keys(
    heads: int, head_dim: int, latent_dim: int, dtype: torch.dtype, cache: torch.dtype | None, split_keys: int,
    device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(triton_tiling, "SPLIT_KEYS", split_keys)
    compare(
        device, upcast, seed=6, dtype=dtype, heads=(heads, 1), head_dim=head_dim, latent_dim=latent_dim, cache=cache,
        processors=32, chunks=(1, 1, 3, 40), steps=2, longest=50,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("split_keys", [16, 1 << 20])
def test_sinks_join_once_however_many_programs_share_the_keys(
    split_keys: int, device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_tiling, "SPLIT_KEYS", split_keys)
    met = compare(device, upcast, seed=5, window=60, longest=130, chunks=(1, 1, 3, 70), processors=16, has_sinks=True)
    assert (max(max(splits) for splits in met) > 1) == (split_keys == 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "head_dim"), [pytest.param((4, 4), 16, marks=pytest.mark.exhaustive), ((9, 3), 24), ((6, 1), 64)]
)
def test_heads_share_keys_in_any_number(
    heads: tuple[int, int], head_dim: int, device: torch.device, upcast: bool
) -> None:
    compare(device, upcast, seed=2, heads=heads, head_dim=head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, pytest.param(5, marks=pytest.mark.exhaustive), 37])
def test_windows_hide_earlier_positions(window: int, device: torch.device, upcast: bool) -> None:
    compare(device, upcast, seed=3, window=window)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 4, 96])
def test_blocks_have_any_size(block_size: int, device: torch.device, upcast: bool) -> None:
    compare(device, upcast, seed=4, block_size=block_size, window=20)


@pytest.mark.slow
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.exhaustive), 60])
def test_keys_of_few_long_sequences_are_split(
    window: int | None, device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_tiling, "SPLIT_KEYS", 16)
    decodes, chunks = compare(
        device, upcast, seed=5, window=window, longest=130, chunks=(1, 1, 3, 70), steps=4, processors=16
    )
    assert max(decodes) >= 4
    assert max(chunks) >= 4


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        ((6, 3), 24),
        ((8, 2), 128),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (((8, 2), 32), ((9, 3), 64), ((4, 1), 256))),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_of_fp8(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, device: torch.device, upcast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(triton_tiling, "SPLIT_KEYS", 16)
    compare(device, upcast, seed=4, dtype=dtype, cache=FP8, window=37, heads=heads, head_dim=head_dim, steps=2)


def test_a_slot_beyond_the_cache_is_found_by_the_interpreter(device: torch.device) -> None:
    """On a GPU it would be written to whatever lies there."""
    if device.type == "cuda":
        pytest.skip("the interpreter is for CPUs")
    backend = TritonPagedAttention(KVLayout((CacheGroup((0,), None, 4),), 4, 1, 16, 1), torch.float32, device)
    x, here = torch.zeros(1, 1, 16), np.zeros(1, np.int32)
    for slot in (15, 16):
        step = backend.prepare(AttentionBatch(here, here + 1, 1, (here[None] + 3,), (np.array([slot], np.int64),)))
        with nullcontext() if slot == 15 else pytest.raises(Exception, match=r"store_tokens .* outside its tensors"):
            backend.attend(0, x, x, x, 1.0, step)


def stored_in_fp8(x: torch.Tensor, device: torch.device, upcast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, heads, dim] and scales [T, heads] of keys x, as they lie in slots 1, 2, …"""
    tokens, heads, dim = x.shape
    layout = KVLayout((CacheGroup((0,), None, tokens + 1),), 1, heads, dim, heads)
    backend = TritonPagedAttention(layout, FP8, device, upcast=upcast, processors=1)
    whole = np.array([0], np.int32), np.array([tokens], np.int32)
    table = np.arange(1, tokens + 1, dtype=np.int32)
    step = backend.prepare(AttentionBatch(*whole, 0, (table[None],), (table.astype(np.int64),)))
    x = x.to(device)
    backend.attend(0, torch.zeros_like(x), x, x, 1.0, step)
    storage = backend.storage
    assert torch.equal(storage.keys[0].view(torch.uint8), storage.values[0].view(torch.uint8))
    return storage.keys[0].cpu().view(-1, heads, dim)[1:], storage.key_scales[0].cpu()[1:]


def test_fp8_keys_are_torchs_own_codes(device: torch.device, upcast: bool) -> None:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, 24, generator=made) * 10.0 ** torch.arange(-20, 20)[:, None, None]
    x[3, 1] = 0
    x[4, 0] = 1e-44  # too small for a scale
    codes, scales, _ = scaled(x)
    got, got_scales = stored_in_fp8(x, device, upcast)
    assert torch.equal(got_scales, scales[:, :, 0])
    assert torch.equal(got.float(), codes.float())


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_stay_so_in_fp8_and_affect_no_other_head(
    broken: float, device: torch.device, upcast: bool
) -> None:
    x = torch.randn(3, 2, 16)
    x[1, 0, 5] = broken
    codes, scales = stored_in_fp8(x, device, upcast)
    assert not (codes.float() * scales[:, :, None])[1, 0].isfinite().any()
    x[1, 0] = 0
    codes[1, 0], scales[1, 0] = 0, 1
    torch.testing.assert_close(codes.float() * scales[:, :, None], scaled(x)[2])


def test_zeroed_blocks_of_fp8_are_zeros(device: torch.device, upcast: bool) -> None:
    layout = KVLayout((CacheGroup((0,), None, 4),), 2, 1, 16, 1)
    backend = TritonPagedAttention(layout, FP8, device, upcast=upcast, processors=1)
    poison_all(backend)
    backend.zero(0, [1, 3])
    storage = backend.storage
    for stored in (storage.keys[0], storage.values[0], storage.key_scales[0], storage.value_scales[0]):
        assert (stored.float()[[1, 3]] == 0).all()
        assert stored.float()[[0, 2]].isnan().all()


def filled(batch: AttentionBatch, rows: int) -> AttentionBatch:
    """A batch of decoding sequences with others that have no tokens, and tokens that have no slots."""
    more = rows - len(batch.starts)
    return AttentionBatch(
        np.pad(batch.starts, (0, more)),
        np.pad(batch.counts, (0, more)),
        batch.num_decodes,
        tuple(np.pad(table, ((0, more), (0, 0))) for table in batch.block_tables),
        tuple(np.pad(slots, (0, more), constant_values=-1) for slots in batch.slot_mapping),
    )


@pytest.mark.slow
@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.exhaustive), 5])
@pytest.mark.parametrize(
    "dtype", [*(pytest.param(each, marks=pytest.mark.exhaustive) for each in TOLERANCE), FP8], ids=str
)
def test_rows_that_only_fill_a_graph_read_and_write_nothing(
    dtype: torch.dtype, splits: int, device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step of five rows, used for three and then for two: its tables lead nowhere behind them, and what it
    computes into is poisoned."""
    monkeypatch.setattr(triton_tiling, "SPLIT_KEYS", 16 if splits > 1 else 1 << 20)
    computed, rows, empty = torch.bfloat16 if dtype == FP8 else dtype, 5, torch.empty
    sequences = Sequences(np.random.default_rng(1), count=3, longest=80, block_size=4, window=9)
    layout = KVLayout(sequences.groups, 4, 2, 16, 4)
    fast = TritonPagedAttention(layout, dtype, device, upcast=upcast, processors=20)
    oracle = make_backend("reference", layout, torch.float32, torch.device("cpu"))
    poison_all(fast)
    step = fast.reserve(rows, rows, rows, False, 20)
    assert [tiles.splits for tiles in step.launches] == [splits]

    def tensors(batch: AttentionBatch) -> list[torch.Tensor]:
        total = len(batch.slot_mapping[0])
        fused = torch.randn(total, 8, 16).to(computed)
        return list(fused.split([4, 2, 2], dim=1))

    def attend_both(layer: int, batch: AttentionBatch, padded: bool) -> None:
        q, k, v = tensors(batch)
        ours = fast.prepare(batch)
        if padded:
            ours = step
            fast.refill(step, filled(batch, rows))
            for table in step.tables:
                table[len(batch.starts) :] = 1 << 30
            step.starts[len(batch.starts) :] = 50
        theirs = [part.float() for part in (q, k, v)]
        if dtype == FP8:
            theirs[1:] = [scaled(part)[2] for part in theirs[1:]]
        want = oracle.attend(layer, *theirs, 0.3, oracle.prepare(batch))
        more = rows - len(q) if padded else 0
        before = [stored.clone() for stored in (fast.storage.keys[layer], fast.storage.values[layer])]
        q, k, v = (torch.cat([part, torch.full((more, *part.shape[1:]), 7.0, dtype=computed)]) for part in (q, k, v))
        with monkeypatch.context() as poisoned:
            poisoned.setattr(triton_paged.torch, "empty", lambda *a, **b: empty(*a, **b).fill_(float("nan")))
            got = fast.attend(layer, *(part.to(device) for part in (q, k, v)), 0.3, ours)
        assert got[len(want) :].isnan().all(), "rows that only fill are not written"
        tolerance = TOLERANCE[computed]
        torch.testing.assert_close(got[: len(want)].cpu().float(), want, atol=tolerance, rtol=tolerance)
        for stored, old in zip((fast.storage.keys[layer], fast.storage.values[layer]), before, strict=True):
            changed = stored.view(torch.uint8) != old.view(torch.uint8)
            slots = changed.view(-1, fast.storage.token_width * dtype.itemsize).any(1).nonzero().flatten().tolist()
            assert set(slots) <= set(batch.slot_mapping[layer].tolist())

    attend_both(0, sequences.batch([0, 1, 2], [70, 33, 2]), padded=False)
    for members in ([0, 1, 2], [2, 0]):
        attend_both(0, sequences.batch(members, [1] * len(members)), padded=True)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.exhaustive), 9])
def test_a_reserved_step_is_filled_again_and_again(
    mixed: bool, window: int | None, device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of all sizes up to the shape's, padded to it, in memory that still holds the step before."""
    monkeypatch.setattr(triton_tiling, "SPLIT_KEYS", 16)
    rng, made = np.random.default_rng(5), torch.Generator().manual_seed(5)
    sequences = Sequences(rng, count=4, longest=90, block_size=4, window=window)
    layout = KVLayout(sequences.groups, 4, 2, 16, 4)
    fast = TritonPagedAttention(layout, torch.float32, device, upcast=upcast, processors=16)
    oracle = make_backend("reference", layout, torch.float32, torch.device("cpu"))
    poison_all(fast)
    shape = GraphShape(24, 5, 4, mixed=True) if mixed else GraphShape(4, 4, 4, mixed=False)
    reserved = fast.reserve(shape.tokens, shape.sequences, shape.decodes, shape.mixed, -(-90 // 4))
    assert reserved.launches[0].splits > 1
    steps = [([0, 1], [1, 1]), ([2], [1]), ([0, 1, 2, 3], [1] * 4), ([3], [1])]
    if mixed:
        steps = [([0, 1, 2, 3], [1, 1, 2, 20]), ([1], [24]), ([2, 0, 1], [17, 3, 2])]
    for members, counts in steps:
        batch = sequences.batch(members, counts)
        fast.refill(reserved, padded(batch, shape))
        theirs = oracle.prepare(batch)
        for layer in range(2):
            fused = torch.randn(sum(counts), 8, 16, generator=made)
            filled = torch.cat([fused, torch.full((shape.tokens - len(fused), 8, 16), float("nan"))])
            got = fast.attend(layer, *filled.to(device).split([4, 2, 2], dim=1), 0.3, reserved)
            want = oracle.attend(layer, *fused.split([4, 2, 2], dim=1), 0.3, theirs)
            torch.testing.assert_close(got[: len(fused)].cpu(), want, atol=2e-5, rtol=2e-5)


BLOCKS_SHARED = (2, 2, 3, 3, 3, 3, 3, 0)
"""Of `Prefixed`, that a sequence shares."""


class Prefixed:
    """Our backend and the oracle, over eight sequences: five begin with the same 3 blocks, two others with the same 2.
    The layers are one without a window and one with."""

    def __init__(
        self, device: torch.device, upcast: bool, *, dtype: torch.dtype, cache: torch.dtype | None = None,
        heads: tuple[int, int] = (32, 1), head_dim: int = 16, latent_dim: int = 0, block_size: int = 16,
    ) -> None:  # fmt: skip
        self.heads, self.head_dim, self.dtype, self.cache, self.latent_dim = heads, head_dim, dtype, cache, latent_dim
        self._generator = torch.Generator().manual_seed(8)
        self.sequences = Sequences(np.random.default_rng(8), 8, longest=8 * block_size, block_size=block_size, window=9)
        layout = KVLayout(self.sequences.groups, block_size, heads[1], head_dim, heads[0], latent_dim=latent_dim)
        self.fast = TritonPagedAttention(layout, cache or dtype, device, upcast=upcast, processors=64)
        self._oracle = make_backend("reference", layout, torch.float32, torch.device("cpu"))
        self.fast._part_bytes = 0  # else so few keys save nothing
        poison_all(self.fast)
        self._device = device
        for first, members, blocks in ((2, (2, 3, 4, 5, 6), 3), (0, (0, 1), 2), (7, (7,), 0)):
            for table in self.sequences.tables:
                table[list(members), :blocks] = table[first, :blocks]
            for member in members:
                written = 0 if member == first else blocks * block_size
                self.sequences.lengths[member] = written
                self.compare([member], [blocks * block_size + 5 + member - written])

    def compare(
        self,
        members: list[int],
        counts: list[int],
        prepare: Callable[[AttentionBatch], Any] | None = None,
        layers: tuple[int, ...] = (0, 1),
    ) -> None:
        """The next tokens of these sequences, layer by layer, by both."""
        batch = self.sequences.batch(members, counts)
        mine, theirs = (prepare or self.fast.prepare)(batch), self._oracle.prepare(batch)
        heads, kv_heads = self.heads
        for layer in layers:
            shape = sum(counts), heads + 2 * kv_heads, self.head_dim
            fused = torch.randn(shape, generator=self._generator).to(self.dtype)
            more = 0 if mine.buffer is None else len(mine.slots[0]) - len(fused)
            filled = torch.cat([fused, torch.full((more, *shape[1:]), float("nan"), dtype=self.dtype)])
            q, k, v = filled.to(self._device).split([heads, kv_heads, kv_heads], dim=1)
            got = self.fast.attend(layer, q, k, v, 0.3, mine)[: len(fused)]
            q, k, v = fused.float().split([heads, kv_heads, kv_heads], dim=1)
            if self.cache is not None:
                k, v = (scaled(part)[2] for part in (k, v))
            if self.latent_dim:
                v = k[..., : self.latent_dim]
            want = self._oracle.attend(layer, q, k, v, 0.3, theirs)
            tolerance = TOLERANCE[self.dtype]
            torch.testing.assert_close(got.cpu().float(), want, atol=tolerance, rtol=tolerance)


@pytest.fixture
def always_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing pays for any number of bytes."""
    monkeypatch.setattr(triton_paged, "LAUNCHES_BYTES", -(1 << 40))


SHARED_FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "fp8": {"dtype": torch.bfloat16, "cache": FP8, "block_size": 4},
    "fp16": {"dtype": torch.float16, "cache": FP8, "heads": (6, 3), "head_dim": 24},
    "float32": {"dtype": torch.float32, "heads": (36, 3), "head_dim": 20},
    "latent": {"dtype": torch.float32, "heads": (20, 1), "head_dim": 28, "latent_dim": 20},
}


@pytest.mark.parametrize(
    "form",
    [
        "fp8",
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("bf16", "latent", "fp16", "float32")),
    ],
)
@pytest.mark.parametrize("split_keys", [4, pytest.param(1 << 20, marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_prefix_that_sequences_share_is_read_by_one_block_table(
    form: str, split_keys: int, device: torch.device, upcast: bool, always_shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' tables lead to NaN there. In layers with a window they are read."""
    monkeypatch.setattr(triton_tiling, "SPLIT_KEYS", split_keys)
    monkeypatch.setattr(triton_tiling, "MOST_SPLITS", 2)
    prefixed = Prefixed(device, upcast, **SHARED_FORMS[form])
    size = prefixed.sequences.block_size

    def prepare(batch: AttentionBatch, members: list[int]) -> Any:
        step = prefixed.fast.prepare(batch)
        shared, decodes = step.launches[0].shared, batch.num_decodes
        assert shared is not None
        assert (shared.splits > 1) == (split_keys == 4)
        together = [
            [row for row in tile if row >= 0]
            for tile in shared.rows.view(len(shared.tile_keys), -1).tolist()
        ]  # fmt: skip
        keys = [0] * len(members)
        for (first, *others), tile_keys in zip(together, shared.tile_keys.tolist(), strict=True):
            keys[first] = tile_keys
            assert others
            for row in others:
                keys[row] = tile_keys
                step.tables[0][row, : tile_keys // size] = 0
        assert shared.keys.tolist() == keys
        alone = {member for member, own in zip(members[:decodes], keys[:decodes], strict=True) if not own}
        for left in (set(members[:decodes]) & {2, 3, 4, 5, 6}, set(members[:decodes]) & {0, 1}):
            assert len(alone & left) == (len(left) % prefixed.fast._tiling.chunk.queries == 1)
        for member, own in zip(members, keys, strict=True):
            assert own in (0, size * BLOCKS_SHARED[member])
        return step

    for members, counts in (
        ([5, 0, 2, 7, 1, 3, 6, 4], [1] * 8),
        ([1, 3, 6, 4, 0, 7, 5], [1] * 7),
        ([2, 0, 6, 1, 3, 5, 7], [1, 1, 1, 1, 1, 7, 2]),
    ):
        prefixed.compare(members, counts, partial(prepare, members=members))


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.exhaustive
def test_a_reserved_step_shares_other_prefixes_each_time(
    mixed: bool, device: torch.device, upcast: bool, always_shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or none, in memory that still holds the step before."""
    monkeypatch.setattr(triton_tiling, "SPLIT_KEYS", 16)
    monkeypatch.setattr(triton_tiling, "MOST_SPLITS", 2)
    prefixed = Prefixed(device, upcast, dtype=torch.float32, heads=(12, 3))
    fast, shape = prefixed.fast, GraphShape(24, 9, 8, mixed=True) if mixed else GraphShape(8, 8, 8, mixed=False)
    sizes = shape.tokens, shape.sequences, shape.decodes, shape.mixed, 8
    fast.reserve(*sizes)
    step = fast.reserve_shared(*sizes)
    assert step.launches[0].shape[2]

    def refill(batch: AttentionBatch) -> Any:
        found = fast.find_shared(batch)
        assert (found is None) == (len(batch.starts) < 4)
        fast.refill_shared(step, padded(batch, shape), found)
        shared = step.launches[0].shared
        assert shared is not None
        together = {int(row) for rows, _ in found or [] for row in rows}
        assert set(shared.keys.nonzero().flatten().tolist()) == together
        return step

    for members in ([5, 0, 2, 7, 1, 3, 6, 4], [7, 2, 0], [1, 7, 0, 2], [6, 2, 3, 4]):
        prefixed.compare(members, [1] * (len(members) - mixed) + [5] * mixed, refill)


def test_prefixes_are_shared_where_that_saves_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.1-8B's shape: 4 KiB a token and layer, and a part of a token's sums 32 KiB, written and read."""
    layout = KVLayout((CacheGroup((0,), 64, 4), CacheGroup((1,), None, 4)), 32, 8, 128, 32)
    backend = TritonPagedAttention(layout, torch.bfloat16, torch.device("cpu"), processors=132, shared=227 << 10)

    def found(rows: int, shared_blocks: int, own: int = 0) -> list[int] | None:
        """Rows that share, where `rows` have the same first blocks and `own` others have not."""
        tables = 1 + np.arange((rows + own) * 64, dtype=np.int32).reshape(rows + own, 64)
        tables[:rows, :shared_blocks] = tables[0, :shared_blocks]
        starts, one = np.full(rows + own, 64 * 32 - 1, np.int32), np.ones(rows + own, np.int32)
        slots = np.zeros(rows + own, np.int64)
        groups = backend.find_shared(AttentionBatch(starts, one, len(one), (0 * tables, tables), (slots, slots)))
        return None if groups is None else [len(rows) for rows, _ in groups]

    # 16 rows over n blocks save 15 x 32 x n tokens' 4 KiB, 1.9 MB, and cost 32 parts of 32 KiB: 1 MB.
    assert found(16, 9) is None
    assert found(16, 10) == [16]
    assert found(16, 10, own=64) is None, "2 MB more of parts"
    assert found(16, 11, own=64) == [16]
    assert found(1, 64, own=8) is None
    layout = KVLayout((CacheGroup((0,), 64, 4),), 32, 8, 128, 32)
    backend = TritonPagedAttention(layout, torch.bfloat16, torch.device("cpu"), processors=132, shared=227 << 10)
    assert found(64, 60) is None, "all layers have a window"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", pytest.param("gemma4-small", marks=pytest.mark.exhaustive)])
def test_an_engine_with_it_gives_the_oracles_tokens(
    family: str, tiny_model: Callable[[str], Path], device: torch.device
) -> None:
    """Chunks, a prefix that is found again, and decoding rows of one model, through the whole engine."""
    cache = CacheConfig(num_blocks=64, block_size=4)
    schedule = ScheduleConfig(max_num_seqs=3, max_num_batched_tokens=16)
    tokens_by_engine = []
    for attention in ("triton", "reference"):
        engine = Engine.load(
            tiny_model(family),
            EngineConfig(
                dtype="float32", device=device.type, threads=1, attention=attention, cache=cache, schedule=schedule
            ),
        )
        assert engine.attention_name == attention
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        prompts = [[*range(5, 20)], [*range(5, 17), 40, 41], [9]]
        requests = [Request(str(i), as_token_ids(ids), params) for i, ids in enumerate(prompts)]
        done = {each.request_id: each.choices[0].token_ids for each in engine.run(requests)}
        tokens_by_engine.append([list(done[str(i)]) for i in range(3)])
    assert tokens_by_engine[0] == tokens_by_engine[1]


@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=str)
def test_no_step_asks_for_a_launch_that_was_not_compiled_at_the_start(cache: torch.dtype) -> None:
    """Steps of any sizes and lengths, whose sequences share what they begin with or nothing, and graphs of any
    shape."""
    layout = KVLayout((CacheGroup((0,), None, 4),), 32, 8, 128, 32)
    backend = TritonPagedAttention(layout, cache, torch.device("cpu"), processors=132, shared=227 << 10)
    rng = np.random.default_rng(1)
    met = set()
    for _ in range(200):
        decodes, chunks = (int(most ** rng.random()) - 1 for most in (600, 12))
        counts = [1] * decodes + rng.integers(2, 2000, chunks).tolist()
        if not counts:
            continue
        starts = (16_000 ** rng.random(len(counts))).astype(np.int32)
        table = np.ones((len(counts), 500), np.int32)
        if rng.random() < 0.5:
            table *= np.arange(1, len(counts) + 1, dtype=np.int32)[:, None]
        slots = np.zeros(sum(counts), np.int64)
        batch = AttentionBatch(starts, np.array(counts, np.int32), decodes, (table,), (slots,))
        met |= {tiles.shape for tiles in backend.prepare(batch).launches}
    for rows in (600, 64, 3, 1):
        for mixed in (True, False):
            for reserve in (backend.reserve, backend.reserve_shared):
                met |= {tiles.shape for tiles in reserve(rows, rows, rows, mixed, 500).launches}
    assert met == {tiles.shape for tiles in backend.warm_up_step().launches} == set(backend.launch_shapes())


@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_step_that_compiles_reads_and_writes_nothing(
    has_sinks: bool, device: torch.device, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KVLayout((CacheGroup((0,), None, 3), CacheGroup((1,), 5, 3)), 4, 2, 16, 4)
    backend = TritonPagedAttention(layout, torch.float32, device, upcast=upcast, processors=4)
    poison_all(backend)
    q = torch.full((WARM_UP_TOKENS, 4, 16), 7.0, device=device)
    empty = torch.empty
    monkeypatch.setattr(triton_paged.torch, "empty", lambda *a, **b: empty(*a, **b).fill_(float("nan")))
    for layer in range(2):
        sinks = torch.zeros(4, device=device) if has_sinks else None
        got = backend.attend(layer, q, q[:, :2], q[:, :2], 0.3, backend.warm_up_step(), sinks)
        assert got.isnan().all()
        assert backend.storage.keys[layer].isnan().all()
        assert backend.storage.values[layer].isnan().all()


def test_heads_of_each_shape_are_compiled(device: torch.device, upcast: bool) -> None:
    groups = CacheGroup((0,), None, 3), CacheGroup((1,), 5, 3)
    shapes = KVShape(2, 16), KVShape(1, 32)
    layout = KVLayout(groups, 4, *shapes[0], 4, shapes=shapes)
    own = attention_by_shape(
        layout, lambda part: TritonPagedAttention(part, torch.float32, device, upcast=upcast, processors=4)
    )
    assert isinstance(own, CompiledAttention)
    step = own.warm_up_step()
    for layer, (kv_heads, head_dim) in enumerate(shapes):
        q, k = (torch.ones(WARM_UP_TOKENS, heads, head_dim, device=device) for heads in (4, kv_heads))
        assert own.attend(layer, q, k, k, 0.3, step).shape == q.shape
    oracle = attention_by_shape(layout, lambda part: ReferenceAttention(part, torch.float32, device))
    assert not isinstance(oracle, CompiledAttention), "torch's operators need no compiling"


def test_latent_attention_that_fits_no_device_is_refused_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout((CacheGroup((0,), None, 2),), 32, 1, 576, 20, latent_dim=512)
    message = (
        r"^attention 'triton' needs 68 KiB of shared memory for this model's latent attention, and the device has 64"
    )
    with pytest.raises(EngineError, match=message):
        TritonPagedAttention(layout, torch.float16, torch.device("cpu"), processors=40, shared=64 << 10)
    TritonPagedAttention(layout, torch.float16, torch.device("cpu"), processors=108, shared=163 << 10)
    for shared, name in ((64 << 10, "paged-sdpa"), (163 << 10, "triton")):
        properties = SimpleNamespace(shared_memory_per_block_optin=shared)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert choice._preferred(layout, torch.float16, torch.device("cuda"), False)[0] == name


class _ReferenceInFp8(ReferenceAttention):
    """The oracle, with keys and values rounded as the cache would round them."""

    name = "triton"

    def attend(self, layer: int, q: Any, k: Any, v: Any, scale: float, step: Any, sinks: Any = None) -> torch.Tensor:
        return super().attend(layer, q, scaled(k)[2], scaled(v)[2], scale, step, sinks)


@pytest.mark.slow
def test_an_engine_with_an_fp8_cache_gives_the_tokens_of_one_that_rounds(
    tiny_model: Callable[[str], Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        dtype="float32", device=device.type, threads=1, attention="triton", kv_dtype="fp8",
        cache=CacheConfig(num_blocks=64, block_size=4), schedule=ScheduleConfig(3, 16),
    )  # fmt: skip
    tokens_by_engine = []
    for ours in (True, False):
        if not ours:
            make = lambda name, layout, dtype, on, *_, **more: _ReferenceInFp8(layout, dtype, on)  # noqa: E731
            monkeypatch.setattr("engine.engine.make_backend", make)
        engine = Engine.load(tiny_model("llama"), config)
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        requests = [Request(str(i), as_token_ids([*range(5, 9 + 7 * i)]), params) for i in range(3)]
        done = {each.request_id: each.choices[0].token_ids.tolist() for each in engine.run(requests)}
        tokens_by_engine.append([done[str(i)] for i in range(3)])
    assert tokens_by_engine[0] == tokens_by_engine[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU keeps one")
@pytest.mark.parametrize("attention", ["auto", "native", "paged-sdpa"])
def test_an_fp8_cache_is_refused_where_nothing_keeps_one(attention: str, tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(dtype="float32", attention=attention, kv_dtype="fp8", cache=CacheConfig(num_blocks=8))
    with pytest.raises(EngineError, match=r"^kv_dtype 'fp8' (needs a GPU|is of attention 'triton')"):
        Engine.load(tiny_model("llama"), config)


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(EngineError, match=r"^attention 'triton' runs on CUDA devices, not on cpu$"):
        make_backend("triton", KVLayout((), 16, 1, 8), torch.float32, torch.device("cpu"))
