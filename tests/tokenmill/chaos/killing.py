"""One job, killed at random moments and started again until it ends; then compared with an undisturbed run.

    python -m tests.tokenmill.chaos.killing --model demo --kills 25 [--signals KILL,TERM,INT] [--json OUT.json]

When a life ends follows from what is durable and not from the clock: some end while they start up, the others a part of
a checkpoint's interval after the log has grown by a share of what was left. So every kill meets a living run, on slow
machines and fast ones, and kills are spread over the whole job; if a run ends before its kill all the same, another
job takes the kills that are left. Meanwhile four readers open the results.

What is checked: as many kills as requested met a living run, most of them with committed parts; one row for each
request, with the text of the unbroken run (float32); parts that never change; readers that see whole rows and none
twice; a log that only ever grows, and of which no token is sampled again. A stopped process (SIGSTOP) shows what a kill
at this moment would cost: what it logs when it is then interrupted, and had not logged before, is at most the work of
two intervals: of the checkpoint that was being written, and since.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.adapters.folder.store import FolderStore
from pipeline.ledger.ledger import JobLedger
from pipeline.results.shard_history import read_history
from tests.tokenmill.chaos.running import GRACE, Setup, is_up, write_requests
from tests.tokenmill.chaos.watching import REFUSED, DurableTokens, answers, digests, read_with_every_reader

EARLY = 0.2
"""Share of the kills that come while the run starts up, at most; the first one always does."""

LIVES_OF_A_KILL = 4
"""Checkpoints between two kills, so that different amounts were logged before each."""


@dataclass(frozen=True)
class UndisturbedRun:
    """The unbroken run: what its answers are, the tokens it sampled, and seconds until its first checkpoint and from
    there to its end."""

    answers: dict[int, tuple[Any, ...]]
    tokens: int
    startup: float
    working: float


@dataclass
class Life:
    """One start of the command that was killed.

    Attributes:
        seconds: from its start to the signal.  early: it was to be killed while it started up.
        parts: committed by then, without that of the refused rows.  tokens: durable by then.
        cost: tokens that a kill at this moment would have cost; None: unknown, since it was killed.
        silence: seconds since something was logged or committed last; None: it was starting up.
    """

    seconds: float
    early: bool
    parts: int
    tokens: int
    cost: int | None
    silence: float | None


@dataclass
class KillReport:
    """Outcome of one or more jobs that were killed by one signal. `reads`: how often all readers opened the results."""

    lives: list[Life] = field(default_factory=list)
    reads: int = 0
    jobs: int = 0
    repeated: int = 0
    repeated_at_most: int = 0
    interval: int = 0


def run_undisturbed(setup: Setup, source: Path, out: Path) -> UndisturbedRun:
    """Run the job to its end."""
    process, begun = setup.start(source, out), time.monotonic()
    while process.poll() is None and not any(out.glob("work/0*/*")):
        time.sleep(0.01)
    started = time.monotonic()
    _, err = process.communicate()
    assert process.returncode == 0, err
    return UndisturbedRun(answers(out), DurableTokens(out).count(), started - begun, time.monotonic() - started)


class Attack:
    """Kills one job again and again, so many times, and brings it to its end."""

    def __init__(
        self,
        setup: Setup,
        source: Path,
        out: Path,
        baseline: UndisturbedRun,
        chance: random.Random,
        how: signal.Signals,
    ) -> None:
        self._setup, self._source, self._out = setup, source, out
        self._baseline, self._chance, self._how = baseline, chance, how
        self._durable, self._committed, self._seen, self._next_read = DurableTokens(out), dict[str, str](), 0, 0.0

    def run(self, kills: int, interval: float, report: KillReport) -> None:
        """At most `kills` lives that end with a kill, noted in `report`; fewer when the job ends before."""
        killed = 0
        while True:
            process, begun = self._setup.start(self._source, self._out), time.monotonic()
            left = kills - killed
            before = sum(life.early for life in report.lives)
            early = left > 0 and (not before or (before < EARLY * kills and self._chance.random() < EARLY))
            if early:
                self._wait_in_startup(process, begun, report)
            elif left:
                self._wait_for_work(process, left, interval, report)
            else:
                self._wait_for_end(process, report)
            seconds = time.monotonic() - begun
            life = self._end(process, seconds, early) if left and process.poll() is None else None
            _, err = process.communicate(timeout=GRACE)
            assert "Traceback" not in err, err
            self._check_what_stands(process.returncode, err, life)
            report.interval = max(report.interval, self._durable.interval())
            if process.returncode == 0:
                return
            assert life is not None, f"exit code {process.returncode} without a signal: {err}"
            life.tokens = self._durable.count()
            killed += 1
            report.lives.append(life)

    def _wait_in_startup(self, process: subprocess.Popen[str], begun: float, report: KillReport) -> None:
        until = begun + self._chance.uniform(0.0, self._baseline.startup)
        # SIGKILL may come at any time. Python itself is ended by the others in its own way, before our code runs.
        while process.poll() is None and (
            time.monotonic() < until or (self._how != signal.SIGKILL and not is_up(process))
        ):
            time.sleep(0.005)
        self._read_results(report)

    def _wait_for_work(self, process: subprocess.Popen[str], left: int, interval: float, report: KillReport) -> None:
        have = self._durable.count()
        goal = have + max(1.0, self._chance.uniform(0.6, 1.4) * (self._baseline.tokens - have) / (left + 1))
        while process.poll() is None and self._durable.count() < goal:
            time.sleep(interval / 10)
            self._read_results(report)
        time.sleep(self._chance.uniform(0.0, interval))

    def _wait_for_end(self, process: subprocess.Popen[str], report: KillReport) -> None:
        while process.poll() is None:
            time.sleep(0.1)
            self._read_results(report)

    def _read_results(self, report: KillReport) -> None:
        if time.monotonic() < self._next_read:
            return
        rows = read_with_every_reader(self._out)
        assert rows >= self._seen, "rows have vanished"
        self._seen = rows
        report.reads += rows > 0
        self._next_read = time.monotonic() + self._chance.uniform(0.2, 1.2)

    def _end(self, process: subprocess.Popen[str], seconds: float, early: bool) -> Life:
        """Send the signal. The process is stopped before, so that the durable files are those that a kill leaves."""
        process.send_signal(signal.SIGSTOP)
        durable, files = self._durable.count(), [*self._out.glob("work/0*/*-*[0-9]"), *self._out.glob("results/*")]
        times: list[float] = []
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # SIGSTOP takes a moment; it may be removed in it
                times.append(file.stat().st_mtime)
        last = max(times, default=None)
        life = Life(
            seconds=round(seconds, 2),
            early=early,
            parts=sum(file.name.endswith(".parquet") and file.name != REFUSED for file in files),
            tokens=durable,
            cost=None,
            silence=None if early or last is None else round(time.time() - last, 2),
        )
        process.send_signal(self._how)
        process.send_signal(signal.SIGCONT)
        return life

    def _check_what_stands(self, code: int, err: str, life: Life | None) -> None:
        now, tokens = digests(self._out), self._durable.count()
        assert {name: now.get(name) for name in self._committed} == self._committed, "a part changed or vanished"
        self._committed = now
        if life is None:
            assert code == 0, f"exit code {code}: {err}"
            return
        # SIGTERM ends Python as it ends any program until the run has taken it over, and so may Ctrl-C once it is done.
        ends = {signal.SIGKILL: {-9}, signal.SIGTERM: {130, -15} if life.early else {130}, signal.SIGINT: {130, -2}}
        assert code in ends[self._how] | {0}, f"exit code {code}: {err}"
        assert tokens >= life.tokens, "something logged has vanished"
        if self._how != signal.SIGKILL:
            life.cost = tokens - life.tokens


def attack(
    setup: Setup, source: Path, baseline: UndisturbedRun, chance: random.Random, kills: int, how: signal.Signals
) -> dict[str, Any]:
    """Kill the job this often and check it; raises AssertionError with the violations."""
    interval = min(1.0, baseline.working / (LIVES_OF_A_KILL * kills))
    often = ("TOKENMILL_CHECKPOINT_SECONDS", str(interval))
    hurried = Setup(setup.model, setup.folder, setup.options, (*setup.environment, often))
    report = KillReport()
    while len(report.lives) < kills:
        assert report.jobs < 5, f"{report.jobs} jobs ended after {len(report.lives)} of {kills} kills; give more --rows"
        out = setup.folder / f"stormy-{how.name}-{report.jobs}"
        Attack(hurried, source, out, baseline, chance, how).run(kills - len(report.lives), interval, report)
        report.jobs += 1
        judge_job(out, baseline, report, how)
        shutil.rmtree(out)
    costs = [life.cost for life in report.lives if life.cost is not None]
    with_parts = sum(life.parts > 0 for life in report.lives)
    assert with_parts >= kills // 2, f"only {with_parts} kills came after a commit"
    assert max(costs, default=0) <= 2 * report.interval, f"a kill would have cost {max(costs)} tokens"
    return {
        "signal": how.name,
        "kills": len(report.lives),
        "kills_after_a_commit": with_parts,
        "kills_in_startup": sum(life.early for life in report.lives),
        "killed_after_seconds": [life.seconds for life in report.lives],
        "parts_at_each_kill": [life.parts for life in report.lives],
        "tokens_logged_at_each_kill": [life.tokens for life in report.lives],
        "seconds_since_something_was_logged": [life.silence for life in report.lives],
        "cost_of_a_kill_tokens": costs,
        "jobs": report.jobs,
        "readers_opened": report.reads,
        "checkpoint_seconds": round(interval, 3),
        "most_tokens_of_an_interval": report.interval,
        "completion_tokens": baseline.tokens,
        "repeated": report.repeated,
        "repeated_at_most": report.repeated_at_most,
    }


def judge_job(out: Path, baseline: UndisturbedRun, report: KillReport, how: signal.Signals) -> None:
    """The invariants of a job that has ended."""
    got = answers(out)
    assert set(got) == set(baseline.answers), "not one row for each request"
    assert got == baseline.answers, {
        row: (want, got[row]) for row, want in baseline.answers.items() if want != got[row]
    }
    assert not list(out.glob("work/*/*-*[0-9]")), "checkpoints are removed when the manifest stands"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["usage"]["repeated"] == 0, "with one worker every logged token is in an answer"
    if how != signal.SIGKILL:
        assert manifest["repeated_at_most"] == 0, "a run that is interrupted logs everything"
    report.repeated += manifest["usage"]["repeated"]
    report.repeated_at_most += manifest["repeated_at_most"]


def compare(
    setup: Setup, rows: int, max_tokens: int, seed: int, kills: int, how: signal.Signals, *, compress: bool = False
) -> dict[str, Any]:
    """One signal against a job of its own; with `compress` its input is gzip, in members of 1,000 bytes."""
    source = setup.folder / "requests.jsonl"
    write_requests(source, setup.model_name, rows, max_tokens)
    baseline = run_undisturbed(setup, source, setup.folder / "calm")
    if compress:
        data = source.read_bytes()
        source = source.with_suffix(".jsonl.gz")
        source.write_bytes(b"".join(gzip.compress(data[at : at + 1_000]) for at in range(0, len(data), 1_000)))
    return attack(setup, source, baseline, random.Random(seed), kills, how)


def logged_tokens(out: Path) -> tuple[int, int]:
    """Of a job of one row: the tokens of its answers that are logged, and how many were sampled for that in all."""
    with FolderStore(out, read_only=True) as store:
        history = read_history(JobLedger(store), 1)
    return (
        sum(len(choice.token_ids) for choices in history.running.values() for choice in choices),
        sum(history.logged.values()),
    )


LONG_ANSWER: Mapping[str, Any] = {"prompt": "Once upon a time", "temperature": 0}
SEVERAL_ANSWERS: Mapping[str, Any] = {
    "prompt": ["Once upon a time", "The quick brown", [5, 6, 7]], "n": 2, "temperature": 0.8, "seed": 5
}  # fmt: skip


def long_answers(
    setup: Setup, chance: random.Random, tokens: int, kills: int, asked: Mapping[str, Any] = LONG_ANSWER
) -> dict[str, Any]:
    """One row of long answers, killed in the middle again and again: it goes on from its last logged tokens each time.

    Args:
        tokens: of each answer.  asked: the prompts, and how they are answered.
    """
    source, out = setup.folder / "long.jsonl", setup.folder / "long"
    whole = tokens * asked.get("n", 1) * (len(asked["prompt"]) if isinstance(asked["prompt"], list) else 1)
    body = {"model": setup.model_name, "max_tokens": tokens, "ignore_eos": True, **asked}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(line) + "\n")
    with setup.start(source, setup.folder / "long-calm") as calm:
        reached = _kill_at_work(setup, source, out, kills, whole, chance)
        last = setup.start(source, out)
        for process in (last, calm):
            _, err = process.communicate()
            assert process.returncode == 0, err
    (row,), (unbroken,) = (pq.read_table(done / "results").to_pylist() for done in (out, setup.folder / "long-calm"))
    assert row["completion_tokens"] == whole
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["usage"]["repeated"] == 0, "every logged token is in the answer"
    choices, expected = (json.loads(one["response"])["choices"] for one in (row, unbroken))
    assert choices == expected
    assert sum(choice["text"] != "" for choice in choices) == whole // tokens
    return {"tokens": whole, "logged_at_each_kill": reached[1:], "repeated_at_most": manifest["repeated_at_most"]}


def _kill_at_work(setup: Setup, source: Path, out: Path, kills: int, whole: int, chance: random.Random) -> list[int]:
    """Kill a job of one row this often, at shares of its `whole` tokens; returns the tokens logged before and at each
    kill."""
    reached = [0]
    for kill in range(kills):
        process = setup.start(source, out)
        goal = max(reached[-1] + 20, whole * (kill + chance.uniform(0.9, 1.3)) / (kills + 1))
        while process.poll() is None and (not (out / "plan/00000.json").exists() or logged_tokens(out)[0] < goal):
            time.sleep(0.02)
        process.kill()
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"it ended before kill {kill + 1}: {err}"
        logged, sampled = logged_tokens(out)
        assert logged == sampled, f"{sampled - logged} logged tokens were sampled again"
        assert logged > reached[-1]
        reached.append(logged)
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-num-seqs", type=int, default=8, help="so that parts are committed one after the other")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signals", default="KILL,TERM,INT", help="the first with all kills, the others with a fifth")
    parser.add_argument("--long", type=int, default=1500, help="tokens of the long answer; 0: none")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options, limits = ("--max-num-seqs", str(args.max_num_seqs)), (("TOKENMILL_PLAN__MAX_SHARD_ROWS", "4"),)
        setup = Setup(args.model, Path(folder), options, limits)
        source = Path(folder) / "requests.jsonl"
        write_requests(source, setup.model_name, args.rows, args.max_tokens)
        baseline = run_undisturbed(setup, source, Path(folder) / "calm")
        report: dict[str, Any] = {
            "model": setup.model_name, "dtype": "float32", "seed": args.seed, "rows": args.rows,
            "startup_seconds": round(baseline.startup, 1),
            "unbroken_seconds": round(baseline.startup + baseline.working, 1),
            "stories": [],
        }  # fmt: skip
        for at, name in enumerate(args.signals.split(",")):
            kills = args.kills if at == 0 else max(1, args.kills // 5)
            story = attack(setup, source, baseline, random.Random(args.seed + at), kills, signal.Signals[f"SIG{name}"])
            report["stories"].append(story)
            print(json.dumps(story), file=sys.stderr, flush=True)
        if args.long:
            report["long_answer"] = long_answers(setup, random.Random(args.seed), args.long, 4)
            print(json.dumps(report["long_answer"]), file=sys.stderr, flush=True)
    reads = sum(story["readers_opened"] for story in report["stories"])
    assert reads >= 2 * args.kills, f"the readers were opened only {reads} times"
    report["whole_seconds"] = round(time.monotonic() - begun)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
