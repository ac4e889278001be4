"""One run of one engine, ours or a peer's, and the check of what it gave."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import process
from benchmarks.peers.catalog import Peer, Setting
from benchmarks.peers.environments import Unavailable, find_libraries, first_error, last_line
from benchmarks.peers.outcomes import Measured, WrongCount, check_lengths, last_json
from benchmarks.workload import Prompt

ROOT = Path(__file__).resolve().parents[2]


class Failed(Exception):
    """An engine gave no result; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share."""

    prompts: list[Prompt]
    ids: Path
    cpus: list[int]
    limit: float
    logs: Path

    def run(self, name: str, command: Sequence[str], env: dict[str, str] | None = None) -> process.Finished:
        """Run one engine; raises `Failed` for a failure and for the time limit."""
        done = process.run(command, self.logs / f"{name}.log", limit=self.limit, cpus=self.cpus, env=env)
        if done.returncode is None:
            raise Failed(f"no result within {self.limit:.0f} s")
        if done.returncode:
            raise Failed(first_error(done.stdout) or first_error(done.log) or last_line(done.log))
        return done

    def measured(self, result: dict[str, Any], done: process.Finished) -> Measured:
        """A result after its check: one answer for each request, each as long as asked. Raises `Failed`."""
        names, asked = [p.custom_id for p in self.prompts], [p.max_tokens for p in self.prompts]
        made = [int(length) for length in result.pop("output_lengths")]
        try:
            check_lengths(names, asked, made)
        except WrongCount as error:
            raise Failed(str(error)) from error
        wall = float(result["wall_seconds"])
        return Measured(sum(made) / wall, wall, sum(made), done.peak_rss_bytes, done.others, result)


def processor_list(cpus: Sequence[int]) -> str:
    """Processors as ranges: `0-1`, or `0,2-3`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def run_ours(bench: Bench, name: str, options: str, model: Path) -> Measured:
    """One run of our engine, by `throughput.py`, on a form of the model."""
    with tempfile.TemporaryDirectory() as folder:
        report, lengths = Path(folder) / "report.json", Path(folder) / "lengths.json"
        script = str(ROOT / "benchmarks" / "throughput.py")
        command = [sys.executable, script, str(bench.ids), "--model", str(model)]
        command += ["--threads", str(len(bench.cpus)), "--warmup", "1", "--runs", "1"]
        command += [*shlex.split(options), "--json", str(report), "--keep-lengths", str(lengths)]
        done = bench.run(f"tokenmill-{name}", command, {"PYTHONPATH": str(ROOT)})
        document = json.loads(report.read_text(encoding="utf-8"))
        made = json.loads(lengths.read_text(encoding="utf-8"))
    run = document["runs"][0]
    result = {"wall_seconds": run["wall_seconds"], "output_lengths": made[0], "cached_tokens": run["cached_tokens"]}
    return bench.measured(result | {"settings": document["settings"], "dtype": document["dtype"]}, done)


def run_peer(bench: Bench, peer: Peer, setting: Setting, python: Path, model: Path) -> Measured:
    """One run of a peer, by its runner, in its own environment."""
    command = [str(python), str(ROOT / "benchmarks" / "peers" / peer.runner), str(bench.ids), "--model", str(model)]
    command += ["--threads", str(len(bench.cpus)), "--options", json.dumps(dict(setting.options))]
    command += [] if peer.warmup is None else ["--warmup", str(peer.warmup)]
    env = {name: value.format(cpus=processor_list(bench.cpus)) for name, value in setting.env.items()}
    try:
        libraries = find_libraries(setting.preload, python)
    except Unavailable as error:
        raise Failed(str(error)) from error
    if libraries:
        env["LD_PRELOAD"] = ":".join(map(str, libraries))
    done = bench.run(f"{peer.name}-{setting.name}", command, env)
    try:
        result = last_json(done.stdout)
    except ValueError as error:
        raise Failed(f"{error}; its last line: {last_line(done.log)}") from error
    result["preloaded"] = [path.name for path in libraries]
    return bench.measured(result, done)
