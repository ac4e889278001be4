"""Products with small weights beside bfloat16 ones, on the shapes of real models.

    python benchmarks/small_weights.py [--shape NxK …] [--rows 1 …] [--rounds 7] [--threads N] [--json FILE]

Each form has so many copies of a weight that the bfloat16 ones don't fit any cache, and a round goes once through all
of them, as a step goes through a model; forms take turns within a round. Times are the median over rounds. The weights
are random: nothing is said of quality, nor of what a step does beside its products.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from throughput import machine

from engine.native.library import NativeLibrary, load_library
from engine.native.linear import NativeLinear
from engine.native.packing import pack_quantized
from engine.native.structs import ElementKind
from engine.native.workspace import KernelWorkspace
from engine.quant.weight import Activations, Factors, Form, QWeight, TwoLevel

SHAPES = {
    "smollm2-135m": ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)),
    "gemma-3-270m": ((1536, 640), (640, 1024), (4096, 640), (640, 2048), (262144, 640)),
    "1b": ((2048, 8192), (8192, 2048)),
}
ROWS = (1, 16, 128)
_BYTES = 256 << 20
"""Of a form's bfloat16 copies, at least."""


def quantized(form: Form, n: int, k: int, group: int, factors: str) -> QWeight:
    """A random one. factors: "scale", "both" (scale and low, float16), "two" (both in two levels) or "int8" (W8A8)."""
    groups = -(-k // group)
    if form == "int4":
        codes = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8)
    elif form == "int8":
        codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    else:
        codes = torch.randn(n, k).to(torch.float8_e4m3fn)

    def numbers() -> Factors:
        if factors == "two":
            whole = torch.randint(0, 64, (n, groups), dtype=torch.int8)
            return TwoLevel(whole, torch.rand(n, -(-groups // 8)).half() * 1e-3, 8)
        return torch.rand(n, groups).half() * 1e-2

    low = numbers() if factors in ("both", "two") else None
    asked = Activations("int8") if factors == "int8" else None
    return QWeight(form, codes, n, k, group, numbers(), low, activations=asked)


Maker = Callable[[NativeLibrary, int, int], NativeLinear]


def _of(form: Form, group: int | None, factors: str) -> Maker:
    def make(library: NativeLibrary, n: int, k: int) -> NativeLinear:
        return NativeLinear(library, pack_quantized(library, quantized(form, n, k, group or k, factors)))

    return make


FORMS: dict[str, Maker] = {
    "bf16": lambda library, n, k: NativeLinear.dense(library, ElementKind.BF16, torch.randn(n, k)),
    "int4, groups of 32, scale": _of("int4", 32, "scale"),
    "int4, groups of 32, scale and low (Q4_1)": _of("int4", 32, "both"),
    "int4, groups of 32 in two levels (Q4_K)": _of("int4", 32, "two"),
    "int8, groups of 32 (Q8_0)": _of("int8", 32, "scale"),
    "int8, a row": _of("int8", None, "scale"),
    "fp8, a row": _of("fp8", None, "scale"),
    "int8 at load (W8A16)": lambda library, n, k: NativeLinear.dense(library, ElementKind.W8, torch.randn(n, k)),
    "int8 by int8 (W8A8)": _of("int8", None, "int8"),
}


def measure(library: NativeLibrary, n: int, k: int, rows: tuple[int, ...], rounds: int, forms: list[str]) -> list[Any]:
    """A row for each form and number of rows."""
    copies = max(1, -(-_BYTES // (2 * n * k)))
    made = {name: [FORMS[name](library, n, k) for _ in range(copies)] for name in forms}
    found = []
    for count in rows:
        x = torch.randn(count, k).bfloat16()
        space = KernelWorkspace.for_linear(library, k, count)
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(rounds):
            for name, linears in made.items():
                begun = time.perf_counter()
                for linear in linears:
                    linear.product(x, space)
                times[name].append((time.perf_counter() - begun) / copies)
        plain = statistics.median(times["bf16"])
        for name, linears in made.items():
            seconds = statistics.median(times[name])
            ratios = sorted(p / t for p, t in zip(times["bf16"], times[name], strict=True))
            entry = {
                "shape": [n, k], "rows": count, "form": name, "bytes": linears[0].num_bytes,
                "microseconds": 1e6 * seconds, "speed_to_bf16": plain / seconds, "least": ratios[0], "most": ratios[-1],
                "gigabytes_per_second": linears[0].num_bytes / seconds / 1e9,
            }  # fmt: skip
            found.append(entry)
            print(
                f"{n}x{k} {count:4} rows  {name:42} {entry['microseconds']:9.1f} us  "
                f"{entry['speed_to_bf16']:5.2f} of bf16 ({ratios[0]:.2f} to {ratios[-1]:.2f})  "
                f"{entry['gigabytes_per_second']:5.1f} GB/s",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", default=[], help="NxK; default: those of three models")
    parser.add_argument("--rows", type=int, action="append", default=[])
    parser.add_argument("--form", action="append", default=[], help="part of a form's name; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--instruction-set", default="auto")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    library = load_library(args.instruction_set, args.threads)
    wanted = [tuple(map(int, shape.split("x"))) for shape in args.shape]
    shapes = wanted or [shape for of_model in SHAPES.values() for shape in of_model]
    forms = ["bf16", *(f for f in FORMS if f != "bf16" and any(part in f for part in args.form or [""]))]
    torch.manual_seed(0)
    results = []
    for n, k in shapes:
        results += measure(library, n, k, tuple(args.rows) or ROWS, args.rounds, forms)
    if args.json:
        report = {"threads": args.threads, "instruction_set": library.name, "machine": machine(), "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
