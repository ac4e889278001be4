"""Runs one engine in a process of its own: a time limit, its processors, its memory, and who else used the machine.

Memory is that of the whole tree of processes (vLLM has three): the greatest sum of resident sets seen five times a
second, or the kernel's own high-water mark of one process, whichever is more. Pages that processes share count for
each. Linux only: it reads /proc.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PERIOD = 0.2
"""Seconds between two looks at the memory."""

NOT_INHERITED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "PYTHONPATH",
    "TOKENIZERS_PARALLELISM",
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True)
class Finished:
    """What came of a process. `returncode` is None where the time limit ended it; `others` in mean cores in use."""

    returncode: int | None
    stdout: str
    log: str
    seconds: float
    peak_rss_bytes: int
    others: float


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would set one engine's threads or libraries and not another's."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return kept | OFFLINE | dict(extra)


def descendants(pid: int) -> list[int]:
    """A process and all its children, theirs too, as far as they still live."""
    found = [pid]
    for parent in found:  # grows while it is read
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue  # it ended just now
    return found


def memory(pid: int) -> tuple[int, int]:
    """Resident set and its high-water mark, in bytes; zeros for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return sizes.get("VmRSS", 0), sizes.get("VmHWM", 0)


def busy_seconds() -> float:
    """Seconds that the processors spent on anything since boot, all of them together."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """Processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def born(pid: int) -> tuple[int, float]:
    """When a process was started (clock ticks since boot), and the seconds that it computed; zeros if it has ended.

    The first tells two users of one id apart.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0.0
    return int(fields[19]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end(process: subprocess.Popen[bytes], known: Mapping[int, int]) -> None:
    """Kill what is left of a tree, by what was seen of it last (ids and times of birth), and what came since."""
    left = {pid: born(pid)[0] for pid in descendants(process.pid)} if process.poll() is None else {}
    for pid, birth in (dict(known) | left).items():
        if birth and born(pid)[0] == birth:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def run(
    command: Sequence[str], log: Path, *, limit: float, cpus: Sequence[int], env: Mapping[str, str] | None = None
) -> Finished:
    """Run a command on these processors for at most `limit` seconds; its stderr goes to the file `log`."""
    out = log.with_suffix(".out")
    busy, used, begun = busy_seconds(), children_seconds(), time.monotonic()
    peak = 0
    known: dict[int, int] = {}
    computed: dict[tuple[int, int], float] = {}
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=clean_environment(env or {}),
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        try:
            while process.poll() is None and time.monotonic() - begun < limit:
                seen = {pid: born(pid) for pid in descendants(process.pid)}
                known = {pid: birth for pid, (birth, _) in seen.items()}
                computed |= {(pid, birth): spent for pid, (birth, spent) in seen.items()}
                sizes = [memory(pid) for pid in known]
                peak = max(peak, sum(rss for rss, _ in sizes), *(mark for _, mark in sizes))
                time.sleep(PERIOD)
        finally:
            returncode = process.poll()
            end(process, known)
    seconds = time.monotonic() - begun
    # The kernel's account has only those whose parent waited for them, what was seen has nothing of the last moment.
    own = max(children_seconds() - used, sum(computed.values()))
    others = (busy_seconds() - busy - own) / seconds
    text, logged = out.read_text(errors="replace"), log.read_text(errors="replace")
    return Finished(returncode, text, logged, seconds, peak, max(0.0, others))
