"""Triton's kernels run on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tests.engine.triton_interpreter import patched_interpreter


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def upcast(device: torch.device) -> bool:
    """Whether products of bfloat16 are to be made in float32: the interpreter's are wrong."""
    return device.type == "cpu"


@pytest.fixture(autouse=True)
def quick_interpreter(device: torch.device) -> Iterator[None]:
    with nullcontext() if device.type == "cuda" else patched_interpreter():
        yield
