"""The folder as an object store: the contract, and what only a folder can do wrong."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.locks import RunLock
from pipeline.adapters.folder.store import FolderStore
from pipeline.ports import OutputLocked, StoreError
from tests.pipeline.contracts.store_contract import MakeStore, SharedStoreContract, create_for_ever


class TestFolderStoreContract(SharedStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        return functools.partial(FolderStore, tmp_path / "store")


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_nothing_but_objects_is_left_when_the_store_is_closed(tmp_path: Path) -> None:
    with FolderStore(tmp_path / "out") as store:
        store.create("results/part-00000", b"1")
        store.create("results/part-00000", b"2")
        assert [path.name for path in (tmp_path / "out" / "results").iterdir()] == ["part-00000"]
    assert files_below(tmp_path) == ["out/results/part-00000"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results"]


def test_given_a_killed_writer_when_the_store_is_opened_again_then_its_temporaries_are_swept(tmp_path: Path) -> None:
    root = tmp_path / "store"
    living = FolderStore(root)
    (living.scratch / "mine").write_bytes(b"still building")
    writer = multiprocessing.get_context("fork").Process(
        target=create_for_ever, args=(functools.partial(FolderStore, root), "k")
    )
    writer.start()
    while living.info("k/000001") is None:
        time.sleep(0.002)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    dead = [path for path in (root / ".tmp").iterdir() if path.name.startswith(f"{writer.pid}-")]
    assert dead
    with FolderStore(root):
        assert not any(path.exists() for path in dead)
        assert (living.scratch / "mine").read_bytes() == b"still building"


def test_stores_on_one_folder_come_and_go_without_harm(tmp_path: Path) -> None:
    def come_and_go(me: int) -> None:
        for turn in range(15):
            with FolderStore(tmp_path / "store") as store:
                assert store.create(f"{me}/{turn}", b"1") is True

    with ThreadPoolExecutor(4) as pool:
        for outcome in [pool.submit(come_and_go, me) for me in range(4)]:
            outcome.result()
    assert [path.name for path in (tmp_path / "store").iterdir() if path.name.startswith(".")] == []


def test_a_file_on_another_file_system_is_copied(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("NOT TESTED HERE: a file from another file system; there is no second one")
    source = elsewhere / f"tokenmill-test-{os.getpid()}"
    source.write_bytes(b"far away")
    store = FolderStore(tmp_path)
    assert store.create("key", source) is True
    assert store.read("key") == b"far away"
    assert not source.exists()


def test_objects_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        FolderStore(tmp_path).create("key", b"1")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o644


def test_foreign_things_in_the_folder_are_not_objects(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / ".DS_Store").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    store.create("a/b", b"1")
    assert [found.key for found in store.list("")] == ["a/b"]


def test_a_folder_at_an_objects_path_is_an_error_not_a_lost_race(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / "key").mkdir()
    with pytest.raises(StoreError, match="isn't an object"):
        store.create("key", b"1")


def test_a_store_for_reading_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        FolderStore(tmp_path / "missing", read_only=True)
    store = FolderStore(tmp_path, read_only=True)
    with pytest.raises(StoreError, match="reading only"):
        store.create("key", b"1")
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="a file is in the way"):
        FolderStore(tmp_path / "file" / "out")
    with pytest.raises(StoreError, match="file"):
        FolderStore(tmp_path / "file")


def open_without_permission(folder: Path, answer: Any) -> None:
    if os.geteuid() == 0:  # permissions don't bind root
        os.setgid(65534)
        os.setuid(65534)
    try:
        FolderStore(folder)
    except StoreError as error:
        answer.put(str(error))
    else:
        answer.put("it was let in")


@pytest.mark.parametrize("below", ["", "new/deep"])
def test_an_unwritable_folder_is_refused_with_a_reason(below: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "locked"
        folder.mkdir(mode=0o555)
        Path(parent).chmod(0o755)
        context = multiprocessing.get_context("fork")
        answer = context.SimpleQueue()
        process = context.Process(target=open_without_permission, args=(folder / below, answer))
        process.start()
        message = answer.get()
        process.join()
    assert "Permission denied; choose a folder that you can write to" in message
    assert str(folder) in message


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"NOT TESTED HERE: a full disk, a read-only one; no disk can be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_given_a_full_disk_when_an_object_is_created_then_it_fails_whole(tiny_disk: Path) -> None:
    store = FolderStore(tiny_disk)
    store.create("small", b"kept")
    with pytest.raises(StoreError, match=r"big.*No space left.*free some space"):
        store.create("big", b"x" * (2 << 20))
    assert store.info("big") is None
    assert store.read("small") == b"kept"
    # The torn temporary is gone too, so the space is free again.
    assert store.create("next", b"x" * (1 << 19)) is True
    store.close()


def test_given_a_read_only_disk_then_the_store_says_so(tiny_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(StoreError, match="Read-only file system; choose a folder on a writable disk"):
        FolderStore(tiny_disk)


HOLD_LOCK = """
import sys
from pathlib import Path
from pipeline.adapters.folder.locks import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_second_run_is_refused_while_the_first_lives_and_let_in_when_it_was_killed(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(OutputLocked, match=rf"another run \(pid {first.pid} on .*\) is running there"),
            RunLock(tmp_path),
        ):
            pytest.fail("both got in")
    finally:
        first.kill()
        first.wait()
    with RunLock(tmp_path), pytest.raises(OutputLocked, match=f"pid {os.getpid()} "), RunLock(tmp_path):
        pytest.fail("both got in")
    with RunLock(tmp_path):
        pass
