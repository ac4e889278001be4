"""Copies the content of whole blocks between the cache's tensors and the host, for a second tier of the prefix cache.

A block's bytes are its line of each tensor of its group, one after the other, whatever the layout: they mean something
only to a cache of the same layout. Those of a CUDA device are copied through pinned memory, down on a stream of its own
(`engine.device_transfer`), so that neither the host nor the steps wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device_transfer import Download, make_transfer
from engine.plan import BlockLoad


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

    def write(self, loads: Sequence[BlockLoad]) -> None:
        """Fill blocks."""
        for group in {load.group for load in loads}:
            own = [load for load in loads if load.group == group]
            if self._is_on_host:
                for lines, columns in self._host_lines(group):
                    for load in own:
                        lines[load.block] = load.data[columns]
                continue
            blocks = np.array([load.block for load in own], dtype=np.int64)
            content, index = self._transfer.up(np.stack([load.data for load in own]), blocks)
            begin = 0
            for tensor in self._tensors[group]:
                end = begin + tensor.shape[1]
                tensor.index_copy_(0, index, content[:, begin:end])
                begin = end

    def _host_lines(self, group: int) -> list[tuple[NDArray[np.uint8], slice]]:
        """Return the group's tensors as arrays, and where their lines are among a block's bytes."""
        found, begin = [], 0
        for tensor in self._tensors[group]:
            end = begin + tensor.shape[1]
            found.append((tensor.numpy(), slice(begin, end)))
            begin = end
        return found
