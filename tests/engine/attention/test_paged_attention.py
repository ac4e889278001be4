"""Every backend against the float32 oracle, on batches cut at random from growing sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import AttentionBackend, AttentionBatch, KVLayout, make_backend
from engine.attention.base import CapturableAttention
from engine.attention.storage import KVStorage
from engine.errors import EngineError
from engine.models.base import KVShape, LayerCache
from engine.native.structs import ElementKind
from engine.plan import BlockCopy, CacheGroup
from tests.native_paths import PATHS, native_path

FAST_BACKENDS = ["paged-sdpa", *(f"native {name}" for name in PATHS)]
STALE = 1e4  # what unused slots of live blocks may still hold: finite, and far from any answer


class Sequences:
    """Block tables and lengths of a few sequences, over two layers: one global, one (perhaps) windowed."""

    def __init__(self, rng: np.random.Generator, count: int, longest: int, block_size: int, window: int | None) -> None:
        self.block_size, self.window = block_size, window
        self.lengths = np.zeros(count, dtype=np.int64)
        width = -(-longest // block_size)
        self.groups = (CacheGroup((0,), None, count * width + 1), CacheGroup((1,), window, count * width + 1))
        self.tables = [(rng.permutation(count * width) + 1).reshape(count, width).astype(np.int32) for _ in range(2)]

    def batch(self, members: list[int], counts: list[int]) -> AttentionBatch:
        """The next `counts` tokens of these sequences; blocks behind the window are released, as in the pool."""
        order = sorted(range(len(members)), key=lambda i: counts[i] != 1)
        rows, sizes = [members[i] for i in order], [counts[i] for i in order]
        starts = self.lengths[rows].astype(np.int32)
        tables, slots = [], []
        for index, table in enumerate(self.tables):
            part = table[rows].copy()
            where = []
            for i, (start, size) in enumerate(zip(starts.tolist(), sizes, strict=True)):
                at = np.arange(start, start + size)
                where.append(part[i, at // self.block_size].astype(np.int64) * self.block_size + at % self.block_size)
                if index == 1 and self.window is not None:
                    part[i, : max(0, start - self.window + 1) // self.block_size] = 0
            tables.append(part)
            slots.append(np.concatenate(where))
        self.lengths[rows] += sizes
        num_decodes = sum(size == 1 for size in sizes)
        return AttentionBatch(starts, np.array(sizes, dtype=np.int32), num_decodes, tuple(tables), tuple(slots))


def store(cache: LayerCache | None, k: Tensor, v: Tensor) -> None:
    """Write keys and values [T, kv_heads, head_dim] where a step's are to be, as a model may itself."""
    assert cache is not None
    for stored, made in ((cache.keys, k), (cache.values, v)):
        stored.view(-1, *made.shape[1:])[cache.slots.long()] = made


def backend_of(name: str, layout: KVLayout, dtype: torch.dtype, kv_kind: ElementKind | None = None) -> AttentionBackend:
    """A backend by name; "native PATH" is the native one on a path of its own."""
    kind, _, path = name.partition(" ")
    library = native_path(path) if path else None
    return make_backend(kind, layout, dtype, torch.device("cpu"), library, kv_kind)


def poison(backend: object, layout: KVLayout) -> None:
    """Fill every block but block 0 with stale values."""
    for layer in range(2):
        for store in (backend.storage.keys[layer], backend.storage.values[layer]):  # type: ignore[attr-defined]
            store[1:] = STALE


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST_BACKENDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    block_size=st.sampled_from([4, 16, 32]),
    window=st.sampled_from([None, 1, 5, 37, 300]),
    heads=st.sampled_from([(4, 4), (9, 3), (6, 1)]),
    sink=st.sampled_from([None, -30.0, 0.0, 30.0]),
)
def test_agrees_with_the_oracle(
    name: str,
    dtype: torch.dtype,
    tolerance: float,
    seed: int,
    block_size: int,
    window: int | None,
    heads: tuple[int, int],
    sink: float | None,
) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    num_heads, kv_heads = heads
    head_dim = 16
    sequences = Sequences(rng, count=6, longest=700, block_size=block_size, window=window)
    layout = KVLayout(sequences.groups, block_size, kv_heads, head_dim, num_heads)
    fast = backend_of(name, layout, dtype)
    oracle = make_backend("reference", layout, torch.float32, torch.device("cpu"))
    poison(fast, layout)
    for _ in range(6):
        members = [int(i) for i in rng.permutation(6)[: rng.integers(1, 7)]]
        room = [int(700 - sequences.lengths[m]) for m in members]
        counts = [min(r, int(rng.choice([1, 1, 2, 33, 300]))) for r in room]
        members = [m for m, c in zip(members, counts, strict=True) if c]
        counts = [c for c in counts if c]
        if not members:
            continue
        batch = sequences.batch(members, counts)
        total = sum(counts)
        steps = fast.prepare(batch), oracle.prepare(batch)
        for layer in range(2):
            fused = torch.randn(total, num_heads + 2 * kv_heads, head_dim).to(dtype)
            q, k, v = fused.split([num_heads, kv_heads, kv_heads], dim=1)  # strided, as from a fused projection
            sinks = None if sink is None else (sink + torch.randn(num_heads)).to(dtype).float()
            got = fast.attend(layer, q, k, v, 0.3, steps[0], sinks)
            want = oracle.attend(layer, q.float(), k.float(), v.float(), 0.3, steps[1], sinks)
            assert got.shape == q.shape
            torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["reference", *FAST_BACKENDS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("dim", "latent_dim", "heads"), [(28, 20, 5), (72, 64, 16)])
def test_values_that_are_the_first_elements_of_keys_are_attended_as_others(
    name: str, dtype: torch.dtype, tolerance: float, dim: int, latent_dim: int, heads: int
) -> None:
    # Given sequences whose values are parts of their keys, and a backend that is given them apart, padded,
    rng = np.random.default_rng(4)
    torch.manual_seed(4)
    sequences = Sequences(rng, count=4, longest=300, block_size=16, window=37)
    fast = backend_of(name, KVLayout(sequences.groups, 16, 1, dim, heads, latent_dim=latent_dim), dtype)
    oracle = make_backend(
        "reference", KVLayout(sequences.groups, 16, 1, dim, heads), torch.float32, torch.device("cpu")
    )
    poison(fast, KVLayout(sequences.groups, 16, 1, dim, heads))
    # when chunks, with and without a context, and tokens attend,
    for counts in ([33, 1, 2, 200], [1, 1, 1, 1], [17, 1, 60, 1]):
        batch = sequences.batch([0, 1, 2, 3], counts)
        steps = fast.prepare(batch), oracle.prepare(batch)
        for layer in range(2):
            q, k = (torch.randn(sum(counts), n, dim).to(dtype) for n in (heads, 1))
            values = torch.nn.functional.pad(k[..., :latent_dim], (0, dim - latent_dim))
            got = fast.attend(layer, q, k, k[..., :latent_dim], 0.3, steps[0])
            want = oracle.attend(layer, q.float(), k.float(), values.float(), 0.3, steps[1])
            # then the results are the same, as long as values are.
            torch.testing.assert_close(got.float(), want[..., :latent_dim], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["reference", *FAST_BACKENDS])
@pytest.mark.parametrize("count", [1, 5])
def test_a_sink_takes_its_share_of_the_weights_and_adds_no_value(name: str, count: int) -> None:
    # Given keys of zeros, whose scores are all 0, and sinks of as much as n keys,
    layout = KVLayout((CacheGroup((0,), None, 4),), 4, 1, 8, 2)
    backend = backend_of(name, layout, torch.float32)
    q, k, v = torch.ones(count, 2, 8), torch.zeros(count, 1, 8), torch.ones(count, 1, 8)
    sinks = torch.tensor([1.0, 3.0]).log()
    batch = AttentionBatch(
        np.zeros(1, np.int32), np.array([count], np.int32), int(count == 1),
        (np.array([[1, 2]], np.int32),), (4 + np.arange(count),),
    )  # fmt: skip
    # when tokens attend,
    out = backend.attend(0, q, k, v, 0.3, backend.prepare(batch), sinks)
    # then a token that sees k keys has k / (k + n) of the values, and without sinks all of them.
    seen = torch.arange(1, count + 1)[:, None, None]
    torch.testing.assert_close(out, (seen / (seen + sinks.exp()[:, None])).expand(out.shape))
    torch.testing.assert_close(backend.attend(0, q, k, v, 0.3, backend.prepare(batch)), torch.ones_like(q))


@pytest.mark.parametrize("name", ["reference", *FAST_BACKENDS])
def test_zeroed_blocks_are_zero_in_every_layer_of_the_group(name: str) -> None:
    layout = KVLayout((CacheGroup((0, 2), None, 4), CacheGroup((1,), 8, 4)), 4, 1, 8)
    backend = backend_of(name, layout, torch.float32)
    storage = backend.storage  # type: ignore[attr-defined]
    for tensor in (*storage.keys, *storage.values):
        tensor.fill_(float("nan"))
    backend.zero(0, [1, 3])
    for layer in (0, 2):
        for tensor in (storage.keys[layer], storage.values[layer]):
            assert bool((tensor[[1, 3]] == 0).all())
            assert bool(tensor[2].isnan().all())
    assert bool(storage.keys[1].isnan().all())


def test_groups_of_several_shapes_have_backends_of_their_own() -> None:
    # Given layers of two shapes, each of whose tokens is stored twice: by all shapes at once, and by its own alone
    layout = KVLayout(
        (CacheGroup((1, 3), None, 4), CacheGroup((0,), 8, 4), CacheGroup((2,), 6, 4)), 4, 1, 24, 4,
        shapes=(KVShape(1, 24), KVShape(2, 16), KVShape(2, 16)),
    )  # fmt: skip
    whole = backend_of("reference", layout, torch.float32)
    alone = {
        group: backend_of("reference", KVLayout((layout.groups[group],), 4, *layout.shapes[group], 4), torch.float32)
        for group in range(3)
    }
    assert whole.name == "reference"
    assert isinstance(whole, CapturableAttention)
    tables, slots = [np.array([[3, 1]], np.int32), np.array([[1, 2]], np.int32)], np.arange(5)
    slots_of = [table[0, slots // 4] * 4 + slots % 4 for table in tables]
    batch = AttentionBatch(
        np.zeros(1, np.int32), np.array([5], np.int32), 0, (tables[0], tables[1], tables[0]),
        (slots_of[0], slots_of[1], slots_of[0]),
    )  # fmt: skip
    torch.manual_seed(3)
    parts = {
        layer: [torch.randn(5, heads, layout.shapes[group].head_dim) for heads in (4, *2 * layout.shapes[group][:1])]
        for group, owned in enumerate(layout.groups)
        for layer in owned.layers
    }

    def check() -> None:
        step = whole.prepare(batch)
        reserved = whole.reserve(int(batch.counts.sum()), 1, batch.num_decodes, mixed=True, table_width=2)
        whole.refill(reserved, batch)
        for group, owned in enumerate(layout.groups):
            table, slots = batch.block_tables[group], batch.slot_mapping[group]
            own = alone[group].prepare(replace(batch, block_tables=(table,), slot_mapping=(slots,)))
            for layer in owned.layers:
                want = alone[group].attend(layer, *parts[layer], 0.3, own)
                for each in (step, reserved):
                    torch.testing.assert_close(whole.attend(layer, *parts[layer], 0.3, each), want)

    # When they attend, then both give the same, and so they do once first blocks were zeroed, and second ones copied.
    check()
    for group, own in alone.items():
        first, second = batch.block_tables[group][0].tolist()
        for backend, number in ((whole, group), (own, 0)):
            backend.zero(number, [first])
            backend.copy(number, [BlockCopy(number, second, second + 1, 1)])
    starts = np.full(1, 4, np.int32)
    at = tuple(slots[4:] for slots in batch.slot_mapping)
    batch = replace(batch, starts=starts, counts=np.ones(1, np.int32), num_decodes=1, slot_mapping=at)
    parts = {layer: [part[4:] for part in own] for layer, own in parts.items()}
    check()
    copied = tuple(np.array([[table[0, 1] + 1, table[0, 1]]], np.int32) for table in batch.block_tables)
    batch = replace(batch, block_tables=copied)
    check()


KINDS = [
    *((name, dtype, None) for name in ["reference", *FAST_BACKENDS] for dtype in (torch.float32, torch.bfloat16)),
    *((f"native {name}", torch.bfloat16, ElementKind.I8) for name in PATHS),
]


@pytest.mark.parametrize(("name", "dtype", "kv_kind"), KINDS)
@pytest.mark.parametrize("tokens", [1, 6, 7])
@pytest.mark.parametrize("latent_dim", [0, 12])
def test_a_copy_is_read_as_the_first_tokens_of_its_source(
    name: str, dtype: torch.dtype, kv_kind: ElementKind | None, tokens: int, latent_dim: int
) -> None:
    # Given blocks whose first tokens are finite, and the others are not,
    kv_heads = 1 if latent_dim else 2
    groups = (CacheGroup((0, 2), None, 6), CacheGroup((1,), None, 6))
    layout = KVLayout(groups, 8, kv_heads, 16, 4, latent_dim=latent_dim)
    backend = backend_of(name, layout, dtype, kv_kind)
    torch.manual_seed(1)
    q, k, v = (torch.randn(8, heads, 16).to(dtype) for heads in (4, kv_heads, kv_heads))
    v = k[..., :latent_dim] if latent_dim else v
    bad = torch.full_like(k[tokens + 1 :], float("nan"))

    def attend(
        layer: int, block: int, start: int, parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        count = len(parts[0])
        table, slots = np.array([[block]], dtype=np.int32), np.arange(start, start + count) + 8 * block
        where = (np.array([start], dtype=np.int32), np.array([count], dtype=np.int32), int(count == 1))
        return backend.attend(layer, *parts, 0.3, backend.prepare(AttentionBatch(*where, (table,) * 2, (slots,) * 2)))

    for layer in range(3):
        attend(
            layer, 1, 0, (q, torch.cat((k[: tokens + 1], bad)), torch.cat((v[: tokens + 1], bad[..., : v.shape[2]])))
        )
        attend(layer, 5, 0, (q[:tokens], k[:tokens], v[:tokens]))
    # when they are copied in one group,
    backend.copy(0, [BlockCopy(0, 1, 4, 1), BlockCopy(0, 1, 2, tokens)])
    # then the next token sees what it would see behind the same tokens, in the layers of the group.
    last = q[-1:], k[-1:], v[-1:]
    for layer in (0, 2):
        assert torch.equal(attend(layer, 2, tokens, last), attend(layer, 5, tokens, last))
    assert bool((backend.storage.keys[1][2] == 0).all())  # type: ignore[attr-defined]


def test_blocks_of_fp8_are_copied_with_their_scales() -> None:
    storage = KVStorage(KVLayout((CacheGroup((0,), None, 4),), 4, 2, 8), torch.float8_e4m3fn, torch.device("cpu"))
    stores = (storage.keys[0], storage.values[0], storage.key_scales[0], storage.value_scales[0])
    for store in stores:
        store.copy_(torch.randn(store.shape))
    before = [store.float().view(4, 4, -1).clone() for store in stores]
    storage.copy(0, [BlockCopy(0, 1, 3, 3), BlockCopy(0, 1, 2, 1)])
    for store, was in zip(stores, before, strict=True):
        now = store.float().view(4, 4, -1)
        assert torch.equal(now[3], torch.cat((was[1, :3], was[3, 3:])))
        assert torch.equal(now[2], torch.cat((was[1, :1], was[2, 1:])))
        assert torch.equal(now[:2], was[:2])


def test_an_unknown_backend_is_named_with_the_choices() -> None:
    with pytest.raises(EngineError, match=r"no attention backend 'flash9'; choose auto or one of .*paged-sdpa"):
        make_backend("flash9", KVLayout((), 16, 1, 8), torch.float32, torch.device("cpu"))
