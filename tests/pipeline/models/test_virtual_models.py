"""Stored virtual models, jobs for them, and the plan of such a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.ingest.intake import Intake, IntakeRefused, JobDraft
from pipeline.inputs.open import pin_uri
from pipeline.jobs.planning import measure_job, plan_job
from pipeline.ledger.ledger import JobLedger, LedgerError
from pipeline.models.catalog import Catalog
from pipeline.models.virtual_models import VIRTUAL, InvalidRules, VirtualModels
from pipeline.ports import World
from pipeline.routing.loads import ModelLoad
from pipeline.routing.rules import RuleRouter
from schemas.jobs.job_options import JobOptions
from schemas.models import CatalogEntry
from schemas.virtual_models import VirtualModel
from tests.pipeline.gateway.http_harness import lines
from tests.pipeline.made_jobs import PIN
from tests.pipeline.simulation import simulated_world

LARGE = PIN.model_copy(update={"name": "large", "digest": "sha256:2"})
LONG: dict[str, Any] = {"model": "large", "when": {"prompt_tokens": {"min": 100}}}
IDLE: dict[str, Any] = {"model": "large", "when": {"max_waiting_tokens": 10}}


def virtual(*rules: dict[str, Any], name: str = "auto", last: str = PIN.name) -> VirtualModel:
    return VirtualModel.model_validate({"name": name, "rules": [*rules, {"model": last}]})


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = simulated_world(tmp_path)
    for pin in (PIN, LARGE):
        Catalog(world.store).publish(CatalogEntry(pin=pin, max_model_len=2_048))
    return world


def test_a_virtual_model_is_stored_replaced_and_removed(world: World) -> None:
    stored = VirtualModels(world.store)
    stored.publish(virtual(name="b/x"))
    stored.publish(virtual(LONG))
    stored.publish(virtual(IDLE))
    assert stored.find("auto") == virtual(IDLE)
    assert [one.name for one in stored.all()] == ["auto", "b/x"]
    assert (stored.remove("auto"), stored.remove("auto"), stored.find("auto")) == (True, False, None)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (virtual(name="large"), "the name of a served model"),
        (virtual(last="missing"), r"'missing' is not served here \(large, tiny\)"),
        (virtual(last="other"), "other is virtual itself"),
        (virtual({"model": "large", "when": {"label": {"model": "judge", "labels": ["a"]}}}), "'judge' is not served"),
    ],
)
def test_rules_over_what_is_not_served_are_refused(world: World, given: VirtualModel, why: str) -> None:
    VirtualModels(world.store).publish(virtual(name="other"))
    with pytest.raises(InvalidRules, match=why):
        VirtualModels(world.store).publish(given)


def test_a_damaged_virtual_model_is_named(world: World) -> None:
    VirtualModels(world.store).publish(virtual())
    (info,) = world.store.list(VIRTUAL)
    world.store.replace(info.key, b'{"name": "auto"}')
    with pytest.raises(LedgerError, match=VIRTUAL):
        VirtualModels(world.store).find("auto")


def submitted(world: World, tmp_path: Path, **options: Any) -> JobLedger:
    """A job of four rows: two for "auto", the second of them long, one for "tiny" and one without a known model."""
    body: dict[str, Any] = {"max_tokens": 5}
    hello, long = ([{"role": "user", "content": text}] for text in ("hello", "word " * 200))
    given = [("auto", hello), ("auto", long), ("tiny", hello), ("other", hello)]
    data = b"".join(lines(1, body=body | {"model": model, "messages": text}) for model, text in given)
    path = tmp_path / "in.jsonl"
    numbered = (line.replace(b'"r0"', f'"r{at}"'.encode()) for at, line in enumerate(data.splitlines(keepends=True)))
    path.write_bytes(b"".join(numbered))
    Intake(world).accept(JobDraft(pin_uri(str(path)), JobOptions(**options), "default", "job-a"))
    return JobLedger(world.store, "jobs/job-a/")


def planned(world: World, ledger: JobLedger, router: RuleRouter | None = None) -> dict[str, list[int]]:
    """Plan the job; returns its rows by the model of their shards."""
    plan_job(ledger, ledger.job(), world, router=router)
    (segment,) = ledger.segments()
    found = {}
    for shard in segment.shards:
        with world.store.open(ledger.prefix + shard.key) as stream:
            table = pq.read_table(stream)
        assert set(table["model"].to_pylist()) == {shard.model}
        found[shard.model] = table["row"].to_pylist()
    return found


def test_a_job_pins_all_models_of_the_rules_and_each_row_gets_its_own(world: World, tmp_path: Path) -> None:
    VirtualModels(world.store).publish(virtual(LONG))
    ledger = submitted(world, tmp_path)
    job = ledger.job()
    assert [pin.name for pin in job.models] == ["large", "tiny"]
    assert job.settings.virtual_models == (virtual(LONG),)
    # Rules that are changed later don't concern it.
    VirtualModels(world.store).publish(virtual())
    assert measure_job(job, world).tokens_of_models.keys() == {"large", "tiny"}
    assert planned(world, ledger) == {"tiny": [0, 2], "large": [1]}


def test_where_one_model_is_served_rows_need_not_name_it_although_there_is_a_virtual_one(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    Catalog(world.store).publish(CatalogEntry(pin=PIN, max_model_len=2_048))
    VirtualModels(world.store).publish(virtual())
    job = submitted(world, tmp_path).job()
    assert (job.only_model, [one.name for one in job.settings.virtual_models or ()]) == (PIN.name, ["auto"])


def test_a_virtual_model_that_cannot_be_read_stops_no_other_job(world: World, tmp_path: Path) -> None:
    stored = VirtualModels(world.store)
    for name in ("auto", "broken"):
        stored.publish(virtual(LONG, name=name))
    (broken,) = [info.key for info in world.store.list(VIRTUAL) if b'"broken"' in world.store.read(info.key)]
    world.store.replace(broken, b'{"name": "broken", "from_a_later_version": 1}')
    assert [one.name for one in stored.all()] == ["auto"]
    assert planned(world, submitted(world, tmp_path)) == {"tiny": [0, 2], "large": [1]}
    with pytest.raises(LedgerError, match=VIRTUAL):
        stored.find("broken")


def test_load_is_that_at_planning(world: World, tmp_path: Path) -> None:
    VirtualModels(world.store).publish(virtual(IDLE))
    router = RuleRouter(lambda: {LARGE.key: ModelLoad(0.0, 5.0)})
    assert planned(world, submitted(world, tmp_path), router) == {"tiny": [2], "large": [0, 1]}


def test_a_job_for_a_virtual_model_takes_no_other_name(world: World, tmp_path: Path) -> None:
    VirtualModels(world.store).publish(virtual(LONG))
    ledger = submitted(world, tmp_path, model="auto")
    job = ledger.job()
    assert ({pin.name for pin in job.models}, job.only_model) == ({"tiny", "large"}, "auto")
    assert planned(world, ledger) == {"tiny": [0], "large": [1]}


def test_a_job_for_a_model_is_as_before(world: World, tmp_path: Path) -> None:
    VirtualModels(world.store).publish(virtual(LONG))
    ledger = submitted(world, tmp_path, model="tiny")
    assert (ledger.job().models, ledger.job().settings.virtual_models) == ((PIN,), None)
    assert b"virtual" not in world.store.read("jobs/job-a/job.json"), "an older dispatcher would refuse it"
    assert planned(world, ledger) == {"tiny": [2]}


def test_a_job_is_refused_when_a_rules_model_is_gone(world: World, tmp_path: Path) -> None:
    VirtualModels(world.store).publish(virtual(LONG))
    for info in list(world.store.list("catalog/")):
        if b'"large"' in world.store.read(info.key):
            world.store.delete(info.key)
    with pytest.raises(IntakeRefused, match="'large', which its rules name"):
        submitted(world, tmp_path)
    with pytest.raises(IntakeRefused, match=r"'nothing' is not served here \(tiny, auto\)"):
        submitted(world, tmp_path, model="nothing")
