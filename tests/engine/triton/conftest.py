"""Triton's kernels run on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def upcast(device: torch.device) -> bool:
    """Whether products of bfloat16 are to be made in float32: the interpreter's are wrong."""
    return device.type == "cpu"
