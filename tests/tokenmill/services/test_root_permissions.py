"""File permissions in a root, which holds prompts, answers and hashes of keys."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.adapters.folder.store import FolderStore
from schemas.settings.settings import Settings
from tokenmill.root import open_root, warn_if_readable_by_all


@pytest.fixture(params=[0o022, 0o002], ids=["umask 022", "umask 002"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def fill(store: FolderStore) -> None:
    """Each way in which an object comes to be."""
    store.create("files/a", b"x")
    given = store.scratch / "given"
    given.write_bytes(b"x")
    store.create("files/b", given)
    store.replace("cache/c", b"x")


def modes(root: Path) -> dict[str, str]:
    stored = [path for path in sorted(root.rglob("*")) if ".tmp" not in path.parts]
    return {str(path.relative_to(root)): f"{stat.S_IMODE(path.stat().st_mode):04o}" for path in stored}


def opened(root: Path) -> list[str]:
    """The events that opening and filling it logs."""
    with capture_logs() as logs, open_root(str(root), Settings()) as found:
        warn_if_readable_by_all(found)
        assert isinstance(found.world.store, FolderStore)
        fill(found.world.store)
    return [log["event"] for log in logs]


PRIVATE = {"cache": "0700", "cache/c": "0600", "files": "0700", "files/a": "0600", "files/b": "0600"}


@pytest.mark.usefixtures("umask")
def test_a_root_that_is_made_is_its_owners_alone(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    assert opened(root) == []
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert modes(root) == PRIVATE


@pytest.mark.usefixtures("umask")
def test_a_root_that_all_may_read_stays_as_it_is_and_is_warned_about(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o755)
    assert opened(root) == ["root_readable_by_all"]
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    assert modes(root) == PRIVATE


def test_a_root_in_which_a_group_may_write_is_shared_with_it(tmp_path: Path, umask: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o770)
    assert opened(root) == []
    assert modes(root)["files/a"] == f"{0o660 & ~umask:04o}"
    assert modes(root)["files"] == f"{0o770 & ~umask:04o}"


def test_files_of_a_run_have_the_permissions_of_the_umask(tmp_path: Path, umask: int) -> None:
    with FolderStore(tmp_path / "out") as store:
        fill(store)
    assert modes(tmp_path / "out")["files/b"] == f"{0o666 & ~umask:04o}"
