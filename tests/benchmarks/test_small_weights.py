"""The benchmarks of small weights measure every form, next to bf16, on weights of the size that they report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import small_weights
from small_models import rates
from small_weights import FORMS, measure

from engine import CacheConfig, Engine, EngineConfig
from tests.native_paths import native_path


def test_given_a_shape_when_it_is_measured_then_each_form_has_a_line_for_each_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(small_weights, "_BYTES", 1 << 18)

    found = measure(native_path("avx2"), 64, 96, rows=(1, 7), rounds=2, forms=list(FORMS))

    assert [(line["form"], line["rows"]) for line in found] == [(form, rows) for rows in (1, 7) for form in FORMS]
    sizes = {line["form"]: line["bytes"] for line in found}
    assert sizes["int4, groups of 32, scale"] == pytest.approx(sizes["bf16"] * 4.5 / 16, rel=0.05)
    assert all(line["least"] <= line["speed_to_bf16"] <= line["most"] for line in found if line["form"] == "bf16")


def test_given_engines_when_they_take_turns_then_rates_are_of_each_batch_and_over_the_firsts(
    tiny_model: Callable[[str], Path],
) -> None:
    settings = EngineConfig(dtype="float32", threads=1, cache=CacheConfig(block_size=16, num_blocks=80))
    engines = {name: Engine.load(tiny_model("llama"), settings) for name in ("one", "other")}

    found = rates(engines, batches=[1, 3], rounds=1)

    assert [*found] == ["one", "other"]
    for by_batch in found.values():
        assert [*by_batch] == [1, 3]
        assert all(0 < speed["least"] <= speed["tokens_per_second"] <= speed["most"] for speed in by_batch.values())
    assert [found["one"][batch]["of_first"] for batch in (1, 3)] == [1.0, 1.0]
    assert engines["one"].weight_bytes.keys() == {"float32"}
