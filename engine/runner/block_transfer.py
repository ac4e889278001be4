"""Copies the content of whole blocks between the cache's tensors and the host, for a second tier of the prefix cache.

A block's bytes are its line of each tensor of its group, one after the other, whatever the layout: they mean something
only to a cache of the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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

    def read(self, group: int, blocks: list[int]) -> NDArray[np.uint8]:
        """Return copies of blocks, uint8 [blocks, bytes]. On a GPU it waits for the steps that were submitted."""
        tensors = self._tensors[group]
        index = torch.tensor(blocks, device=tensors[0].device)
        content: NDArray[np.uint8] = (
            torch.cat([tensor.index_select(0, index) for tensor in tensors], dim=1).cpu().numpy()
        )
        return content

    def write(self, loads: Sequence[BlockLoad]) -> None:
        """Fill blocks."""
        for group in {load.group for load in loads}:
            own = [load for load in loads if load.group == group]
            device = self._tensors[group][0].device
            content = torch.from_numpy(np.stack([load.data for load in own])).to(device)
            index = torch.tensor([load.block for load in own], device=device)
            begin = 0
            for tensor in self._tensors[group]:
                end = begin + tensor.shape[1]
                tensor.index_copy_(0, index, content[:, begin:end])
                begin = end
