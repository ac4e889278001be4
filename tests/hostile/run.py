"""A run of attacks on one deployment: a quiet period, the attacks one after the other, and the judgement."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.cluster.cluster import ROOT
from tests.hostile.attack import Answer, Attack, Target, unexpected
from tests.hostile.client import CHAT, batch_end, chat, create_batch, line, send, upload
from tests.hostile.deployment import Deployment, ProcessDeath
from tests.hostile.judging import Verdict, judge
from tests.hostile.well_behaved import GIVE_UP_SECONDS, Sample

MAX_DEATHS: Final = 2
"""Number of deaths of processes after which an attack is stopped, since its effect is known then."""
POLL_SECONDS: Final = 0.2
CLEAN_SECONDS: Final = 240.0
"""Timeout for the end of cancelled jobs, in seconds."""
DAMAGED_SECONDS: Final = 10.0
"""Timeout for the end of damaged jobs, which may never end, in seconds."""
SETTLE_SECONDS: Final = 10.0
BATCH_ROWS: Final = 100
BATCH_TOKENS: Final = 8
BATCH_SECONDS: Final = 240.0
LONG_PROMPTS: Final = 24
LONG_PROMPT_WORDS: Final = 300
"""Requests with more tokens in total than the cache holds: its memory becomes resident when it is written."""


@dataclass(frozen=True, slots=True)
class Options:
    """What can be chosen of a run. `quiet_seconds`: without attacks, before them."""

    seed: int
    quiet_seconds: float = 60.0
    uploaded_files: int = 100
    dropped_files: int = 300


@dataclass(slots=True)
class Result:
    """What came of one attack.

    Attributes:
        wrong: why the answers are not the expected ones; None: they are.
        begun, ended: `time.monotonic`; the cleaning up behind the attack is included.
        peaks, child_peaks: most bytes resident, by process.
        removed: jobs that had to be taken out by hand.
    """

    attack: Attack
    answers: list[Answer] = field(default_factory=list)
    wrong: str | None = None
    begun: float = 0.0
    ended: float = 0.0
    deaths: list[ProcessDeath] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    child_peaks: dict[str, int] = field(default_factory=dict)
    removed: str | None = None


@dataclass
class Outcome:
    """A run that has ended.

    Attributes:
        quiet, attacked: chats of the well-behaved tenant before and during the attacks.
        memory_before, memory_after: bytes resident when the attacks began, and some seconds after their end.
        batch: how the well-behaved tenant's own batch went, and what was wrong with it.
    """

    form: str
    options: Options
    quiet: list[Sample] = field(default_factory=list)
    attacked: list[Sample] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    memory_before: dict[str, int] = field(default_factory=dict)
    memory_after: dict[str, int] = field(default_factory=dict)
    pids_before: dict[str, int] = field(default_factory=dict)
    pids_after: dict[str, int] = field(default_factory=dict)
    deaths: list[ProcessDeath] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    batch: Answer | None = None
    batch_wrong: str | None = "it was not sent"
    seconds: float = 0.0

    def samples_during(self, result: Result) -> list[Sample]:
        return [sample for sample in self.attacked if result.begun <= sample.at <= result.ended]

    def verdicts(self) -> list[Verdict]:
        return judge(self)


class Campaign:
    """Attacks on a deployment that answers."""

    def __init__(self, deployment: Deployment, options: Options) -> None:
        self._deployment = deployment
        self._options = options
        self._good_batches: set[str] = set()
        self._outcome = Outcome(deployment.form, options)

    def run(self, attacks: Sequence[Attack]) -> Outcome:
        outcome, deployment = self._outcome, self._deployment
        self._fill_cache()
        texts = self._texts(self._send_batch())
        with _WellBehaved(deployment) as tenant:
            time.sleep(self._options.quiet_seconds)
            deployment.memory.sample()
            outcome.memory_before, outcome.pids_before = deployment.memory.now(), dict(deployment.pids)
            begun, batch = time.monotonic(), None
            for number, attack in enumerate(attacks):
                if number == len(attacks) // 2:
                    batch = self._send_batch()
                outcome.results.append(self._run_attack(attack))
                _report_progress(number, len(attacks), outcome.results[-1])
            ended = time.monotonic()
            if batch is not None:
                outcome.batch = batch_end(self._target(), batch, key="good", seconds=BATCH_SECONDS)
                outcome.batch_wrong = self._wrong_batch(batch, texts)
            time.sleep(SETTLE_SECONDS)
            outcome.memory_after = deployment.memory.now()
            outcome.pids_after = {name: process.pid for name, process in deployment.processes.items()}
        outcome.quiet = [sample for sample in tenant.samples if sample.at < begun]
        outcome.attacked = [sample for sample in tenant.samples if begun <= sample.at <= ended]
        outcome.deaths, outcome.restarts = list(deployment.deaths), list(deployment.restarts)
        outcome.seconds = ended - begun
        return outcome

    def _target(self) -> Target:
        options = self._options
        return self._deployment.target(options.seed, options.uploaded_files, options.dropped_files)

    def _run_attack(self, attack: Attack) -> Result:
        deployment, deaths = self._deployment, len(self._deployment.deaths)
        deployment.memory.reset()
        result = Result(attack, begun=time.monotonic())
        result.answers, stopped = self._attack(attack, deaths)
        result.wrong = stopped or unexpected(attack.expected, result.answers)
        deployment.memory.sample()
        result.peaks, result.child_peaks = dict(deployment.memory.peaks), dict(deployment.memory.child_peaks)
        result.removed = self._clean(result, deaths)
        result.deaths = deployment.deaths[deaths:]
        result.ended = time.monotonic()
        return result

    def _attack(self, attack: Attack, deaths: int) -> tuple[list[Answer], str | None]:
        """The answers, and why the attack had to be stopped, if it had to."""
        deployment, until = self._deployment, time.monotonic() + attack.limit_seconds
        with (deployment.folder / "attacker.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.attacker", attack.name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        out = process.stdout
        process.stdin.write(json.dumps(asdict(self._target())).encode())
        process.stdin.close()
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.append(out.read()), daemon=True)
        reader.start()
        why = None
        while process.poll() is None and why is None:
            time.sleep(POLL_SECONDS)
            if len(deployment.deaths) - deaths >= MAX_DEATHS:
                why = f"stopped after {MAX_DEATHS} deaths of processes"
            elif time.monotonic() > until:
                why = f"stopped after {attack.limit_seconds:.0f} s without an end"
        process.kill()
        code = process.wait()
        reader.join()
        if why is not None:
            return [], why
        if code != 0:
            return [], f"the attack itself failed with {code}; see attacker.log"
        return [Answer(**answer) for answer in json.loads(read[0])], None

    def _clean(self, result: Result, deaths: int) -> str | None:
        """End what the attack left open, so that the next one is judged by itself; returns the manual steps."""
        deployment, objects, attack = self._deployment, self._deployment.objects, result.attack
        until = time.monotonic() + (DAMAGED_SECONDS if attack.leaves_jobs else CLEAN_SECONDS)
        left = objects.open_jobs() - self._good_batches
        self._cancel(left)
        while left and time.monotonic() < until and len(deployment.deaths) - deaths < MAX_DEATHS:
            time.sleep(1.0)
            left = objects.open_jobs() - self._good_batches
        untaken = any(answer.status in ("open", "none") for answer in result.answers)
        hung = attack.name.startswith("drop:") and result.wrong is not None and untaken
        removed = None
        if left and attack.leaves_jobs:
            deployment.remove_jobs(left)
            removed, left = f"{len(left)} damaged jobs, removed from the store", set()
        if left or hung:
            why = f"{len(left)} jobs that did not end, although cancelled" if left else "files that are not taken"
            deployment.restart_without(left, f"{attack.name}: {why}")
            return why
        objects.remove("incoming/")
        try:
            deployment.await_ready()
        except TimeoutError:
            deployment.restart_without(objects.open_jobs() - self._good_batches, f"{attack.name}: no answer afterwards")
            return "no chat was answered afterwards"
        return removed

    def _cancel(self, jobs: set[str]) -> None:
        """Cancel by every tenant that may own them."""
        calls = [partial(self._deployment.request, "POST", f"/v1/batches/{job}/cancel", key=key, seconds=10.0)
                 for job in sorted(jobs) for key in ("bad", "other", "limited")]  # fmt: skip
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda call: call(), calls))

    def _fill_cache(self) -> None:
        """Have the model's cache written to as a whole, as that of a service that has run for a while is."""
        drawn = random.Random(self._options.seed)
        for _ in range(LONG_PROMPTS):
            words = " ".join(str(drawn.randrange(1_000_000)) for _ in range(LONG_PROMPT_WORDS))
            self._deployment.request("POST", CHAT, chat(words), key="good")

    def _send_batch(self) -> str | None:
        """The well-behaved tenant's batch."""
        rows = (
            line(f"good-{row}", body=chat(f"Tell me about the number {row}.", BATCH_TOKENS, ignore_eos=True))
            for row in range(BATCH_ROWS)
        )
        file, _ = upload(self._target(), b"".join(rows), "good.jsonl", key="good")
        batch = None if file is None else create_batch(self._target(), file, key="good")[0]
        self._good_batches |= {batch} if batch else set()
        return batch

    def _texts(self, batch: str | None) -> dict[str, str]:
        """Of a batch that must be answered, by custom_id; waits for its end."""
        ended = (
            Answer("job", "not taken")
            if batch is None
            else batch_end(self._target(), batch, key="good", seconds=BATCH_SECONDS)
        )
        if batch is None or ended.status != "completed":
            raise RuntimeError(f"the well-behaved tenant's batch ended {ended} before any attack: {ended.message}")
        return self._answered(batch)

    def _answered(self, batch: str) -> dict[str, str]:
        found = json.loads(send(self._target(), "GET", f"/v1/batches/{batch}", key="good")[1])
        data = send(self._target(), "GET", f"/v1/files/{found['output_file_id']}/content", key="good")[1]
        rows = [json.loads(row) for row in data.splitlines()]
        return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}

    def _wrong_batch(self, batch: str, expected: dict[str, str]) -> str | None:
        ended = self._outcome.batch
        if ended is None or ended.status != "completed":
            return f"{ended}: {'' if ended is None else ended.message}"
        found = self._answered(batch)
        different = [name for name in expected if found.get(name) != expected[name]]
        return f"{len(different)} of {len(expected)} rows are missing or have another text" if different else None


class _WellBehaved:
    """The well-behaved tenant's process; its samples once it has ended."""

    def __init__(self, deployment: Deployment) -> None:
        self._path = deployment.folder / "well_behaved.jsonl"
        self._address = ("127.0.0.1", str(deployment.port))
        self._key = deployment.keys["good"]
        self.samples: list[Sample] = []

    def __enter__(self) -> _WellBehaved:
        with self._path.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.well_behaved", *self._address],
                stdin=subprocess.PIPE, stdout=out, cwd=ROOT,
            )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(self._key.encode() + b"\n")
        self._process.stdin.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(GIVE_UP_SECONDS + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        rows = Path(self._path).read_text().splitlines()
        self.samples = sorted((Sample(**json.loads(row)) for row in rows), key=lambda sample: sample.at)


def _report_progress(number: int, attacks: int, result: Result) -> None:
    """One line of progress."""
    shown: list[Any] = [f"{number + 1:3}/{attacks}", f"{result.ended - result.begun:6.1f} s", result.attack.name]
    if result.deaths:
        shown.append(f"[{len(result.deaths)} deaths]")
    shown.append("as expected" if result.wrong is None else f"NOT AS EXPECTED: {result.wrong[:160]}")
    print(*shown, file=sys.stderr, flush=True)
