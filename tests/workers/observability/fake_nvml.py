"""A stand-in for NVIDIA's module `pynvml`, with some GPUs; `test_gpu.py` compares its functions with the module's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


class NotFound(NVMLError):
    pass


class NotSupported(NVMLError):
    pass


class FunctionNotFound(NVMLError):
    pass


class NoPermission(NVMLError):
    pass


class GpuIsLost(NVMLError):
    pass


@dataclass
class FakeGpu:
    """A GPU, or (with `parent`) a MIG instance: most queries fail for that. `failures`: by query."""

    minor: int = 0
    memory: tuple[int, int] = (80 << 30, 60 << 30)
    utilization: int = 0
    milliwatts: tuple[int, int] = (0, 700_000)
    celsius: int = 30
    megahertz: int = 1980
    reasons: int = 0
    parent: FakeGpu | None = None
    failures: dict[str, Exception] = field(default_factory=dict)

    def check(self, query: str) -> None:
        if query in self.failures:
            raise self.failures[query]
        if self.parent is not None and query != "memory":
            raise NotSupported


class FakeNvml:
    """Set as `sys.modules["pynvml"]`. `gpus`: by UUID, in the order of NVML's numbers. Queries wait for `answers`."""

    NVMLError = NVMLError
    NVMLError_NotFound = NotFound
    NVMLError_NotSupported = NotSupported
    NVMLError_FunctionNotFound = FunctionNotFound
    NVMLError_NoPermission = NoPermission
    NVMLError_GpuIsLost = GpuIsLost
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1

    def __init__(self, gpus: dict[str, FakeGpu]) -> None:
        self.gpus = gpus
        self.init_error: NVMLError | None = None
        self.inits = 0
        self.answers = threading.Event()
        self.answers.set()

    def nvmlInit(self) -> None:
        self.inits += 1
        if self.init_error is not None:
            raise self.init_error

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        self.answers.wait()
        if uuid not in self.gpus:
            raise NotFound
        return self.gpus[uuid]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: FakeGpu) -> FakeGpu:  # noqa: N803
        assert migDevice.parent is not None
        return migDevice.parent

    def nvmlDeviceGetMinorNumber(self, handle: FakeGpu) -> int:
        handle.check("minor")
        return handle.minor

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu, version: int | None = None) -> SimpleNamespace:
        handle.check("memory")
        total, used = handle.memory
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> SimpleNamespace:
        handle.check("utilization")
        return SimpleNamespace(gpu=handle.utilization, memory=1)

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        handle.check("power")
        return handle.milliwatts[0]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: FakeGpu) -> int:
        handle.check("limit")
        return handle.milliwatts[1]

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        handle.check("temperature")
        assert sensor == self.NVML_TEMPERATURE_GPU
        return handle.celsius

    def nvmlDeviceGetClockInfo(self, handle: FakeGpu, type: int) -> int:  # noqa: A002
        handle.check("clock")
        assert type == self.NVML_CLOCK_SM
        return handle.megahertz

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: FakeGpu) -> int:
        handle.check("reasons")
        return handle.reasons


def functions(module: Any) -> dict[str, Callable[..., Any]]:
    """Its functions, by name."""
    return {name: getattr(module, name) for name in dir(FakeNvml) if name.startswith("nvml")}
