"""Arrays to the device and small tensors back, without making the host wait for the device's queue.

A plain copy from or to pageable memory waits until everything that was queued before it is done, and with it the host.
So a CUDA device's arrays travel together through one pinned buffer, and what comes back lands in pinned memory on a
stream of its own, behind an event that the host asks for only when it needs the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: where an array may begin in the buffer that carries it."""


class Download(Protocol):
    """A tensor on its way to the host."""

    def numpy(self) -> NDArray[Any]:
        """Its values; waits until they are there, and for nothing that was queued after them."""
        ...


class Transfer(Protocol):
    """The way between the host and one device."""

    def up(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        """The arrays as tensors on the device. The caller leaves the arrays as they are; the tensors are its own only
        where they are copies, so it does not write to them either."""
        ...

    def down(self, tensor: Tensor) -> Download:
        """Begin to bring a tensor to the host. Nobody writes to it any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Here:
    """A tensor that is on the host already."""

    tensor: Tensor

    def numpy(self) -> NDArray[Any]:
        return self.tensor.numpy()


class HostTransfer:
    """Of the CPU: nothing travels."""

    def up(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(array) for array in arrays)

    def down(self, tensor: Tensor) -> Download:
        return _Here(tensor)


def pack(arrays: tuple[NDArray[Any], ...], *, pinned: bool) -> tuple[Tensor, list[int]]:
    """The arrays' bytes in one new uint8 buffer of the host, and where each begins."""
    begins, end = [], 0
    for array in arrays:
        begins.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    whole = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    view = whole.numpy()
    for begin, array in zip(begins, arrays, strict=True):
        view[begin : begin + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return whole, begins


def unpack(whole: Tensor, begins: list[int], arrays: tuple[NDArray[Any], ...]) -> tuple[Tensor, ...]:
    """What was packed, as views of the buffer's copy on a device."""
    tensors = []
    for begin, array in zip(begins, arrays, strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        tensors.append(whole[begin : begin + array.nbytes].view(dtype).view(array.shape))
    return tuple(tensors)


class PinnedTransfer:
    """Of a CUDA device. The allocator of pinned memory gives a buffer out again only when its copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._downwards = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def up(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        whole, begins = pack(arrays, pinned=True)
        return unpack(whole.to(self._device, non_blocking=True), begins, arrays)

    def down(self, tensor: Tensor) -> Download:
        self._downwards.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._downwards):
            here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            here.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._downwards)
            landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landed.record(self._downwards)
        return _Landing(here, landed)


@dataclass(frozen=True, slots=True)
class _Landing:
    """Pinned memory, and the event after which it holds the values."""

    here: Tensor
    landed: torch.cuda.Event

    def numpy(self) -> NDArray[Any]:
        self.landed.synchronize()
        return self.here.numpy()


def transfer_of(device: torch.device) -> Transfer:
    """The way to this device."""
    return PinnedTransfer(device) if device.type == "cuda" else HostTransfer()
