"""A CUDA device that is pretended: its tensors lie in the host's memory, but nothing may treat them as if they did.

Code that runs on a GPU goes other ways than on a CPU: buffers are page-locked, results come later, tensors must be on
one device. On a machine without a GPU these ways are walked here, with real numbers. A tensor "on the device" wraps one
of the host's; whatever mixes both kinds raises, as CUDA would, and so does reading one from numpy. What is copied to
the host without waiting is garbage until an event behind it was waited for. Operations for which the host would wait
are counted, and refused while a graph is recorded.

What it can't tell: streams (all work is done at once, in order), memory (there is plenty), CUDA's own kernels.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
c10::impl::DeviceGuardImplRegistrar guard(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
}
"""
"""What torch wants to know how to switch to a device by; builds for the CPU have none for this one."""

_ASKING = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero", "item",
}  # fmt: skip
"""Operations whose result, or its shape, the host must see."""

_BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Here(Tensor):
    """A tensor on the device. `values_held`: what it holds, in the host's memory."""

    values_held: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> Here:
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.size(), strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.values_held = real
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Here({self.values_held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is called where nobody pretends (by a thread?)")


def real(value: Any) -> Any:
    """What the device's tensor holds; others as they are."""
    return value.values_held if isinstance(value, Here) else value


class PretendedCuda(TorchDispatchMode):
    """The device.

    Attributes:
        waits: names of operations for which the host had to wait.
        recording: a graph is being recorded: the host may not wait, and nothing may come from it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.recording = False
        self._landing: list[tuple[Tensor, Tensor]] = []

    def land(self) -> None:
        """What is on its way to the host arrives."""
        for into, values in self._landing:
            into.copy_(values)
        self._landing.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given, _ = tree_flatten((args, kwargs))
        tensors = [each for each in given if isinstance(each, Tensor)]
        here = [each for each in tensors if isinstance(each, Here)]
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs["device"] = torch.device("cpu") if torch.device(wanted).type == "cuda" else wanted
        kwargs.pop("pin_memory", None)
        arrives = wanted is not None and torch.device(wanted).type == "cuda"
        free = bool(kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,)))
        if name in ("copy_", "_to_copy"):
            to = isinstance(args[0], Here) if name == "copy_" else arrives or (wanted is None and bool(here))
            since = isinstance(args[1 if name == "copy_" else 0], Here)
            self._note(name, waits=to != since and not free, crosses=to != since)
            if since and not to and free:
                return self._send(args[0], args[1])
        else:
            self._note(name, waits=(name in _ASKING and bool(here)) or self._gathers(name, args, tensors, here))
        out = func(*tree_map(real, args), **tree_map(real, kwargs))
        if name == "copy_":
            return args[0]
        if name == "_local_scalar_dense" or not (arrives or (wanted is None and here)):
            return out
        known = {id(each.values_held): each for each in here}  # what is changed in place stays the same tensor

        def wrapped(each: Any) -> Any:
            return (known[id(each)] if id(each) in known else Here(each)) if isinstance(each, Tensor) else each

        return tree_map(wrapped, out)

    def _note(self, name: str, *, waits: bool, crosses: bool = False) -> None:
        assert not (self.recording and (waits or crosses)), f"{name} needs the host while a graph is recorded"
        if waits:
            self.waits.append(name)

    @staticmethod
    def _gathers(name: str, args: Any, tensors: list[Tensor], here: list[Here]) -> bool:
        """Whether the host waits for the indices of an operation; what else is mixed is refused, as CUDA does it."""
        strangers = [each for each in tensors if not isinstance(each, Here) and each.dim()]
        if name in _BY_INDEX and isinstance(args[0], Here):
            return bool(strangers) or any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1])
        assert not (here and strangers), f"{name}: tensors of the host and of the device together"
        return False

    def _send(self, into: Tensor, source: Here) -> Tensor:
        self._landing.append((into, source.values_held.clone()))
        into.view(torch.uint8).fill_(0xA5)
        return into


def compiler() -> str | None:
    """That makes the guard; None: there is none here."""
    return shutil.which(os.environ.get("CXX", "c++"))


@cache
def _guard_devices() -> None:
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()  # of builds with CUDA, where there is no device
        return
    root, made = Path(torch.__file__).parent, Path(tempfile.mkdtemp()) / "guard.so"
    command = [str(compiler()), "-xc++", "-", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}"]
    subprocess.run([*command, "-o", str(made), f"-L{root / 'lib'}", "-lc10"], input=_GUARD, text=True, check=True)
    ctypes.CDLL(str(made))
    shutil.rmtree(made.parent)


class _Event:
    def __init__(self, device: PretendedCuda) -> None:
        self._device = device

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        self._device.land()


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass


class _Recorder:
    """Records by keeping what is to be run, which may not look at the host; each run is another graph's, too."""

    def __init__(self, device: PretendedCuda) -> None:
        self._device = device

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def replay() -> Tensor:
            self._device.recording = True
            try:
                return run()
            finally:
                self._device.recording = False

        replay()
        return replay


class _Unwrapping:
    """A kernel of Triton, interpreted, that gets the values."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            strangers = [each for each in args if isinstance(each, Tensor) and not isinstance(each, Here)]
            assert not strangers, "a kernel got a tensor of the host"
            with _disable_current_modes():  # what the interpreter does by itself is nobody's affair
                return self._kernel[grid](*map(real, args), **kwargs)

        return launch


_KERNELS = (
    ("engine.attention.triton_paged", ("attend_tiles", "join_splits", "store_tokens", "store_tokens_scaled")),
    ("engine.triton_kernels.small_weights", ("_small_weight_product",)),
    ("engine.triton_kernels.fp8", ("_quantize_rows", "_quantize_groups", "_grouped_product")),
)


def _nothing(*arguments: Any) -> None:
    """Streams and modes do nothing here."""


@contextmanager
def pretended_cuda(capability: tuple[int, int] = (9, 0), *, triton: bool = True) -> Iterator[PretendedCuda]:
    """Meanwhile this process has one such device; work on it in this thread only.

    Args:
        triton: its kernels run there, in Triton's interpreter.
    """
    _guard_devices()
    device, total = PretendedCuda(), 80 << 30
    properties = SimpleNamespace(multi_processor_count=4, shared_memory_per_block_optin=227 << 10)
    answers: dict[str, Any] = {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1,
        "_lazy_init": lambda: None, "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties, "synchronize": lambda at=None: device.land(),
        "empty_cache": lambda: None, "mem_get_info": lambda device=None: (total - (1 << 30), total),
        "memory_reserved": lambda device=None: 0, "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 1 << 30, "current_stream": lambda device=None: _Stream(),
        "Stream": lambda device=None: _Stream(), "Event": lambda **_: _Event(device),
        "stream": lambda stream: ExitStack(), "device": lambda device: ExitStack(),
    }  # fmt: skip
    with ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, answer))
        # Tensors that wrap others can't be made inside of it; nothing here wants gradients anyway.
        for name in ("__enter__", "__exit__"):
            patches.enter_context(mock.patch.object(torch.inference_mode, name, _nothing))
        patches.enter_context(mock.patch.object(Tensor, "record_stream", _nothing))
        patches.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor, device=None: tensor.clone()))
        patches.enter_context(mock.patch("engine.runner.graphs.make_recorder", return_value=_Recorder(device)))
        if triton:
            for module, names in _KERNELS:
                loaded = __import__(module, fromlist=["_"])
                for name in names:
                    patches.enter_context(mock.patch.object(loaded, name, _Unwrapping(getattr(loaded, name))))
        patches.enter_context(device)
        yield device
