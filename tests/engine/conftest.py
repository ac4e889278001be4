"""The engine's tests run tiny models: a second thread would only make them wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def prompts() -> list[Tensor]:
    """Random token ids of three lengths, longer and shorter than the tiny models' windows."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 257, (n,), generator=generator) for n in (45, 6, 23)]
