"""A disk that fills up in the middle of a run: one clear line, nothing half-written, and the same command goes on. The
same for a process that the kernel kills for memory.

The first life computes one row at a time, so that it has minutes of work; the next one many at once. And it is stopped
while its disk or its memory is made small, so that it can't get past that on any machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tokenmill.chaos.running import GRACE, Setup, write_requests
from tests.tokenmill.chaos.watching import REFUSED, answers, parts, read_with_every_reader
from tests.tokenmill.small_disk import SIZE, resize, small_disk

pytestmark = pytest.mark.slow

ROWS = 120
SLOWLY = ("--max-num-seqs", "1")
FAST = ("--max-num-seqs", "64")


@pytest.fixture
def setup(folder: Path, model_folder: Path) -> Setup:
    environment = (("TOKENMILL_PLAN__MAX_SHARD_ROWS", "6"), ("TOKENMILL_CHECKPOINT_SECONDS", "0.05"))
    return Setup(f"tiny={model_folder}", folder, ("--threads", "1"), environment)


@pytest.fixture
def source(setup: Setup, folder: Path) -> Path:
    path = folder / "requests.jsonl"
    write_requests(path, setup.model_name, ROWS, 120)
    return path


@pytest.fixture
def undisturbed(setup: Setup, source: Path, folder: Path) -> Path:
    """The job as it goes when nothing happens to it."""
    process = setup.start(source, folder / "undisturbed", *FAST)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return folder / "undisturbed"


def stop_in_the_middle(process: subprocess.Popen[str], out: Path) -> None:
    """Stop it (it doesn't notice) when two shards are committed, of twenty."""
    while len(parts(out)) < 3:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    process.send_signal(signal.SIGSTOP)
    assert process.poll() is None, "it has ended before it could be stopped"


@pytest.fixture
def disk(folder: Path) -> Iterator[Path]:
    with small_disk(folder / "disk") as mounted:
        yield mounted


@pytest.mark.exhaustive
def test_given_a_full_disk_when_there_is_room_again_then_the_same_command_goes_on(
    setup: Setup, source: Path, undisturbed: Path, disk: Path
) -> None:
    out = disk / "out"
    full = setup.start(source, out, *SLOWLY, TOKENMILL_CHECKPOINT_SECONDS="1")
    stop_in_the_middle(full, out)
    # With a log now and then, what it may still free by removing checkpoints is far less than the other parts need.
    resize(disk, shutil.disk_usage(disk).used)
    full.send_signal(signal.SIGCONT)
    _, err = full.communicate(timeout=GRACE)

    assert full.returncode == 1, err
    assert "Traceback" not in err
    assert "No space left on device" in err.splitlines()[-1], err
    assert str(disk) in err.splitlines()[-1], "it says where"
    committed = {file.name: file.read_bytes() for file in parts(out)}
    assert len(committed.keys() - {REFUSED}) >= 2, "shards were committed before the disk was full"
    assert read_with_every_reader(out) < ROWS

    resize(disk, SIZE)
    again = setup.start(source, out, *FAST)
    _, err = again.communicate(timeout=GRACE)

    assert again.returncode == 0, err
    assert {name: (out / "results" / name).read_bytes() for name in committed} == committed
    assert answers(out) == answers(undisturbed)


@pytest.fixture
def memory() -> Iterator[Callable[[int, int], None]]:
    """Limits a process to so many bytes of memory (a control group); the kernel kills it when it allocates more."""
    untested = "NOT TESTED HERE: a run that the kernel kills for memory; "
    root = Path("/sys/fs/cgroup/memory")
    group = (root if root.is_dir() else root.parent) / f"tokenmill-test-{os.getpid()}"
    names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if root.is_dir() else ("memory.max",)
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"{untested}no control group can be made: {error.strerror}")
    limits = [group / name for name in names if (group / name).exists()]
    swap = group / "memory.swap.max"
    if not limits:
        group.rmdir()
        pytest.skip(f"{untested}this control group has no limit of memory")

    def limit(pid: int, size: int) -> None:
        for file in limits:
            file.write_text(str(size))
        if swap.exists():  # else it swaps, and lives
            swap.write_text("0")
        (group / "cgroup.procs").write_text(str(pid))

    yield limit
    group.rmdir()


@pytest.mark.exhaustive
def test_given_a_process_that_the_kernel_kills_for_memory_when_started_again_then_it_goes_on(
    setup: Setup, source: Path, undisturbed: Path, folder: Path, memory: Callable[[int, int], None]
) -> None:
    """Only pages that it touches from then on count, so it dies while it works."""
    out = folder / "out"
    process = setup.start(source, out, *SLOWLY)
    stop_in_the_middle(process, out)
    memory(process.pid, 1 << 19)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=GRACE)
    assert process.returncode == -signal.SIGKILL, err
    assert 0 < read_with_every_reader(out) < ROWS, "it died in the middle"

    again = setup.start(source, out, *FAST)
    _, err = again.communicate(timeout=GRACE)
    assert again.returncode == 0, err
    assert answers(out) == answers(undisturbed)
