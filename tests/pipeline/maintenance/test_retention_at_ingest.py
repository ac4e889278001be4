"""Retention of what ingest stores: tickets of tasks, and dead letters."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest

from pipeline.ingest.celery.tasks import CeleryTasks, TaskRefused
from pipeline.ingest.dead_letters import DeadLetterNotFound, DeadLetters, DeadLetterSource
from pipeline.ingest.intake import Intake
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.maintenance.retention import RemovedKind, RetentionSettings, RetentionSweep
from pipeline.ports import World
from schemas.jobs.inputs import InputRef
from schemas.models import CatalogEntry
from tests.pipeline.dying_store import Killed, WatchedStore, dies_at
from tests.pipeline.made_jobs import PIN, end_job

DAY = 86_400.0
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}


def pin_nothing(uri: str) -> InputRef:
    raise AssertionError(uri)


def test_given_old_tickets_when_collected_then_unneeded_ones_are_removed(world: World) -> None:
    world.store.create("catalog/x.json", CatalogEntry(pin=PIN, max_model_len=9).to_json())
    tasks = CeleryTasks(world, Intake(world), pin_nothing)
    ended, opened = (tasks.submit("team", task, [[LINE]], {}) for task in ("ended", "open"))
    with pytest.raises(TaskRefused, match="model_not_found"):
        tasks.submit("team", "refused", [[LINE]], {"model": "gpt-x"})
    end_job(JobLedger(world.store, f"{JOBS}{ended}/"), world.clock.now())
    world.clock.sleep(29 * DAY)
    assert tasks.submit("team", "new", [[LINE]], {}) not in (ended, opened)
    assert RetentionSweep(world).run().objects == {}

    world.clock.sleep(1 * DAY)
    would = RetentionSweep(world, dry_run=True).run().objects
    assert would == {RemovedKind.TICKET: 2, RemovedKind.BATCH: 1}, "of what was refused the lines, too"
    for nth in range(1, 60):
        with suppress(Killed):
            RetentionSweep(replace(world, store=WatchedStore(world.store, dies_at(nth)))).run()
    assert RetentionSweep(world).run().objects == {}
    left = [info.key.rpartition("-")[2] for info in world.store.list("intake/celery/")]
    assert (len(left), left.count("task.json")) == (5, 2), "the ended job's lines, and all of the others"
    assert tasks.submit("team", "open", [[LINE]], {}) == opened
    for job in (ended, opened):
        (file,) = JobLedger(world.store, f"{JOBS}{job}/").job().input.files
        assert world.store.info(file.uri.removeprefix("memory:")) is not None


def test_given_old_dead_letters_when_collected_then_they_go_if_a_setting_says_so(world: World) -> None:
    dead_letters = DeadLetters(world)
    future = world.clock.now() + timedelta(days=365)  # by the source's own clock
    for position in ("a", "b"):
        dead_letter = dead_letters.record(
            DeadLetterSource("kafka", "c/t", position, future), "bad", "no good", b"original"
        )
        dead_letters.replay(dead_letter, lambda *_: "sent again")
        world.clock.sleep(10 * DAY)
    assert RetentionSweep(world).run().objects == {}
    settings = RetentionSettings(dead_letters=timedelta(days=20))
    assert RetentionSweep(world, settings, dry_run=True).run().objects == {RemovedKind.LETTER: 3}
    assert RetentionSweep(world, settings).run().objects == {RemovedKind.LETTER: 3}
    assert [found.dead_letter.position for found in dead_letters.dead_letters()] == ["b"]

    world.clock.sleep(10 * DAY)
    for nth in range(1, 30):
        with suppress(Killed):
            RetentionSweep(replace(world, store=WatchedStore(world.store, dies_at(nth))), settings).run()
        for found in dead_letters.dead_letters():  # while it goes it says so
            with suppress(DeadLetterNotFound):
                assert dead_letters.original(found.dead_letter) == b"original"
    assert list(world.store.list("deadletters/")) == []
