"""Layers are divided into stages, a step into micro-batches, and the cache is planned for all stages together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention import AttentionBatch, KVLayout
from engine.attention.reference import ReferenceAttention
from engine.config import CacheConfig, ScheduleConfig
from engine.errors import OutOfMemory, UnsupportedModel
from engine.models.base import ModelSpec
from engine.models.load import open_model
from engine.parallel.pipeline import best_count, divide_layers, divide_step, held_groups, plan_stages, stage_specs
from engine.parallel.sharding import Share
from engine.runner.memory import plan_cache

CPU = torch.device("cpu")
BLOCK = 4


@given(st.integers(1, 130), st.integers(1, 16))
def test_each_layer_is_in_one_stage_and_stages_differ_by_one_layer(num_layers: int, num_stages: int) -> None:
    stages = divide_layers(num_layers, num_stages)
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))
    sizes = [len(layers) for layers in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes), "embedding and head are in the first stage, too"


def test_five_layers_are_divided_unevenly() -> None:
    assert divide_layers(5, 2) == (range(2), range(2, 5))
    assert divide_layers(5, 4) == (range(1), range(1, 2), range(2, 3), range(3, 5))


def step(counts: list[int], tables: list[list[int]] | None = None, wanted: list[int] | None = None) -> AttentionBatch:
    """Sequences with so many tokens at their ends, each in blocks of its own unless `tables` says otherwise."""
    width = 1 + max(counts) // BLOCK
    table = np.arange(1, 1 + len(counts) * width).reshape(-1, width) if tables is None else np.array(tables)
    starts = [0 if count > 1 else BLOCK * (table.shape[1] - 1) for count in counts]
    slots = [
        table[row, at // BLOCK] * BLOCK + at % BLOCK
        for row, (start, count) in enumerate(zip(starts, counts, strict=True))
        for at in range(start, start + count)
    ]
    return AttentionBatch(
        np.array(starts, np.int32), np.array(counts, np.int32), sum(count == 1 for count in counts),
        (table.astype(np.int32),), (np.array(slots, np.int64),), None if wanted is None else np.array(wanted, np.int32),
    )  # fmt: skip


def ends(batch: AttentionBatch, count: int | None, stages: int = 2) -> list[int]:
    return divide_step(batch, count, num_stages=stages, block_size=BLOCK, device="cpu").tolist()


def test_micro_batches_have_about_as_many_tokens_each() -> None:
    assert ends(step([1] * 8), 4) == [2, 4, 6, 8]
    assert ends(step([1] * 8), 3) == [3, 5, 8]
    assert ends(step([1, 1, 1, 1, 8, 4]), 2) == [4, 6]
    assert ends(step([1, 1, 30]), 3) == [2, 3], "a row is not divided"
    assert ends(step([1, 1]), 9) == [1, 2]
    assert ends(step([30]), 4) == [1]
    assert ends(step([1] * 8), 4, stages=1) == [8], "where there is one stage, nothing computes meanwhile"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 14))
def test_micro_batches_divide_a_step(counts: list[int], count: int) -> None:
    counts.sort(key=lambda count: count > 1)
    found = ends(step(counts), count)
    assert found == sorted(set(found))
    assert found[0] > 0
    assert found[-1] == len(counts)
    assert len(found) <= count


def test_a_row_is_never_computed_before_the_row_whose_blocks_it_reads() -> None:
    """A decoding row reads blocks 1 and 2, which the last row, a chunk, writes in the same step."""
    tables = [[1, 2, 9], [4, 5, 6], [7, 8, 10], [1, 2, 3]]
    counts = [1, 1, 1, 12]
    assert ends(step(counts), 4) == [3, 4]
    assert ends(step(counts, tables), 4) == [4]
    assert ends(step(counts, [[9, 11, 12], [4, 5, 6], [1, 2, 10], [1, 2, 3]]), 4) == [2, 4]
    tables = [[4, 5, 6], [1, 2, 0], [1, 2, 3]]
    shared = replace(step([1, 4, 4], tables), slot_mapping=(np.array([24, 4, 5, 6, 7, 12, 13, 14, 15]),))
    assert ends(shared, 3) == [1, 2, 3], "a later row may read what an earlier one writes"


def test_the_number_of_micro_batches_takes_the_shortest_time() -> None:
    """By the formula's own terms: turns times the length of a turn, with 25 tokens to a reading of the weights."""
    for tokens in (1, 16, 100, 2048):
        for stages in (2, 4, 8):
            chosen = best_count(tokens, stages, "cpu")
            times = {count: (count + stages - 1) * (25 + tokens / count) for count in range(1, 400)}
            assert times[chosen] <= 1.02 * min(times.values())


def test_a_part_of_a_step_is_the_step_of_its_rows() -> None:
    whole = step([1, 1, 3, 4], wanted=[0, 1, 8])
    part = whole.rows(1, 3)
    assert part.starts.tolist() == [4, 0]
    assert part.counts.tolist() == [1, 3]
    assert part.num_decodes == 1
    assert part.block_tables[0].tolist() == whole.block_tables[0][1:3].tolist()
    assert part.slot_mapping[0].tolist() == whole.slot_mapping[0][1:5].tolist()
    assert part.wanted is not None
    assert part.wanted.tolist() == [0]
    last = whole.rows(3, 4)
    assert (last.num_decodes, last.wanted.tolist()) == (0, [3])  # type: ignore[union-attr]
    assert whole.rows(2, 3).wanted.tolist() == []  # type: ignore[union-attr]


SPEC = ModelSpec("llama", 5, 4, 2, 16, 64, 256, 512, (None,) * 5, (2,), 1000, torch.float32)
WINDOWS = replace(SPEC, windows=(None, None, 32, 32, 32))


def test_each_stage_caches_its_own_layers_and_the_first_has_the_head() -> None:
    first, second = stage_specs(SPEC, 2)
    assert (first.window_layers, second.window_layers) == ({None: (0, 1)}, {None: (2, 3, 4)})
    assert (first.generates, second.generates) == (True, False)
    assert first.kv_elements + second.kv_elements == SPEC.kv_elements
    (mixed, *_) = stage_specs(replace(SPEC, uncached_layers=(1,)), 2)
    assert mixed.attending_layers == (0,)


def test_a_pool_has_as_many_blocks_as_the_stage_with_the_least_memory_stores() -> None:
    specs, schedule = stage_specs(SPEC, 2), ScheduleConfig(64, 64)
    caches = [CacheConfig(memory_bytes=size << 20) for size in (2, 3)]
    (group,) = plan_stages(SPEC, specs, caches, schedule, 512, CPU)
    assert group.layers == (0, 1, 2, 3, 4)
    alone = [plan_cache(spec, cache, schedule, 512, CPU)[0] for spec, cache in zip(specs, caches, strict=True)]
    assert group.num_blocks == alone[0].num_blocks == alone[1].num_blocks, "memory is in proportion to layers"
    (group,) = plan_stages(SPEC, specs, [caches[0]] * 2, schedule, 512, CPU)
    assert group.num_blocks < alone[0].num_blocks
    with pytest.raises(OutOfMemory, match="one sequence of 512 tokens"):
        plan_stages(SPEC, specs, [caches[0], CacheConfig(memory_bytes=1 << 10)], schedule, 512, CPU)


def test_stages_without_a_window_have_no_memory_of_its_pool() -> None:
    """The first stage attends to everything, and the second one to a window: block tables have both pools."""
    specs = stage_specs(WINDOWS, 2)
    groups = plan_stages(WINDOWS, specs, [CacheConfig(memory_bytes=4 << 20)] * 2, ScheduleConfig(4, 64), 512, CPU)
    assert [(group.layers, group.window) for group in groups] == [((0, 1), None), ((2, 3, 4), 32)]
    for index, spec in enumerate(specs):
        held = held_groups(spec, groups)
        assert [group.num_blocks for group in held] == [group.num_blocks for group in groups]
        assert [bool(group.layers) for group in held] == [index == 0, index == 1]
        storage = ReferenceAttention(KVLayout.of(spec, held, 32), torch.float32, CPU).storage
        stored = [layer for layer, keys in enumerate(storage.keys) if keys.numel()]
        assert stored == list(divide_layers(5, 2)[index])


@pytest.mark.parametrize(
    ("family", "stages", "message"),
    [
        ("llama", 4, "3 layers can't be divided into 4 stages; give a --pipeline-parallel of 3 or less"),
        ("gemma4-small", 2, "layers with inputs of their own, or that read the keys .* leave --pipeline-parallel out"),
        (
            "qwen3-next",
            2,
            "layers with states can't be shared by several devices yet; leave --tensor-parallel, --pi",
        ),
    ],
)
def test_models_that_can_not_be_divided_are_refused(family: str, stages: int, message: str, tiny_model: Any) -> None:
    opened = open_model(Path(tiny_model(family)))
    assert opened.decoder is not None
    with pytest.raises(UnsupportedModel, match=message):
        Share(opened.decoder, 0, 1, stage=0, num_stages=stages)


def test_layers_without_attention_do_not_make_a_stage(tiny_model: Any) -> None:
    opened = open_model(Path(tiny_model("llama")))
    assert opened.decoder is not None
    with pytest.raises(UnsupportedModel, match="of 3 stages one would have no layer that attends"):
        Share(replace(opened.decoder, without_mixer=frozenset({1})), 0, 1, stage=0, num_stages=3)


def test_a_rank_has_the_weights_of_its_layers_alone(tiny_model: Any) -> None:
    opened = open_model(Path(tiny_model("llama")))
    assert opened.decoder is not None
    shares = [Share(opened.decoder, 0, 1, stage=stage, num_stages=2) for stage in range(2)]
    for name in opened.weights.names:
        held = [share.has(name) for share in shares]
        if "layers." in name:
            assert held == [".0." in name, ".0." not in name], name
        else:
            assert held == [True, True], name
