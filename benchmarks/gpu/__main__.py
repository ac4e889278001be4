"""Measure one GPU: `python -m benchmarks.gpu --stage NAME [--stage NAME …] [--out FOLDER]`.

Each stage runs in a process of its own, ends itself within --limit-seconds, and writes what it finds into OUT/gpu.json,
part by part; what fails is written down, and the next goes on. --dry-run tries every line with tiny shapes on a CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report, end_unfinished, measured_rates, read

STAGES = {
    "machine": "benchmarks.gpu.machine",
    "correctness": "benchmarks.gpu.correctness",
    "attention": "benchmarks.gpu.attention",
    "kernels": "benchmarks.gpu.kernels",
    "serve": "benchmarks.gpu.serve",
    "published": "benchmarks.gpu.published",
    "mixed": "benchmarks.gpu.mixed",
    "peers": "benchmarks.gpu.peers",
    "profile": "benchmarks.gpu.profile_stage",
}
"""Names and modules, in the order in which they make sense."""

_GRACE = 20.0
"""Seconds beyond its limit after which a stage's process is ended."""


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--stage", action="append", choices=[*STAGES, "all"], required=True)
    made.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of gpu.json, models and logs")
    made.add_argument("--limit-seconds", type=float, default=470.0, help="for each stage")
    made.add_argument("--window", type=float, default=None, help="seconds of a steady state that count (10)")
    made.add_argument("--batch", type=int, default=None, help="rows of the running batch (256)")
    made.add_argument("--set", default="", help="settings of the engine on top: key:value,… (cache.block_size:64)")
    made.add_argument("--gguf", type=Path, default=None, help="a model's file, to check it, too")
    made.add_argument("--vllm", type=Path, default=None, help="folder that `python -m benchmarks.gpu.carry` unpacked")
    made.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    made.add_argument("--together", action="store_true", help="all stages in this process (a crash ends them all)")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; 0 if all of them ended by themselves and in time."""
    args = parser().parse_args(arguments)
    names = list(STAGES) if "all" in args.stage else list(dict.fromkeys(args.stage))
    if args.dry_run:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # is read when triton is first imported
    run = run_stage if args.together else run_apart
    ended = [run(name, args) for name in names]
    return 0 if all(ended) else 1


def run_apart(name: str, args: argparse.Namespace) -> bool:
    """A stage in a process of its own, which may crash or hang."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", name, "--out", str(args.out)]
    command += ["--limit-seconds", str(args.limit_seconds), "--set", args.set]
    for option in ("window", "batch", "gguf", "vllm"):
        if getattr(args, option) is not None:
            command += [f"--{option}", str(getattr(args, option))]
    command += ["--together", *(["--dry-run"] if args.dry_run else [])]
    try:
        status = subprocess.run(command, timeout=args.limit_seconds + _GRACE, check=False).returncode
    except subprocess.TimeoutExpired:
        end_unfinished(args.out, name, f"did not end within {args.limit_seconds + _GRACE:.0f} s")
        return False
    if status:
        end_unfinished(args.out, name, f"the process ended with status {status}")
    return status == 0


def run_stage(name: str, args: argparse.Namespace) -> bool:
    """A stage in this process."""
    deadline = time.monotonic() + args.limit_seconds
    report = Report(args.out, name, dry_run=args.dry_run, limit_seconds=args.limit_seconds, settings=args.set)
    try:
        context = context_of(args, deadline)
        for part, finding in import_module(STAGES[name]).run(context):
            report.add(part, finding)
            print(f"{name}: {part}: {line_of(finding)}", flush=True)
    except Exception as error:  # noqa: BLE001 - it stands in the file, and the next stage goes on
        report.end(f"{type(error).__name__}: {error}")
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False
    report.end()
    seconds = read(args.out)["stages"][name]["seconds"]
    print(f"{name}: {seconds:.0f} s", flush=True)
    return True


def context_of(args: argparse.Namespace, deadline: float) -> Any:
    """The stage's circumstances.

    Raises:
        RuntimeError: there is no GPU, and no dry run was asked for.
    """
    import torch

    from benchmarks.engine_settings import parse_overrides
    from benchmarks.gpu.context import Context

    if not args.dry_run and not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU; --dry-run tries everything with tiny shapes on the CPU")
    device = torch.device("cpu" if args.dry_run else "cuda")
    if args.dry_run:
        torch.set_num_threads(1)
    folder = args.out / "work"
    folder.mkdir(parents=True, exist_ok=True)
    return Context(
        device=device,
        dry=args.dry_run,
        deadline=deadline,
        folder=folder.resolve(),
        window=args.window or (0.1 if args.dry_run else 10.0),
        rates=measured_rates(args.out, args.dry_run),
        batch=args.batch or (4 if args.dry_run else 256),
        settings=parse_overrides(args.set),
        gguf=args.gguf,
        vllm=None if args.vllm is None else args.vllm.resolve(),
    )


def line_of(finding: dict[str, Any]) -> str:
    """A finding on one line: its numbers, and of what lies deeper the shares and ratios."""
    for name in ("error", "skipped"):
        if name in finding:
            return f"{name}: {finding[name]}"
    shown = [f"{key} {number(value)}" for key, value in finding.items() if isinstance(value, bool | int | float | str)]
    for name, inner in finding.items():
        for label, deep in inner.items() if isinstance(inner, dict) else ():
            if isinstance(deep, dict):
                wanted = {key: deep[key] for key in ("share", "ours_is_faster_by", "ok", "error") if key in deep}
                shown += [f"{label}: {key} {number(value)}" for key, value in wanted.items()]
            elif label in ("share", "idle_share"):
                shown.append(f"{name} {label} {number(deep)}")
    return ", ".join(shown)


def number(value: Any) -> str:
    """Short enough to read."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:80]


if __name__ == "__main__":
    sys.exit(main())
