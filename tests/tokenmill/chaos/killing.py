"""One job, killed at random moments and started again until it ends; then compared with a run that nobody disturbed.

    python -m tests.tokenmill.chaos.killing --model demo --kills 25 [--seed 1] [--signal KILL] [--json OUT.json]

Between kills, four readers open the results at random moments. What is checked: one row for each request, the texts of
the unbroken run (float32), committed parts that never change, readers that see whole rows and none twice, and that the
log of a long answer only ever grows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq

from pipeline.adapters.folder import FolderStore
from pipeline.checkpoints import read_history
from pipeline.ledger import JobLedger

ROOT = Path(__file__).parents[3]
GRACE = 60.0
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.0, "n": 2, "stop": ["\n\n", " the"]},
    {"temperature": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
]


@dataclass
class Life:
    """One start of the command. `seconds` until it ended or was killed; `rows` that were committed by then."""

    seconds: float
    code: int | None
    rows: int


@dataclass
class Story:
    """What happened to a job. `looks`: how often the four readers were opened."""

    lives: list[Life] = field(default_factory=list)
    looks: int = 0
    manifest: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """How the command is run. `patience`: the longest time until a kill, seconds; None: so that the kills are spread
    over the job."""

    model: str
    folder: Path
    patience: float | None
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def start(self, source: Path, out: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tokenmill", "run", str(source), "--model", self.model, "--output", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **dict(self.environment)}
        return subprocess.Popen(
            [*command, "--dtype", "float32", *self.options],
            cwd=self.folder, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip


def write_requests(path: Path, model: str, rows: int, max_tokens: int) -> None:
    """Chat requests of all kinds, one broken line among them, and two that ask the same."""
    lines = []
    for row in range(rows):
        topic = f"the number {row if row != rows - 1 else 0} and what it means"
        body = {"model": model, "messages": [{"role": "user", "content": f"Tell me about {topic}."}]}
        body |= {"max_tokens": max_tokens + row % 7, **KINDS[row % len(KINDS) if row != rows - 1 else 0]}
        line = {"custom_id": f"id-{row}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append("{broken" if row == 3 else json.dumps(line))
    path.write_text("\n".join(lines) + "\n")


def digests(out: Path) -> dict[str, str]:
    """The parts that stand."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in out.glob("results/*.parquet")}


def look(out: Path) -> int:
    """Open the results with every reader; the rows they see, each once. 0: there are none yet."""
    folder = out / "results"
    if not any(folder.glob("*.parquet")):
        return 0
    # A part may be committed between two readers, so each is judged by itself.
    with duckdb.connect() as database:
        seen = {"duckdb": [row[0] for row in database.sql(f"select row from '{folder}/*.parquet'").fetchall()]}  # noqa: S608
    seen["pyarrow"] = pq.read_table(folder)["row"].to_pylist()
    seen["pandas"] = pd.read_parquet(folder)["row"].tolist()
    seen["polars"] = pl.read_parquet(folder)["row"].to_list()
    for reader, rows in seen.items():
        assert len(set(rows)) == len(rows), f"{reader} sees a row twice"
    return len(seen["polars"])


def answers(out: Path) -> dict[int, tuple[Any, ...]]:
    """What users compare: everything but times and what was cached."""
    found = {}
    for row in pq.read_table(out / "results").to_pylist():
        texts = None
        if row["response"] is not None:
            texts = [choice["message"]["content"] for choice in json.loads(row["response"])["choices"]]
        found[row["row"]] = (row["custom_id"], row["status"], row["error_code"], row["completion_tokens"], texts)
    return found


def undisturbed(setup: Setup, source: Path, out: Path) -> tuple[float, float]:
    """Run the job; seconds until its first shard was begun, and until it ended."""
    process, begun = setup.start(source, out), time.monotonic()
    while process.poll() is None and not any(out.glob("work/0*/attempt-*")):
        time.sleep(0.01)
    started = time.monotonic() - begun
    _, err = process.communicate()
    assert process.returncode == 0, err
    return started, time.monotonic() - begun


def patience_for(kills: int, startup: float, whole: float) -> float:
    """The longest time until a kill, drawn evenly, with which four fifths of the work are done when all have come."""
    share = 0.8 * (whole - startup) / kills  # mean work of a life: (patience - startup)^2 / (2 patience)
    return startup + share + (share * share + 2 * share * startup) ** 0.5


def disturb(
    setup: Setup, source: Path, out: Path, chance: random.Random, kills: int, how: signal.Signals, patience: float
) -> Story:
    """Start the command and end it at a random moment, so many times; then let it run to its end."""
    story, committed = Story(), dict[str, str]()
    for life in range(kills + 1):
        process, begun = setup.start(source, out), time.monotonic()
        until = begun + (chance.uniform(0.05, patience) if life < kills else 1e9)
        while process.poll() is None and time.monotonic() < until:
            time.sleep(min(chance.uniform(0.05, patience / 3), max(0.0, until - time.monotonic())))
            look(out)
            story.looks += 1
        if process.poll() is None:
            process.send_signal(how)
        _, err = process.communicate(timeout=GRACE if life < kills else None)
        assert "Traceback" not in err, err
        allowed = {0, -how.value, 130} if life < kills else {0}
        assert process.returncode in allowed, f"exit code {process.returncode}: {err}"
        now = digests(out)
        assert {name: now.get(name) for name in committed} == committed, "a committed part changed or vanished"
        committed = now
        story.lives.append(Life(round(time.monotonic() - begun, 2), process.returncode, look(out)))
    story.manifest = json.loads((out / "manifest.json").read_text())
    return story


def logged_tokens(out: Path) -> tuple[int, int]:
    """Of a job of one row: the tokens of its answer that are logged, and how many were sampled for that in all."""
    with FolderStore(out, read_only=True) as store:
        history = read_history(JobLedger(store), 1)
    longest = max((len(choice.token_ids) for choices in history.running.values() for choice in choices), default=0)
    return longest, sum(history.logged.values())


def long_answer(setup: Setup, chance: random.Random, tokens: int, kills: int) -> dict[str, Any]:
    """One long answer, killed in the middle again and again: it goes on from its last logged token each time."""
    source, out = setup.folder / "long.jsonl", setup.folder / "long"
    body = {"model": setup.model.split("=")[0], "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {**body, "temperature": 0}}
    source.write_text(json.dumps(line) + "\n")
    reached = [0]
    for kill in range(kills):
        process = setup.start(source, out)
        goal = min(tokens - 50, reached[-1] + chance.randrange(20, tokens // (kills + 1)))
        while process.poll() is None and (not (out / "plan/00000.json").exists() or logged_tokens(out)[0] < goal):
            time.sleep(0.02)
        assert process.poll() is None, f"it ended before kill {kill + 1}"
        process.kill()
        process.communicate()
        longest, sampled = logged_tokens(out)
        assert longest == sampled, f"{sampled - longest} logged tokens were sampled again"
        assert longest > reached[-1]
        reached.append(longest)
    last = setup.start(source, out)
    _, err = last.communicate()
    assert last.returncode == 0, err
    (row,) = pq.read_table(out / "results").to_pylist()
    assert row["completion_tokens"] == tokens
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["usage"]["repeated"] == 0, "every logged token is in the answer"
    shutil.rmtree(out)
    whole = setup.start(source, out)
    assert whole.wait() == 0
    (unbroken,) = pq.read_table(out / "results").to_pylist()
    assert unbroken["text"] == row["text"]
    return {"tokens": tokens, "logged_at_each_kill": reached[1:], "repeated_at_most": manifest["repeated_at_most"]}


def compare(setup: Setup, rows: int, max_tokens: int, seed: int, kills: int, how: signal.Signals) -> dict[str, Any]:
    """The whole thing; raises AssertionError with what went wrong."""
    source = setup.folder / "requests.jsonl"
    write_requests(source, setup.model.split("=")[0], rows, max_tokens)
    calm, stormy = setup.folder / "calm", setup.folder / f"stormy-{how.name}"
    startup, unbroken = undisturbed(setup, source, calm)
    patience = setup.patience or patience_for(kills, startup, unbroken)
    story = disturb(setup, source, stormy, random.Random(seed), kills, how, patience)
    expected, got = answers(calm), answers(stormy)
    assert set(got) == set(range(rows)), "not one row for each request"
    assert got == expected, {row: (expected[row], got[row]) for row in expected if expected[row] != got[row]}
    assert not list(stormy.glob("work/*/*-*[0-9]")), "checkpoints are removed when the manifest stands"
    usage = story.manifest["usage"]
    assert usage["repeated"] <= story.manifest["repeated_at_most"]
    return {
        "signal": how.name,
        "rows": rows,
        "kills": sum(life.code != 0 for life in story.lives),
        "killed_after_seconds": [life.seconds for life in story.lives[:-1]],
        "rows_committed_at_each_kill": [life.rows for life in story.lives[:-1]],
        "readers_opened": story.looks,
        "startup_seconds": round(startup, 1),
        "unbroken_seconds": round(unbroken, 1),
        "completion_tokens": usage["completion"],
        "repeated": usage["repeated"],
        "repeated_at_most": story.manifest["repeated_at_most"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--patience", type=float, help="the longest time until a kill, seconds; by default it fits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signals", default="KILL,TERM,INT", help="the first with all kills, the others with a fifth")
    parser.add_argument("--long", type=int, default=1500, help="tokens of the long answer; 0: none")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    report: dict[str, Any] = {"model": args.model, "dtype": "float32", "seed": args.seed, "stories": []}
    with tempfile.TemporaryDirectory() as folder:
        limits = (("TOKENMILL_PLAN__MAX_SHARD_ROWS", "10"),)
        setup = Setup(args.model, Path(folder), args.patience, environment=limits)
        for at, name in enumerate(args.signals.split(",")):
            kills = args.kills if at == 0 else max(1, args.kills // 5)
            story = compare(setup, args.rows, args.max_tokens, args.seed + at, kills, signal.Signals[f"SIG{name}"])
            report["stories"].append(story)
            print(json.dumps(story), file=sys.stderr, flush=True)
            shutil.rmtree(Path(folder) / "calm")
        if args.long:
            report["long_answer"] = long_answer(setup, random.Random(args.seed), args.long, 4)
            print(json.dumps(report["long_answer"]), file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
