"""Operations of ranks together: sums, broadcasts and gathers of tensors, and sending one from rank to rank, by NCCL on
GPUs and by gloo on CPUs.

The group is an object, not torch's process-wide default, so that an engine can be closed and another one made. Ranks
rendezvous through a file and, with gloo, communicate over the loopback interface only.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """The ranks of one engine, or those of one pipeline stage.

    Args:
        meeting: the rendezvous file; no group has used it before.
        timeout: seconds within which all ranks must join a collective operation.
    """

    def __init__(self, rank: int, size: int, device: torch.device, meeting: Path, timeout: float) -> None:
        self.rank, self.size, self.device = rank, size, device
        if not dist.is_available():
            raise EngineError("this build of torch has no torch.distributed, which several ranks need")
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
        if self.size == 1:
            return part
        part = part.contiguous()
        self._group.allreduce([part]).wait()
        return part

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcast the first rank's tensor, in place."""
        if self.size == 1:
            return tensor
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
        return tensor

    def gather(self, part: Tensor) -> Tensor:
        """Gather each rank's part on all ranks: [size, *part.shape]."""
        if self.size == 1:
            return part[None]
        parts = torch.empty(self.size, *part.shape, dtype=part.dtype, device=part.device)
        self._group.allgather([list(parts.unbind())], [part.contiguous()]).wait()
        return parts

    def send(self, tensor: Tensor, to: int) -> Any:
        """Start sending a contiguous tensor to a rank, and return the operation: behind its `wait` the tensor may be
        changed. A rank's tensors arrive in the order in which they are sent."""
        return self._group.send([tensor], to, 0)

    def receive(self, into: Tensor, sender: int) -> Any:
        """Start receiving from a rank, and return the operation: behind its `wait` the tensor is complete."""
        return self._group.recv([into], sender, 0)

    def abort(self) -> None:
        """Release operations that wait for a rank that has ended. gloo detects it itself, by the closed connection."""
        if self.device.type == "cuda":
            self._group.abort()


@dataclass(frozen=True, slots=True)
class RankGroups:
    """A rank's groups. Rank = stage * (ranks of a stage) + shard.

    Attributes:
        whole: all ranks of the engine.
        stage: the ranks that share this rank's stage by tensor parallelism; `whole` itself where there is one stage.
    """

    whole: RankGroup
    stage: RankGroup

    @classmethod
    def join(cls, rank: int, size: int, stages: int, device: torch.device, meeting: Path, timeout: float) -> RankGroups:
        """Join the groups of one of `size` ranks in so many stages; arguments as of `RankGroup`."""
        whole = RankGroup(rank, size, device, meeting, timeout)
        if stages == 1:
            return cls(whole, whole)
        stage, shard = divmod(rank, size // stages)
        meeting = meeting.with_name(f"{meeting.name}-{stage}")
        return cls(whole, RankGroup(shard, size // stages, device, meeting, timeout))

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def num_stages(self) -> int:
        return self.whole.size // self.stage.size

    @property
    def stage_index(self) -> int:
        return self.whole.rank // self.stage.size

    @property
    def before(self) -> int:
        """The rank with the same shard in the stage before; in the first stage, in the last one."""
        return (self.whole.rank - self.stage.size) % self.whole.size

    @property
    def following(self) -> int:
        """The rank with the same shard in the next stage; in the last stage, in the first one."""
        return (self.whole.rank + self.stage.size) % self.whole.size

    def abort(self) -> None:
        """See `RankGroup.abort`."""
        self.whole.abort()
        if self.stage is not self.whole:
            self.stage.abort()
