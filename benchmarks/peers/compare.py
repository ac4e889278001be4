"""Our engine against its peers, in turn: ours, a peer, ours, the next peer, ours …, and one table at the end.

    python benchmarks/peers/compare.py benchmarks/workloads/mixed.jsonl --model MODEL.gguf --threads 2 \\
        --ours "bf16=--dtype bfloat16" --peers vllm,openvino,llamacpp,transformers --pairs 3 --json OUT.json

Every engine gets the same token ids (made once, with our tokenizer), the same processors, a fresh process and a
warm-up. A run of each of our settings stands right before every run of a peer, and ratios are taken within such a pair:
the speed of a shared machine drifts. Peers are installed from the package index, each in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.catalog import SAFETENSORS, W8A8, Environment, Setting, select
from benchmarks.peers.engines import ROOT, Bench, Failed, run_ours, run_peer
from benchmarks.peers.environments import Unavailable, prepare
from benchmarks.peers.forms import Forms
from benchmarks.peers.outcomes import Measured, Pair, Row, table, verdict
from benchmarks.workload import load_prompts, write_prompts

Runner = Callable[[], Measured]
"""One run of an engine; raises `Failed`."""


@dataclass(frozen=True, slots=True)
class Ours:
    """One of our settings: options of `throughput.py`, and the form of the model; None: as it was given."""

    options: str
    form: str | None = None


def parse_ours(texts: Sequence[str]) -> dict[str, Ours]:
    """Our settings by name, from `NAME[@FORM]=OPTIONS` (options alone: `ours`).

    Raises `ValueError` for a name twice, and for a form that our engine doesn't read.
    """
    ours: dict[str, Ours] = {}
    for text in texts:
        name, sign, options = text.partition("=")
        if not sign or not name or name.startswith("-"):
            name, options = "ours", text
        name, _, form = name.partition("@")
        if form not in ("", SAFETENSORS, W8A8):
            raise ValueError(f"--ours {text!r}: there is no form {form!r}; write {SAFETENSORS} or {W8A8}")
        if name in ours:
            raise ValueError(f"--ours {text!r}: the name {name!r} is taken; write NAME=OPTIONS")
        ours[name] = Ours(options.strip(), form or None)
    return ours


def opponents(setting: Setting, ours: Sequence[str], same_precision: bool) -> tuple[str, ...]:
    """Which of ours a peer's setting is compared with: all, or the one that is named like its precision.

    Raises `ValueError` if there is none.
    """
    if not same_precision:
        return tuple(ours)
    if setting.precision not in ours:
        raise ValueError(f"--same-precision: none of ours is named {setting.precision}, as {setting.name} needs")
    return (setting.precision,)


def compare(
    rows: list[tuple[Row, Runner]],
    ours: Mapping[str, Runner],
    pairs: int,
    say: Callable[[str], None],
    keep: Callable[[list[Row]], None],
) -> list[Row]:
    """The rounds: in each, every peer once, with a run of each of ours before it that it is compared with. A peer that
    failed is not run again.

    `keep` is given all rows so far after each pair. Raises `Failed` if ours fails: there is nothing to compare with.
    """
    done = [row for row, _ in rows]
    for turn in range(pairs):
        for i, (_, run) in enumerate(rows):
            row = done[i]
            if row.reason:
                continue
            before = {name: ours[name]() for name in row.against}
            rates = ", ".join(f"{name} {measured.rate:.1f}" for name, measured in before.items())
            try:
                result = run()
            except Failed as error:
                done[i] = replace(row, pairs=[*row.pairs, Pair(None, before)], reason=str(error))
                say(f"round {turn}: {rates}; {row.engine} {row.setting}: no result: {error}")
            else:
                done[i] = replace(row, pairs=[*row.pairs, Pair(result, before)])
                say(f"round {turn}: {rates}; {row.engine} {row.setting} {result.rate:.1f} output tok/s")
            keep(done)
    return done


def pinned_torch() -> str:
    """The torch that this repository is developed with, as a requirement."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.strip() for line in lines if line.startswith("torch=="))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path, help="OpenAI batch lines, or token ids (.json)")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or a folder with safetensors")
    parser.add_argument(
        "--gguf", type=Path, default=None, help="the model as GGUF for llama.cpp, if --model is a folder"
    )
    parser.add_argument(
        "--peers", default="vllm,openvino,llamacpp,transformers", help="NAME or NAME:SETTING, by commas"
    )
    parser.add_argument(
        "--ours", action="append", default=[], help="NAME[@FORM]=OPTIONS of throughput.py; may be repeated"
    )
    parser.add_argument(
        "--same-precision",
        action="store_true",
        help="compare each peer only with those of ours named like its precision",
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="processors for each engine")
    parser.add_argument("--limit", type=int, default=None, help="first N requests only")
    parser.add_argument("--max-tokens", type=int, default=None, help="no answer is longer")
    parser.add_argument("--time-limit", type=float, default=600, help="seconds for one run, with load and warm-up")
    parser.add_argument("--prepare-limit", type=float, default=3600, help="seconds for one step of an installation")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "tokenmill-peers")
    parser.add_argument("--pip-args", default="", help="more options for every pip install")
    parser.add_argument("--prepare-only", action="store_true", help="install and convert, run nothing")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    try:
        args.ours = parse_ours(args.ours or ["bf16=--dtype bfloat16"])
        args.peers = [
            (peer, setting, opponents(setting, list(args.ours), args.same_precision))
            for peer, setting in select(args.peers)
        ]
    except ValueError as error:
        parser.error(str(error))
    if not 0 < args.threads <= len(os.sched_getaffinity(0)):
        parser.error(f"--threads {args.threads}: there are {len(os.sched_getaffinity(0))} processors")
    return args


def prepared(args: argparse.Namespace, bench: Bench) -> tuple[list[tuple[Row, Runner]], dict[str, Runner]]:
    """Install and convert for every peer, and for ours: a row for each peer, with the reason where that failed.

    Raises `Unavailable` if a form that ours need can't be made.
    """
    known: dict[str, Path | Unavailable] = {}

    def python_of(environment: Environment) -> Path:
        if environment.name not in known:
            try:
                known[environment.name] = prepare(
                    environment,
                    args.folder,
                    pinned_torch(),
                    threads=len(bench.cpus),
                    limit=args.prepare_limit,
                    pip_args=shlex.split(args.pip_args),
                    say=say,
                )
            except Unavailable as error:
                known[environment.name] = error
        found = known[environment.name]
        if isinstance(found, Unavailable):
            raise found
        return found

    forms = Forms(args.model.resolve(), args.folder / "forms", python_of, args.prepare_limit, args.gguf)
    rows: list[tuple[Row, Runner]] = []
    for peer, setting, against in args.peers:
        row = Row(peer.name, setting.name, setting.note, setting.precision, against, [])
        try:
            python, model = python_of(peer.environment), forms.path(setting.form)
        except Unavailable as error:
            say(f"{peer.name} {setting.name}: {error}")
            rows.append((replace(row, reason=str(error)), unreachable))
        else:
            rows.append((row, partial(run_peer, bench, peer, setting, python, model)))
    ours = {
        name: partial(run_ours, bench, name, our.options, args.model if our.form is None else forms.path(our.form))
        for name, our in args.ours.items()
    }
    return rows, ours


def unreachable() -> Measured:
    raise AssertionError("a peer without an installation is never run")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    args = arguments()
    prompts = load_prompts(args.workload, args.model, args.limit)
    if args.max_tokens is not None:
        prompts = [replace(prompt, max_tokens=min(prompt.max_tokens, args.max_tokens)) for prompt in prompts]
    logs = args.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ids = args.folder / f"{args.workload.stem}.{os.getpid()}.ids.json"
    write_prompts(ids, prompts)
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    bench = Bench(prompts, ids, cpus, args.time_limit, logs)
    try:
        rows, ours = prepared(args, bench)
        if args.prepare_only:
            return
        done = compare(rows, ours, args.pairs, say, partial(keep_report, args, bench))
    except (Failed, Unavailable) as error:
        raise SystemExit(f"tokenmill: {error}; its log lies in {logs}") from error
    finally:
        ids.unlink()
    print(table(done, options_of(args.ours)))
    print("\n" + "\n".join(verdict(done, list(args.ours))))


def options_of(ours: Mapping[str, Ours]) -> dict[str, str]:
    return {name: our.options for name, our in ours.items()}


def keep_report(args: argparse.Namespace, bench: Bench, rows: list[Row]) -> None:
    """Write all that is known so far, for the record: machine, every run in every pair. Nothing without `--json`."""
    from benchmarks.throughput import machine

    if not args.json:
        return
    report = {
        "workload": args.workload.name,
        "requests": len(bench.prompts),
        "prompt_tokens": sum(len(prompt.token_ids) for prompt in bench.prompts),
        "output_tokens": sum(prompt.max_tokens for prompt in bench.prompts),
        "model": args.model.name,
        "threads": len(bench.cpus),
        "machine": machine(),
        "ours": {name: asdict(our) for name, our in args.ours.items()},
        "table": table(rows, options_of(args.ours)).splitlines(),
        "verdict": verdict(rows, list(args.ours)),
        "rows": [asdict(row) for row in rows],
    }
    args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
