"""Events become jobs, once, whatever changes in between; what can't become one is refused with a reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.ingest.intake import Intake, IntakeRefused, IntakeSettings, JobDraft
from pipeline.jobs.submit import derived_job_id, new_job_id
from pipeline.ledger.active_index import open_jobs
from pipeline.ledger.ledger import JobLedger
from pipeline.models.catalog import CATALOG, Catalog
from pipeline.ports import ObjectInfo, World
from schemas.jobs.job import Tier
from schemas.jobs.job_options import JobOptions
from schemas.jobs.outcome import Counts, JobStatus
from schemas.jobs.progress import Progress
from schemas.models import CatalogEntry
from tests.pipeline.made_jobs import PIN, order
from tests.pipeline.simulation import START, MemoryStore, SeededRandomness, simulated_world

OTHER = PIN.model_copy(update={"name": "org/other", "digest": "sha256:2"})


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = simulated_world(tmp_path)
    for pin in (PIN, OTHER):
        Catalog(world.store).publish(CatalogEntry(pin=pin, max_model_len=2_048))
    return world


def draft(job_id: str = "job-a", tenant: str = "default", **options: Any) -> JobDraft:
    return JobDraft(order().input, JobOptions(**options), tenant, job_id)


def test_the_same_event_is_one_job_though_settings_and_catalog_have_changed(world: World) -> None:
    first = Intake(world).accept(draft(tier="bulk", deadline="6h", output_expires_after="30d"))
    Catalog(world.store).publish(CatalogEntry(pin=PIN.model_copy(update={"digest": "sha256:3"}), max_model_len=10))
    world.clock.sleep(100)
    again = Intake(world, IntakeSettings(default_tier=Tier.BULK, default_model="tiny")).accept(draft(tier="standard"))
    assert (first.created, again.created) == (True, False)
    assert again.job == first.job
    assert (first.job.tier, first.job.deadline) == (Tier.BULK, START + timedelta(hours=6))
    assert first.job.output_expires_after == timedelta(days=30)
    assert [ledger.name for ledger in open_jobs(world.store)] == ["job-a"]


def test_concurrent_intakes_make_one_job(tmp_path: Path, world: World) -> None:
    made, start = [], threading.Barrier(8)

    def accept() -> None:
        start.wait()
        made.append(Intake(world).accept(draft()))

    threads = [threading.Thread(target=accept) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(submitted.created for submitted in made) == 1
    assert len({submitted.job.id for submitted in made}) == 1


def test_a_job_whose_intake_died_before_it_was_marked_is_marked_by_the_next_event(world: World) -> None:
    Intake(world).accept(draft())
    world.store.delete("active/job-a")
    assert list(open_jobs(world.store)) == []
    Intake(world).accept(draft())
    assert [ledger.name for ledger in open_jobs(world.store)] == ["job-a"]


def test_a_job_runs_on_the_model_named_or_on_any_in_the_catalog(world: World) -> None:
    intake = Intake(world)
    assert intake.accept(draft("job-1", model="org/other")).job.models == (OTHER,)
    assert intake.accept(draft("job-2")).job.models == (OTHER, PIN)
    assert Intake(world, IntakeSettings(default_model="tiny")).accept(draft("job-3")).job.models == (PIN,)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"model": "gone"}, "model_not_found", "'gone' is not served here .org/other, tiny."),
        ({"max_output_tokens": 101}, "cap_exceeded", "is 101, but the standard tier's cap is 100"),
    ],
)
def test_what_can_never_be_a_job_is_refused(world: World, options: dict[str, Any], code: str, message: str) -> None:
    intake = Intake(world, IntakeSettings(caps={Tier.STANDARD: 100}))
    with pytest.raises(IntakeRefused, match=message) as refused:
        intake.accept(draft(**options))
    assert refused.value.code == code
    assert list(open_jobs(world.store)) == []


@pytest.mark.parametrize("options", [{}, {"model": "tiny"}])
def test_before_the_first_worker_a_job_has_to_wait(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(IntakeRefused, match="none yet: start a worker") as refused:
        Intake(simulated_world(tmp_path)).accept(draft(**options))
    assert refused.value.code == "no_model"


def test_a_tenant_with_too_much_open_has_no_room_until_it_is_done(world: World) -> None:
    intake = Intake(world, IntakeSettings(max_tenant_tokens=1_000, refresh_interval_seconds=5.0))
    assert intake.room_for("a")
    big = replace(draft(tenant="a"), input=order().input.model_copy(update={"files": _sized(4_000)}))
    intake.accept(big)
    assert not intake.room_for("a"), "what was just accepted counts at once"
    assert intake.room_for("b")
    ledger = JobLedger(world.store, "jobs/job-a/")
    ledger.cache_progress(
        Progress(job="job-a", status=JobStatus.IN_PROGRESS, counts=Counts(), tokens_left=999, as_of=world.clock.now())
    )
    assert not intake.room_for("a")
    world.clock.sleep(5.0)
    assert intake.room_for("a")
    other = Intake(world, IntakeSettings(max_tenant_tokens=999))
    assert not other.room_for("a"), "another process sees the same"


def _sized(size: int) -> Any:
    return (order().input.files[0].model_copy(update={"size": size}),)


def test_derived_ids_sort_by_time_like_new_ones_and_differ_between_events() -> None:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    later = at + timedelta(milliseconds=1)
    ids = {derived_job_id(at, *names) for names in (("a", "b"), ("ab",), ("a", "", "b"), ("b", "a"))}
    assert len(ids) == 4
    assert derived_job_id(at, "a", "b") == "job-uc8fike00b6p73bgrniot67a1iac1ft5hduq3jqqf", "in every process"
    assert all(derived_job_id(later, "x") < name for name in ids), "the newest first"
    assert new_job_id(later, SeededRandomness())[:13] < min(ids)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"deadline": "6 hours"}, "deadline"),
        ({"deadline": 3600}, "an amount such as 6h"),
        ({"deadline": "2026-05-01T00:00"}, "timezone"),
        ({"tier": "interactive"}, "standard or bulk"),
        ({"tier": "gold"}, "tier"),
        ({"quick": True}, "quick"),
        ({"deadline": "99999d"}, "3650 days"),
        ({"metadata": {"k": "x" * 513}}, "512"),
    ],
)
def test_invalid_options_are_refused_with_a_message(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobOptions(**wrong)


def test_a_model_that_is_published_while_it_is_looked_for_is_found(tmp_path: Path) -> None:
    """Its first worker may publish it between the read of the name and the read of all names."""
    world = simulated_world(tmp_path)

    class LatePublishingStore(MemoryStore):
        def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
            if prefix == CATALOG:
                Catalog(late).publish(CatalogEntry(pin=PIN, max_model_len=2_048))
            return super().list(prefix, after)

    late = LatePublishingStore()
    submitted = Intake(replace(world, store=late)).accept(draft(model=PIN.name))
    assert submitted.job.models == (PIN,)


def test_given_a_version_by_its_digest_when_a_job_names_it_then_it_is_pinned_to_that_one(world: World) -> None:
    catalog = Catalog(world.store)
    old = CatalogEntry(pin=PIN.model_copy(update={"digest": "sha256:" + "0" * 64}), max_model_len=9)
    new = CatalogEntry(pin=PIN.model_copy(update={"digest": "sha256:" + "1" * 64}), max_model_len=9)
    for entry in (old, new):
        catalog.publish_version(entry)
    catalog.publish(new)
    version = f"{PIN.name}@{old.pin.digest}"

    (by_digest,) = Intake(world).accept(draft("job-old", model=version)).job.models
    (by_name,) = Intake(world).accept(draft("job-new", model=PIN.name)).job.models

    assert (by_digest.name, by_digest.key) == (version, old.pin.key)
    assert (by_name.name, by_name.key) == (PIN.name, new.pin.key)
    with pytest.raises(IntakeRefused, match="is not served here"):
        Intake(world).accept(draft("job-none", model=f"{PIN.name}@sha256:{'2' * 64}"))
