"""Memory of pools."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that take memory, on a CPU, only where they are written: a pool is large, and much of it may never
    be used. `torch.zeros` writes every page. (Huge pages would be touched sooner: keys of tokens scattered over them
    were measured to take twice the time.)"""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
