"""Whether the owner of a held lock can still be running, by its lock file and the kernel."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.adapters.folder.locks import PF_EXITING, RunLock, has_ended
from pipeline.ports import OutputLocked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED HERE: Linux's files about processes")

SOON = 0.1


def dead_pid() -> int:
    """The id of a process that has ended, and was waited for."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def refusal(folder: Path, owner: str) -> str:
    """The error of a run when the lock is held and its file names `owner`."""
    with RunLock(folder) as held:
        held.path.write_text(f"{owner}\n")
        with pytest.raises(OutputLocked) as caught, RunLock(folder, retry_timeout_seconds=SOON):
            pytest.fail("both got in")
    return str(caught.value)


def test_given_a_lock_then_its_file_says_where_the_owners_id_means_something(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        words = held.path.read_text().split()
    assert words == [str(os.getpid()), socket.gethostname(), os.readlink("/proc/self/ns/pid")]


@pytest.mark.slow
def test_given_the_id_of_no_process_then_the_run_was_killed_if_it_is_of_the_same_host_and_pid_namespace(
    tmp_path: Path,
) -> None:
    pid, host, here = dead_pid(), socket.gethostname(), os.readlink("/proc/self/ns/pid")
    assert f"a run that was killed (pid {pid} on {host}) has left" in refusal(tmp_path, f"{pid} {host} {here}")
    for elsewhere in (f"{host} pid:[1]", f"{host}", f"another-{host} {here}"):
        assert f"another run (pid {pid} on " in refusal(tmp_path, f"{pid} {elsewhere}")
    for unreadable in ("", "unknown", f"{pid} {host} {here} more"):
        assert "another run is running there" in refusal(tmp_path, unreadable)


def test_given_a_zombie_then_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path = Path(f"/proc/{child.pid}/stat")
    try:
        assert not has_ended(path.read_bytes())
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(path.read_bytes())
    finally:
        child.kill()
        child.wait()


def test_given_a_process_that_the_kernel_takes_down_then_it_has_ended_whatever_its_name() -> None:
    stat = Path("/proc/self/stat").read_bytes()
    found = re.fullmatch(rb"(\d+) \((.*)\) (\S+(?: \S+){5}) (\d+) (.*)\n", stat, re.DOTALL)
    assert found is not None
    pid, _, before, flags, after = found.groups()
    for name in (b"python", b"a) Z 1 (b", b") X", b"\xff 4 4 4 4 4 4 4"):
        for more, ended in ((0, False), (PF_EXITING, True)):
            text = b"%s (%s) %s %d %s\n" % (pid, name, before, int(flags) | more, after)
            assert has_ended(text) is ended, text
    assert not has_ended(b"")
