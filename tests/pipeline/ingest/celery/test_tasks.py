"""Celery ingest tasks without Celery: a task becomes a job exactly once, or is refused with one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ingest.celery.tasks import INTAKE, CeleryTasks, TaskRefused, TaskSettings, TryLater
from pipeline.ingest.intake import Intake, IntakeSettings
from pipeline.inputs.pinning import pin_input
from pipeline.ledger.ledger import JobLedger
from pipeline.maintenance.retention import RetentionSettings, RetentionSweep
from pipeline.models.catalog import Catalog
from pipeline.ports import StoreError, World
from pipeline.runtime.availability import BadAddress
from schemas.jobs.inputs import InputRef
from schemas.jobs.job import Job, Tier
from schemas.jobs.outcome import Counts, JobStatus
from schemas.models import CatalogEntry
from tests.pipeline.made_jobs import PIN, end_job
from tests.pipeline.simulation import MemoryStore, simulated_world

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "é"}}


def pin(uri: str) -> InputRef:
    return pin_input(Path(uri))


class CeleryTasksHarness:
    """A root with one model, a folder that tenant "acme" may name, and the tasks."""

    def __init__(self, folder: Path, world: World, intake: IntakeSettings | None = None) -> None:
        self.folder, self.world = folder, world
        settings = TaskSettings({"acme": [f"file://{folder}/in/"]}, max_requests=5, max_bytes=1_000)
        self.tasks = CeleryTasks(world, Intake(world, intake), pin, settings)
        (folder / "in").mkdir(exist_ok=True)
        self.source = folder / "in/rows.jsonl"
        self.source.write_text(json.dumps(LINE) + "\n")

    def publish(self) -> None:
        Catalog(self.world.store).publish(CatalogEntry(pin=PIN, max_model_len=2_048))

    def submit(self, *args: Any, task: str = "task-1", tenant: str = "acme", **options: Any) -> str:
        return self.tasks.submit(tenant, task, args, options)

    def jobs(self) -> list[str]:
        return [prefix.split("/")[1] for prefix in self.world.store.folders("jobs/")]

    def job(self, name: str) -> Job:
        return JobLedger(self.world.store, f"jobs/{name}/").job()


@pytest.fixture
def harness(tmp_path: Path) -> CeleryTasksHarness:
    harness = CeleryTasksHarness(tmp_path, simulated_world(tmp_path))
    harness.publish()
    return harness


def test_a_file_becomes_a_job_of_the_queues_tenant(harness: CeleryTasksHarness) -> None:
    job_id = harness.submit(f"file://{harness.source}", model="tiny", tier="bulk", deadline="6h", metadata={"k": "v"})
    job = harness.job(job_id)
    assert (job.tenant, job.tier, job.metadata) == ("acme", Tier.BULK, {"k": "v"})
    assert job.deadline == job.created_at + timedelta(hours=6)
    assert job.input.files[0].uri == str(harness.source)
    assert job.models == (PIN,)


def test_requests_given_inline_are_durable_before_the_job_is(harness: CeleryTasksHarness) -> None:
    job_id = harness.submit([LINE, {"custom_id": "b"}])
    store = harness.world.store
    assert isinstance(store, MemoryStore)
    keys = [key for key in store.log if key.startswith((INTAKE, "jobs/"))]
    assert [key.rpartition("-")[2] for key in keys[:1]] == ["task.json"]
    assert keys[1].endswith(".jsonl")
    assert keys[2] == f"jobs/{job_id}/job.json"
    file = harness.job(job_id).input.files[0]
    lines = store.read(keys[1])
    assert [json.loads(line) for line in lines.splitlines()] == [LINE, {"custom_id": "b"}]
    assert (file.uri, file.size) == (store.locate(keys[1]), len(lines))


def test_a_task_that_comes_again_is_the_same_job_whatever_has_changed(harness: CeleryTasksHarness) -> None:
    first = harness.submit(str(harness.source))
    harness.world.clock.sleep(3_600)
    harness.source.write_text("something else entirely\n")
    Catalog(harness.world.store).publish(
        CatalogEntry(pin=PIN.model_copy(update={"digest": "sha256:9"}), max_model_len=10)
    )
    again = CeleryTasksHarness.submit(harness, str(harness.source))
    harness.source.unlink()
    assert [first, again, harness.submit(str(harness.source))] == [first] * 3
    assert harness.jobs() == [first]


def test_a_task_that_died_anywhere_on_the_way_is_finished_by_its_next_delivery(tmp_path: Path) -> None:
    class DyingStore(MemoryStore):
        left = 0

        def create(self, key: str, data: bytes | Path) -> bool:
            if self.left == 0:
                raise StoreError("the store went away")
            self.left -= 1
            return super().create(key, data)

    ids = set[str]()
    for left in range(1, 8):
        store = DyingStore()
        simulated = simulated_world(tmp_path)
        harness = CeleryTasksHarness(tmp_path, World(store, simulated.clock, simulated.random, tmp_path))
        store.left = -1
        harness.publish()
        store.left = left
        with suppress(TryLater):
            harness.submit([LINE])
        store.left = -1
        harness.world.clock.sleep(5)
        job_id = harness.submit([LINE])
        assert harness.jobs() == [job_id]
        assert len([key for key in store.log if key.startswith(INTAKE)]) == 2
        ids.add(job_id)
    assert len(ids) == 1  # named by the moment of the first delivery, which is the same in all these worlds


def test_deliveries_at_once_are_one_job_even_while_the_file_changes(tmp_path: Path) -> None:
    with FolderStore(tmp_path / "root") as store:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        harnesses = [CeleryTasksHarness(tmp_path, world) for _ in range(6)]
        harnesses[0].publish()
        for round_ in range(8):
            start, made = threading.Barrier(len(harnesses)), list[str]()

            def deliver(index: int, round_: int = round_, start: Any = start, made: Any = made) -> None:
                start.wait()
                if index == 0:
                    harnesses[0].source.write_text(json.dumps(LINE) * (round_ + 2))
                source = [LINE] if round_ % 2 else str(harnesses[0].source)
                with suppress(TaskRefused):  # the file changed under the first who read it
                    made.append(harnesses[index].submit(source, task=f"task-{round_}"))

            threads = [threading.Thread(target=deliver, args=(index,)) for index in range(len(harnesses))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(made) > 0
            assert len(set(made)) == 1
        assert len(harnesses[0].jobs()) == 8


@pytest.mark.parametrize("left", ["changed", "gone"])
def test_a_delivery_that_reads_the_file_when_another_has_made_the_job_finds_it(
    harness: CeleryTasksHarness, left: str
) -> None:
    made = list[str]()

    def pin_late(uri: str) -> InputRef:
        made.append(harness.submit(str(harness.source)))
        if left == "gone":
            harness.source.unlink()
        else:
            harness.source.write_text("changed\n")
        return pin(uri)

    settings = TaskSettings({"acme": [f"file://{harness.folder}/in/"]})
    late = CeleryTasks(harness.world, Intake(harness.world), pin_late, settings)
    assert late.submit("acme", "task-1", [str(harness.source)], {}) == made[0]
    assert harness.jobs() == made


def test_tasks_of_one_moment_are_jobs_of_their_own(harness: CeleryTasksHarness) -> None:
    first, second = harness.submit([LINE], task="task-1"), harness.submit([LINE], task="task-2")
    assert first != second
    assert sorted(harness.jobs()) == sorted([first, second])


def test_an_id_used_for_another_task_is_refused_and_another_tenants_ids_are_its_own(
    harness: CeleryTasksHarness,
) -> None:
    first = harness.submit([LINE])
    for args, options in (([LINE, LINE],), {}), (([LINE],), {"tier": "bulk"}), ((str(harness.source),), {}):
        with pytest.raises(TaskRefused, match="task_id_used: task 'task-1' came before with other arguments"):
            harness.submit(*args, **options)
    other = harness.submit([LINE], tenant="other")
    assert other != first
    assert sorted(harness.jobs()) == sorted([first, other])
    for tenant, job_id, found in ("acme", first, True), ("acme", other, False), ("other", first, False):
        if found:
            assert harness.tasks.status(tenant, [job_id], {})["id"] == job_id
        else:
            for act in (harness.tasks.status, harness.tasks.cancel):
                with pytest.raises(TaskRefused, match=f"job_not_found: there is no job '{job_id}'"):
                    act(tenant, [job_id], {})
    assert JobLedger(harness.world.store, f"jobs/{other}/").closing() is None


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((), {}, "invalid_request: tokenmill.submit takes one uri_or_requests, not 0"),
        (([LINE], "tiny"), {}, "takes one uri_or_requests, not 2; options go by their names"),
        (([LINE],), {"uri_or_requests": [LINE]}, "takes one uri_or_requests, not 2"),
        ((5,), {}, "invalid_request: uri_or_requests is of type int; give a URI, or a list"),
        ((None,), {}, "uri_or_requests is null"),
        ((LINE,), {}, "uri_or_requests is of type dict"),
        (([],), {}, "the list of requests is empty"),
        (([LINE, "x"],), {}, r"invalid_request: requests\[1\] is of type str; give an object"),
        (([{"body": float("nan")}],), {}, r"requests\[0\] is no JSON: .*; send plain JSON"),
        (([{"at": timedelta(1)}],), {}, r"requests\[0\] is no JSON: .*timedelta"),
        (([{"text": "\ud800"}],), {}, r"requests\[0\] holds half a character"),
        (([LINE],), {"colour": "red"}, r"invalid_options: colour: .*\(options are model, tier, deadline"),
        (([LINE],), {"tier": "interactive"}, "invalid_options: tier: .*interactive requests are not jobs"),
        (([LINE],), {"deadline": 6}, "invalid_options: deadline: "),
        (([LINE],), {"tenant": "other"}, "invalid_options: tenant"),
        (([LINE],), {"model": "none-such"}, "model_not_found: model 'none-such' is not served here"),
        (([LINE],), {"max_output_tokens": 10**9}, "cap_exceeded: "),
        (([LINE] * 6,), {}, "too_large: 6 requests, but a task brings 5 at most; put them into a file"),
        (([LINE, {"x": "y" * 1_000}],), {}, r"too_large: the requests up to requests\[1\] have 11\d\d bytes"),
        (("rows.jsonl",), {}, "bad_uri: uri 'rows.jsonl' must begin with s3:// or file://"),
        (("/etc/passwd",), {}, "forbidden_uri: uri 'file:///etc/passwd' is not below"),
        (("IN/../x.jsonl",), {}, "bad_uri: .*must be file:/// and an absolute path without"),
        (("s3://bucket/x.jsonl",), {}, "forbidden_uri"),
        (("https://host/x.jsonl?signature=1",), {}, "bad_uri"),
        (("IN/none.jsonl",), {}, "input_error: .*none.jsonl: no such file"),
        (("IN/\ud800.jsonl",), {}, "bad_uri: the uri holds half a character"),
    ],
)
def test_what_can_never_become_a_job_is_refused_in_one_line(
    harness: CeleryTasksHarness, args: Sequence[Any], options: dict[str, Any], message: str
) -> None:
    given = [arg.replace("IN/", f"{harness.folder}/in/") if isinstance(arg, str) else arg for arg in args]
    with pytest.raises(TaskRefused, match=message) as refused:
        harness.tasks.submit("acme", "task-1", given, options)
    assert "\n" not in str(refused.value)
    assert refused.value.args == (str(refused.value),)  # what travels as JSON
    assert harness.jobs() == []


def test_without_settings_no_uri_is_accepted(harness: CeleryTasksHarness) -> None:
    with pytest.raises(TaskRefused, match=r"forbidden_uri.*none is configured"):
        harness.submit(str(harness.source), tenant="other")
    with pytest.raises(BadAddress, match="must end with a slash"):
        TaskSettings({"acme": ["s3://ours"]})


def test_without_room_or_a_model_the_task_is_for_later_and_then_done(tmp_path: Path) -> None:
    harness = CeleryTasksHarness(
        tmp_path, simulated_world(tmp_path), IntakeSettings(max_tenant_tokens=1, refresh_interval_seconds=1.0)
    )
    with pytest.raises(TryLater, match="no_model: "):
        harness.submit([LINE])
    harness.publish()
    first = harness.submit([LINE])
    with pytest.raises(TryLater, match="no_room: too much is queued already"):
        harness.submit([LINE], task="task-2")
    assert harness.submit([LINE]) == first  # that one is in
    ledger = JobLedger(harness.world.store, f"jobs/{first}/")
    end_job(ledger, harness.world.clock.now(), JobStatus.COMPLETED)
    harness.world.clock.sleep(2)
    assert harness.submit([LINE], task="task-2") != first


def test_a_job_is_returned_as_a_batch_object_and_cancelled(harness: CeleryTasksHarness) -> None:
    job_id = harness.submit([LINE], deadline="1h", output_expires_after="2d", metadata={"k": "v"})
    batch = harness.tasks.status("acme", [], {"id": job_id})
    assert json.loads(json.dumps(batch)) == batch
    created = int(harness.job(job_id).created_at.timestamp())
    assert (batch["object"], batch["status"], batch["created_at"]) == ("batch", "validating", created)
    assert batch["expires_at"] == created + 3_600
    assert batch["metadata"] == {"k": "v"}
    assert batch["tokenmill"]["results"] == harness.world.store.locate(f"jobs/{job_id}/results/")
    assert batch["tokenmill"]["results_expire_at"] is None, "it counts from the end"
    batch = harness.tasks.cancel("acme", [job_id], {})
    assert batch["status"] == "cancelling"
    assert batch["cancelling_at"] is not None
    assert harness.tasks.cancel("acme", [job_id], {}) == batch
    now = harness.world.clock.now()
    counts = Counts(total=6, succeeded=3, failed=1, cancelled=2)
    end_job(JobLedger(harness.world.store, f"jobs/{job_id}/"), now, counts=counts)
    ended = harness.tasks.cancel("acme", [job_id], {})
    assert ended["status"] == "cancelled"
    assert ended["cancelled_at"] == int(now.timestamp())
    assert ended["tokenmill"]["results_expire_at"] == (now + timedelta(days=2)).isoformat()
    assert ended["request_counts"] == {"total": 6, "completed": 3, "failed": 3}


@pytest.mark.parametrize("wanted", ["job-none", "../acme", "a/b", "", 5, None, ["x"], "x" * 200])
def test_an_unknown_job_is_not_found(harness: CeleryTasksHarness, wanted: Any) -> None:
    for act in (harness.tasks.status, harness.tasks.cancel):
        with pytest.raises(
            TaskRefused, match=r"job_not_found: there is no job .*give the id that tokenmill.submit gave"
        ):
            act("acme", [wanted], {})


def test_inline_requests_are_removed_with_the_jobs_results(harness: CeleryTasksHarness) -> None:
    job_id = harness.submit([LINE])
    end_job(JobLedger(harness.world.store, f"jobs/{job_id}/"), harness.world.clock.now(), JobStatus.COMPLETED)
    harness.world.store.delete(f"active/{job_id}")
    harness.world.clock.sleep(40 * 86_400)
    RetentionSweep(harness.world, RetentionSettings(outputs=timedelta(days=1))).run()
    assert list(harness.world.store.list(INTAKE)) == []
