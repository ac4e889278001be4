"""`tokenmill run`: the main job. A file of requests becomes a folder of Parquet, on this machine."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill import options, output
from tokenmill.errors import Interrupted, UserError
from tokenmill.options import Debug, Device, DType, Input, Json, Model, OnInvalid, Tier
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from tokenmill.tracker import RunTracker
    from tokenmill.wiring import EngineOptions, JobRun, RunPlan

SHOWN_ERRORS = 10
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _bytes(text: str) -> int:
    """A size such as 4GB or 512MiB, in bytes."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; give bytes, or a number with MB, GB, MiB or GiB")
    return int(float(match.group(1)) * UNITS[(match.group(2) or "").upper()])


def _folder(given: str) -> Path:
    """A folder's path; an unset variable must not become the current folder."""
    if not given:
        raise typer.BadParameter("it is empty; name a folder")
    return Path(given)


def run(
    input_: Input,
    model: Model,
    out: Annotated[
        Path,
        typer.Option(
            "--output", "-o", parser=_folder, metavar="OUT", help="The job's folder. Results are in OUT/results."
        ),
    ],
    tier: Annotated[Tier, typer.Option(help="How urgent the job is.")] = "standard",
    dtype: Annotated[
        DType, typer.Option(help="Of weights and arithmetic. auto: bfloat16 where the CPU has it, else float32.")
    ] = "auto",
    device: Annotated[Device, typer.Option(help="Where to compute.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute. Default: one a core.")] = None,
    max_output_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Refuse requests that ask for more, and give no more to those that don't say."),
    ] = None,
    on_invalid: Annotated[
        OnInvalid, typer.Option(help="An invalid line fails by itself (row), or stops the job at once (job).")
    ] = "row",
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the job in OUT, and start anew.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows of the input.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of sampled requests that bring none.")] = 0,
    price_per_hour: Annotated[
        float | None,
        typer.Option(parser=options.price, metavar="PRICE", help="Of this machine, for the cost in the summary."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A chat template (jinja) in place of the model's own.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences computed at once.")] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed in a step.")] = 2048,
    kv_cache_memory: Annotated[
        int | None,
        typer.Option(
            parser=_bytes,
            metavar="SIZE",
            help="Most memory for the KV cache, such as 4GB. Default: half of what is free.",
        ),
    ] = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Answer every request of INPUT, and write the answers to OUT/results as Parquet.

    The same command again goes on where the last one stopped; what was committed is never computed again. Every line
    gets a row, an invalid one too, with the reason. OUT/results can be read at any moment.
    """
    from tokenmill.wiring import EngineOptions

    engine = EngineOptions(dtype, device, threads, max_num_seqs, max_num_batched_tokens, kv_cache_memory)
    settings = read_settings()
    plan = _plan(
        input_, model, out, tier, engine, chat_template,
        on_invalid=on_invalid, fresh=fresh, limit=limit, seed=seed, max_output_tokens=max_output_tokens,
        price_per_hour=settings.price_per_hour if price_per_hour is None else price_per_hour,
    )  # fmt: skip
    _report(_run(plan), plan, as_json=as_json)


def _plan(
    input_: str,
    model: str,
    out: Path,
    tier: Tier,
    engine: EngineOptions,
    chat_template: Path | None,
    *,
    on_invalid: OnInvalid,
    fresh: bool,
    limit: int | None,
    seed: int,
    max_output_tokens: int | None,
    price_per_hour: float | None,
) -> RunPlan:
    """Everything that can be found out, and refused, before a job is made. Cheap checks come first."""
    from schemas.job import Tier as JobTier
    from tokenmill import job_options
    from tokenmill.wiring import RunPlan
    from workers.shard_worker import WorkerSettings

    settings = read_settings()
    wanted = job_options.job_settings(
        settings, tier=tier, seed=seed, on_invalid=on_invalid, limit=limit, max_output_tokens=max_output_tokens
    )
    template = job_options.read_template(chat_template)
    inputs = job_options.read_input(input_)
    return RunPlan(
        inputs=inputs,
        model=job_options.choose_model(model, settings.model_cache),
        output=out.expanduser(),
        tier=JobTier(tier),
        settings=wanted,
        engine=engine,
        chat_template=template,
        fresh=fresh,
        price_per_hour=price_per_hour,
        worker=WorkerSettings(request_timeout=settings.request_timeout, checkpoint_seconds=settings.checkpoint_seconds),
    )


def _run(plan: RunPlan) -> JobRun:
    """Run with progress on stderr; the first Ctrl-C stops after the current step, the second at once."""
    from pipeline.planner import InvalidInput
    from tokenmill.logs import log_to_stderr
    from tokenmill.progress import ProgressDisplay
    from tokenmill.tracker import RunTracker
    from tokenmill.wiring import run_job

    log_to_stderr()
    tracker, stop = RunTracker(), threading.Event()
    try:
        with _stopping(stop, tracker), ProgressDisplay(output.stderr(), tracker.snapshot):
            return run_job(plan, tracker, stop)
    except InvalidInput as error:
        for wrong in error.errors[:SHOWN_ERRORS]:
            output.say(f"line {wrong.line}: {wrong.code}: {wrong.message}")
        if error.count > SHOWN_ERRORS:
            output.say(f"… and {error.count - SHOWN_ERRORS} more")
        raise UserError(f"{error}; nothing was computed. Correct the lines, or run with --on-invalid row") from error


@contextmanager
def _stopping(stop: threading.Event, tracker: RunTracker) -> Iterator[None]:
    """Ctrl-C, and SIGTERM likewise: while the engine computes, the first one stops it after the current step, so that
    what is done is still committed. At any other time, and the second time, everything ends at once: that is safe too,
    only more is to be done again."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set() or not tracker.is_computing:
            raise KeyboardInterrupt
        stop.set()
        output.say("stopping after this step; once more to stop at once")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(done: JobRun, plan: RunPlan, *, as_json: bool) -> None:
    """The outcome: summary on stderr, the document on stdout with --json. Raises `Interrupted` when there is none."""
    from tokenmill import summary

    manifest = done.manifest
    if manifest is None:
        have = f"{output.count(done.counts.total - done.counts.pending)} of {output.count(done.counts.total)} rows"
        raise Interrupted(f"interrupted: {have} are committed in {plan.output}; the same command goes on from there")
    if done.before and done.before == done.counts.total:
        output.say(f"{plan.output}: this job was done before; --fresh runs it anew")
    elif done.before:
        output.say(f"{output.count(done.before)} rows had a result from an earlier run")
    if as_json:
        output.print_json(summary.as_document(manifest, plan.output))
    summary.show(manifest, plan.output)
