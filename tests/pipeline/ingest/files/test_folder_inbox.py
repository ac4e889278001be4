"""File ingest from a folder: the contract of file ingest, and behaviour that is specific to folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.ingest.dead_letters import DeadLetters
from pipeline.ingest.files.folder_inbox import FolderInbox
from pipeline.ingest.files.source import FileIngestSource, IngestResult
from pipeline.ingest.files.watcher import FileIngestWatcher, WatchSettings
from pipeline.ingest.intake import Intake, IntakeRefused, JobDraft
from pipeline.jobs.submit import SubmittedJob
from pipeline.ports import StoreError, World
from schemas.jobs.inputs import InputFormat
from tests.pipeline.contracts.ingest_contract import LINE, FileIngestContract, InboxHarness, RefusalContract
from tests.pipeline.simulation import SeededRandomness, SimulatedClock

SETTLE = 2.0


class FolderInboxHarness(InboxHarness):
    tenant = "default"

    def __init__(self, root: Path) -> None:
        self.store = FolderStore(root)
        self.clock = SimulatedClock()
        self.world = World(self.store, self.clock, SeededRandomness(), self.store.scratch)
        self.incoming = root / "incoming"

    def put(self, name: str, data: bytes, metadata: Mapping[str, str] | None = None) -> None:
        assert metadata is None, "files have none"
        path = self.incoming / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def source(self, intake: Intake, world: World) -> FileIngestSource:
        return FileIngestSource(FolderInbox(self.store, self.clock, settle=SETTLE), intake, world)

    def notice(self, source: FileIngestSource) -> None:
        source.sweep()
        self.clock.sleep(SETTLE)
        source.sweep()

    def remove(self, name: str) -> None:
        (self.incoming / name).unlink()

    def has_file(self, name: str) -> bool:
        return (self.incoming / name).is_file()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[FolderInboxHarness]:
    harness = FolderInboxHarness(tmp_path / "root")
    yield harness
    harness.store.close()


class TestFolderInboxContract(FileIngestContract, RefusalContract):
    pass


@pytest.fixture
def served(harness: FolderInboxHarness) -> FolderInboxHarness:
    harness.serve()
    return harness


def test_given_a_file_that_grows_when_it_is_watched_then_it_is_taken_when_it_has_been_the_same_for_a_while(
    served: FolderInboxHarness,
) -> None:
    source = served.intake()
    for lines in range(1, 5):
        served.put("a.jsonl", LINE * lines)
        source.sweep()
        served.clock.sleep(SETTLE - 0.5)
        assert source.sweep() == {}
    assert source.take("a.jsonl") is IngestResult.WAITING
    served.clock.sleep(0.6)
    assert source.sweep() == {IngestResult.JOB: 1}
    (job,) = served.jobs()
    assert job.input.size == 4 * len(LINE)


def test_given_a_file_that_changes_while_it_is_hashed_when_it_is_taken_then_it_waits(
    served: FolderInboxHarness,
) -> None:
    source = served.intake()
    served.put("a.jsonl", LINE)
    source.sweep()
    served.clock.sleep(SETTLE)
    list(source.inbox.entries())
    served.put("a.jsonl", LINE * 2)
    assert source.take("a.jsonl") is IngestResult.WAITING
    assert served.jobs() == []


def test_given_the_same_bytes_dropped_again_then_it_is_a_new_job_but_a_copy_with_its_times_is_not(
    served: FolderInboxHarness, tmp_path: Path
) -> None:
    served.put("a.jsonl", LINE)
    (first,) = served.take_all()
    path = served.incoming / "a.jsonl"
    status = path.stat()

    path.unlink()
    served.put("a.jsonl", LINE)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert served.take_all() == [first]

    path.unlink()
    served.put("a.jsonl", LINE)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert len(served.take_all()) == 2

    path.unlink()
    served.put("a.jsonl", LINE.replace(b"hello", b"world"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(served.take_all()) == 3, "other bytes with the same size and time, as archives make them"


def test_given_a_file_that_has_to_wait_when_it_is_looked_at_again_then_it_is_not_hashed_again(
    harness: FolderInboxHarness,
) -> None:
    harness.put("a.jsonl", LINE)
    source = harness.intake()
    harness.notice(source)
    assert source.take("a.jsonl") is IngestResult.WAITING, "no model is served yet"
    drop = source.inbox.find("a.jsonl")
    assert drop is not None
    first, second = (source.inbox.pin(drop, InputFormat.JSONL).input.files[0] for _ in range(2))
    assert first is second


def test_given_a_file_that_cannot_be_taken_now_when_swept_then_the_others_do_not_wait_for_it(
    served: FolderInboxHarness,
) -> None:
    class FailingIntake(Intake):
        def accept(self, draft: JobDraft) -> SubmittedJob:
            if draft.input.uri.endswith("a.jsonl"):
                raise StoreError("the disk is full")
            return super().accept(draft)

    for name in ("a.jsonl", "b.jsonl"):
        served.put(name, LINE)
    source = served.source(FailingIntake(served.world), served.world)
    served.notice(source)
    assert [job.input.uri[-7:] for job in served.jobs()] == ["b.jsonl"]
    assert served.dead_letters() == []
    assert len(served.take_all()) == 2


@pytest.mark.parametrize("seconds", [-5, 0, 1e15])
def test_given_a_file_of_an_impossible_time_when_it_is_taken_then_it_is_a_job(
    served: FolderInboxHarness, seconds: float
) -> None:
    served.put("a.jsonl", LINE)
    try:
        os.utime(served.incoming / "a.jsonl", (seconds, seconds))
    except OverflowError:
        pytest.skip("NOT TESTED HERE: the file system has no such time")
    assert len(served.take_all()) == 1


def test_given_a_link_to_a_file_elsewhere_when_it_is_noticed_then_it_is_refused(
    served: FolderInboxHarness, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(LINE)
    served.put("good.jsonl", LINE)
    (served.incoming / "link.jsonl").symlink_to(secret)
    (served.incoming / "bulk").symlink_to(tmp_path)
    (job,) = served.take_all()
    assert job.input.uri.endswith("good.jsonl")
    assert [code for code, _ in served.dead_letters()] == ["unsupported_file"]


@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "link to JSON", "folder"])
def test_given_a_sidecar_that_is_no_file_when_its_input_is_taken_then_that_is_refused_and_the_others_go_on(
    served: FolderInboxHarness, tmp_path: Path, kind: str
) -> None:
    """Opening a FIFO would wait for ever, and a link may lead to what only this process may read."""
    served.put("good.jsonl", LINE)
    served.put("three.jsonl", LINE)
    sidecar = served.incoming / "three.job.json"
    (tmp_path / "secret.json").write_text('{"aws_secret_key": 1}')
    os.mkfifo(tmp_path / "fifo")
    match kind:
        case "fifo":
            os.mkfifo(sidecar)
        case "link to a fifo":
            sidecar.symlink_to(tmp_path / "fifo")
        case "link to JSON":
            sidecar.symlink_to(tmp_path / "secret.json")
        case _:
            sidecar.mkdir()
    (job,) = served.take_all()
    assert job.input.uri.endswith("good.jsonl")
    (refused,) = DeadLetters(served.world).dead_letters()
    assert refused.dead_letter.reason_code == "unsupported_file"
    what = "a symbolic link" if "link" in kind else "no regular file"
    assert refused.dead_letter.message.startswith(f"{sidecar}: is {what}")
    assert "aws" not in refused.dead_letter.message


def test_given_a_folder_that_becomes_a_link_while_a_file_in_it_is_taken_then_nothing_is_read_through_it(
    served: FolderInboxHarness, tmp_path: Path
) -> None:
    served.put("bulk/a.jsonl", LINE)
    inbox = served.intake().inbox
    list(inbox.entries())
    served.clock.sleep(SETTLE)
    drop = inbox.find("bulk/a.jsonl")
    assert drop is not None
    (served.incoming / "bulk").rename(tmp_path / "elsewhere")
    (served.incoming / "bulk").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntakeRefused, match=r"bulk/a\.jsonl: is a symbolic link, or lies below one"):
        inbox.pin(drop, InputFormat.JSONL)
    with pytest.raises(IntakeRefused, match="is a symbolic link, or lies below one"):
        inbox.read("bulk/a.jsonl", 100)


def test_given_a_file_that_is_renamed_when_it_is_whole_then_only_the_whole_file_is_taken(
    served: FolderInboxHarness,
) -> None:
    served.put(".a.jsonl", LINE)
    assert served.take_all() == []
    (served.incoming / ".a.jsonl").rename(served.incoming / "a.jsonl")
    assert len(served.take_all()) == 1


def test_given_a_watch_when_files_come_then_each_is_taken_once_and_settled_ones_are_not_hashed_again(
    served: FolderInboxHarness,
) -> None:
    watch = FileIngestWatcher([served.intake()], served.world, WatchSettings(sweep_interval_seconds=1.0))
    for number in range(3):
        served.put(f"{number}.jsonl", LINE)
        for _ in range(8):
            watch.step()
    assert len(served.jobs()) == 3
    assert served.clock.seconds == pytest.approx(24.0)


def test_given_so_many_files_that_a_sweep_takes_long_when_watched_then_it_rests_ten_times_as_long(
    served: FolderInboxHarness,
) -> None:
    class SlowSource(FileIngestSource):
        sweeps = 0

        def sweep(self) -> Counter[IngestResult]:
            self.sweeps += 1
            served.clock.sleep(5.0)
            return super().sweep()

    source = SlowSource(FolderInbox(served.store, served.clock), Intake(served.world), served.world)
    watch = FileIngestWatcher([source], served.world, WatchSettings(sweep_interval_seconds=1.0))
    while served.clock.seconds < 10 * 55.0:
        watch.step()
    assert source.sweeps == 10
