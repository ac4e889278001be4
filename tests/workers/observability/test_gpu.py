"""Metrics of GPUs, read from a stand-in for NVIDIA's driver."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
from structlog.testing import capture_logs

from schemas.workers.metrics import THROTTLE_REASONS, GpuMetrics
from tests.workers.observability.fake_nvml import (
    FakeGpu,
    FakeNvml,
    FunctionNotFound,
    GpuIsLost,
    NoPermission,
    NotSupported,
    NVMLError,
    functions,
)
from workers.observability import gpu as gpu_module
from workers.observability.gpu import GpuReader

BUSY = FakeGpu(2, (1000, 900), 87, (650_500, 700_000), 71, 1755, 0x01 | 0x04 | 0x40)
IDLE = FakeGpu(5, (1000, 10), 0, (70_000, 600_000), 30, 345, 0x01)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two GPUs; NVML numbers the idle one first."""
    made = FakeNvml({"GPU-i": IDLE, "GPU-b": BUSY})
    monkeypatch.setitem(sys.modules, "pynvml", made)  # type: ignore[arg-type]
    return made


def read(reader: GpuReader) -> tuple[GpuMetrics, ...]:
    """What a reading of now finds."""
    reader.read()
    join(reader)
    found = reader.read()
    join(reader)
    return found


def join(reader: GpuReader) -> None:
    assert reader._thread is not None
    reader._thread.join()


def test_gpus_are_read_by_uuid_in_the_order_of_the_ranks(nvml: FakeNvml) -> None:
    # Given devices that CUDA numbers in the other order, when they are read, then each has its own values in SI units.
    busy, idle = read(GpuReader(["b", "i"]))
    assert busy == GpuMetrics(
        uuid="GPU-b", device="nvidia2", memory_bytes=1000, memory_used_bytes=900, utilization=0.87, power_watts=650.5,
        power_limit_watts=700, temperature_celsius=71, sm_clock_hertz=1_755_000_000,
        throttled=("sw_power_cap", "hw_thermal_slowdown"),
    )  # fmt: skip
    assert (idle.uuid, idle.device, idle.utilization, idle.throttled) == ("GPU-i", "nvidia5", 0, ())
    # Given the driver's order, or one visible device, then the same of each.
    assert read(GpuReader(["i", "b"])) == (idle, busy)
    assert read(GpuReader(["i"])) == (idle,)


def test_a_mig_instance_has_its_own_memory_and_no_share_of_the_gpus_power(nvml: FakeNvml) -> None:
    nvml.gpus["MIG-m"] = FakeGpu(memory=(100, 40), parent=BUSY)
    (found,) = read(GpuReader(["m"]))
    assert found == GpuMetrics(
        uuid="MIG-m", device="nvidia2", memory_bytes=100, memory_used_bytes=40, temperature_celsius=71,
        sm_clock_hertz=1_755_000_000, throttled=("sw_power_cap", "hw_thermal_slowdown"),
    )  # fmt: skip


def test_what_a_gpu_does_not_report_is_unknown(nvml: FakeNvml) -> None:
    refusals = [NotSupported(), FunctionNotFound(), NoPermission()]
    queries = ["minor", "memory", "utilization", "power", "limit", "temperature", "clock", "reasons"]
    nvml.gpus["GPU-b"] = FakeGpu(failures={query: refusals[n % 3] for n, query in enumerate(queries)})
    with capture_logs() as logs:
        assert read(GpuReader(["b"])) == (GpuMetrics(uuid="GPU-b"),)
    assert logs == []


def test_a_cpu_worker_does_not_import_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader = GpuReader(())
    with capture_logs() as logs:
        assert [reader.read() for _ in range(3)] == [(), (), ()]
    assert (logs, reader._thread) == ([], None)


def warnings(logs: list[Any]) -> list[tuple[str | None, str]]:
    return [(one["uuid"], one["why"]) for one in logs if one["event"] == "GPU metrics can't be read"]


def test_without_nvidias_bindings_there_are_no_metrics_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader = GpuReader(["b"])
    with capture_logs() as logs:
        assert [read(reader) for _ in range(3)] == [(), (), ()]
    assert warnings(logs) == [(None, "nvidia-ml-py is not installed")]


def test_without_a_driver_there_are_no_metrics_until_there_is_one(nvml: FakeNvml) -> None:
    nvml.init_error = NVMLError("Driver Not Loaded")
    reader = GpuReader(["b"])
    with capture_logs() as logs:
        assert [read(reader) for _ in range(3)] == [(), (), ()]
    assert warnings(logs) == [(None, "Driver Not Loaded")]
    nvml.init_error, nvml.inits = None, 0
    assert [len(read(reader)) for _ in range(3)] == [1, 1, 1]
    assert nvml.inits == 1


def test_when_a_gpu_is_lost_the_others_are_still_read(nvml: FakeNvml) -> None:
    reader = GpuReader(["b", "i"])
    assert len(read(reader)) == 2
    nvml.gpus["GPU-b"] = FakeGpu(failures={"power": GpuIsLost("GPU is lost")})
    with capture_logs() as logs:
        assert [[one.uuid for one in read(reader)] for _ in range(3)] == [["GPU-i"]] * 3
        del nvml.gpus["GPU-i"]
        assert read(reader) == (), "no old values"
    assert warnings(logs) == [("b", "GPU is lost")]


def test_a_driver_that_does_not_answer_does_not_delay_the_worker(nvml: FakeNvml) -> None:
    reader = GpuReader(["b"])
    assert len(read(reader)) == 1
    nvml.answers.clear()
    with capture_logs() as logs:
        assert len(reader.read()) == 1, "of the reading before"
        assert [reader.read() for _ in range(3)] == [(), (), ()]
    assert warnings(logs) == [(None, "the driver does not answer")]
    nvml.answers.set()
    join(reader)
    assert len(read(reader)) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_reading_that_breaks_off_there_are_no_old_values(nvml: FakeNvml) -> None:
    reader = GpuReader(["b"])
    assert len(read(reader)) == 1
    nvml.gpus["GPU-b"] = FakeGpu(failures={"power": RuntimeError("not NVML's")})
    assert read(reader) == ()
    nvml.gpus["GPU-b"] = BUSY
    assert len(read(reader)) == 1


def test_nvidias_bindings_have_the_functions_of_the_stand_in() -> None:
    pynvml = pytest.importorskip("pynvml")
    given, real = functions(FakeNvml({})), functions(pynvml)
    assert len(given) == 11
    for name, function in given.items():
        wrapped = inspect.signature(real[name]).parameters
        assert list(inspect.signature(function).parameters) == list(wrapped), name
    for name in dir(FakeNvml):
        if name.startswith("NVMLError_"):
            assert issubclass(getattr(pynvml, name), pynvml.NVMLError), name
    for name in ("NVML_TEMPERATURE_GPU", "NVML_CLOCK_SM"):
        assert getattr(pynvml, name) == getattr(FakeNvml, name)
    names = ("SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    assert tuple(getattr(pynvml, f"nvmlClocksEventReason{name}") for name in names) == gpu_module._BITS
    assert [name.replace("_", "") for name in THROTTLE_REASONS] == [name.lower() for name in names]
