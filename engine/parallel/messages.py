"""Messages of the leader to the other ranks, and their answers, over a socket pair between processes of one engine.
Tensors are sent between the ranks directly, device to device. `engine.parallel.encoding` is the messages' binary form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.adapters.targets import Product
from engine.attention import AttentionBatch
from engine.config import Quantize, ScheduleConfig
from engine.plan import BlockCopy, CacheGroup
from engine.runner.buckets import GraphBuckets
from engine.runner.device_memory import MemoryUse


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Join the process group. The first message.

    Attributes:
        stages: of the pipeline.  device: its kind.  meeting, timeout: of `RankGroup`.  threads: of each rank; None:
            torch's choice.
    """

    rank: int
    size: int
    stages: int
    device: str
    meeting: Path
    timeout: float
    threads: int | None


@dataclass(frozen=True, slots=True)
class LoadShare:
    """Load a shard of a model, which replaces one loaded before; answered with `Loaded`."""

    path: Path
    dtype: torch.dtype
    quantize: Quantize
    max_positions: int | None
    expert_parallel: bool
    expert_counts: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class AddPlaces:
    """`AdaptedModel.add_places`."""

    max_loras: int
    max_ranks: Mapping[Product, int]


@dataclass(frozen=True, slots=True)
class PlaceAdapter:
    """Read the rank's shard of an adapter, and put it into a place.

    Attributes:
        folder, digest: of its files; None: the place becomes empty.
    """

    place: int
    folder: Path | None
    digest: bytes


@dataclass(frozen=True, slots=True)
class Measure:
    """Compute the largest step of this schedule collectively; answered with `MeasuredMemory`."""

    schedule: ScheduleConfig


@dataclass(frozen=True, slots=True)
class MakeCache:
    """Allocate the cache; answered with `Done`."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    attention: str


@dataclass(frozen=True, slots=True)
class MakeGraphs:
    """Reserve buffers for the graphs of these shapes; answered with `Done`.

    Attributes:
        table_width: entries of a whole block table.
    """

    buckets: GraphBuckets
    table_width: int


@dataclass(frozen=True, slots=True)
class RecordGraph:
    """Record the graph of `Graphs.shapes[number]` collectively; answered with `Done`, or with `Failed` if the forward
    pass was computed, but not captured."""

    number: int


@dataclass(frozen=True, slots=True)
class DropGraphs:
    """Release the graphs: not all ranks have them."""


@dataclass(frozen=True, slots=True)
class ZeroBlocks:
    """`AttentionBackend.zero`."""

    group: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """`AttentionBackend.copy`."""

    group: int
    copies: list[BlockCopy]


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a step. Its int64 [2 or 3, tokens] of token ids, positions and rotary lengths, where the model has such,
    are broadcast then, from the leader's device: of a step ahead the host has no token ids yet.

    Attributes:
        ends: int32 [M], ascending: the sequence before which each micro-batch ends, as of `divide_step`.
        graph: number of the shape whose graph is replayed (`Graphs.shapes`); None: the step is launched without.
        adapters: as of `AttentionStep`.
    """

    batch: AttentionBatch
    lengths: bool
    ends: NDArray[np.int32]
    graph: int | None = None
    adapters: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute logits of hidden states [rows, hidden_size], which are broadcast then. Only for the first stage."""

    rows: int


@dataclass(frozen=True, slots=True)
class Done:
    """The command succeeded."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The shard is loaded.

    Attributes:
        available: free bytes of the rank's device.  resident: bytes of memory that loading took, without mapped files.
    """

    available: int
    resident: int


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Memory of the largest step on the rank's device."""

    use: MemoryUse


@dataclass(frozen=True, slots=True)
class Failed:
    """The command failed. `reason`: the error's class and message."""

    reason: str


SetUp = JoinGroup | LoadShare | AddPlaces | PlaceAdapter | Measure | MakeCache | MakeGraphs | RecordGraph | DropGraphs
Message = SetUp | ZeroBlocks | CopyBlocks | Forward | Logits
Answer = Done | Loaded | MeasuredMemory | Failed
