"""What every door of dropped files must do. A test module subclasses `DropDoorContract` and gives a `drops` fixture: a
`Drops` on a place that is empty at first."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import orjson
import pytest

from pipeline.ingest.dead_letters import DeadLetters
from pipeline.ingest.files.source import TAKEN, FileIngestSource
from pipeline.ingest.intake import Intake, IntakeSettings
from pipeline.ledger.active_index import ACTIVE, tidy
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.models.catalog import Catalog
from pipeline.ports import PipelineError, World
from schemas.jobs.job import Job, Tier
from schemas.models import CatalogEntry, ModelPin
from tests.pipeline.dying_store import Killed, WatchedStore, dies_at
from tests.pipeline.made_jobs import end_job

MODEL = "tiny"
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "hello"}}\n'


class Drops(ABC):
    """A drop place, as its users and its intakes see it.

    Attributes:
        world: of the root.  tenant: whose place it is.
    """

    world: World
    tenant: str

    @abstractmethod
    def put(self, name: str, data: bytes, metadata: Mapping[str, str] | None = None) -> None:
        """Drop a file; returns when it is whole."""

    @abstractmethod
    def door(self, intake: Intake, world: World) -> FileIngestSource:
        """A door, as an intake of its own has it."""

    @abstractmethod
    def notice(self, door: FileIngestSource) -> None:
        """Let the door come to know all that lies there, and do what it does."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """The user takes the file away."""

    @abstractmethod
    def lies_there(self, name: str) -> bool:
        """Whether the file is still there."""

    def intake(self, settings: IntakeSettings | None = None, world: World | None = None) -> FileIngestSource:
        """A door with the real intake behind it."""
        chosen = world or self.world
        return self.door(Intake(chosen, settings or IntakeSettings(look_every=0.0)), chosen)

    def take_all(self, settings: IntakeSettings | None = None) -> list[Job]:
        """A new intake comes, takes what it finds, and goes; the jobs that stand then."""
        self.notice(self.intake(settings))
        return self.jobs()

    def jobs(self) -> list[Job]:
        """All jobs that stand, the newest first."""
        return [JobLedger(self.world.store, prefix).job() for prefix in self.world.store.folders(JOBS)]

    def serve(self, name: str = MODEL) -> None:
        """A worker came and says what it serves."""
        pin = ModelPin(name=name, source=f"/models/{name}", digest="sha256:1", dtype="float32")
        Catalog(self.world.store).publish(CatalogEntry(pin=pin, max_model_len=512))

    def end(self, job: Job) -> None:
        """The job ends."""
        ledger = JobLedger(self.world.store, f"{JOBS}{job.id}/")
        end_job(ledger, self.world.clock.now())
        tidy(ledger)

    def letters(self) -> list[tuple[str, str]]:
        """Reason and place of all dead letters."""
        return [(found.letter.reason_code, found.letter.place) for found in DeadLetters(self.world).letters()]


class DropDoorContract:
    """Given a place for dropped files, then this holds.

    Attributes:
        every: of the moments at which a door may die, how many are tried.
    """

    every = 1

    @pytest.fixture(autouse=True)
    def _served(self, drops: Drops) -> None:
        drops.serve()

    def test_given_a_dropped_file_when_it_is_noticed_then_it_is_a_job_and_stays_where_it_is(self, drops: Drops) -> None:
        drops.put("bulk/some prompts+1.jsonl", LINE)
        (job,) = drops.take_all()
        assert job.input.files[0].uri.endswith("incoming/bulk/some prompts+1.jsonl")
        assert job.input.size == len(LINE)
        assert (job.tenant, job.tier) == (drops.tenant, Tier.BULK)
        assert drops.world.store.info(ACTIVE + job.id) is not None
        assert drops.lies_there("bulk/some prompts+1.jsonl")
        assert len(list(drops.world.store.list(TAKEN))) == 1

    def test_given_a_file_when_it_is_noticed_again_by_others_and_without_its_marker_then_it_is_one_job(
        self, drops: Drops
    ) -> None:
        drops.put("a.jsonl", LINE)
        (job,) = drops.take_all()
        assert drops.take_all() == [job]
        for info in list(drops.world.store.list(TAKEN)):
            drops.world.store.delete(info.key)
        assert drops.take_all() == [job]
        drops.end(job)
        for info in list(drops.world.store.list(TAKEN)):
            drops.world.store.delete(info.key)
        assert drops.take_all() == [job], "the job's papers make a repeated event harmless, not the marker"

    def test_given_files_when_two_intakes_notice_them_at_the_same_time_then_each_is_one_job(self, drops: Drops) -> None:
        for number in range(6):
            drops.put(f"{number}.jsonl", LINE * (number + 1))
        doors = [drops.intake() for _ in range(2)]
        start, failed = threading.Barrier(len(doors)), list[BaseException]()

        def run(door: FileIngestSource) -> None:
            start.wait()
            try:
                drops.notice(door)
            except BaseException as error:  # noqa: BLE001 - told below
                failed.append(error)

        threads = [threading.Thread(target=run, args=(door,)) for door in doors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert sorted(job.input.size for job in drops.jobs()) == [len(LINE) * (number + 1) for number in range(6)]

    def test_given_a_name_that_is_used_again_when_it_is_noticed_then_it_is_a_new_job(self, drops: Drops) -> None:
        drops.put("a.jsonl", LINE)
        (first,) = drops.take_all()
        drops.put("a.jsonl", LINE * 2)
        jobs = drops.take_all()
        assert sorted(job.input.size for job in jobs) == [len(LINE), 2 * len(LINE)]
        assert first in jobs

    def test_given_a_death_at_any_call_when_the_next_intake_comes_then_there_is_one_job(self, drops: Drops) -> None:
        for times, nth in enumerate(range(1, 100, self.every), start=1):
            drops.put(f"{nth}.jsonl", LINE * nth)
            watched = WatchedStore(drops.world.store, dies_at(nth))
            with suppress(Killed):
                drops.notice(drops.intake(world=replace(drops.world, store=watched)))
            assert len(drops.take_all()) == times
            drops.remove(f"{nth}.jsonl")
            if len(watched.calls) < nth:
                assert nth > 8
                return
        raise AssertionError("it never ends")

    def test_given_a_sidecar_when_its_file_is_noticed_then_the_job_has_its_options(self, drops: Drops) -> None:
        options = {"model": MODEL, "tier": "bulk", "seed": 7, "limit": 5, "metadata": {"team": "search"}}
        drops.put("a.job.json", orjson.dumps(options))
        drops.put("b.jsonl.job.json", b'{"deadline": "6h"}')
        drops.put("a.jsonl", LINE)
        drops.put("b.jsonl", LINE * 2)
        b, a = sorted(drops.take_all(), key=lambda job: -job.input.size)
        assert (a.tier, a.settings.seed, a.settings.limit, a.metadata) == (Tier.BULK, 7, 5, {"team": "search"})
        assert b.deadline is not None
        assert (b.deadline - b.created_at).total_seconds() == 6 * 3600
        assert drops.letters() == []

    def test_given_a_dead_letter_when_what_was_wrong_is_mended_and_it_is_replayed_then_it_is_a_job(
        self, drops: Drops
    ) -> None:
        drops.put("a.job.json", b'{"model": "late"}')
        drops.put("a.jsonl", LINE)
        assert drops.take_all() == []
        letters = DeadLetters(drops.world)
        (found,) = letters.letters()
        letters.replay(found.letter.id)
        assert drops.take_all() == [], "it was refused again, which is another letter"
        assert [one.replays for one in letters.letters()].count(0) == 1
        assert len(drops.letters()) == 2
        drops.serve("late")
        for info in list(drops.world.store.list(TAKEN)):
            drops.world.store.delete(info.key)
        assert drops.take_all() == [], "nobody asked for another try; a lost marker is no reason"
        (latest,) = (one.letter for one in letters.letters() if not one.replays)
        letters.replay(latest.id)
        (job,) = drops.take_all()
        assert job.models[0].name == "late"
        assert len(drops.letters()) == 2

    def test_given_a_tenant_with_too_much_queued_when_more_is_dropped_then_it_waits_until_there_is_room(
        self, drops: Drops
    ) -> None:
        settings = IntakeSettings(tenant_tokens=1, look_every=0.0)
        drops.put("a.jsonl", LINE)
        (first,) = drops.take_all(settings)
        drops.put("b.jsonl", LINE * 2)
        assert drops.take_all(settings) == [first]
        assert drops.letters() == []
        drops.end(first)
        assert len(drops.take_all(settings)) == 2

    def test_given_unfinished_names_and_empty_files_when_noticed_then_they_are_passed_over(self, drops: Drops) -> None:
        for name in ("a.jsonl.tmp", "b.jsonl.part", "_SUCCESS", "_temporary/0/c.jsonl", "d.jsonl~"):
            drops.put(name, LINE)
        drops.put("empty.jsonl", b"")
        assert drops.take_all() == []
        assert drops.letters() == []
        drops.put("_a.jsonl", LINE)
        assert len(drops.take_all()) == 1, "only as a folder's name it says that there is nothing to read"

    def test_given_no_worker_yet_when_a_file_is_dropped_then_it_waits_for_one(self, drops: Drops) -> None:
        for info in list(drops.world.store.list("catalog/")):
            drops.world.store.delete(info.key)
        drops.put("a.jsonl", LINE)
        assert drops.take_all() == []
        assert drops.letters() == []
        drops.serve()
        assert len(drops.take_all()) == 1

    def test_given_a_store_that_fails_when_a_file_is_noticed_then_the_next_time_takes_it(self, drops: Drops) -> None:
        drops.put("a.jsonl", LINE)
        watched = WatchedStore(drops.world.store, _fails_once())
        door = drops.intake(world=replace(drops.world, store=watched))
        with suppress(PipelineError):
            drops.notice(door)
        drops.notice(door)
        assert len(drops.take_all()) == 1


class RefusalContract:
    """What can never be a job, at any door of dropped files."""

    @pytest.mark.parametrize(
        ("name", "sidecar", "code"),
        [
            ("a.jsonl", b'{"model": "unknown"}', "model_not_found"),
            ("a.jsonl", b'{"tenant": "other"}', "unknown_option"),
            ("a.jsonl", b'{"seed": "no number"}', "invalid_option"),
            ("a.jsonl", b"[1]", "invalid_option"),
            ("a.jsonl", b"{", "invalid_option"),
            ("bulk/a.jsonl", b'{"tier": "standard"}', "conflicting_options"),
            ("a.csv", b"{}", "unsupported_format"),
            ("a.jsonl.gz", b"{}", "unsupported_format"),
            ("2026/a.jsonl", b"{}", "unknown_folder"),
        ],
    )
    def test_given_what_can_never_be_a_job_when_it_is_noticed_then_it_is_one_dead_letter_and_others_go_on(
        self, drops: Drops, name: str, sidecar: bytes, code: str
    ) -> None:
        drops.serve()
        drops.put(f"{name}.job.json", sidecar)
        drops.put(name, LINE)
        drops.put("good.jsonl", LINE)
        for _ in range(3):
            assert len(drops.take_all()) == 1
            ((reason, place),) = drops.letters()
            assert reason == code
            assert place.endswith(f"incoming/{name}")


class _Failing(PipelineError):
    pass


def _fails_once() -> object:
    def before(nth: int) -> None:
        if nth == 4:
            raise _Failing("the store is busy")

    return before
