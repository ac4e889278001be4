"""New versions of a model alongside the served one, as real processes: a bad one is caught and rolled back, a good one
is promoted, and the jobs that run meanwhile have the answers of the version that they are pinned to."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ingest.intake import Intake, IntakeSettings, JobDraft
from pipeline.inputs.open import pin_uri
from pipeline.models.canaries import Canaries
from pipeline.models.catalog import Catalog
from pipeline.models.registry import ModelRegistry, ReleaseState
from pipeline.models.shadow_results import ShadowCopies
from pipeline.ports import World
from schemas.jobs.job_options import JobOptions
from schemas.jobs.outcome import Manifest
from schemas.releases import CanaryRecord, Release
from schemas.requests.limits import PlanSettings
from tests.servers.process import MissingServer, free_port
from tests.servers.prometheus import PrometheusServer
from tests.servers.redis import RedisServer
from tests.tokenmill import dashboards
from tests.tokenmill.command_processes import Processes
from tests.waiting import HANG_SECONDS, wait_for
from tokenmill.config.job_options import ChosenModel
from tokenmill.errors import ModelError
from tokenmill.models.sources import ModelSource
from tokenmill.services.worker import load_any
from workers.model.loaded_model import model_digest
from workers.text.chat_options import OWN_CHAT

ENGINE = ("--dtype", "float32", "--threads", 1, "--max-num-seqs", 2, "--speculate", "off")


def another_version(model: Path, folder: Path, *, noise: float) -> Path:
    """The model with each weight off by `noise` times its spread, drawn once."""
    shutil.copytree(model, folder)
    draw = torch.Generator().manual_seed(1)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=draw)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def processes(folder: Path, redis_server: RedisServer) -> Iterator[Processes]:
    made = Processes(
        folder,
        TOKENMILL_ROOT=str(folder / "root"),
        TOKENMILL_REDIS_URL=redis_server.url,
        TOKENMILL_CHECKPOINT_SECONDS="0.5",
    )
    yield made
    made.close()


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with FolderStore(folder / "root") as store:
        yield World(store, SystemClock(), SystemRandomness(), store.scratch)


@pytest.mark.exhaustive
def test_given_a_differing_record_when_a_worker_starts_then_it_ends_with_71_and_is_in_no_catalog(
    processes: Processes, world: World, model_folder: Path, tokenmill: Any, folder: Path
) -> None:
    # given what the model answers, with one log-probability that it doesn't have
    assert tokenmill("canary", "record", f"tiny={model_folder}", *ENGINE[:4], "--root", folder / "root").code == 0
    canaries = Canaries(world.store)
    (key,) = [info.key for info in world.store.list("canaries/")]
    record = CanaryRecord.model_validate_json(world.store.read(key))
    first = record.answers[0]
    wrong = first.model_copy(update={"logprobs": (first.logprobs[0] - 0.2, *first.logprobs[1:])})
    world.store.replace(key, record.model_copy(update={"answers": (wrong, *record.answers[1:])}).to_json())
    # when a worker starts with these very weights
    number = processes.start("-m", "tokenmill", "worker", "--model", f"tiny={model_folder}", *ENGINE)
    # then
    assert processes.running[number].wait(HANG_SECONDS) == 71
    (said,) = [line for line in processes.log(number).read_text().splitlines() if line.startswith("error: ")]
    assert "canary prompt 0: the log-probability of token 0 is off by 0.2" in said
    assert Catalog(world.store).entries() == []
    assert Catalog(world.store).versions("tiny") == []
    assert canaries.failures() == {"tiny": 1}


def test_given_a_digest_in_a_models_name_when_it_is_loaded_then_only_these_weights_do(
    model_folder: Path,
) -> None:
    digest = model_digest(model_folder)
    source = ModelSource("tiny", model_folder, None, 0)
    config = EngineConfig(dtype="float32", threads=1)
    assert load_any(ChosenModel(f"tiny@{digest}", source), config, OWN_CHAT).name == "tiny"
    other = f"tiny@sha256:{'0' * 64}"
    with pytest.raises(ModelError, match=f"is {digest}; give the model's own digest"):
        load_any(ChosenModel(other, source), config, OWN_CHAT)


class Installation:
    """A root with processes around it, and a model that is served."""

    def __init__(self, processes: Processes, world: World, tokenmill: Callable[..., Any], source: Path) -> None:
        self.processes = processes
        self.world = world
        self.source = source
        self.registry = ModelRegistry(world.store)
        self._tokenmill = tokenmill

    @property
    def root(self) -> Path:
        assert isinstance(self.world.store, FolderStore)
        return self.world.store.root

    def start(self, *command: object, **variables: str) -> int:
        return self.processes.start("-m", "tokenmill", *command, **variables)

    def submit(self, name: str) -> None:
        intake = Intake(self.world, IntakeSettings(plan=PlanSettings(max_shard_rows=10)))
        intake.accept(JobDraft(pin_uri(str(self.source)), JobOptions(model="tiny"), "default", name))

    def parts(self, name: str) -> list[Path]:
        return sorted((self.root / "jobs" / name / "results").glob("part-*.parquet"))[1:]

    def answers(self, name: str) -> list[tuple[str, str]]:
        """Of a job, once it has ended."""
        manifest = self.root / "jobs" / name / "manifest.json"
        wait_for(manifest.is_file, f"{name} doesn't end")
        assert json.loads(manifest.read_text())["status"] == "completed"
        return read_answers(manifest.parent)

    def release(self, model: Path, number: int, job: str) -> None:
        """Start a candidate, and its release while this job runs."""
        digest = model_digest(model)
        self.start("worker", "--candidate", "--model", f"tiny={model}", *ENGINE)
        versions = Catalog(self.world.store).versions
        wait_for(lambda: any(entry.pin.digest == digest for entry in versions("tiny")), "the candidate isn't up")
        self.submit(job)
        wait_for(lambda: self.parts(job), "nothing is computed")
        begun = self._tokenmill("release", "start", f"tiny@{digest[:20]}", "--root", self.root, "--json")
        assert (begun.code, begun.json()["number"]) == (0, number)

    def ran_meanwhile(self, job: str, release: Release) -> bool:
        """Whether the job that has ended went on after the release had begun."""
        manifest = Manifest.model_validate_json((self.root / "jobs" / job / "manifest.json").read_bytes())
        return manifest.finished_at > release.started_at + timedelta(seconds=1)

    def outcome(self, poll: Callable[[], None]) -> ReleaseState:
        """The verdict of the last release; polls until it is decided."""

        def ended() -> ReleaseState | None:
            poll()
            last = self.registry.last("tiny")
            return last if last is not None and last.outcome is not None else None

        found = wait_for(ended, "the release isn't decided")
        assert found is not None
        return found


def read_answers(job: Path) -> list[tuple[str, str]]:
    rows = pq.read_table(job / "results").sort_by("row").to_pylist()
    return [(row["custom_id"], row["text"]) for row in rows]


@pytest.fixture
def print_line(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints to the test's runner, past the capture of the fixture `tokenmill`."""

    def call(line: str) -> None:
        with capfd.disabled():
            print(f"\n{line}")

    return call


class ReleasePanels:
    """A Prometheus that scrapes the dispatcher, and which of the dashboards' questions about releases it could answer.
    Where no Prometheus is installed, a line says so and nothing of it is checked."""

    def __init__(self, folder: Path, print_line: Callable[[str], None]) -> None:
        self.port = free_port()
        self._prometheus = PrometheusServer(
            folder / "prometheus", {"tokenmill-dispatcher": [f"127.0.0.1:{self.port}"]}, ""
        )
        questions = [one for one in dashboards.questions() if one.panel in dashboards.OF_RELEASES]
        self._answers = dashboards.PanelAnswers(self._prometheus, questions)
        try:
            self._prometheus.start()
            self._is_installed = True
        except MissingServer as error:
            print_line(f"NOT TESTED HERE: the dashboards' panels of releases, since {error}")
            self._is_installed = False

    def __enter__(self) -> ReleasePanels:
        return self

    def __exit__(self, *_: object) -> None:
        self._prometheus.close()

    def poll(self) -> None:
        if self._is_installed:
            self._answers.poll()

    def await_verdict(self, verdict: str) -> None:
        """The panel shows that a release ended like that."""
        (question,) = [one for one in dashboards.questions() if one.panel == "Releases" and "verdict" in one.text]
        text = question.real.replace("[10s]", "[60s]")
        if self._is_installed:
            wait_for(
                lambda: any(one["metric"]["verdict"] == verdict for one in self._prometheus.query(f"{text} > 0")),
                f"no panel shows that it was {verdict}",
            )

    def await_all(self) -> None:
        if self._is_installed:
            wait_for(lambda: not self._answers.poll(), f"unanswered: {self._answers.left}")


@pytest.fixture
def panels(folder: Path, print_line: Callable[[str], None]) -> Iterator[ReleasePanels]:
    with ReleasePanels(folder, print_line) as made:
        yield made


@pytest.mark.exhaustive
def test_a_bad_version_is_rolled_back_and_a_good_one_promoted_while_jobs_run(
    processes: Processes, world: World, model_folder: Path, chat: Any, write_lines: Any, tokenmill: Any,
    folder: Path, monkeypatch: pytest.MonkeyPatch, panels: ReleasePanels, print_line: Callable[[str], None],
) -> None:  # fmt: skip
    # Both versions share two cores with everything else here, so time says little; a real pool has machines alike.
    for name, value in {"SHARE": "1.0", "SLOWER": "20", "MORE_ERRORS": "0.1"}.items():
        monkeypatch.setenv(f"TOKENMILL_RELEASES__{name}", value)
    source = write_lines(*[chat(f"r{n}", f"number {n}", max_tokens=60, ignore_eos=True) for n in range(200)])
    bad = another_version(model_folder, folder / "bad", noise=0.3)
    good = another_version(model_folder, folder / "good", noise=1e-6)
    alone = {}
    for name, model in (("stable", model_folder), ("bad", bad), ("good", good)):
        assert tokenmill("run", source, "--output", name, "--model", f"tiny={model}", *ENGINE).code == 0
        alone[name] = read_answers(folder / name)
    assert alone["bad"] != alone["stable"]
    harness = Installation(processes, world, tokenmill, source)
    harness.start("worker", "--model", f"tiny={model_folder}", *ENGINE)
    harness.start("dispatcher", TOKENMILL_METRICS__PORT=str(panels.port))
    catalog = Catalog(world.store)
    wait_for(lambda: catalog.find("tiny"), "no worker is up")

    # A bad one: detected, and rolled back without a trace in any results.
    begun = time.monotonic()
    harness.release(bad, 1, "job-1")
    first = harness.outcome(panels.poll)
    print_line(f"rolled back {time.monotonic() - begun:.1f} s after its worker started: {first.outcome}")
    assert first.outcome is not None
    assert (first.outcome.verdict, first.outcome.by) == ("rolled_back", "comparison")
    assert any(reason.startswith("agreement of answers") for reason in first.outcome.reasons), first.outcome
    panels.await_verdict("rolled_back")
    assert catalog.find("tiny").pin.digest == model_digest(model_folder)
    assert harness.answers("job-1") == alone["stable"]
    assert harness.ran_meanwhile("job-1", first.release)

    # A good one: promoted, and jobs that came before keep the version that they are pinned to.
    begun = time.monotonic()
    harness.release(good, 2, "job-2")
    second = harness.outcome(panels.poll)
    print_line(f"promoted {time.monotonic() - begun:.1f} s after its worker started: {second.outcome}")
    assert second.outcome is not None
    assert (second.outcome.verdict, second.outcome.by) == ("promoted", "comparison"), second.outcome
    panels.await_verdict("promoted")
    assert harness.answers("job-2") == alone["stable"]
    assert harness.ran_meanwhile("job-2", second.release)
    wait_for(lambda: catalog.find("tiny").pin.digest == model_digest(good), "the name means the old version still")

    # New jobs run on it, computed by the worker that was its candidate; all that ran before was the old one's.
    harness.submit("job-3")
    assert harness.answers("job-3") == alone["good"]
    pinned = {
        name: json.loads((harness.root / "jobs" / name / "job.json").read_text())["models"][0]["digest"]
        for name in ("job-1", "job-2", "job-3")
    }
    assert pinned == {
        "job-1": model_digest(model_folder), "job-2": model_digest(model_folder), "job-3": model_digest(good),
    }  # fmt: skip
    workers = {name: workers_of(harness.parts(name)) for name in pinned}
    assert workers["job-1"] == workers["job-2"]
    assert len(workers["job-1"]) == 1
    assert not workers["job-3"] & workers["job-1"]
    for standing in (first, second):
        wait_for(lambda one=standing: not ShadowCopies(world.store, one.release).standing(), "copies are left")

    # A worker that does not answer as its version did doesn't serve, and is counted.
    canaries = Canaries(world.store)
    record = canaries.find(catalog.find("tiny").pin)
    assert record is not None
    key = f"canaries/{record.pin.key}.json"
    wrong = record.answers[0].model_copy(update={"logprobs": tuple(one - 0.2 for one in record.answers[0].logprobs)})
    stored = world.store.read(key)
    world.store.replace(key, record.model_copy(update={"answers": (wrong, *record.answers[1:])}).to_json())
    number = harness.start("worker", "--model", f"tiny={good}", *ENGINE)
    assert processes.running[number].wait(HANG_SECONDS) == 71
    world.store.replace(key, stored)
    panels.await_all()

    # And back, by hand: the old version's worker is there still.
    back = tokenmill("release", "rollback", "tiny", "--root", harness.root)
    assert back.code == 0, back.err
    harness.submit("job-4")
    assert harness.answers("job-4") == alone["stable"]
    shown = tokenmill("release", "status", "tiny", "--history", "--root", harness.root, "--json").json()
    assert [one["verdict"] for one in shown["releases"]] == ["rolled_back", "promoted", "promoted"]


def workers_of(parts: list[Path]) -> set[str]:
    """The workers that computed these parts."""
    footers = [pq.read_metadata(part).metadata for part in parts]
    texts = [value for footer in footers for value in footer.values() if value.startswith(b'{"version"')]
    return {json.loads(text)["worker"] for text in texts}
