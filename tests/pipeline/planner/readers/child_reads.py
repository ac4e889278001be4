"""Reads inputs in a process of its own, to measure the memory that it takes."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from schemas.jobs.inputs import InputFormat
from tests.waiting import HANG_SECONDS

MAX_BYTES = 3 << 30

READS = """
import resource, sys
from pathlib import Path
from pipeline.planner import SourceFile, open_source
from pipeline.planner.ports import BrokenInput
from pipeline.planner.segment_sizes import SegmentSizes
from schemas.jobs.inputs import InputFormat
from schemas.requests.limits import Limits
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[2:]:
    file = SourceFile(name, lambda name=name: Path(name).open("rb"))
    rows = 0
    try:
        source = open_source([file], InputFormat(sys.argv[1]), Limits(), "demo")
        for batch in source.batches(SegmentSizes(10_000, 100_000)):
            rows += len(batch.rows)
    except BrokenInput as error:
        print(error, file=sys.stderr)
        rows = -1
    print(rows)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def read_in_child(kind: InputFormat, *paths: Path) -> tuple[list[int], int]:
    """Read each file as an input of its own, within 3 GiB of memory.

    Returns:
        The rows of each, -1 for one that is refused; and the MiB by which the process grew.
    """
    child = subprocess.run(
        [sys.executable, "-c", READS, kind, *map(str, paths)],
        capture_output=True, text=True, timeout=HANG_SECONDS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES)),
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    *rows, grown = map(int, child.stdout.split())
    return rows, grown
