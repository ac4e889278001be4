"""Only regular files are opened, and below a folder none through a link."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.inputs.regular_files import IrregularFile, open_regular, open_regular_below

Open = Callable[[Path], Any]


@pytest.fixture(params=["by its path", "below a folder"])
def open_file(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return open_regular if request.param == "by its path" else lambda path: open_regular_below(tmp_path, path)


@pytest.fixture(params=["folder", "fifo", "socket"])
def irregular(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "it"
    with socket.socket(socket.AF_UNIX) as server:
        if request.param == "folder":
            path.mkdir()
        elif request.param == "fifo":
            os.mkfifo(path)
        else:
            server.bind(str(path))
        yield path


def test_a_regular_file_is_opened(open_file: Open, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/file").write_bytes(b"text")
    with open_file(tmp_path / "inner/file") as file:
        assert file.read() == b"text"


def test_nothing_else_is(open_file: Open, irregular: Path) -> None:
    with pytest.raises(IrregularFile, match="is no regular file, but a folder, a FIFO, a socket or a device"):
        open_file(irregular)


def test_a_missing_file_is_an_error_of_the_system(open_file: Open, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "nothing")


@pytest.mark.parametrize("at", ["link", "folder/file"])
def test_below_a_folder_no_part_of_the_path_is_a_link(at: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_bytes(b"secret")
    below = tmp_path / "below"
    below.mkdir()
    (below / "link").symlink_to(tmp_path / "there/file")
    (below / "folder").symlink_to(tmp_path / "there")
    with pytest.raises(IrregularFile, match="is a symbolic link, or lies below one"):
        open_regular_below(below, below / at)
    with open_regular(below / at) as file:
        assert file.read() == b"secret"
