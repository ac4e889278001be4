"""What the leader tells the other ranks, and what they answer. They go over a socket pair between processes of one
engine, pickled; tensors go between the ranks themselves, device to device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention import AttentionBatch
from engine.config import Quantize, ScheduleConfig
from engine.plan import CacheGroup
from engine.runner.device_memory import MemoryUse


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Meet the others. The first message.

    Attributes:
        device: its kind.  meeting, timeout: of `RankGroup`.  threads: of each rank; None: torch's choice.
    """

    rank: int
    size: int
    device: str
    meeting: Path
    timeout: float
    threads: int | None


@dataclass(frozen=True, slots=True)
class LoadShare:
    """Load a share of a model, in place of one that was loaded before; answered with `Loaded`."""

    path: Path
    dtype: torch.dtype
    quantize: Quantize
    max_positions: int | None


@dataclass(frozen=True, slots=True)
class Measure:
    """Compute the largest step of this schedule, all ranks together; answered with `MeasuredMemory`."""

    schedule: ScheduleConfig


@dataclass(frozen=True, slots=True)
class MakeCache:
    """Make the cache; answered with `Done`."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    attention: str


@dataclass(frozen=True, slots=True)
class ZeroBlocks:
    """`AttentionBackend.zero`."""

    group: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a step. Its int64 [2 or 3, tokens] of token ids, positions and rotary lengths, where the model has such,
    are broadcast then."""

    batch: AttentionBatch
    tokens: int
    lengths: bool


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute logits of hidden states [rows, hidden_size], which are broadcast then."""

    rows: int


@dataclass(frozen=True, slots=True)
class Done:
    """It went well."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The share is loaded.

    Attributes:
        available: bytes that the rank's device has left.  resident: bytes of memory that loading took, beyond files.
    """

    available: int
    resident: int


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What the largest step took of the rank's device."""

    use: MemoryUse


@dataclass(frozen=True, slots=True)
class Failed:
    """It could not be done. `reason`: the error's class and message."""

    reason: str


Message = JoinGroup | LoadShare | Measure | MakeCache | ZeroBlocks | Forward | Logits
Answer = Done | Loaded | MeasuredMemory | Failed
