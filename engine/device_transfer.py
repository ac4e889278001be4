"""Transfers arrays to the device and small tensors back, without blocking the host on the device's queue.

A plain copy from or to pageable memory waits until all earlier work in the queue is done, and the host with it. So a
CUDA device's arrays are copied through one pinned buffer. Results are copied to pinned memory on a separate stream; the
host waits for an event only when it needs the values.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import OutOfMemory

_ALIGNMENT = 16
"""Alignment of an array in the transfer buffer, bytes."""


class Download(Protocol):
    """A tensor that is being copied to the host."""

    def numpy(self) -> NDArray[Any]:
        """Return the values; waits for them, but not for work that was queued later."""
        ...


class Transfer(Protocol):
    """Copies data between the host and one device."""

    def up(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        """Return the arrays as tensors on the device. The caller must not modify the arrays afterwards, nor write to
        the tensors, which may share memory with them."""
        ...

    def down(self, tensor: Tensor) -> Download:
        """Start copying a tensor to the host. It must not be written to any more."""
        ...


@dataclass(frozen=True, slots=True)
class _HostDownload:
    """A tensor that is on the host already."""

    tensor: Tensor

    def numpy(self) -> NDArray[Any]:
        return self.tensor.numpy()


class HostTransfer:
    """The transfer of a CPU: nothing is copied."""

    def up(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(array) for array in arrays)

    def down(self, tensor: Tensor) -> Download:
        return _HostDownload(tensor)


def pack(arrays: tuple[NDArray[Any], ...], *, pinned: bool) -> tuple[Tensor, list[int]]:
    """Copy the arrays' bytes into one new uint8 buffer of the host; returns it and the arrays' offsets."""
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
    """Return the packed arrays as views of the buffer's copy on a device."""
    tensors = []
    for begin, array in zip(begins, arrays, strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        tensors.append(whole[begin : begin + array.nbytes].view(dtype).view(array.shape))
    return tuple(tensors)


class PinnedTransfer:
    """The transfer of a CUDA device. The allocator of pinned memory reuses a buffer only when its copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._download_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def up(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        whole, begins = pack(arrays, pinned=True)
        return unpack(whole.to(self._device, non_blocking=True), begins, arrays)

    def down(self, tensor: Tensor) -> Download:
        self._download_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._download_stream):
            values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            values.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._download_stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._download_stream)
        return _PinnedDownload(values, copied)

    def down_into(self, source: Tensor, targets: Sequence[Tensor]) -> None:
        """Start copying each line of a tensor to page-locked memory (`lock_pages`). `wait_for_downloads` precedes all
        that the device does with these bytes, and with the source's, afterwards."""
        self._download_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._download_stream):
            for line, target in zip(source, targets, strict=True):
                target.copy_(line, non_blocking=True)
        source.record_stream(self._download_stream)

    def wait_for_downloads(self) -> None:
        """Let the device's later work wait for the downloads that were started."""
        torch.cuda.current_stream(self._device).wait_stream(self._download_stream)


@dataclass(frozen=True, slots=True)
class _PinnedDownload:
    """Pinned memory, and the event after which it holds the values."""

    values: Tensor
    copied: torch.cuda.Event

    def numpy(self) -> NDArray[Any]:
        self.copied.synchronize()
        return self.values.numpy()


def allocate_pages(size: int) -> NDArray[np.uint8]:
    """Allocate host memory, uint8 [size], with nothing else in its pages."""
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)


def lock_pages(memory: NDArray[np.uint8]) -> None:
    """Lock the pages of `allocate_pages`, which a CUDA device is to copy from and to, until they are freed. (torch's
    `pin_memory` takes up to twice the bytes, a power of two.)

    Raises:
        OutOfMemory: the system does not lock so many.
    """
    runtime, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
    if (code := int(runtime.cudaHostRegister(address, memory.nbytes, 0))) != 0:
        raise OutOfMemory(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory can't be page-locked (CUDA error {code}); give "
            "--kv-offloading-size less"
        )
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False


def make_transfer(device: torch.device) -> Transfer:
    """Return the transfer of a device."""
    return PinnedTransfer(device) if device.type == "cuda" else HostTransfer()
