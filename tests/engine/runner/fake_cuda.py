"""A fake CUDA device: its tensors lie in the host's memory, but the code under test can't treat them as host tensors.

Code on a GPU takes other paths than on a CPU: buffers are page-locked, results come later, tensors must be on one
device. On a machine without a GPU these paths run on the CPU, with real numbers. A tensor "on the device" wraps one of
the host's; an operation that mixes both kinds raises, as CUDA would, and so does reading one from numpy. What is copied
to the host without waiting is garbage until the host waits for an event behind it, or the device for the copy's stream.
Operations for which the host would wait
are counted, and refused while a graph is recorded.

Not simulated: streams (all work is done at once, in order), memory (there is plenty), CUDA's own kernels.
"""

from __future__ import annotations

import ctypes
import mmap
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

from engine.device_transfer import make_transfer
from engine.models.layer_ops.torch_ops import TorchLayerOps
from engine.sampling.batch import Columns, choose
from engine.sampling.draw import DrawWorkspace
from tests.engine.triton_interpreter import patched_interpreter

DEVICE = torch.device("cuda", 0)

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
c10::impl::DeviceGuardImplRegistrar guard(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
}
"""
"""Torch switches devices through a guard; builds for the CPU have none for CUDA."""

_SYNCHRONIZING = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero", "item",
}  # fmt: skip
"""Operations whose result, or its shape, the host must see."""

_BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}


class DeviceTensor(Tensor):
    """A tensor on the device. `host_values`: its values, in the host's memory."""

    host_values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.host_values = values
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host_values!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is called where the fake device is not active (by a thread?)")


def host_tensor(value: Any) -> Any:
    """The host's tensor behind a device tensor; other values as they are."""
    return value.host_values if isinstance(value, DeviceTensor) else value


class FakeCuda(TorchDispatchMode):
    """The fake device: intercepts every operation of this thread.

    Attributes:
        waits: names of operations for which the host had to wait.
        launches: names of operations and of Triton's kernels that the device computed; views and new memory are none.
        recording: a graph is being recorded: the host may not wait, and nothing may come from it.
        locked: bytes of host memory that are page-locked, by address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.launches: list[str] = []
        self.recording = False
        self.locked: dict[int, int] = {}
        self._pending_copies: list[tuple[Tensor, Tensor]] = []

    def lock_pages(self, address: int, size: int, flags: int) -> int:
        """Stand for cudaHostRegister: pages are locked once."""
        assert address % mmap.PAGESIZE == 0, "the first page is shared with other memory"
        assert address not in self.locked
        self.locked[address] = size
        return 0

    def finish_copies(self) -> None:
        """Complete the copies to the host that are under way."""
        for into, values in self._pending_copies:
            into.copy_(values)
        self._pending_copies.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given, _ = tree_flatten((args, kwargs))
        tensors = [each for each in given if isinstance(each, Tensor)]
        on_device = [each for each in tensors if isinstance(each, DeviceTensor)]
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs["device"] = torch.device("cpu") if torch.device(wanted).type == "cuda" else wanted
        kwargs.pop("pin_memory", None)
        arrives = wanted is not None and torch.device(wanted).type == "cuda"
        free = bool(kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,)))
        if name in ("copy_", "_to_copy"):
            stays = wanted is None and bool(on_device)
            to = isinstance(args[0], DeviceTensor) if name == "copy_" else arrives or stays
            since = isinstance(args[1 if name == "copy_" else 0], DeviceTensor)
            self._record(name, waits=to != since and not free, crosses=to != since)
            if since and not to and free:
                return self._copy_later(args[0], args[1])
        else:
            waits = name in _SYNCHRONIZING and bool(on_device)
            self._record(name, waits=waits or self._waits_for_index(name, args, tensors, on_device))
        if (on_device or arrives) and not _is_view(func) and not name.startswith(("empty", "new_empty")):
            self.launches.append(name)
        out = func(*tree_map(host_tensor, args), **tree_map(host_tensor, kwargs))
        if name == "copy_":
            return args[0]
        if name == "_local_scalar_dense" or not (arrives or (wanted is None and on_device)):
            return out
        known = {id(each.host_values): each for each in on_device}  # what is changed in place stays the same tensor

        def wrapped(each: Any) -> Any:
            return (known[id(each)] if id(each) in known else DeviceTensor(each)) if isinstance(each, Tensor) else each

        return tree_map(wrapped, out)

    def _record(self, name: str, *, waits: bool, crosses: bool = False) -> None:
        assert not (self.recording and (waits or crosses)), f"{name} needs the host while a graph is recorded"
        if waits:
            self.waits.append(name)

    @staticmethod
    def _waits_for_index(name: str, args: Any, tensors: list[Tensor], on_device: list[DeviceTensor]) -> bool:
        """Whether the host waits for the indices of an operation; other mixes of host and device tensors raise."""
        on_host = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim()]
        if name in _BY_INDEX and isinstance(args[0], DeviceTensor):
            return bool(on_host) or any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1])
        assert not (on_device and on_host), f"{name}: tensors of the host and of the device together"
        return False

    def _copy_later(self, into: Tensor, source: DeviceTensor) -> Tensor:
        self._pending_copies.append((into, source.host_values.clone()))
        into.view(torch.uint8).fill_(0xA5)
        return into


def _is_view(func: Any) -> bool:
    """Whether an operation only describes the memory of its argument otherwise."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def compiler() -> str | None:
    """The C++ compiler that builds the guard; None if there is none."""
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
    def __init__(self, device: FakeCuda) -> None:
        self._device = device

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        self._device.finish_copies()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds, always one: the host's time says nothing about a device."""
        return 1.0


class _Stream:
    """A class, as torch's own: libraries that are imported meanwhile name it in annotations."""

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class _ComputeStream(_Stream):
    """The stream of the steps. What it waits for is there for the device's later work."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__(device)
        self._device = device

    def wait_stream(self, other: Any) -> None:
        self._device.finish_copies()


class _Recorder:
    """Records by storing the function, which must not synchronize with the host; each replay is checked as well."""

    def __init__(self, device: FakeCuda) -> None:
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


class _InterpretedKernel:
    """A Triton kernel in its interpreter, on the host's tensors."""

    def __init__(self, name: str, kernel: Any, device: FakeCuda) -> None:
        self._name = name
        self._kernel = kernel
        self._device = device

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            on_host = [each for each in args if isinstance(each, Tensor) and not isinstance(each, DeviceTensor)]
            assert not on_host, "a kernel got a tensor of the host"
            self._device.launches.append(self._name)
            with _disable_current_modes():  # the interpreter's own operations are not checked
                return self._kernel[grid](*map(host_tensor, args), **kwargs)

        return launch


_KERNELS = (
    (
        "engine.attention.triton_paged",
        ("attend_tiles", "attend_shared", "join_splits", "store_tokens", "store_tokens_scaled"),
    ),
    ("engine.triton_kernels.small_weights", ("_small_weight_product", "_join_sums", "_dequantize")),
    ("engine.triton_kernels.int8", ("_quantize_rows", "_scale_sums")),
    ("engine.triton_kernels.fp8", ("_quantize_rows", "_quantize_groups", "_grouped_product")),
    ("engine.triton_kernels.draws", ("_draw_rows",)),
    ("engine.triton_kernels.low_rank", ("_multiply_a", "_add_b")),
    ("engine.triton_kernels.layers", ("_add_norm", "_rotate_and_store", "_activate")),
)


def _no_op(*arguments: Any) -> None:
    """Streams and modes have no effect on the fake device."""


def _torch_layer_ops(hidden_size: int, epsilon: float, device: torch.device, *, layer_norm: bool) -> TorchLayerOps:
    return TorchLayerOps(epsilon, layer_norm=layer_norm)


def _torch_draws(*arguments: Any) -> tuple[Tensor, ...]:
    with _disable_current_modes():
        logits, *columns = map(host_tensor, arguments)
        cpu = torch.device("cpu")
        chosen = choose(
            logits, None, Columns(*(column.numpy() for column in columns)),
            lambda: DrawWorkspace(logits.shape[1], cpu), make_transfer(cpu),
        )  # fmt: skip
    return tuple(map(DeviceTensor, chosen))


@contextmanager
def fake_cuda(
    capability: tuple[int, int] = (9, 0), *, triton: bool = True, fused_layers: bool = False, fused_draws: bool = False
) -> Iterator[FakeCuda]:
    """Within this context the process has one fake device; use it from this thread only.

    Args:
        triton: its kernels run on the device, in Triton's interpreter.
        fused_layers: so do those of decoder layers; the interpreter takes seconds for a hundred tokens. Else layers are
            computed by torch's operators.
        fused_draws: the same of draws, which take a tenth of a second a row.
    """
    _guard_devices()
    device, total = FakeCuda(), 80 << 30
    properties = SimpleNamespace(
        multi_processor_count=4, shared_memory_per_block_optin=227 << 10, uuid="f", name="Fake"
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1,
        "_lazy_init": lambda: None, "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties, "synchronize": lambda at=None: device.finish_copies(),
        "empty_cache": lambda: None, "mem_get_info": lambda device=None: (total - (1 << 30), total),
        "memory_reserved": lambda device=None: 0, "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 1 << 30, "current_stream": lambda at=None: _ComputeStream(device),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=device.lock_pages, cudaHostUnregister=device.locked.pop),
        "_sleep": lambda cycles: None, "Stream": _Stream, "Event": lambda **_: _Event(device),
        "stream": lambda stream: ExitStack(), "device": lambda device: ExitStack(),
    }  # fmt: skip
    with ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, answer))
        # Tensors that wrap others can't be made in inference mode; these tests need no gradients.
        for name in ("__enter__", "__exit__"):
            patches.enter_context(mock.patch.object(torch.inference_mode, name, _no_op))
        patches.enter_context(mock.patch.object(Tensor, "record_stream", _no_op))
        patches.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor, device=None: tensor.clone()))
        patches.enter_context(mock.patch("engine.runner.graphs.make_recorder", return_value=_Recorder(device)))
        if not fused_layers:
            patches.enter_context(mock.patch("engine.models.decoder.make_layer_ops", _torch_layer_ops))
        if triton:
            patches.enter_context(patched_interpreter())
            for module, names in _KERNELS:
                loaded = __import__(module, fromlist=["_"])
                for name in names:
                    kernel = _InterpretedKernel(name, getattr(loaded, name), device)
                    patches.enter_context(mock.patch.object(loaded, name, kernel))
            if not fused_draws:
                patches.enter_context(mock.patch("engine.triton_kernels.draws.draw_rows", _torch_draws))
        patches.enter_context(device)
        yield device
