"""Shapes of published models have the parameters that their cards state."""

from __future__ import annotations

import pytest

from pipeline.planner.estimates.published_models import PUBLISHED_MODELS


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("llama-3.2-1b", 1.24e9, None),
        ("llama-3.1-8b", 8.03e9, None),
        ("llama-3.1-70b", 70.6e9, None),
        ("qwen3-14b", 14.8e9, None),
        ("qwen3-32b", 32.8e9, None),
        ("qwen3-30b-a3b", 30.5e9, 3.35e9),
    ],
)
def test_a_shape_has_the_parameters_of_its_model_card(name: str, parameters: float, active: float | None) -> None:
    shape = PUBLISHED_MODELS[name]
    assert shape.parameters == pytest.approx(parameters, rel=0.005)
    assert shape.active_parameters == (None if active is None else pytest.approx(active, rel=0.005))


def test_every_model_is_listed_and_has_its_keys_and_values() -> None:
    assert len(PUBLISHED_MODELS) == 6
    # 32 layers of 8 heads of 128, keys and values, in two bytes
    assert PUBLISHED_MODELS["llama-3.1-8b"].kv_bytes_per_token == 32 * 8 * 128 * 2 * 2
    assert PUBLISHED_MODELS["llama-3.1-8b"].query_elements == 32 * 32 * 128
