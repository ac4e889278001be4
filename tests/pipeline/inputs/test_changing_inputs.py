"""An input that changes while its job is planned is never mixed in: planning stops with an error, and committed
segments stay."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.inputs.pinning import WatchedInput, pin_again, pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger
from pipeline.planner import InputError, InvalidInput
from pipeline.ports import World
from schemas.jobs.job import Job, JobSettings, OnInvalid
from schemas.requests.limits import PlanSettings
from tests.pipeline.made_jobs import MODEL, order
from tests.pipeline.simulation import MemoryStore, simulated_world

ROWS = 12
WIDTH = 200_000
"""Bytes of a prompt: so many that the file is not read at once."""


class WatchedStore(MemoryStore):
    """A store that calls `then` before it creates an object whose key holds `at`."""

    def __init__(self, at: str, then: Callable[[], object]) -> None:
        super().__init__()
        self._at, self._then = at, then

    def create(self, key: str, data: bytes | Path) -> bool:
        if self._at in key:
            self._then()
        return super().create(key, data)


def lines(word: str, broken: int | None = None) -> str:
    made = []
    for row in range(ROWS):
        body = {"model": MODEL, "prompt": f"{word} {row}".ljust(WIDTH), "max_tokens": 8}
        line = {"custom_id": f"id-{row}", "method": "POST", "url": "/v1/completions", "body": body}
        made.append("{" + " " * (len(json.dumps(line)) - 1) if row == broken else json.dumps(line))
    return "\n".join(made) + "\n"


def rewrite(source: Path, text: str) -> None:
    """Overwrite in place, at the same size and with the old modification time, as careless tools do."""
    before = source.stat()
    time.sleep(0.02)  # a later tick of the file system's clock
    source.write_text(text)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source.stat().st_size == before.st_size


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(lines("old"))
    return path


def accept(world: World, source: Path, on_invalid: OnInvalid = OnInvalid.ROW) -> tuple[JobLedger, Job]:
    settings = JobSettings(plan=PlanSettings(segment_rows=4, first_segment_rows=4), on_invalid=on_invalid)
    ledger = JobLedger(world.store)
    return ledger, submit(order(input=pin_input(source), settings=settings), ledger, world).job


def prompts(ledger: JobLedger) -> list[str]:
    """The prompts of all planned rows, in input order."""
    rows = [
        row
        for segment in ledger.segments()
        for shard in segment.shards
        for row in pq.read_table(pa.BufferReader(ledger.read_shard(shard))).to_pylist()
    ]
    return [json.loads(row["body"])["prompt"].strip() for row in sorted(rows, key=lambda row: row["row"])]


def world_with(tmp_path: Path, store: MemoryStore) -> World:
    world = simulated_world(tmp_path)
    return World(store, world.clock, world.random, tmp_path)


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_given_an_input_rewritten_in_place_while_it_is_planned_then_the_open_segment_is_not_committed(
    tmp_path: Path, source: Path, segment: int
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    shard = f"shards/{segment + 1:05d}.parquet"
    world = world_with(scratch, WatchedStore(shard, lambda: rewrite(source, lines("new"))))
    ledger, job = accept(world, source)

    with pytest.raises(
        InputError, match=rf"{source}: was written or replaced after it was hashed, and holds other bytes"
    ):
        plan_job(ledger, job, world)

    assert prompts(ledger) == [f"old {row}" for row in range(4 * segment)]
    with pytest.raises(InputError, match="after it was hashed"):
        plan_job(ledger, job, world)
    with pytest.raises(InputError, match="is not what the job was accepted with; put the old file back"):
        pin_again(job.input)

    # Given the old bytes again, when the plan goes on, then what was committed is its beginning.
    stood = list(ledger.segments())
    source.write_text(lines("old"))
    assert isinstance(world.store, MemoryStore)
    again = world_with(scratch, MemoryStore(world.store.objects))
    plan_job(JobLedger(again.store), job.model_copy(update={"input": pin_again(job.input)}), again)
    whole = JobLedger(again.store)
    assert list(whole.segments())[: len(stood)] == stood
    assert prompts(whole) == [f"old {row}" for row in range(ROWS)]


def test_given_invalid_lines_that_came_into_a_strict_jobs_input_meanwhile_then_the_job_has_not_failed_for_them(
    tmp_path: Path, source: Path
) -> None:
    """The lines are another file's; the job's own may all be good."""
    world = simulated_world(tmp_path)
    ledger, job = accept(world, source, OnInvalid.JOB)

    def count_tokens(text: str) -> int:
        """Called for the first lines, before the last ones are read."""
        rewrite(source, lines("old", broken=10))
        return len(text)

    with pytest.raises(InputError, match="after it was hashed"):
        plan_job(ledger, job, world, count_tokens)
    assert ledger.manifest() is None

    # The same lines in an input that was accepted with them do end the job.
    world = simulated_world(tmp_path)
    ledger, job = accept(world, source, OnInvalid.JOB)
    with pytest.raises(InvalidInput, match="the first is line 11"):
        plan_job(ledger, job, world)
    assert ledger.manifest() is not None


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def linked(path: Path) -> None:
    os.link(path, path.with_name("link"))


def made_private(path: Path) -> None:
    path.chmod(0o600)


def replaced_by_a_copy(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


HARMLESS = [touched, linked, made_private, replaced_by_a_copy]


@pytest.mark.parametrize("change", HARMLESS)
def test_given_an_input_whose_bytes_stay_while_it_is_planned_then_the_plan_goes_on(
    tmp_path: Path, source: Path, change: Callable[[Path], None]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    changed: list[os.stat_result] = []

    def change_it() -> None:
        time.sleep(0.02)  # a later tick of the file system's clock
        change(source)
        changed.append(source.stat())

    world = world_with(scratch, WatchedStore("shards/00002.parquet", change_it))
    ledger, job = accept(world, source)

    assert plan_job(ledger, job, world) is not None

    (stamp,) = [file.stamp for file in job.input.files]
    assert stamp is not None
    assert len(changed) == 1
    now = changed[0]
    assert (stamp.mtime, stamp.ctime, stamp.inode) != (now.st_mtime_ns, now.st_ctime_ns, now.st_ino)
    assert prompts(ledger) == [f"old {row}" for row in range(ROWS)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("change", HARMLESS)
def test_given_a_file_whose_stamp_alone_changed_then_it_is_hashed_once_more_and_not_again(
    tmp_path: Path, change: Callable[[Path], None], suffix: str
) -> None:
    path = tmp_path / f"in{suffix}"
    path.write_bytes(b"one\n")
    pinned = pin_input(path)
    opened, checked = WatchedInput(pinned), WatchedInput(pinned)
    time.sleep(0.02)  # a later tick of the file system's clock
    change(path)

    with opened.files()[0].open() as stream:
        assert stream.read() == b"one\n", "from the beginning"
    checked.check()

    assert opened.pinned == checked.pinned == pin_input(path).files
    assert opened.pinned[0].stamp != pinned.files[0].stamp
    # A hash that no file has: where nothing is said, nothing was hashed.
    marked = [file.model_copy(update={"sha256": "f" * 64}) for file in opened.pinned]
    WatchedInput(pinned.model_copy(update={"files": tuple(marked)})).check()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("change", ["rewritten", "replaced", "longer", "gone"])
@pytest.mark.slow
def test_given_a_file_that_changed_after_it_was_pinned_when_it_is_opened_then_it_is_refused(
    tmp_path: Path, change: str, suffix: str
) -> None:
    path = tmp_path / f"in{suffix}"
    path.write_bytes(b"one\n")
    watched = WatchedInput(pin_input(path))
    (file,) = watched.files()
    watched.check()
    file.open().close()
    if change == "rewritten":
        rewrite(path, "two\n")
    elif change == "replaced":
        other = tmp_path / "other"
        other.write_bytes(b"two\n")
        other.replace(path)
    elif change == "longer":
        path.write_bytes(b"one\ntwo\n")
    else:
        path.unlink()
    for look in (file.open, watched.check, file.open, watched.check):
        with pytest.raises(InputError, match=rf"^{path}: .*(run again|--fresh)$") as caught:
            look()
        assert "\n" not in str(caught.value)


def test_given_files_that_were_only_touched_or_copied_when_pinned_again_then_they_are_the_same_input(
    tmp_path: Path,
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(f"{name}\n")
    pinned = pin_input(tmp_path)
    (tmp_path / "c.jsonl").write_text("a file that came later is not the job's\n")
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    again = pin_again(pinned)
    WatchedInput(again).check()
    assert [file.sha256 for file in again.files] == [file.sha256 for file in pinned.files]
    assert (again.files[1], again.files[0].stamp != pinned.files[0].stamp) == (pinned.files[1], True)
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(InputError, match=r"b.jsonl: can't read the input: No such file or directory; put it back"):
        pin_again(pinned)
