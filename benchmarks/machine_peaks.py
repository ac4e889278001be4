"""What this machine can do at most, measured here and now: read bandwidth by size, and the register peak by dtype.

    python benchmarks/machine_peaks.py [--threads 1,2] [--json FILE]

machine_peaks.c does the measuring; it is compiled by the system's compiler (a second). The instructions per cycle say
whether a figure can be believed: 2 of the wide multiply-accumulates on current servers, a sixteenth of a tile's. A rate
that more threads together don't raise means that other processes took their time: such a figure is no limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
SIZES = tuple(mebibytes << 20 for mebibytes in (4, 16, 64, 128, 256, 512, 1024))
ROUND_SECONDS = 0.1
SLOWED = 0.9
"""Threads that run together keep at least this share of a lone one's clock, or somebody else is running too."""


class PeaksError(Exception):
    """Raised when the machine can't be measured; says what is missing."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One multiply-accumulate instruction, on registers.

    Attributes:
        operations_per_second: multiplications and additions, of all threads.  instructions_per_cycle: of one.
    """

    name: str
    dtype: str
    operations_per_second: float
    instructions_per_cycle: float


@dataclass(frozen=True, slots=True)
class Read:
    """Reading `bytes` again and again, all threads together."""

    bytes: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class MachinePeaks:
    """What so many threads reach. `clock_hz` of each while all run."""

    threads: int
    clock_hz: float
    kernels: tuple[Kernel, ...]
    reads: tuple[Read, ...]

    def operations_per_second(self, dtype: str) -> float:
        """The best that any instruction reaches for "bf16", "int8" or "f32"; what has no bf16 computes it as f32."""
        dtypes = (dtype, "f32") if dtype == "bf16" else (dtype,)
        rates = [kernel.operations_per_second for kernel in self.kernels if kernel.dtype in dtypes]
        if not rates:
            raise PeaksError(f"no instruction for {dtype!r}; there are {sorted({k.dtype for k in self.kernels})}")
        return max(rates)

    def bandwidth(self, size: float) -> float:
        """Bytes per second at most for a pass over `size` bytes: no larger pass was faster than this."""
        fitting = [read.bytes_per_second for read in self.reads if read.bytes >= size]
        return max(fitting) if fitting else max(self.reads, key=lambda read: read.bytes).bytes_per_second

    def best_with(self, other: MachinePeaks) -> MachinePeaks:
        """The higher of two measurements of the same, figure by figure: a limit is what was reached at any time."""
        kernels = zip(self.kernels, other.kernels, strict=True)
        reads = zip(self.reads, other.reads, strict=True)
        return MachinePeaks(
            self.threads,
            max(self.clock_hz, other.clock_hz),
            tuple(max(pair, key=lambda kernel: kernel.operations_per_second) for pair in kernels),
            tuple(max(pair, key=lambda read: read.bytes_per_second) for pair in reads),
        )


def build(folder: Path) -> Path:
    """Compile the measuring program; raises `PeaksError` where that is impossible."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise PeaksError(f"register peaks are measured on x86-64 only, and this is {platform.machine()}")
    named = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, [named] if named else ["cc", "gcc", "clang"])), None)
    if compiler is None:
        raise PeaksError(
            f"no C compiler ({named or 'cc, gcc, clang'}): install one (Debian: apt install gcc), or set CC"
        )
    program = folder / "machine_peaks"
    command = [compiler, "-O2", "-pthread", str(SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PeaksError(f"{compiler} can't build {SOURCE.name}: {done.stderr.strip().splitlines()[-1:]}")
    return program


def measure(
    threads: Sequence[int], sizes: Sequence[int] = SIZES, round_seconds: float = ROUND_SECONDS
) -> dict[int, MachinePeaks]:
    """Peaks for each number of threads. Takes about 10 s for two of them, and as much memory as the largest size.

    Raises:
        PeaksError: no compiler, or no x86-64 with AVX2.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for count in threads:
            command = [str(program), str(round_seconds), str(count), *map(str, sizes)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise PeaksError(f"{SOURCE.name} ended with code {done.returncode}: {done.stderr.strip()}")
            said = json.loads(done.stdout)
            kernels = tuple(Kernel(**kernel) for kernel in said["kernels"])
            found[count] = MachinePeaks(count, said["clock_hz"], kernels, tuple(Read(**read) for read in said["reads"]))
    return found


def disturbed(peaks: dict[int, MachinePeaks]) -> bool:
    """Whether threads together ran visibly slower than the fewest: other processes took part of their time."""
    clocks = [peaks[count].clock_hz for count in sorted(peaks)]
    return min(clocks) < SLOWED * clocks[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas between")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    try:
        peaks = measure([int(count) for count in args.threads.split(",")])
    except PeaksError as error:
        raise SystemExit(f"error: {error}") from error
    for count, found in peaks.items():
        print(f"{count} threads, {found.clock_hz / 1e9:.2f} GHz")
        for k in found.kernels:
            rate = f"{k.operations_per_second / 1e9:8.0f} Gop/s"
            print(f"  {k.name:12} {k.dtype} {rate}  {k.instructions_per_cycle:.2f} instructions a cycle")
        for read in found.reads:
            print(f"  read {read.bytes / 2**20:6.0f} MiB {read.bytes_per_second / 1e9:8.1f} GB/s")
    if disturbed(peaks):
        print("warning: other processes were running; these are no limits", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps([asdict(found) for found in peaks.values()], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
