"""A disk that fills up in the middle of a run: one clear line, nothing half-written, and the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tokenmill.chaos.killing import Setup, answers, look, write_requests

Mount = Callable[[str], None]

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(place: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = place / "disk"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small disk")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=220k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this machine can't mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_given_a_full_disk_when_there_is_room_again_then_the_same_command_goes_on(
    place: Path, model_folder: Path, disk: Path
) -> None:
    options = ("--threads", "1", "--max-num-seqs", "8")
    environment = (("TOKENMILL_PLAN__MAX_SHARD_ROWS", "6"), ("TOKENMILL_CHECKPOINT_SECONDS", "0.05"))
    setup = Setup(f"tiny={model_folder}", place, 5.0, options, environment)
    source, out, calm = place / "requests.jsonl", disk / "out", place / "calm"
    write_requests(source, "tiny", 60, 120)
    assert setup.start(source, calm).wait() == 0

    full = setup.start(source, out)
    _, err = full.communicate(timeout=120)

    assert full.returncode == 1, err
    assert "Traceback" not in err
    assert "No space left on device" in err.splitlines()[-1], err
    assert str(disk) in err.splitlines()[-1], "it says where"
    committed = {file.name: file.read_bytes() for file in out.glob("results/*.parquet")}
    assert committed, "something was committed before the disk was full"
    assert look(out) < 60

    subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
    again = setup.start(source, out)
    _, err = again.communicate(timeout=240)

    assert again.returncode == 0, err
    assert {name: (out / "results" / name).read_bytes() for name in committed} == committed
    assert answers(out) == answers(calm)


@pytest.fixture
def memory() -> Iterator[Callable[[int, int], None]]:
    """Gives a process so many bytes of memory (a control group of its own); the kernel kills it when it wants more."""
    root = Path("/sys/fs/cgroup/memory")
    group = (root if root.is_dir() else root.parent) / f"tokenmill-test-{os.getpid()}"
    names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if root.is_dir() else ("memory.max",)
    try:
        group.mkdir()
        limits = [group / name for name in names if (group / name).exists()]
        (group / "cgroup.procs").exists()
    except OSError as error:
        pytest.skip(f"this machine lets nobody limit memory: {error.strerror}")
    if not limits:
        group.rmdir()
        pytest.skip("this machine lets nobody limit memory")

    def limit(pid: int, size: int) -> None:
        for file in limits:
            file.write_text(str(size))
        (group / "cgroup.procs").write_text(str(pid))

    yield limit
    group.rmdir()


def test_given_a_process_that_the_kernel_kills_for_memory_when_started_again_then_it_goes_on(
    place: Path, model_folder: Path, memory: Callable[[int, int], None]
) -> None:
    """Only pages that it touches from then on count, so it dies while it works."""
    options = ("--threads", "1", "--max-num-seqs", "8")
    environment = (("TOKENMILL_PLAN__MAX_SHARD_ROWS", "6"), ("TOKENMILL_CHECKPOINT_SECONDS", "0.05"))
    setup = Setup(f"tiny={model_folder}", place, 5.0, options, environment)
    source, out, calm = place / "requests.jsonl", place / "out", place / "calm"
    write_requests(source, "tiny", 300, 120)
    assert setup.start(source, calm).wait() == 0

    process = setup.start(source, out)
    while not any(out.glob("results/part-00001.parquet")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    memory(process.pid, 1 << 19)
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, err
    assert 0 < look(out) < 300, "it died in the middle"

    _, err = (again := setup.start(source, out)).communicate(timeout=240)
    assert again.returncode == 0, err
    assert answers(out) == answers(calm)
