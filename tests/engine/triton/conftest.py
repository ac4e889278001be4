"""Triton's kernels run on a GPU where there is one, else in Triton's interpreter, which is chosen before its import."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def upcast(device: torch.device) -> bool:
    """Whether products of bfloat16 are to be made in float32: the interpreter's are wrong."""
    return device.type == "cpu"
