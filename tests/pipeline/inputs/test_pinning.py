"""An input is hashed once, and again only if its stamp in the file system changed."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from pipeline.inputs.pinning import WatchedInput, pin_again, pin_input
from pipeline.jobs.submit import DifferentJob, submit
from pipeline.ledger.ledger import JobLedger
from pipeline.planner import InputError
from pipeline.ports import World
from schemas.jobs.inputs import InputFile, InputRef
from tests.pipeline.made_jobs import order


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"one\n")
    return path


def marked(pinned: InputRef) -> InputRef:
    """The same with a hash that no file has: where it comes back, nothing was hashed."""
    files = tuple(file.model_copy(update={"sha256": "f" * 64}) for file in pinned.files)
    return pinned.model_copy(update={"files": files})


def hash_of(pinned: InputRef) -> str | None:
    (file,) = pinned.files
    return file.sha256


def test_an_unchanged_file_is_not_hashed_again(source: Path) -> None:
    known = marked(pin_input(source))
    assert pin_input(source, known) == known


def test_a_touched_file_is_hashed_again_and_is_the_same_input(source: Path, world: World) -> None:
    first = pin_input(source)
    os.utime(source)
    assert hash_of(pin_input(source, marked(first))) == hash_of(first)
    job = submit(order(input=first), JobLedger(world.store), world).job
    again = submit(order(input=pin_input(source, job.input)), JobLedger(world.store), world)
    assert (again.job.id, again.created) == (job.id, False)


@pytest.mark.parametrize("times", ["new", "restored"])
def test_a_file_changed_in_place_to_the_same_size_is_noticed_even_when_its_time_is_set_back(
    source: Path, world: World, times: str
) -> None:
    first = pin_input(source)
    job = submit(order(input=first), JobLedger(world.store), world).job
    before = source.stat()
    source.write_bytes(b"two\n")
    if times == "restored":
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = pin_input(source, job.input)
    assert hash_of(changed) != hash_of(first)
    with pytest.raises(DifferentJob, match=r"input.sha256 was .*, now .*; choose another output or pass --fresh"):
        submit(order(input=changed), JobLedger(world.store), world)


def test_a_file_replaced_by_another_is_hashed_again(source: Path) -> None:
    known = marked(pin_input(source))
    other = source.with_name("other")
    shutil.copy2(source, other)
    other.replace(source)
    assert hash_of(pin_input(source, known)) == hash_of(pin_input(source))


def test_of_a_folder_only_what_changed_is_hashed(tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_bytes(b"1\n")
    known = marked(pin_input(folder))
    (folder / "b.jsonl").write_bytes(b"22\n")
    pinned = pin_input(folder, known)
    assert pinned.files[0] == known.files[0]
    assert pinned.files[1].sha256 not in (None, "f" * 64)


def test_a_hash_without_a_stamp_is_not_relied_on(source: Path) -> None:
    pinned = pin_input(source)
    bare = tuple(InputFile(uri=file.uri, size=file.size, sha256="f" * 64) for file in pinned.files)
    assert pin_input(source, pinned.model_copy(update={"files": bare})) == pinned


def test_a_file_that_is_still_being_written_is_refused(source: Path) -> None:
    """Given bytes that are written while the file is hashed, then pinning fails: no hash could match later reads."""
    grown = source.with_name("grows.jsonl")
    grown.write_bytes(b"x" * (64 << 20))
    stop = threading.Event()

    def write() -> None:
        with grown.open("ab") as out:
            while not stop.is_set():
                out.write(b"y")
                out.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(InputError, match="changes while it is read"):
            pin_input(grown)
    finally:
        stop.set()
        writer.join()


def test_what_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    """Also when it replaces a pinned file."""
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"a\.jsonl: is no regular file"):
        pin_input(path)
    path.unlink()
    path.write_bytes(b"{}\n")
    pinned = pin_input(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"a\.jsonl: is no regular file"):
        WatchedInput(pinned).files()[0].open()
    with pytest.raises(InputError, match=r"a\.jsonl: is no regular file"):
        pin_again(pinned)
