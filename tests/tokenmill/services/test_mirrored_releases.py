"""New versions of a model that are judged by copies of callers' requests, as real processes with a real Redis: bad ones
are rolled back before a caller sees them, a good one is promoted, and no caller loses an answer."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from safetensors.torch import load_file, save_file

from pipeline.adapters.folder.store import FolderStore
from pipeline.models.catalog import Catalog
from pipeline.models.registry import ModelRegistry, ReleaseState
from tests.cluster.cluster import NULL_WORKER
from tests.cluster.null_worker import digest_of
from tests.pipeline.observability.scrapes import scrape
from tests.servers.redis import RedisServer
from tests.tokenmill.command_processes import Processes
from tests.tokenmill.services.test_releases import ENGINE, another_version
from tests.waiting import HANG_SECONDS, wait_for
from workers.model.loaded_model import model_digest

pytestmark = pytest.mark.exhaustive

PROMPTS = 24
CALLERS = 4
REQUESTS = "tokenmill_release_requests_total"
CHAT = "/v1/chat/completions"


@dataclass
class Callers:
    """Callers that send requests one after the other, each half of its own as streams, and check the answers.

    Attributes:
        texts: the stable version's answers, by prompt.
        other: answers of another text.  failures: answers without an end, or with an error.
    """

    url: str
    model: str
    texts: dict[int, str] = field(default_factory=dict)
    answered: int = 0
    other: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, http: httpx2.Client, prompt: int, user: str, *, stream: bool = False, tokens: int = 24) -> str:
        """One request's text. Raises `RuntimeError` for an error."""
        body = {
            "model": self.model, "messages": [{"role": "user", "content": f"number {prompt}"}], "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "user": user, "stream": stream,
        }  # fmt: skip
        answer = http.post(CHAT, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        return stream_text(answer.text) if stream else str(answer.json()["choices"][0]["message"]["content"])

    def learn(self) -> None:
        """Ask for the stable version's answers."""
        with httpx2.Client(base_url=self.url, timeout=HANG_SECONDS) as http:
            for prompt in range(PROMPTS):
                self.texts[prompt] = self.ask(http, prompt, "first")

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CALLERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()

    def _run(self, number: int) -> None:
        with httpx2.Client(base_url=self.url, timeout=HANG_SECONDS) as http:
            count = 0
            while not self.stop.is_set():
                count += 1
                prompt = (7 * count + number) % PROMPTS
                try:
                    text = self.ask(http, prompt, f"user-{number}-{count % 50}", stream=count % 2 == 0)
                except (RuntimeError, httpx2.HTTPError) as error:
                    self.failures.append(str(error))
                    continue
                with self._lock:
                    self.answered += 1
                    if text != self.texts[prompt]:
                        self.other[text[:40]] += 1


def stream_text(events: str) -> str:
    """The text of a chat's stream, which must have its end. Raises `RuntimeError`."""
    data = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: ")]
    if not data or data[-1] != "[DONE]":
        raise RuntimeError(f"a stream without its end: {events[-300:]}")
    chunks = [orjson.loads(one) for one in data[:-1]]
    if any("error" in chunk for chunk in chunks):
        raise RuntimeError(f"a stream with an error: {events[-300:]}")
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


@dataclass
class Installation:
    """A gateway, a dispatcher and a worker with the stable version."""

    processes: Processes
    store: FolderStore
    tokenmill: Any
    name: str
    gateway: str = ""

    @property
    def registry(self) -> ModelRegistry:
        return ModelRegistry(self.store)

    def start(self, *program: object) -> None:
        """Start all but candidates; `program`: the stable version's worker."""
        self.processes.start("-m", "tokenmill", "dispatcher")
        self.processes.start(*program)
        number = self.processes.start("-m", "tokenmill", "gateway", "--port", 0)
        self.gateway = self.processes.url(number)
        wait_for(lambda: Catalog(self.store).find(self.name), "no worker is up")

    def candidate(self, digest: str, *program: object) -> int:
        """Start a candidate, and wait until it is up; its process's number."""
        number = self.processes.start(*program)
        versions = Catalog(self.store).versions
        wait_for(lambda: any(one.pin.digest == digest for one in versions(self.name)), "the candidate isn't up")
        return number

    def release(self, digest: str, *options: object) -> None:
        begun = self.tokenmill(
            "release", "start", f"{self.name}@{digest[:20]}", "--root", self.store.root, "--json", *options
        )
        assert begun.code == 0, begun.err

    def outcome(self) -> ReleaseState:
        """The last release, once it is decided."""

        def ended() -> ReleaseState | None:
            last = self.registry.last(self.name)
            return last if last is not None and last.outcome is not None else None

        found = wait_for(ended, "the release isn't decided")
        assert found is not None
        assert found.outcome is not None
        print(found.outcome)
        return found

    def count(self, kind: str) -> float:
        """The gateway's requests of releases of this kind."""
        return scrape(f"{self.gateway}/metrics").sum(REQUESTS, kind=kind)

    def status(self) -> str:
        shown = self.tokenmill("release", "status", self.name, "--root", self.store.root)
        assert shown.code == 0, shown.err
        print(shown.out)
        return str(shown.out)


@pytest.fixture
def processes(folder: Path, redis_server: RedisServer) -> Iterator[Processes]:
    made = Processes(folder, TOKENMILL_ROOT=str(folder / "root"), TOKENMILL_REDIS_URL=redis_server.url)
    yield made
    made.close()


@pytest.fixture
def store(folder: Path) -> Iterator[FolderStore]:
    with FolderStore(folder / "root") as opened:
        yield opened


@pytest.fixture
def real(processes: Processes, store: FolderStore, tokenmill: Any, model_folder: Path) -> Installation:
    """With the tiny model."""
    made = Installation(processes, store, tokenmill, "tiny")
    made.start("-m", "tokenmill", "worker", "--model", f"tiny={model_folder}", *ENGINE)
    return made


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both versions share two cores with everything else, so their times say little, unless a test is about them."""
    values = {"MORE_ERRORS": "0.1", "SLOWER_TTFT": "20", "SLOWER_ITL": "20", "DRIFT": "100"}
    for name, value in values.items():
        monkeypatch.setenv(f"TOKENMILL_RELEASES__{name}", value)


def resaved(model: Path, folder: Path) -> Path:
    """The same weights with another digest."""
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file), file, metadata={"format": "pt", "saved": "again"})
    return folder


def candidate_of(model: Path) -> tuple[object, ...]:
    return ("-m", "tokenmill", "worker", "--candidate", "--model", f"tiny={model}", *ENGINE)


def test_a_version_that_answers_otherwise_is_rolled_back_and_no_caller_sees_it(
    real: Installation, model_folder: Path, folder: Path
) -> None:
    bad = another_version(model_folder, folder / "bad", noise=1.0)
    callers = Callers(real.gateway, "tiny")
    callers.learn()
    real.candidate(model_digest(bad), *candidate_of(bad))
    with callers.running():
        real.release(model_digest(bad), "--mirror", 0.5, "--canary", 0.02)
        ended = real.outcome()
    assert ended.outcome is not None
    assert ended.outcome.verdict == "rolled_back"
    assert ended.outcome.reasons[0].startswith("agreement of answers"), ended.outcome
    assert ended.outcome.comparison is not None
    assert ended.outcome.comparison.mirror is not None
    assert (callers.failures, callers.other, real.count("canary")) == ([], Counter(), 0)
    assert "mirror: " in real.status()


def test_a_version_that_crashes_is_rolled_back_and_no_caller_sees_it(
    real: Installation, model_folder: Path, folder: Path
) -> None:
    new = resaved(model_folder, folder / "new")
    callers = Callers(real.gateway, "tiny")
    callers.learn()
    number = real.candidate(model_digest(new), *candidate_of(new))
    with callers.running():
        real.release(model_digest(new), "--mirror", 1.0, "--canary", 0.02)
        wait_for(lambda: real.count("compared") >= 20, "nothing is compared")
        real.processes.running[number].kill()
        ended = real.outcome()
    assert ended.outcome is not None
    assert ended.outcome.verdict == "rolled_back"
    reason = ended.outcome.reasons[0]  # what it had begun is lost; what it had not waits in vain
    assert reason.startswith(("its workers lost", "share of rows that fail more")), ended.outcome
    assert (callers.failures, callers.other, real.count("canary")) == ([], Counter(), 0)


def test_a_slower_version_is_rolled_back_and_no_caller_sees_it(
    processes: Processes, store: FolderStore, tokenmill: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 26 ms against 20: 30 % slower."""
    monkeypatch.setenv("TOKENMILL_RELEASES__SLOWER_ITL", "1.15")
    installation = Installation(processes, store, tokenmill, "null")
    null = (*NULL_WORKER, "--model", f"null={model_folder}")
    installation.start(*null, "--step-ms", 20)
    callers = Callers(installation.gateway, "null")
    callers.learn()
    installation.candidate(digest_of(model_folder, 1), *null, "--step-ms", 26, "--candidate", "--version", 1)
    with callers.running():
        installation.release(digest_of(model_folder, 1), "--mirror", 0.5, "--canary", 0.02)
        ended = installation.outcome()
    assert ended.outcome is not None
    assert ended.outcome.verdict == "rolled_back"
    assert ended.outcome.reasons[0].startswith("time between tokens"), ended.outcome
    assert (callers.failures, callers.other, installation.count("canary")) == ([], Counter(), 0)


def test_a_good_version_answers_some_callers_and_is_promoted_and_the_old_one_ends_what_it_holds(
    real: Installation, model_folder: Path, folder: Path
) -> None:
    new = resaved(model_folder, folder / "new")
    callers = Callers(real.gateway, "tiny")
    callers.learn()
    real.candidate(model_digest(new), *candidate_of(new))
    with callers.running():
        real.release(model_digest(new), "--mirror", 0.5, "--canary", 0.3)
        ended = real.outcome()
        before = callers.answered
        wait_for(lambda: callers.answered > before + 100, "no caller is answered after the promotion")
    assert ended.outcome is not None
    assert (ended.outcome.verdict, ended.outcome.by) == ("promoted", "comparison"), ended.outcome
    assert (callers.failures, callers.other) == ([], Counter())
    assert real.count("canary") > 0
    assert Catalog(real.store).find("tiny").pin.digest == model_digest(new)  # type: ignore[union-attr]


def test_a_version_that_crashes_with_callers_loses_none_of_their_answers(
    real: Installation, model_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_RELEASES__LEAST_SHARDS", "4")
    new = resaved(model_folder, folder / "new")
    callers = Callers(real.gateway, "tiny")
    callers.learn()
    number = real.candidate(model_digest(new), *candidate_of(new))
    process = real.processes.running[number]
    with callers.running():
        real.release(model_digest(new), "--mirror", 1.0, "--canary", 0.5)
        wait_for(lambda: real.count("canary") > 0, "the canary stage doesn't begin")
        process.send_signal(signal.SIGSTOP)  # it holds requests of callers when it dies
        before = real.count("canary")
        wait_for(lambda: real.count("canary") > before, "no caller's request waits for it")
        time.sleep(0.5)
        process.kill()
        ended = real.outcome()
    assert ended.outcome is not None
    assert ended.outcome.verdict == "rolled_back"
    assert real.count("fell_back") > 0
    assert (callers.failures, callers.other) == ([], Counter())
