"""Former results that are damaged or hostile: the message names the file, and says what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.jobs.manifest import build_manifest
from pipeline.ledger.ledger import JobLedger, part_key
from pipeline.ledger.records import PartSummary
from pipeline.ports import World
from pipeline.results.former_answers import ADVICE
from pipeline.results.part_files import PartWriter, read_part, shard_results
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.arrow_schemas import result_schema
from schemas.jobs.results import results_table
from tests.pipeline.made_jobs import answers, plan_by_hand, shard_table
from tokenmill.config.former import FormerUnusable, open_former

ROWS = 6
PART = part_key(1)


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A run that has ended; row 4 failed."""
    folder = tmp_path / "former"
    with FolderStore(folder) as store:
        ledger, clock = JobLedger(store), SystemClock()
        world = World(store, clock, SystemRandomness(), store.scratch)
        job = plan_by_hand(ledger, world, [range(ROWS)], rejected=[ROWS])
        shard, now = shard_table(range(ROWS)), clock.now()
        writer = PartWriter(store.scratch / "part", result_schema())
        writer.append(shard_results(results_table(answers(ShardWork(job, 1, 1, "a", shard, now))), shard))
        counts = writer.counts()
        writer.finish(
            PartSummary(job=job.id, part=1, attempt_id="a", worker="w", counts=counts, started_at=now, committed_at=now)
        )
        ledger.create_part(1, writer.path)
        parts = {number: read_part(ledger, number) for number, _ in ledger.parts()}
        ledger.create_manifest(build_manifest(ledger, job, list(ledger.segments()), parts, now, None))
    return folder


def key(row: int) -> bytes:
    """The key of a row of `shard_table`."""
    return row.to_bytes(16, "big")


def test_given_a_former_run_when_opened_then_it_has_the_answers_of_rows_that_succeeded(
    former: Path, tmp_path: Path
) -> None:
    with open_former(former, tmp_path, 100) as found:
        rows = found.find([key(row) for row in (5, 4, 0, 6)], [True] * 4)
        assert [index >= 0 for index in rows.tolist()] == [True, False, True, False]
        assert found.take(rows[[0, 2]])["text"].to_pylist() == ["answer 5", "answer 0"]
    assert not list(tmp_path.glob("former-*")), "the scratch files are removed"


def test_given_a_run_that_has_not_ended_when_opened_then_it_has_the_committed_answers(
    former: Path, tmp_path: Path
) -> None:
    (former / "manifest.json").unlink()
    with open_former(former, tmp_path, 100) as found:
        assert len(found) == ROWS - 1


def no_job(former: Path) -> None:
    (former / "job.json").unlink()


def no_folder(former: Path) -> None:
    former.rename(former.with_name("moved"))


def cut(former: Path) -> None:
    os.truncate(former / PART, 900)


def cut_while_running(former: Path) -> None:
    (former / "manifest.json").unlink()
    cut(former)


def flipped(former: Path) -> None:
    data = bytearray((former / PART).read_bytes())
    data[100] ^= 1
    (former / PART).write_bytes(data)


def linked(former: Path) -> None:
    (former / PART).rename(former / "moved")
    (former / PART).symlink_to(former / "moved")


def linked_results(former: Path) -> None:
    (former / "results").rename(former / "moved")
    (former / "results").symlink_to(former / "moved")


def pipe(former: Path) -> None:
    (former / PART).unlink()
    os.mkfifo(former / PART)


def other_record(former: Path) -> None:
    (former / "manifest.json").write_text("[]")


def linked_record(former: Path) -> None:
    (former / "job.json").rename(former / "moved")
    (former / "job.json").symlink_to(former / "moved")


def large_record(former: Path) -> None:
    os.truncate(former / "manifest.json", 1 << 30)


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (no_job, "", "there is no job here (job.json is missing)"),
        (no_folder, "", "no such folder"),
        (cut, "results/", "results/part-00001.parquet has 900 bytes instead of"),
        (cut_while_running, PART, "is not a whole Parquet file"),
        (flipped, "results/", "results/part-00001.parquet has other contents than were committed"),
        (linked, PART, "is a symbolic link"),
        (linked_results, "results", "is a symbolic link, or lies below one"),
        (pipe, "results/", "results/part-00001.parquet is missing"),
        (other_record, "manifest.json", "it was damaged or written by another version"),
        (linked_record, "job.json", "is a symbolic link"),
        (large_record, "manifest.json", "is larger than 67108864 bytes"),
    ],
)
def test_given_a_damaged_former_run_when_opened_then_the_error_names_the_file_and_the_fix(
    damage: Callable[[Path], None], name: str, message: str, former: Path, tmp_path: Path
) -> None:
    damage(former)
    with pytest.raises(FormerUnusable) as raised, open_former(former, tmp_path, 100):
        raise AssertionError("it was opened")
    assert str(raised.value).startswith(str(former / name))
    assert message in str(raised.value)
    assert str(raised.value).endswith(f"; {ADVICE}")


def test_given_a_file_that_is_no_regular_one_when_opened_then_it_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.parquet"
    os.mkfifo(fifo)
    for path, message in ((fifo, "is no regular file"), (tmp_path / "no.parquet", "No such file")):
        with pytest.raises(FormerUnusable, match=message), open_former(path, tmp_path, 100):
            raise AssertionError("it was opened")
