"""Memory of packed weights, in huge pages.

A step reads weights from one end to the other, or the experts that its tokens chose. In pages of 4 KB the processor has
to look up a new address every 4 KB, which took 3 to 15 % of a mixture's step of 64 rows, most while other processes
used the memory. Experts are smaller than a huge page, so weights share areas of many.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
AREA = 64 << 20
"""Bytes that are reserved at once; only those that are written take memory."""

_LINE = 64
"""Weights begin with a line of the caches."""


class WeightMemory:
    """Allocates memory for weights, one behind the other. An area is released with the last of its weights."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return zeros, uint8 [size]."""
        padded = -(-size // _LINE) * _LINE
        if padded > len(self._free):
            self._free = _reserve(max(padded, AREA))
        taken, self._free = self._free[:size], self._free[padded:]
        return taken


def _reserve(size: int) -> Tensor:
    """Return zeros, uint8 [size], which begin with a huge page."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE
    return whole[first : first + size]
