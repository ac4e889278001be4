"""The pool is planned by what a token's keys and values really take, quantized or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention import KVLayout
from engine.attention.native import NativeStorage
from engine.attention.storage import KVStorage
from engine.config import CacheConfig, EngineConfig, KVDType, ScheduleConfig
from engine.engine import Engine
from engine.models.base import KVShape, ModelSpec
from engine.native.structs import ElementKind
from engine.plan import CacheGroup
from engine.runner.memory import block_bytes, plan_cache

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
SPEC = ModelSpec(
    architecture="tiny", num_layers=4, num_heads=6, num_kv_heads=2, head_dim=64, hidden_size=384, vocab_size=100,
    max_position=1024, windows=(None, 64, None, 64), eos_token_ids=(), num_parameters=0, dtype=torch.bfloat16,
)  # fmt: skip
BUDGET = 64 << 20


def pools(kv_dtype: KVDType, *, windows: tuple[int | None, ...] = (None,) * 4) -> tuple[CacheGroup, ...]:
    spec = replace(SPEC, windows=windows)
    cache, schedule = CacheConfig(memory_bytes=BUDGET), ScheduleConfig(max_num_seqs=10_000)
    return plan_cache(spec, cache, schedule, 1024, CPU, kv_dtype)


def stored_bytes(groups: tuple[CacheGroup, ...], kind: ElementKind) -> int:
    storage = NativeStorage(KVLayout(groups, 32, SPEC.num_kv_heads, SPEC.head_dim), kind)
    tensors = (*storage.keys, *storage.values, *storage.key_scales, *storage.value_scales)
    return sum(tensor.nbytes for tensor in tensors)


def test_an_int8_pool_of_the_same_memory_holds_nearly_twice_the_tokens() -> None:
    (plain,), (quantized,) = pools("auto"), pools("int8")
    # a head of 64 elements: 128 bytes in bfloat16, 64 and a scale of 4 in int8
    assert (quantized.num_blocks - 1) / (plain.num_blocks - 1) == pytest.approx(128 / 68, rel=0.01)


@pytest.mark.parametrize(("kv_dtype", "kind"), [("auto", ElementKind.BF16), ("int8", ElementKind.I8)])
@pytest.mark.parametrize("windows", [(None,) * 4, (None, 64, None, 64)])
def test_the_stored_tensors_are_the_planned_ones(
    kv_dtype: KVDType, kind: ElementKind, windows: tuple[int | None, ...]
) -> None:
    groups = pools(kv_dtype, windows=windows)
    extra = stored_bytes(tuple(replace(group, num_blocks=1) for group in groups), kind)  # block 0 is never allocated
    assert 0.97 * BUDGET < stored_bytes(groups, kind) - extra <= BUDGET


def test_an_fp8_pool_is_planned_as_it_is_stored() -> None:
    (group,) = pools("fp8")
    storage = KVStorage(KVLayout((replace(group, num_blocks=8),), 32, SPEC.num_kv_heads, SPEC.head_dim), FP8, CPU)
    stored = (*storage.keys, *storage.values, *storage.key_scales, *storage.value_scales)
    assert (group.num_blocks - 1) * sum(tensor.nbytes for tensor in stored) // 8 == pytest.approx(BUDGET, rel=0.01)


def test_groups_of_several_shapes_are_planned_each_by_its_own() -> None:
    # Given full-attention layers with one head of 128, and others with two of 64: as many bytes a token
    shapes = (KVShape(1, 128), KVShape(2, 64)) * 2
    spec = replace(SPEC, kv_shapes=shapes)
    group = CacheGroup((0, 2), None, 0)
    assert block_bytes(spec, group, 32) == block_bytes(SPEC, group, 32)
    # When they have four heads, then their blocks alone are four times as large, and int8's scales one for each head
    wide = replace(SPEC, kv_shapes=(KVShape(4, 128), KVShape(2, 64)) * 2)
    assert block_bytes(wide, group, 32) == 2 * 32 * 4 * 2 * 256
    assert block_bytes(wide, group, 32, "int8") == 2 * 32 * 4 * 2 * (128 + 4)
    assert block_bytes(wide, CacheGroup((1, 3), 64, 0), 32) == block_bytes(SPEC, CacheGroup((1, 3), 64, 0), 32)
    assert wide.kv_elements == 2 * (4 * 2 * 128 + 2 * 2 * 64)


LATENT = replace(SPEC, num_kv_heads=1, head_dim=72, latent_dim=64)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_values_that_are_a_part_of_keys_are_planned_and_stored_once(kv_dtype: KVDType) -> None:
    cache, schedule = CacheConfig(memory_bytes=BUDGET), ScheduleConfig(max_num_seqs=10_000)
    (group,) = plan_cache(replace(LATENT, windows=(None,) * 4), cache, schedule, 1024, CPU, kv_dtype)
    layout = KVLayout.of(LATENT, (replace(group, num_blocks=8),), 32)
    storage = KVStorage(layout, torch.bfloat16 if kv_dtype == "auto" else FP8, CPU)
    stored = {t.data_ptr(): t.nbytes for stores in vars(storage).values() if isinstance(stores, list) for t in stores
              if isinstance(t, torch.Tensor)}  # fmt: skip
    assert (group.num_blocks - 1) * sum(stored.values()) // 8 == pytest.approx(BUDGET, rel=0.01)


@pytest.mark.parametrize(("kv_dtype", "kind"), [("auto", ElementKind.BF16), ("int8", ElementKind.I8)])
def test_the_kernels_store_them_in_both_orders_and_that_is_planned(kv_dtype: KVDType, kind: ElementKind) -> None:
    cache, schedule = CacheConfig(memory_bytes=BUDGET), ScheduleConfig(max_num_seqs=10_000)
    spec = replace(LATENT, windows=(None,) * 4)
    (group,) = plan_cache(spec, cache, schedule, 1024, CPU, kv_dtype, native=True)
    storage = NativeStorage(KVLayout.of(LATENT, (replace(group, num_blocks=8),), 32), kind)
    stored = (*storage.keys, *storage.values, *storage.key_scales, *storage.value_scales)
    assert (group.num_blocks - 1) * sum(tensor.nbytes for tensor in stored) // 8 == pytest.approx(BUDGET, rel=0.01)


def test_an_engine_plans_its_pool_for_the_kv_dtype_it_has(tiny_model: Callable[[str], Path]) -> None:
    # Given heads of 12 elements in float32, when an engine is loaded: 48 bytes of a head against 12 and a scale of 4
    config = EngineConfig(
        dtype="float32", attention="native", cache=CacheConfig(memory_bytes=4 << 20), schedule=ScheduleConfig(1000)
    )
    plain, quantized = (
        Engine.load(tiny_model("llama"), replace(config, kv_dtype=kv_dtype)).stats().total_blocks
        for kv_dtype in ("auto", "int8")
    )
    assert quantized / plain == pytest.approx(3, rel=0.02)
