"""Stage `machine`: what this is, how fast it copies, and how fast it multiplies in bf16 and fp8.

Datasheets are leads; the rooflines of all other stages rest on these numbers. Random numbers, never zeros: products of
zeros run faster than any real ones.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu.context import Context, Part, parts, seconds_of

_PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "vllm", "flash-attn")
_QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
_SECONDS = 8.0


def run(context: Context) -> Iterator[Part]:
    """Versions, the device, and its two ceilings."""
    context.need(context.sized(_SECONDS, 1.0))
    yield from parts(
        {
            "versions": versions,
            "device": lambda: device(context),
            "copy": lambda: copy(context),
            "bf16": lambda: bf16_products(context),
            "fp8": lambda: fp8_products(context),
            "after": lambda: {"nvidia_smi": nvidia_smi()},
        }
    )


def versions() -> dict[str, Any]:
    """Of Python and of the packages that are there."""
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def nvidia_smi() -> dict[str, str] | None:
    """Clocks, driver and temperature as the driver's tool tells them; None: there is no such tool."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    if done.returncode or not done.stdout.strip():
        return {"error": (done.stderr or done.stdout).strip()[:500]}
    return dict(zip(_QUERY.split(","), done.stdout.splitlines()[0].split(", "), strict=False))


def device(context: Context) -> dict[str, Any]:
    """The device's own words on itself."""
    found: dict[str, Any] = {"type": context.device.type, "cores": os.cpu_count(), "nvidia_smi": nvidia_smi()}
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        free, total = torch.cuda.mem_get_info(context.device)
        found |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": total,
            "free_bytes": free,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return found


def copy(context: Context) -> dict[str, Any]:
    """A copy within the device's memory, several times its caches; bytes read plus bytes written."""
    size = context.sized(4 << 30, 8 << 20)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=context.device)
    into = torch.empty_like(source)
    return rate("bytes_per_second", 2 * size, seconds_of(lambda: into.copy_(source), context.device))


def bf16_products(context: Context) -> dict[str, Any]:
    """A square product of random bf16 numbers."""
    n = context.sized(8192, 192)
    x, w = (torch.randn(n, n, device=context.device).bfloat16() for _ in range(2))
    return {"n": n, **rate("operations_per_second", 2 * n**3, seconds_of(lambda: x @ w, context.device))}


def fp8_products(context: Context) -> dict[str, Any]:
    """The same in fp8 with a factor for each row, as quantized weights are multiplied."""
    n = context.sized(8192, 192)
    x, w = (torch.randn(n, n, device=context.device).to(torch.float8_e4m3fn) for _ in range(2))
    rows = torch.full((n, 1), 0.5, device=context.device)

    def product() -> object:
        return torch._scaled_mm(x, w.t(), scale_a=rows, scale_b=rows.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

    return {"n": n, **rate("operations_per_second", 2 * n**3, seconds_of(product, context.device))}


def rate(name: str, amount: float, seconds: list[float]) -> dict[str, Any]:
    """`amount` over the median time, with the range beside it."""
    ordered = sorted(seconds)
    return {
        name: amount / ordered[len(ordered) // 2],
        "best": amount / ordered[0],
        "worst": amount / ordered[-1],
        "repeats": len(ordered),
    }
