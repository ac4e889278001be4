"""Jobs of a root with the answer store: which rows are computed, after damage, retention, and for other tenants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.answers.index import MERGED_AT_ONCE, AnswerIndex
from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.gateway.inference.response_cache import ResponseCache
from pipeline.inputs.open import open_pinned
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_open_job
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger
from pipeline.maintenance.retention import RetentionSettings, RetentionSweep
from pipeline.models.catalog import Catalog
from pipeline.models.stored_answers import open_answers
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import JobSettings
from schemas.jobs.outcome import JobStatus, Manifest
from schemas.models import CatalogEntry
from schemas.requests.limits import PlanSettings
from schemas.settings.answers import AnswerOptions
from tests.pipeline.made_jobs import MODELS, PIN, all_rows, computed, order, report
from tests.pipeline.simulation import MemoryStore, SimulatedClock, simulated_world

FAILED = 5
"""Each fifth row of a shard fails."""


def line(number: int, **changes: Any) -> str:
    body = {"model": "tiny", "prompt": f"prompt {number}", "max_tokens": 8, "temperature": 0, **changes}
    return json.dumps({"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body})


class Installation:
    """A root in memory, with a worker that answers at once.

    Attributes:
        policies: the content policies of the worker, which the catalog names.
        response: of each row that succeeds; None: as `computed` makes it.
    """

    def __init__(self, scratch: Path, options: AnswerOptions) -> None:
        self.world = simulated_world(scratch)
        self.options = options
        self.policies: str | None = None
        self.response: dict[str, Any] | None = None

    @property
    def objects(self) -> dict[str, bytes]:
        assert isinstance(self.world.store, MemoryStore)
        return self.world.store.objects

    def run(self, name: str, lines: Sequence[str], tenant: str = "a", cache: bool | None = None) -> Manifest:
        """The outcome of a job of these lines. Its planner and dispatcher are new ones, as after a restart."""
        world, ledger = self.world, self.ledger(name)
        Catalog(world.store).publish(CatalogEntry(pin=PIN, max_model_len=512, policies=self.policies))
        source = world.scratch / f"{name}.jsonl"
        source.write_text("\n".join(lines))
        settings = JobSettings(plan=PlanSettings(max_shard_rows=50, segment_rows=80))
        made = order(input=pin_input(source), settings=settings, tenant=tenant, cache=cache)
        job = submit(made, ledger, world, job_id=name).job
        self.index = AnswerIndex(world.store, world.clock, self.options)
        opened = partial(open_answers, self.index, world.scratch)
        plan_open_job(ledger, world, open_pinned, in_time=True, open_answers=opened)
        queue, beats = MemoryQueue(), MemoryHeartbeats(world.clock, 60.0)
        dispatcher = Dispatcher(world, queue, beats, answers=AnswerIndex(world.store, world.clock, self.options))
        dispatcher.add(ledger)
        client = ShardClient("w", world, lambda _: ledger, queue, beats, lambda: False, models=MODELS)
        while ledger.manifest() is None:
            dispatcher.tick()
            while (work := client.take(0)) is not None:
                facts = {} if self.policies is None else {"content_policies": f"rules ({self.policies})"}
                finished = computed(work, mark=f" of {job.id}")
                if self.response is not None:
                    text = json.dumps(self.response)
                    rows = [replace(row, response=row.response and text) for row in finished.rows]
                    finished = FinishedRows(rows, finished.usages)
                client.commit(work, finished, replace(report(work), engine=facts))
            self.pass_time(seconds=1)
        manifest = ledger.manifest()
        assert manifest is not None
        assert manifest.status is JobStatus.COMPLETED
        assert manifest.counts.total == len(lines)
        return manifest

    def pass_time(self, **amount: float) -> None:
        assert isinstance(self.world.clock, SimulatedClock)
        self.world.clock.sleep(timedelta(**amount).total_seconds())

    def ledger(self, name: str) -> JobLedger:
        return JobLedger(self.world.store, f"jobs/{name}/")


@pytest.fixture
def root(tmp_path: Path) -> Installation:
    return Installation(tmp_path, AnswerOptions(always=True))


def reused(manifest: Manifest) -> int:
    return manifest.reused


@pytest.mark.slow
def test_given_an_ended_job_when_its_rows_come_again_then_only_new_and_failed_ones_are_computed(
    root: Installation,
) -> None:
    lines = [line(number) for number in range(100)]
    assert reused(root.run("first", lines)) == 0
    again = root.run("second", [*lines[::-1], *(line(number) for number in range(100, 120))])
    succeeded = 100 - 100 // FAILED
    assert reused(again) == succeeded
    assert again.usage.completion == 7 * (120 - succeeded), "the others cost nothing"
    rows = {row["custom_id"]: row for row in all_rows(root.ledger("second"))}
    former = {row["custom_id"]: row for row in all_rows(root.ledger("first"))}
    for number in range(100):
        row, was = rows[str(number)], former[str(number)]
        if was["status"] == "succeeded":
            assert (row["text"], row["reused_from"]) == (was["text"], "first")
            assert row["completion_tokens"] == 0
    assert root.index.counts.snapshot()["hit"] == succeeded

    # A third job finds those of the first under its name, and those that the second computed.
    third = root.run("third", [line(number) for number in range(120)])
    origins = {row["reused_from"] for row in all_rows(root.ledger("third"))}
    assert {"first", "second"} <= origins
    assert reused(third) > succeeded


def test_given_another_tenant_policy_or_wish_when_planned_then_it_finds_nothing(root: Installation) -> None:
    lines = [line(number) for number in range(10)]
    root.run("first", lines)
    assert reused(root.run("other-tenant", lines, tenant="b")) == 0
    assert reused(root.run("unwilling", lines, cache=False)) == 0
    root.policies = "f00d"
    assert reused(root.run("judged", lines)) == 0
    assert reused(root.run("judged-again", lines)) == 8
    root.options = AnswerOptions()
    root.policies = None
    assert reused(root.run("default", lines)) == 0
    assert reused(root.run("willing", lines, cache=True)) == 8
    sampled = [line(number, temperature=1.0) for number in range(10)]
    root.run("sampled", sampled, cache=True)
    assert reused(root.run("sampled-again", sampled, cache=True)) == 0, "each draw is another"


def test_given_an_ended_job_when_a_row_is_requested_over_http_then_it_is_found(root: Installation) -> None:
    root.response = {"model": "tiny", "choices": [{"finish_reason": "stop", "text": "hi"}], "usage": {}}
    root.run("first", [line(number) for number in range(10)])
    cache = ResponseCache(AnswerIndex(root.world.store, root.world.clock, root.options), root.world.clock)
    for row in all_rows(root.ledger("first")):
        key = bytes.fromhex(row["request_key"])
        found = cache.find("a", None, key)
        assert found == (
            {**root.response, "usage": {"tokenmill_cached": True}} if row["status"] == "succeeded" else None
        )
        assert cache.find("b", None, key) is None


def test_given_retention_when_it_has_passed_then_answers_are_computed_and_gc_removes_them(root: Installation) -> None:
    lines = [line(number) for number in range(10)]
    root.run("first", lines)
    root.pass_time(days=6)
    assert reused(root.run("second", lines)) == 8
    sweep = RetentionSweep(root.world, RetentionSettings(answers=root.options))
    assert sweep.run().objects["answers"] == 0
    root.pass_time(days=2)
    assert reused(root.run("third", lines)) == 0, "what was reused has its first age"
    assert sweep.run().objects["answers"] == 1
    assert [name for name in root.objects if name.startswith("answers/") and "-8-" in name]


def test_given_too_many_answers_when_collected_then_the_oldest_go(root: Installation) -> None:
    for name in ("one", "two", "three"):
        root.run(name, [line(number, stop=name) for number in range(5)])
    few = AnswerOptions(max_tenant_answers=8)
    RetentionSweep(root.world, RetentionSettings(answers=few)).run()
    kept = [
        name for name in ("one", "two", "three")
        if reused(root.run(f"{name}-again", [line(number, stop=name) for number in range(5)]))
    ]  # fmt: skip
    assert kept == ["two", "three"]


@pytest.mark.parametrize("damage", [b"", b"PAR1 torn", None], ids=["empty", "torn", "removed"])
@pytest.mark.parametrize("where", ["answers/", "jobs/first/results/part-00001"])
def test_given_a_damaged_object_when_planned_then_its_rows_are_computed(
    root: Installation, where: str, damage: bytes | None
) -> None:
    lines = [line(number) for number in range(10)]
    root.run("first", lines)
    (name,) = [name for name in root.objects if name.startswith(where)]
    if damage is None:
        del root.objects[name]
    else:
        root.objects[name] = damage
    with capture_logs() as logs:
        assert reused(root.run("second", lines)) == 0
    told = [log["event"] for log in logs if log["log_level"] == "warning"]
    assert told == ([] if damage is None else ["stored_answers_damaged"])
    assert root.index.counts.snapshot().get("damaged", 0) == len(told)
    assert reused(root.run("third", lines)) == 8, "of the second"


def test_given_a_flipped_bit_in_a_part_when_planned_then_no_row_gets_it(root: Installation) -> None:
    lines = [line(number) for number in range(10)]
    root.run("first", lines)
    data = bytearray(root.objects["jobs/first/results/part-00001.parquet"])
    data[len(data) // 2] ^= 1
    root.objects["jobs/first/results/part-00001.parquet"] = bytes(data)
    assert reused(root.run("second", lines)) == 0


@pytest.mark.slow
def test_given_many_small_segments_when_merged_then_all_answers_are_found_in_one(root: Installation) -> None:
    lines = [line(number) for number in range(MERGED_AT_ONCE)]
    for number, text in enumerate(lines):
        root.run(f"job-{number}", [text])
        root.pass_time(hours=6)
    root.run("other", [line(1_000)])
    assert len([name for name in root.objects if name.startswith("answers/")]) <= 2
    assert reused(root.run("all", lines)) == MERGED_AT_ONCE
    root.pass_time(days=5)
    assert reused(root.run("later", lines)) == MERGED_AT_ONCE // 2 - 1, "each answer has its own age"


def test_given_a_store_that_cant_be_written_when_a_job_ends_then_it_ends(
    root: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(AnswerIndex, "write", refuse)
    with capture_logs() as logs:
        root.run("first", [line(0)])
    assert "answers_not_stored" in [log["event"] for log in logs]
