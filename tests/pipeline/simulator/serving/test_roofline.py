"""Times of steps are those of the parts' rooflines."""

from __future__ import annotations

import pytest

from pipeline.planner.estimates.capacity import HARDWARE, compute_seconds, read_seconds
from pipeline.planner.estimates.published_models import PUBLISHED_MODELS
from pipeline.simulator.serving.roofline import PromptChunk, StepRoofline, choose_step_tokens

MODEL, H100 = PUBLISHED_MODELS["llama-3.1-8b"], HARDWARE["h100"]
FULL = StepRoofline(MODEL, H100, flops_share=1.0, bandwidth_share=1.0, launch_seconds=0.0)
"""The data sheet's rates."""


def test_a_decode_step_takes_as_long_as_reading_weights_keys_and_values() -> None:
    assert FULL.step_seconds(16, 16 * 1_000) == pytest.approx(read_seconds(MODEL, H100, 16, 1_000))
    half = StepRoofline(MODEL, H100, flops_share=1.0, bandwidth_share=0.5, launch_seconds=0.0)
    assert half.step_seconds(16, 16 * 1_000) == pytest.approx(2 * FULL.step_seconds(16, 16 * 1_000))


def test_a_prompts_step_takes_as_long_as_its_products_and_its_attention() -> None:
    attention = 4 * MODEL.query_elements * 8_192 * 8_193 / 2 / H100.flops
    assert FULL.step_seconds(0, 0, [PromptChunk(0, 8_192)]) == pytest.approx(
        compute_seconds(MODEL, H100, 8_192) + attention
    )
    later = FULL.step_seconds(0, 0, [PromptChunk(8_192, 8_192)])
    assert later == pytest.approx(compute_seconds(MODEL, H100, 8_192) + attention + 2 * attention, rel=1e-3)


def test_up_to_the_ridge_more_tokens_take_no_longer() -> None:
    def products(tokens: int) -> float:
        """A step without attention: the tokens are of prompts that begin."""
        return FULL.step_seconds(0, 0, [PromptChunk(0, 1)] * tokens)

    ridge = FULL.ridge_tokens
    assert ridge == pytest.approx(H100.flops / H100.bandwidth)  # two bytes, and two operations a parameter
    assert products(int(0.9 * ridge)) == pytest.approx(products(1), rel=0.01)
    assert products(int(2 * ridge)) == pytest.approx(2 * products(1), rel=0.01)


def test_launches_come_on_top() -> None:
    slow = StepRoofline(MODEL, H100, flops_share=1.0, bandwidth_share=1.0, launch_seconds=0.25)
    assert slow.step_seconds(1, 10) == pytest.approx(0.25 + FULL.step_seconds(1, 10))


def test_a_prompt_in_more_steps_takes_no_less() -> None:
    whole, parts = FULL.prompt_seconds(8_192, 8_192), FULL.prompt_seconds(8_192, 512)
    assert whole == pytest.approx(FULL.step_seconds(0, 0, [PromptChunk(0, 8_192)]))
    assert whole <= parts == pytest.approx(whole, rel=0.05)
    assert FULL.prompt_seconds(8_192, 64) > 2 * whole, "each of these steps reads all weights"


def test_the_size_of_a_step_is_within_the_engines_bounds() -> None:
    sizes = {name: choose_step_tokens(StepRoofline(MODEL, hardware)) for name, hardware in HARDWARE.items()}
    assert sizes["h100"] == 8_192
    assert sizes["t4"] == 2_048
    assert sizes["b200"] == 16_384
