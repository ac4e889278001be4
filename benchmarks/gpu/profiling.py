"""What torch's profiler says of some steps: where the device's time goes, and how long it waits.

Idle time is what no kernel covers between the first one's start and the last one's end. The profiler slows the host
down, so it comes out larger than it is; a graph's kernels are seen one by one. On a CPU the same is done with torch's
operators instead of kernels, which tries the code and says nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.context import synchronize

_ROWS = 25

KINDS = (
    ("attention", ("attend_tiles", "attend_shared", "join_splits", "flash", "fmha", "attention")),
    ("cache writes", ("store_tokens", "reshape_and_cache", "index_copy")),
    ("products", ("gemm", "matmul", "cutlass", "nvjet", "addmm", "scaled_mm", "linear", "::mm", "xmma", "sm90")),
    ("copies", ("memcpy", "memset", "copy_", "fill_")),
    ("norms", ("norm",)),
    ("sampling", ("draw_rows", "argmax", "topk", "sort", "softmax", "scan", "max")),
)
"""Of kernels, by what their names hold; the first that fits counts. The rest is elementwise."""


def steps(step: Callable[[], object], device: torch.device, count: int) -> dict[str, Any]:
    """`count` steps under the profiler: busy share, and a table of kernels by time."""
    for _ in range(2):
        step()
    synchronize(device)
    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_device else [ProfilerActivity.CPU]
    begun = time.perf_counter()
    with profile(activities=activities) as found:
        for _ in range(count):
            step()
        synchronize(device)
    wall = time.perf_counter() - begun
    spans = [
        (float(event.time_range.start), float(event.time_range.end), str(event.name))
        for event in found.events()
        if (event.device_type == torch.autograd.DeviceType.CUDA) == on_device
    ]
    return {"steps": count, "wall_seconds": wall, **account(spans)}


def account(spans: Iterable[tuple[float, float, str]]) -> dict[str, Any]:
    """Of (begin, end, name) in microseconds: span, time covered by any, idle share, gaps, and tables by name and kind.

    Raises:
        ValueError: there is nothing.
    """
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("the profiler saw nothing on the device")
    covered, until, gaps = 0.0, ordered[0][0], []
    for begin, end, _ in ordered:
        if begin > until:
            gaps.append(begin - until)
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    whole = until - ordered[0][0]
    by_name: dict[str, list[float]] = {}
    for begin, end, name in ordered:
        by_name.setdefault(name, []).append(end - begin)
    total = sum(sum(times) for times in by_name.values())
    by_kind: dict[str, float] = {}
    for name, times in by_name.items():
        kind = kind_of(name)
        by_kind[kind] = by_kind.get(kind, 0.0) + sum(times) / max(total, 1e-9)
    rows = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_ROWS]
    return {
        "span_seconds": whole / 1e6,
        "busy_seconds": covered / 1e6,
        "idle_share": 1 - covered / whole if whole else 0.0,
        "longest_gaps_us": sorted(gaps, reverse=True)[:10],
        "shares": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        "kernels": [
            {
                "name": name[:120],
                "calls": len(times),
                "seconds": sum(times) / 1e6,
                "share": sum(times) / max(total, 1e-9),
                "mean_us": sum(times) / len(times),
            }
            for name, times in rows
        ],
    }


def kind_of(name: str) -> str:
    """What a kernel is for, as far as its name tells."""
    lower = name.lower()
    return next((kind for kind, words in KINDS if any(word in lower for word in words)), "elementwise and other")
