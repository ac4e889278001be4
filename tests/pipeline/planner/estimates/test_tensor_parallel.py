"""Models that several devices share: what fits, and how long they take at least."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.planner.estimates.capacity import HARDWARE, DoesNotFit, ModelShape, bound
from pipeline.planner.estimates.tensor_parallel import (
    LATENCY_SECONDS,
    DecoderLayout,
    ShardedModel,
    UnevenShards,
    capacity,
    check_fits,
    replica_bound,
)

H100 = HARDWARE["h100"]
LAYOUT = DecoderLayout(layers=80, hidden_size=8_192, heads=64, kv_heads=8)
LLAMA_70B = ModelShape(parameters=70_000_000_000, kv_elements=80 * 2 * 8 * 128)
FOUR = ShardedModel(LLAMA_70B, LAYOUT, 4)
WORK = {"requests": 1_000, "prompt_tokens": 1e6, "computed_prompt_tokens": 8e5, "output_tokens": 3e5}


def test_four_h100_hold_a_quarter_of_a_70b_model_each() -> None:
    found = capacity(FOUR, H100, 4_096)
    assert (found.weight_bytes, found.kv_bytes_per_token) == (35e9, 81_920)
    assert found.kv_bytes_per_request == 4_096 * 81_920
    assert found.max_requests == int((0.9 * 80e9 - 35e9) // (4_096 * 81_920)) == 110
    assert capacity(replace(FOUR, devices=1), H100, 4_096).max_requests == 0


@pytest.mark.parametrize(("devices", "share"), [(1, 1), (2, 2), (8, 8), (16, 8), (64, 8)])
def test_fewer_key_value_heads_than_devices_are_held_by_several(devices: int, share: int) -> None:
    shard = ShardedModel(LLAMA_70B, LAYOUT, devices).shard
    assert (shard.kv_elements, shard.parameters) == (LLAMA_70B.kv_elements // share, -(-70_000_000_000 // devices))


def test_latent_attention_keeps_its_one_vector_on_every_device_and_experts_are_divided() -> None:
    mixture = replace(LLAMA_70B, kv_elements=61 * 576, active_parameters=10_000_000_000)
    shard = ShardedModel(mixture, replace(LAYOUT, kv_heads=1), 8).shard
    assert (shard.kv_elements, shard.active_parameters) == (61 * 576, 1_250_000_000)


@pytest.mark.parametrize(
    ("layout", "devices", "sizes"),
    [(LAYOUT, 3, "1, 2, 4, 8"), (replace(LAYOUT, heads=12, kv_heads=2), 3, "1, 2, 4, 6"),
     (replace(LAYOUT, has_states=True), 2, "1")],
)  # fmt: skip
def test_a_model_that_cant_be_shared_evenly_is_refused_with_what_it_allows(
    layout: DecoderLayout, devices: int, sizes: str
) -> None:
    with pytest.raises(UnevenShards, match=f"allow: {sizes}$"):
        ShardedModel(LLAMA_70B, layout, devices)


@pytest.mark.parametrize(
    ("device", "devices", "advice"),
    [
        ("h100", 1, r"1 x h100: 140.0 GB .* 4,096 tokens in 80 GB; it fits with --tensor-parallel 2$"),
        ("a10g", 4, "it fits with --tensor-parallel 8$"),
        ("t4", 8, "no --tensor-parallel up to 8 is enough: quantize it"),
    ],
)
def test_what_doesnt_fit_says_the_least_tensor_parallelism_that_does(device: str, devices: int, advice: str) -> None:
    with pytest.raises(DoesNotFit, match=advice):
        check_fits(replace(FOUR, devices=devices), HARDWARE[device], 4_096)
    check_fits(FOUR, H100, 4_096)


def test_sums_take_their_latency_in_every_step_and_their_bytes_for_every_token() -> None:
    """Of four devices each sends 6 messages, and 1.5 times the activations, in each of 160 sums."""
    latency, num_bytes = 160 * LATENCY_SECONDS, 160 * 1.5 * 8_192 * 2
    assert FOUR.sum_seconds(H100, tokens=0) == pytest.approx(latency)
    assert FOUR.sum_seconds(H100, 1_000, steps=5) == pytest.approx(5 * latency + 1_000 * num_bytes / 450e9)
    assert FOUR.sum_seconds(HARDWARE["l4"], 1e9) > 10 * FOUR.sum_seconds(H100, 1e9), "PCIe is slower than NVLink"
    assert replace(FOUR, devices=1).sum_seconds(H100, 1_000, steps=5) == 0.0


def test_the_bound_of_several_devices_adds_the_sums_to_that_of_a_shard() -> None:
    found = replica_bound(FOUR, H100, price_per_hour=36.0, **WORK)
    shard = bound(FOUR.shard, H100, **WORK)
    assert found.estimate.sequences == shard.sequences
    assert shard.sequences is not None
    steps = 3e5 / shard.sequences
    assert found.sum_seconds == pytest.approx(FOUR.sum_seconds(H100, 1.1e6, steps))
    assert found.estimate.seconds == pytest.approx(shard.seconds + found.sum_seconds)
    assert found.estimate.cost == pytest.approx(found.estimate.seconds / 100)
    eight = replica_bound(replace(FOUR, devices=8), H100, **WORK)
    assert found.estimate.seconds / 2 < eight.estimate.seconds < found.estimate.seconds
    assert eight.sum_seconds > found.sum_seconds
    assert replica_bound(FOUR, H100, **dict.fromkeys(WORK, 0)).estimate.seconds == 0.0


def test_one_device_has_the_bound_of_before() -> None:
    small = ShardedModel(ModelShape(8_030_000_000, 32 * 2 * 8 * 128), LAYOUT)
    assert replica_bound(small, H100, **WORK).estimate == bound(small.whole, H100, **WORK)
