"""Reads a stored tensor directly into its final memory: in concurrent pieces, with bounded memory.

The file is read, not mapped, so that loading holds one copy of the model and a few pieces. On a GPU a piece goes
through one of a few page-locked buffers, each of which is read into while others are on their way to the device; what
is stored in another dtype is converted there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from engine.errors import CorruptWeights

PIECE_BYTES = 16 << 20
"""Read at once."""

IN_FLIGHT = 4
"""Pieces, and threads that read them."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies: `length` bytes from `offset` on, elements of `dtype` in row-major order."""

    path: Path
    offset: int
    length: int
    dtype: torch.dtype


class ChunkedReader:
    """Fills tensors on one device.

    Attributes:
        device: theirs.

    Args:
        piece_bytes: read at once, a multiple of 8.  in_flight: pieces that may be held.
        threads: that read; None: as many as pieces on a GPU, else as torch computes with.
    """

    def __init__(
        self,
        device: torch.device,
        piece_bytes: int = PIECE_BYTES,
        in_flight: int = IN_FLIGHT,
        threads: int | None = None,
    ) -> None:
        self.device = device
        self._piece_bytes = piece_bytes
        self._threads = threads or (in_flight if device.type == "cuda" else min(in_flight, torch.get_num_threads()))
        self._pool: ThreadPoolExecutor | None = None
        self._buffers: SimpleQueue[_Buffer | None] = SimpleQueue()  # None: of one that was not needed yet
        for _ in range(in_flight):
            self._buffers.put(None)

    def fill(self, extent: Extent, into: Tensor) -> None:
        """Copy a stored tensor into `into`: contiguous, on the reader's device, with as many elements, of any float
        dtype. What follows on the current stream finds it there.

        Raises:
            CorruptWeights: the file ends early.  OSError: it can't be read.
        """
        size = extent.dtype.itemsize
        assert extent.length == into.numel() * size, "the header was checked against its shape"
        flat, each = into.view(-1), self._piece_bytes // size
        direct = into.device.type == "cpu" and into.dtype == extent.dtype
        with extent.path.open("rb", buffering=0) as file:
            work: Callable[[int], None] = partial(self._piece, file.fileno(), extent, flat, each, direct)
            starts = range(0, len(flat), each)
            converts_here = into.device.type == "cpu" and not direct  # which torch does with all its threads
            if self._threads == 1 or len(starts) < 2 or converts_here:
                for start in starts:
                    work(start)
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="weights")
            for _ in self._pool.map(work, starts):
                pass

    def _piece(self, file: int, extent: Extent, flat: Tensor, each: int, direct: bool, start: int) -> None:
        """The elements from `start` on."""
        part = flat[start : start + each]
        at = extent.offset + start * extent.dtype.itemsize
        if direct:
            _read(file, extent, at, part)
            return
        buffer = self._take()
        try:
            stored = buffer.memory[: len(part) * extent.dtype.itemsize].view(extent.dtype)
            _read(file, extent, at, stored)
            buffer.send(stored, part)
        finally:
            self._buffers.put(buffer)

    def _take(self) -> _Buffer:
        """Wait for a free buffer."""
        buffer = self._buffers.get()
        if buffer is None:
            return _Buffer(self._piece_bytes, self.device)
        buffer.wait()
        return buffer


class _Buffer:
    """Memory for a piece on its way; page-locked for a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        self._sent: Any = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def send(self, stored: Tensor, part: Tensor) -> None:
        """Copy a piece to its destination; the copy may still run when this returns."""
        if self._sent is None:
            part.copy_(stored)
            return
        with torch.cuda.device(self._device):
            there = part if part.dtype == stored.dtype else torch.empty_like(stored, device=part.device)
            there.copy_(stored, non_blocking=True)
            if there is not part:
                part.copy_(there)  # converts where it lies
            self._sent.record()

    def wait(self) -> None:
        """Wait until the buffer may be written to again."""
        if self._sent is not None:
            self._sent.synchronize()


def _read(file: int, extent: Extent, at: int, into: Tensor) -> None:
    """Fill a contiguous tensor on the CPU with the bytes from `at` on."""
    memory = into.view(torch.uint8).numpy().data
    while len(memory):
        count = os.preadv(file, [memory], at)
        if not count:
            raise CorruptWeights(f"{extent.path} ends at byte {at}, in the midst of a tensor; fetch it again")
        memory, at = memory[count:], at + count
