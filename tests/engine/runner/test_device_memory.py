"""The memory that the cache takes on a device, and steps that shrink and grow again after an allocation failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import ScheduleConfig
from engine.errors import OutOfMemory
from engine.models.base import CausalModel
from engine.models.load import load_model
from engine.runner.device_memory import MemoryUse, cache_budget, largest_step
from engine.scheduler.token_budget import STEPS_BEFORE_GROWTH, TokenBudget

GIB = 2**30


def test_the_cache_takes_what_the_largest_step_leaves() -> None:
    use = MemoryUse(total=80 * GIB, outside=2 * GIB, peak=20 * GIB)
    assert cache_budget(use, 0.9) == int(80 * GIB * 0.9) - 22 * GIB
    with pytest.raises(OutOfMemory, match=r"take 20\.0 GiB and others hold 2\.0 GiB, which leaves nothing of 25% of"):
        cache_budget(use, 0.25)
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="gpu_memory_utilization is"):
            cache_budget(use, share)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_largest_step_is_as_large_as_they_come(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: CausalModel = load_model(tiny_model(family), dtype=torch.float32, device=torch.device("cpu"))
    sizes = {}
    for name in ("forward", "logits"):
        inner = getattr(model, name)

        def noted(first: torch.Tensor, *rest: object, inner: object = inner, name: str = name) -> torch.Tensor:
            sizes[name] = len(first)
            return inner(first, *rest)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(model, name, noted)
    largest_step(model, ScheduleConfig(max_num_seqs=5, max_num_batched_tokens=70), torch.device("cpu"))
    assert sizes == {"forward": 70, "logits": 5}


def test_steps_that_have_no_room_halve_and_are_tried_larger_later() -> None:
    budget = TokenBudget(100)
    assert budget.shrink()
    assert budget.shrink()
    assert budget.tokens == 25
    for _ in range(4 * STEPS_BEFORE_GROWTH - 1):
        budget.record_success()
    assert budget.tokens == 25
    budget.record_success()
    assert budget.tokens == 50
    for _ in range(4 * STEPS_BEFORE_GROWTH):
        budget.record_success()
    assert budget.tokens == 100
    while budget.tokens > 1:
        assert budget.shrink()
    assert not budget.shrink()
    assert budget.tokens == 1
