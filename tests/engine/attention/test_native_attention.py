"""Guarantees of the native backend beyond the oracle: the same bits in any batch, and an int8 cache that is close."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import AttentionBatch, KVLayout, make_backend
from engine.attention.native import NativeAttention
from engine.errors import EngineError
from engine.native.structs import ElementKind
from engine.plan import CacheGroup
from tests.native_paths import PATHS, native_path

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 64, 32
CPU = torch.device("cpu")
Change = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def backend(path: str, num_blocks: int, *, threads: int = 2, kv_kind: ElementKind | None = None) -> NativeAttention:
    layout = KVLayout((CacheGroup((0,), None, num_blocks),), BLOCK, KV_HEADS, HEAD_DIM, HEADS)
    made = make_backend("native", layout, torch.bfloat16, CPU, native_path(path, threads), kv_kind)
    assert isinstance(made, NativeAttention)
    return made


def batch_of(tables: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> AttentionBatch:
    width = max(len(table) for table in tables)
    padded = np.array([[*table, *[0] * (width - len(table))] for table in tables], dtype=np.int32)
    positions = [np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
    slots = [padded[i, p // BLOCK].astype(np.int64) * BLOCK + p % BLOCK for i, p in enumerate(positions)]
    decodes = sum(count == 1 for count in counts)
    as_int32 = (np.array(values, dtype=np.int32) for values in (starts, counts))
    return AttentionBatch(*as_int32, decodes, (padded,), (np.concatenate(slots),))


def inputs(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, heads, HEAD_DIM, generator=made) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def attend(attention: NativeAttention, batch: AttentionBatch, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return attention.attend(0, *qkv, 0.2, attention.prepare(batch))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kv_kind", [None, ElementKind.I8])
def test_sharing_a_prefix_changes_no_bit(path: str, kv_kind: ElementKind | None) -> None:
    # Given a prefix of 23 blocks, two branches of 10 more, and sequences of their own ends on top of them
    trunk = list(range(1, 24))
    branches = [trunk + list(range(24, 34)), trunk + list(range(34, 44)), trunk]
    tables = [branches[i % 3] + [44 + 2 * i, 45 + 2 * i] for i in range(13)]
    attention = backend(path, 80, kv_kind=kv_kind)
    for table in (*branches[:2], *([0] * len(t[:-2]) + t[-2:] for t in tables)):
        start = next(i for i, block in enumerate(table) if block) * BLOCK
        count = len(table) * BLOCK - start
        attend(attention, batch_of([table], [start], [count]), inputs(count, seed=table[-1]))
    starts = [len(table) * BLOCK - 7 - i for i, table in enumerate(tables)]
    q, k, v = inputs(len(tables), seed=1)
    # When they decode together, and each alone
    together = attend(attention, batch_of(tables, starts, [1] * len(tables)), (q, k, v))
    alone = [
        attend(attention, batch_of([t], [s], [1]), (q[i : i + 1], k[i : i + 1], v[i : i + 1]))
        for i, (t, s) in enumerate(zip(tables, starts, strict=True))
    ]
    # Then the prefix was read for many at once, and the answers are the same to the last bit
    assert shared_rows(attention, batch_of(tables, starts, [1] * len(tables))) == 9  # both branches
    assert torch.equal(together, torch.cat(alone))


def shared_rows(attention: NativeAttention, batch: AttentionBatch) -> int:
    """The number of sequences whose first tiles are computed in a task with others'."""
    step = attention.prepare(batch)
    return int(step.tasks.shared_rows(0))


@pytest.mark.parametrize("path", PATHS)
def test_a_row_in_a_chunk_is_the_row_that_decodes(path: str) -> None:
    # Given a prompt of 700 tokens, computed in one chunk
    table = list(range(1, 23))
    whole = backend(path, 30)
    q, k, v = inputs(700, seed=2)
    in_chunk = attend(whole, batch_of([table], [0], [700]), (q, k, v))
    # When another cache takes it in chunks, and the last tokens one by one
    pieces = backend(path, 30, threads=1)
    got, at = [], 0
    for count in (1, 59, 333, 300, *[1] * 7):
        part = tuple(x[at : at + count] for x in (q, k, v))
        got.append(attend(pieces, batch_of([table], [at], [count]), part))  # type: ignore[arg-type]
        at += count
    # Then nothing differs
    assert torch.equal(torch.cat(got), in_chunk)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_long_contexts_spread_over_threads_change_no_bit(path: str) -> None:
    table = list(range(1, 130))
    answers = []
    for threads in (1, 2, 3):
        attention = backend(path, 140, threads=threads)
        qkv = inputs(4100, seed=3)
        attend(attention, batch_of([table], [0], [4100]), qkv)
        answers.append(attend(attention, batch_of([table], [4100], [1]), inputs(1, seed=4)))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("path", PATHS)
def test_an_int8_cache_stays_close(path: str) -> None:
    table = list(range(1, 20))
    exact, small = backend(path, 20), backend(path, 20, kv_kind=ElementKind.I8)
    for count, start in ((555, 0), (1, 555), (40, 556)):
        qkv = inputs(count, seed=count)
        wanted, got = (attend(a, batch_of([table], [start], [count]), qkv).float() for a in (exact, small))
        assert (got - wanted).norm() < 0.02 * wanted.norm()
    assert small.storage.keys[0].element_size() == 1


@pytest.mark.parametrize("kv_kind", [None, ElementKind.I8])
def test_non_finite_values_reach_their_row_and_no_other(kv_kind: ElementKind | None) -> None:
    # Given two sequences, one of which has met a NaN in its keys
    attention = backend("avx2", 10, kv_kind=kv_kind)
    q, k, v = inputs(40, seed=5)
    k[3, 1, 7] = float("nan")
    got = attend(attention, batch_of([[1], [2]], [0, 0], [20, 20]), (q, k, v))
    # Then every later row of that sequence and KV head is NaN, and the other sequence is untouched
    assert bool(got[3:20, HEADS // 2 :].isnan().all())
    assert bool(got[20:].isfinite().all())
    assert bool(got[:3].isfinite().all())


def test_half_precision_is_refused_by_name() -> None:
    layout = KVLayout((CacheGroup((0,), None, 4),), 16, 1, 8)
    with pytest.raises(EngineError, match=r"computes in bfloat16 and float32, not torch.float16; use paged-sdpa"):
        make_backend("native", layout, torch.float16, CPU, native_path("avx2"))


@pytest.mark.parametrize(
    ("named", "change"),
    [
        (r"q of \[20, 6, 64\] in BF16, but the model gives \[20, 3, 64\]", lambda q, k, v: (q[:, :3], k, v)),
        (r"k of \[20, 2, 64\] in BF16, but the model gives \[20, 1, 64\]", lambda q, k, v: (q, k[:, :1], v[:, :1])),
        (r"k of \[20, 2, 64\] in BF16, but the model gives \[20, 4, 64\]", lambda q, k, v: (q, k.repeat(1, 2, 1), v)),
        (r"v of \[20, 2, 64\] in BF16, but the model gives \[20, 2, 32\]", lambda q, k, v: (q, k, v[..., :32])),
        (r"v of \[20, 2, 64\] in BF16, but the model gives \[19, 2, 64\]", lambda q, k, v: (q, k, v[:19])),
        (r"q of \[20, 6, 64\] in BF16, but .* torch\.float32", lambda q, k, v: (q.float(), k, v)),
    ],
)
def test_tensors_of_another_shape_are_refused_before_a_kernel_reads_them(named: str, change: Change) -> None:
    attention = backend("avx2", 10)
    with pytest.raises(EngineError, match=named):
        attend(attention, batch_of([[1]], [0], [20]), change(*inputs(20, seed=6)))
