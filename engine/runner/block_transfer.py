"""Copies the content of whole blocks between the cache's tensors and the host, for second tiers of the prefix cache.

A block's bytes are its line of each tensor of its group, one after the other, whatever the layout: they mean something
only to a cache of the same layout. Those of a CUDA device are copied through pinned memory, down on a stream of its own
(`engine.device_transfer`), so that neither the host nor the steps wait.

Between blocks and the page-locked memory of the tier in host memory (`allocate_host`) the device copies by itself,
through a buffer in its own memory: blocks are gathered there, so that steps may write to them at once. The buffer is
used again when its last copy is done, for which only the device waits. No copy overtakes another one of the same bytes:
the stream of downloads waits for the steps before it, and uploads wait for that stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.block_tier import Bytes
from engine.device_transfer import Download, PinnedTransfer, allocate_pages, lock_pages, make_transfer
from engine.plan import BlockLoad

BUFFER_BYTES: Final = 32 << 20
"""Bytes of the device's buffer between blocks and page-locked memory, or of one block, if that is larger."""


class BlockTransfer:
    """Reads and writes blocks of all cache groups.

    Args:
        tensors: per group, those that `AttentionBackend.block_tensors` returns.

    Attributes:
        layout: of each group's tensors the shapes of a line, and the dtypes.
        block_bytes: per group, bytes of a block.
    """

    def __init__(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        self.layout = [[(*tensor.shape[1:], str(tensor.dtype)) for tensor in group] for group in tensors]
        self._tensors = [[tensor.view(len(tensor), -1).view(torch.uint8) for tensor in group] for group in tensors]
        self.block_bytes = [sum(tensor.shape[1] for tensor in group) for group in self._tensors]
        device = tensors[0][0].device
        self._is_on_host = device.type == "cpu"
        self._transfer = make_transfer(device)
        self._device = device
        self._locked: Bytes | None = None
        self._buffer: Tensor | None = None

    def allocate_host(self, num_blocks: Sequence[int]) -> list[Bytes]:
        """Allocate host memory for so many blocks of each group: uint8 [blocks, bytes]; page-locked for a CUDA device.

        Raises:
            OutOfMemory: the system does not lock so many pages.
        """
        sizes = [count * size for count, size in zip(num_blocks, self.block_bytes, strict=True)]
        whole = allocate_pages(sum(sizes))
        if not self._is_on_host:
            lock_pages(whole)
            self._locked = whole
            self._buffer = torch.empty(max(BUFFER_BYTES, *self.block_bytes), dtype=torch.uint8, device=self._device)
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        return [part.reshape(-1, size) for part, size in zip(parts, self.block_bytes, strict=True)]

    def read(self, group: int, blocks: list[int]) -> Download:
        """Copy blocks as they are after the steps submitted so far, uint8 [blocks, bytes]."""
        if not self._is_on_host:
            (index,) = self._transfer.up(np.array(blocks, dtype=np.int64))
            parts = [tensor.index_select(0, index) for tensor in self._tensors[group]]
            return self._transfer.down(torch.cat(parts, dim=1))
        content = np.empty((len(blocks), self.block_bytes[group]), dtype=np.uint8)
        # Line by line: torch's indexing takes 15 times as long.
        for lines, columns in self._host_lines(group):
            for at, block in enumerate(blocks):
                content[at, columns] = lines[block]
        return self._transfer.down(torch.from_numpy(content))

    def read_into(self, group: int, blocks: Sequence[int], targets: Sequence[Bytes]) -> None:
        """Copy each block, as it is after the steps submitted so far, to its target, uint8 [bytes] of `allocate_host`.
        Only `write` may read the targets."""
        if self._is_on_host:
            for lines, columns in self._host_lines(group):
                for block, target in zip(blocks, targets, strict=True):
                    target[columns] = lines[block]
            return
        assert isinstance(self._transfer, PinnedTransfer)
        for part, buffer in self._parts(group, len(blocks)):
            (index,) = self._transfer.up(np.array(blocks[part], dtype=np.int64))
            torch.cat([tensor.index_select(0, index) for tensor in self._tensors[group]], dim=1, out=buffer)
            self._transfer.down_into(buffer, [torch.from_numpy(target) for target in targets[part]])

    def write(self, loads: Sequence[BlockLoad]) -> None:
        """Fill blocks."""
        for group in {load.group for load in loads}:
            own = [load for load in loads if load.group == group]
            if self._is_on_host:
                for lines, columns in self._host_lines(group):
                    for load in own:
                        lines[load.block] = load.data[columns]
                continue
            locked = [load for load in own if self._is_locked(load.data)]
            for part, buffer in self._parts(group, len(locked)):
                for line, load in zip(buffer, locked[part], strict=True):
                    line.copy_(torch.from_numpy(load.data), non_blocking=True)
                self._fill(group, locked[part], buffer)
            if others := [load for load in own if not self._is_locked(load.data)]:
                (content,) = self._transfer.up(np.stack([load.data for load in others]))
                self._fill(group, others, content)

    def _fill(self, group: int, loads: Sequence[BlockLoad], content: Tensor) -> None:
        """Fill blocks of a device with its lines, uint8 [blocks, bytes]."""
        (index,) = self._transfer.up(np.array([load.block for load in loads], dtype=np.int64))
        for tensor, columns in self._lines(group):
            tensor.index_copy_(0, index, content[:, columns])

    def _is_locked(self, data: Bytes) -> bool:
        return self._locked is not None and np.may_share_memory(data, self._locked)

    def _parts(self, group: int, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Divide so many blocks into parts that fit the buffer. Yields each part, and its lines of the buffer, uint8
        [blocks, bytes], which the device uses behind all copies from them."""
        if not count:
            return
        assert self._buffer is not None
        assert isinstance(self._transfer, PinnedTransfer)
        size = self.block_bytes[group]
        step = len(self._buffer) // size
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            self._transfer.wait_for_downloads()
            yield part, self._buffer[: (part.stop - first) * size].view(-1, size)

    def _lines(self, group: int) -> Iterator[tuple[Tensor, slice]]:
        """Iterate over the group's tensors, and where their lines are among a block's bytes."""
        begin = 0
        for tensor in self._tensors[group]:
            end = begin + tensor.shape[1]
            yield tensor, slice(begin, end)
            begin = end

    def _host_lines(self, group: int) -> list[tuple[NDArray[np.uint8], slice]]:
        """Return the group's tensors as arrays, and where their lines are among a block's bytes."""
        return [(tensor.numpy(), columns) for tensor, columns in self._lines(group)]
