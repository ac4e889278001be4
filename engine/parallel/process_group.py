"""Collective operations of ranks: sums, broadcasts and gathers of tensors, by NCCL on GPUs and by gloo on CPUs.

The group is an object, not torch's process-wide default, so that an engine can be closed and another one made. Ranks
rendezvous through a file and, with gloo, communicate over the loopback interface only.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from engine.errors import EngineError

_LOOPBACK = "127.0.0.1"


class RankGroup:
    """The ranks of one engine.

    Args:
        meeting: the rendezvous file; no group has used it before.
        timeout: seconds within which all ranks must join a collective operation.
    """

    def __init__(self, rank: int, size: int, device: torch.device, meeting: Path, timeout: float) -> None:
        self.rank, self.size, self.device = rank, size, device
        if not dist.is_available():
            raise EngineError("this build of torch has no torch.distributed, which tensor parallelism needs")
        store = FileStore(str(meeting), size)
        store.set_timeout(timedelta(seconds=timeout))
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout)
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=_LOOPBACK)]
            options._timeout = timedelta(seconds=timeout)
            self._group = gloo(store, rank, size, options)

    def sum(self, part: Tensor) -> Tensor:
        """Sum over the ranks, in place, on all of them."""
        part = part.contiguous()
        self._group.allreduce([part]).wait()
        return part

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast the first rank's tensor, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
        return tensor

    def gather(self, part: Tensor) -> Tensor:
        """Gather each rank's part on all ranks: [size, *part.shape]."""
        parts = torch.empty(self.size, *part.shape, dtype=part.dtype, device=part.device)
        self._group.allgather([list(parts.unbind())], [part.contiguous()]).wait()
        return parts

    def abort(self) -> None:
        """Release operations that wait for a rank that has ended. gloo detects it itself, by the closed connection."""
        if self.device.type == "cuda":
            self._group.abort()
