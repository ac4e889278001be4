"""Reads the state of a worker's GPUs from NVIDIA's driver, through NVML.

GPUs are found by the UUIDs that CUDA reports, never by number: `CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER` and MIG make
CUDA's numbers differ from NVML's. A driver in trouble can take seconds to answer, or never answer. So each reading has
a thread of its own, and the worker's loop takes the result of the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from schemas.workers.metrics import THROTTLE_REASONS, GpuMetrics

logger = structlog.get_logger(__name__)


class GpuReader:
    """Reads some GPUs. One thread calls `read`.

    Args:
        uuids: of GPUs or MIG instances, without a prefix; none: NVML isn't even imported.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self._found: tuple[GpuMetrics, ...] = ()
        self._thread: threading.Thread | None = None
        self._is_initialized = False
        self._has_warned = False

    def read(self) -> tuple[GpuMetrics, ...]:
        """Return what the reading found that the last call began, and begin another; returns at once. GPUs that can't
        be read are left out: all of them at the first call, without NVML, and while the last reading isn't done. The
        first failure is logged."""
        if not self._uuids:
            return ()
        if self._thread is not None and self._thread.is_alive():
            self._warn(None, "the driver does not answer")
            return ()
        found, self._found = self._found, ()
        self._thread = threading.Thread(target=self._read_all, name="gpu-metrics", daemon=True)
        self._thread.start()
        return found

    def _read_all(self) -> None:
        found: list[GpuMetrics] = []
        try:
            import pynvml  # noqa: PLC0415 - only where there are GPUs
        except ImportError:
            self._warn(None, "nvidia-ml-py is not installed")
            return
        try:
            if not self._is_initialized:
                pynvml.nvmlInit()
                self._is_initialized = True
            for uuid in self._uuids:
                try:
                    found.append(_read(pynvml, uuid))
                except pynvml.NVMLError as error:
                    self._warn(uuid, str(error))
        except pynvml.NVMLError as error:
            self._warn(None, str(error))
        self._found = tuple(found)

    def _warn(self, uuid: str | None, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("GPU metrics can't be read", uuid=uuid, why=why)


_BITS: Final = (0x04, 0x08, 0x10, 0x20, 0x40, 0x80)
"""NVML's bits of `THROTTLE_REASONS` (nvmlClocksEventReason…)."""


def _read(nvml: Any, uuid: str) -> GpuMetrics:
    """The state of a GPU or MIG instance. Raises `NVMLError`."""

    def optional(query: Callable[..., Any], *arguments: Any) -> Any:
        """The answer; None: this GPU or driver has none, or not for this user."""
        try:
            return query(*arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
            return None

    try:
        name = f"GPU-{uuid}"
        gpu = handle = nvml.nvmlDeviceGetHandleByUUID(name)
        is_whole = True
    except nvml.NVMLError_NotFound:
        name = f"MIG-{uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(name)
        gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        is_whole = False
    minor = optional(nvml.nvmlDeviceGetMinorNumber, gpu)
    memory = optional(nvml.nvmlDeviceGetMemoryInfo, handle)
    busy = optional(nvml.nvmlDeviceGetUtilizationRates, gpu) if is_whole else None
    power = optional(nvml.nvmlDeviceGetPowerUsage, gpu) if is_whole else None  # milliwatts
    limit = optional(nvml.nvmlDeviceGetEnforcedPowerLimit, gpu) if is_whole else None
    clock = optional(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM)  # megahertz
    reasons = optional(nvml.nvmlDeviceGetCurrentClocksEventReasons, gpu)
    return GpuMetrics(
        uuid=name,
        device="" if minor is None else f"nvidia{minor}",
        memory_bytes=None if memory is None else memory.total,
        memory_used_bytes=None if memory is None else memory.used,
        utilization=None if busy is None else min(1.0, busy.gpu / 100),
        power_watts=None if power is None else power / 1000,
        power_limit_watts=None if limit is None else limit / 1000,
        temperature_celsius=optional(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
        sm_clock_hertz=None if clock is None else clock * 1_000_000,
        throttled=None
        if reasons is None
        else tuple(reason for reason, bit in zip(THROTTLE_REASONS, _BITS, strict=True) if reasons & bit),
    )
