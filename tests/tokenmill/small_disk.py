"""A file system of its own for a test, whose size can change while processes use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SIZE = 400 << 20
"""Planning wants 256 MiB of free space."""


@contextmanager
def small_disk(mounted: Path) -> Iterator[Path]:
    """Mount one at a new folder; the test is skipped where that is not possible."""
    mounted.mkdir()
    untested = "NOT TESTED HERE: a disk that fills up; "
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip(f"{untested}only root on Linux can mount a small disk")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(mounted)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"{untested}no disk can be mounted: {done.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
