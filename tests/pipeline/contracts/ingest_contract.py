"""Contract tests of file ingest sources. A test module subclasses `FileIngestContract` and provides a fixture
`harness`: an `InboxHarness` on an inbox that is empty at first."""

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
from pipeline.ledger.active_index import ACTIVE, clean_up
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.models.catalog import Catalog
from pipeline.ports import PipelineError, World
from schemas.jobs.job import Job, Tier
from schemas.models import CatalogEntry, ModelPin
from tests.pipeline.dying_store import Killed, WatchedStore, dies_at
from tests.pipeline.made_jobs import end_job

MODEL = "tiny"
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "hello"}}\n'


class InboxHarness(ABC):
    """An inbox, with the operations of its users and of its intakes.

    Attributes:
        world: of the root.  tenant: the inbox's tenant.
    """

    world: World
    tenant: str

    @abstractmethod
    def put(self, name: str, data: bytes, metadata: Mapping[str, str] | None = None) -> None:
        """Upload a file; returns when it is complete."""

    @abstractmethod
    def source(self, intake: Intake, world: World) -> FileIngestSource:
        """A new ingest source of the inbox, as in an intake of its own."""

    @abstractmethod
    def notice(self, source: FileIngestSource) -> None:
        """Make the source process all files of the inbox."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete the file, as its user."""

    @abstractmethod
    def has_file(self, name: str) -> bool:
        """Whether the file still exists."""

    def intake(self, settings: IntakeSettings | None = None, world: World | None = None) -> FileIngestSource:
        """A new ingest source with a real `Intake`."""
        chosen = world or self.world
        return self.source(Intake(chosen, settings or IntakeSettings(refresh_interval_seconds=0.0)), chosen)

    def take_all(self, settings: IntakeSettings | None = None) -> list[Job]:
        """Process all files with a new intake; returns the jobs."""
        self.notice(self.intake(settings))
        return self.jobs()

    def jobs(self) -> list[Job]:
        """All jobs, the newest first."""
        return [JobLedger(self.world.store, prefix).job() for prefix in self.world.store.folders(JOBS)]

    def serve(self, name: str = MODEL) -> None:
        """Publish a model in the catalog, as a worker."""
        pin = ModelPin(name=name, source=f"/models/{name}", digest="sha256:1", dtype="float32")
        Catalog(self.world.store).publish(CatalogEntry(pin=pin, max_model_len=512))

    def end(self, job: Job) -> None:
        """End the job."""
        ledger = JobLedger(self.world.store, f"{JOBS}{job.id}/")
        end_job(ledger, self.world.clock.now())
        clean_up(ledger)

    def dead_letters(self) -> list[tuple[str, str]]:
        """Reason code and location of all dead letters."""
        return [
            (found.dead_letter.reason_code, found.dead_letter.place) for found in DeadLetters(self.world).dead_letters()
        ]


class FileIngestContract:
    """Tests of file ingest.

    Attributes:
        every: crashes are tested at each n-th store call.
    """

    every = 1

    @pytest.fixture(autouse=True)
    def _served(self, harness: InboxHarness) -> None:
        harness.serve()

    def test_given_a_new_file_when_it_is_noticed_then_it_is_a_job_and_stays_where_it_is(
        self, harness: InboxHarness
    ) -> None:
        harness.put("bulk/some prompts+1.jsonl", LINE)
        (job,) = harness.take_all()
        assert job.input.files[0].uri.endswith("incoming/bulk/some prompts+1.jsonl")
        assert job.input.size == len(LINE)
        assert (job.tenant, job.tier) == (harness.tenant, Tier.BULK)
        assert harness.world.store.info(ACTIVE + job.id) is not None
        assert harness.has_file("bulk/some prompts+1.jsonl")
        assert len(list(harness.world.store.list(TAKEN))) == 1

    def test_given_a_file_when_it_is_noticed_again_by_others_and_without_its_marker_then_it_is_one_job(
        self, harness: InboxHarness
    ) -> None:
        harness.put("a.jsonl", LINE)
        (job,) = harness.take_all()
        assert harness.take_all() == [job]
        for info in list(harness.world.store.list(TAKEN)):
            harness.world.store.delete(info.key)
        assert harness.take_all() == [job]
        harness.end(job)
        for info in list(harness.world.store.list(TAKEN)):
            harness.world.store.delete(info.key)
        assert harness.take_all() == [job], "the job's records make a repeated event harmless, not the marker"

    def test_given_files_when_two_intakes_notice_them_at_the_same_time_then_each_is_one_job(
        self, harness: InboxHarness
    ) -> None:
        for number in range(6):
            harness.put(f"{number}.jsonl", LINE * (number + 1))
        sources = [harness.intake() for _ in range(2)]
        start, failed = threading.Barrier(len(sources)), list[BaseException]()

        def run(source: FileIngestSource) -> None:
            start.wait()
            try:
                harness.notice(source)
            except BaseException as error:  # noqa: BLE001 - asserted below
                failed.append(error)

        threads = [threading.Thread(target=run, args=(source,)) for source in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert sorted(job.input.size for job in harness.jobs()) == [len(LINE) * (number + 1) for number in range(6)]

    def test_given_a_name_that_is_used_again_when_it_is_noticed_then_it_is_a_new_job(
        self, harness: InboxHarness
    ) -> None:
        harness.put("a.jsonl", LINE)
        (first,) = harness.take_all()
        harness.put("a.jsonl", LINE * 2)
        jobs = harness.take_all()
        assert sorted(job.input.size for job in jobs) == [len(LINE), 2 * len(LINE)]
        assert first in jobs

    def test_given_a_death_at_any_call_when_the_next_intake_comes_then_there_is_one_job(
        self, harness: InboxHarness
    ) -> None:
        for times, nth in enumerate(range(1, 100, self.every), start=1):
            harness.put(f"{nth}.jsonl", LINE * nth)
            watched = WatchedStore(harness.world.store, dies_at(nth))
            with suppress(Killed):
                harness.notice(harness.intake(world=replace(harness.world, store=watched)))
            assert len(harness.take_all()) == times
            harness.remove(f"{nth}.jsonl")
            if len(watched.calls) < nth:
                assert nth > 8
                return
        raise AssertionError("it never ends")

    def test_given_a_sidecar_when_its_file_is_noticed_then_the_job_has_its_options(self, harness: InboxHarness) -> None:
        options = {"model": MODEL, "tier": "bulk", "seed": 7, "limit": 5, "metadata": {"team": "search"}}
        harness.put("a.job.json", orjson.dumps(options))
        harness.put("b.jsonl.job.json", b'{"deadline": "6h"}')
        harness.put("a.jsonl", LINE)
        harness.put("b.jsonl", LINE * 2)
        b, a = sorted(harness.take_all(), key=lambda job: -job.input.size)
        assert (a.tier, a.settings.seed, a.settings.limit, a.metadata) == (Tier.BULK, 7, 5, {"team": "search"})
        assert b.deadline is not None
        assert (b.deadline - b.created_at).total_seconds() == 6 * 3600
        assert harness.dead_letters() == []

    def test_given_a_dead_letter_when_what_was_wrong_is_mended_and_it_is_replayed_then_it_is_a_job(
        self, harness: InboxHarness
    ) -> None:
        harness.put("a.job.json", b'{"model": "late"}')
        harness.put("a.jsonl", LINE)
        assert harness.take_all() == []
        dead_letters = DeadLetters(harness.world)
        (found,) = dead_letters.dead_letters()
        dead_letters.replay(found.dead_letter.id)
        assert harness.take_all() == [], "it was refused again, which is another dead letter"
        assert [one.replays for one in dead_letters.dead_letters()].count(0) == 1
        assert len(harness.dead_letters()) == 2
        harness.serve("late")
        for info in list(harness.world.store.list(TAKEN)):
            harness.world.store.delete(info.key)
        assert harness.take_all() == [], "a lost marker does not replay a dead letter"
        (latest,) = (one.dead_letter for one in dead_letters.dead_letters() if not one.replays)
        dead_letters.replay(latest.id)
        (job,) = harness.take_all()
        assert job.models[0].name == "late"
        assert len(harness.dead_letters()) == 2

    def test_given_a_tenant_with_too_much_queued_when_more_is_dropped_then_it_waits_until_there_is_room(
        self, harness: InboxHarness
    ) -> None:
        settings = IntakeSettings(max_tenant_tokens=1, refresh_interval_seconds=0.0)
        harness.put("a.jsonl", LINE)
        (first,) = harness.take_all(settings)
        harness.put("b.jsonl", LINE * 2)
        assert harness.take_all(settings) == [first]
        assert harness.dead_letters() == []
        harness.end(first)
        assert len(harness.take_all(settings)) == 2

    def test_given_unfinished_names_and_empty_files_when_noticed_then_they_are_passed_over(
        self, harness: InboxHarness
    ) -> None:
        for name in ("a.jsonl.tmp", "b.jsonl.part", "_SUCCESS", "_temporary/0/c.jsonl", "d.jsonl~"):
            harness.put(name, LINE)
        harness.put("empty.jsonl", b"")
        assert harness.take_all() == []
        assert harness.dead_letters() == []
        harness.put("_a.jsonl", LINE)
        assert len(harness.take_all()) == 1, "only as a folder's name it says that there is nothing to read"

    def test_given_no_worker_yet_when_a_file_arrives_then_it_waits_for_one(self, harness: InboxHarness) -> None:
        for info in list(harness.world.store.list("catalog/")):
            harness.world.store.delete(info.key)
        harness.put("a.jsonl", LINE)
        assert harness.take_all() == []
        assert harness.dead_letters() == []
        harness.serve()
        assert len(harness.take_all()) == 1

    def test_given_a_store_that_fails_when_a_file_is_noticed_then_the_next_time_takes_it(
        self, harness: InboxHarness
    ) -> None:
        harness.put("a.jsonl", LINE)
        watched = WatchedStore(harness.world.store, _fails_once())
        source = harness.intake(world=replace(harness.world, store=watched))
        with suppress(PipelineError):
            harness.notice(source)
        harness.notice(source)
        assert len(harness.take_all()) == 1


class RefusalContract:
    """Files that can never be a job, at any file ingest source."""

    @pytest.mark.parametrize(
        ("name", "sidecar", "code"),
        [
            ("a.jsonl", b'{"model": "unknown"}', "model_not_found"),
            ("a.jsonl", b'{"tenant": "other"}', "unknown_option"),
            ("a.jsonl", b'{"seed": "no number"}', "invalid_option"),
            ("a.jsonl", b"[1]", "invalid_option"),
            ("a.jsonl", b"{", "invalid_option"),
            ("bulk/a.jsonl", b'{"tier": "standard"}', "conflicting_options"),
            ("a.tsv", b"{}", "unsupported_format"),
            ("a.jsonl.bz2", b"{}", "unsupported_format"),
            ("2026/a.jsonl", b"{}", "unknown_folder"),
        ],
    )
    def test_given_what_can_never_be_a_job_when_it_is_noticed_then_it_is_one_dead_letter_and_others_go_on(
        self, harness: InboxHarness, name: str, sidecar: bytes, code: str
    ) -> None:
        harness.serve()
        harness.put(f"{name}.job.json", sidecar)
        harness.put(name, LINE)
        harness.put("good.jsonl", LINE)
        for _ in range(3):
            assert len(harness.take_all()) == 1
            ((reason, location),) = harness.dead_letters()
            assert reason == code
            assert location.endswith(f"incoming/{name}")


class _StoreBusy(PipelineError):
    pass


def _fails_once() -> object:
    def before(nth: int) -> None:
        if nth == 4:
            raise _StoreBusy("the store is busy")

    return before
