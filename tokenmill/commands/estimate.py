"""`tokenmill estimate`: tokens, time and cost, before anything runs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenmill import output
from tokenmill.config import cli_options
from tokenmill.config.cli_options import (
    Debug,
    DType,
    EngineOption,
    EngineOptionValues,
    Input,
    Json,
    KvDType,
    Model,
    Quantize,
    TruncatePrompt,
)
from tokenmill.settings import read_settings

Market = Literal["on-demand", "spot"]

if TYPE_CHECKING:
    from pipeline.planner import InputEstimate
    from tokenmill.bench_results import MeasuredSpeed
    from tokenmill.config.engine_options import EngineOptions
    from tokenmill.local.estimate import JobDryRuns
    from tokenmill.local.hardware_bounds import HardwareBound

DEVICES = ("b200", "h200", "h100", "a100", "l40s", "a10g", "l4", "t4")
"""The names in `pipeline.planner.estimates.capacity.HARDWARE`, whose import would slow down --help."""


def _device(name: str) -> str:
    if name not in DEVICES:
        raise typer.BadParameter(f"{name!r} is not known; give one of {', '.join(DEVICES)}")
    return name


def estimate(
    input_: Input,
    model: Model,
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            parser=_device,
            metavar="DEVICE",
            help=f"Also the least time on one of this device: {', '.join(DEVICES)}. Repeat for several.",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of --hardware: devices of one machine that share the model.")
    ] = 1,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Of --hardware: groups of --tensor-parallel devices that divide the work."
        ),
    ] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Of --hardware: prompt and answer of a request, for the most concurrent ones. Default: the model's "
            "longest.",
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            parser=cli_options.price,
            metavar="PRICE",
            help="Of a worker, for the cost. Default: of this machine the configured one, of others the price book's.",
        ),
    ] = None,
    measured_there: Annotated[
        list[Path] | None,
        typer.Option(
            "--measured",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Also the time on the machine where 'tokenmill bench --json' printed this. Repeat for several.",
        ),
    ] = None,
    instance: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Take the price of this instance type from the price book.")
    ] = None,
    region: Annotated[str | None, typer.Option(help="Where that is. Default: as configured, else any.")] = None,
    market: Annotated[
        Market | None, typer.Option(help="How it is paid. Default: as configured, else on demand.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="So many work at it together.")] = 1,
    engine: EngineOption = None,
    engine_option: EngineOptionValues = None,
    dtype: Annotated[DType, typer.Option(help="For the time on this machine: what 'run' would compute in.")] = "auto",
    quantize: Annotated[
        Quantize, typer.Option(help="For the time on this machine, likewise; and for lower bounds.")
    ] = "none",
    kv_dtype: Annotated[
        KvDType, typer.Option(help="For the time on this machine, likewise; and for lower bounds.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="For the time on this machine.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows of the input.")] = None,
    truncate_prompt: TruncatePrompt = None,
    exact: Annotated[bool, typer.Option("--exact", help="Count the tokens of every prompt, not of a sample.")] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Say how many tokens a job has, how long it takes and what it costs. Nothing is computed.

    The job is rehearsed: its shards are tokenized and go through the prefix cache and the schedule that 'run' has, only
    without a model. Of more than some 4 million tokens a sample is. Where the model may end answers, they are taken for
    as long as TOKENMILL_PLAN__ANSWER_FRACTION says.

    The time on this machine comes from the last 'tokenmill bench' with this model; that on other hardware is a lower
    bound, from its arithmetic, its memory, and what devices that share the model send each other. Both are the time in
    which is computed: loading a model and waiting for a worker are not in it, nor in the cost that a job's manifest
    has. With --hardware it also says what fits there: bytes of weights and KV cache on each device, and how many
    requests.
    """
    output.announce_imports()
    from tokenmill.config import job_options
    from tokenmill.config.engine_options import engine_options
    from tokenmill.local.dry_run import bytes_per_parameter
    from tokenmill.local.estimate import JobDryRuns
    from tokenmill.local.hardware_bounds import ReplicaGroup, lower_bounds
    from tokenmill.local.pricing import EstimatePrices
    from workers.model.loaded_model import model_digest

    if not hardware and (tensor_parallel, replicas, context) != (1, 1, None):
        raise typer.BadParameter("--tensor-parallel, --replicas and --context are those of --hardware; give it too")
    settings = read_settings()
    wanted = job_options.job_settings(settings, limit=limit, truncate_prompt=truncate_prompt)
    inputs = job_options.read_input(input_)
    chosen = job_options.choose_model(job_options.only_model(model), settings.model_cache)
    options = engine_options(
        settings, dtype=dtype, threads=threads, quantize=quantize, kv_dtype=kv_dtype, speculate="off", engine=engine,
        engine_option=engine_option,
    )  # fmt: skip
    dry_runs = JobDryRuns.of(inputs, chosen, wanted, options, exact=exact)
    path, spec = dry_runs.path, dry_runs.spec
    speed = dry_runs.speed_here(settings.model_cache)
    prices = EstimatePrices(settings, price_per_hour, instance, region, market)
    num_workers = min(workers, max(1, dry_runs.planned.shards))
    amount = dry_runs.amount()
    times = []
    if speed is not None:
        times.append(_as_measured(dry_runs, options, speed, "this machine", prices.here(), num_workers))
    for file in measured_there or []:
        there = _measured_there(file, model_digest(path))
        its = replace(
            options, kv_cache_bytes=there.cache_bytes, max_num_seqs=there.step_rows,
            max_num_batched_tokens=there.step_tokens,
        )  # fmt: skip
        times.append(_as_measured(dry_runs, its, there, there.machine, prices.given(), num_workers))
    width = bytes_per_parameter(path, spec, quantize)
    count, shards = workers * replicas, max(1, dry_runs.planned.shards)
    groups = [
        ReplicaGroup(name, tensor_parallel, count, prices.of_replica(name, tensor_parallel)) for name in hardware or []
    ]
    bounds = lower_bounds(amount, spec, width, kv_dtype, groups, context, min(count, shards))
    times += [
        _entry(amount, str(group), None, None, count, one) if isinstance(one, str) else _bound_entry(amount, one)
        for group, one in zip(groups, bounds, strict=True)
    ]
    fitting = [one for one in bounds if not isinstance(one, str)]
    if as_json:
        capacities = [one.as_json() for one in fitting]
        output.print_json({**asdict(amount), "workers": num_workers, "times": times, "capacity": capacities})
        return
    _show(amount, times)
    if fitting:
        _show_capacity(fitting)
    if not amount.rows:
        output.say("the input holds no rows: nothing would be computed")
    elif speed is None:
        output.say("no time for this machine yet: 'tokenmill bench --model MODEL' measures it")


def _measured_there(file: Path, digest: str) -> MeasuredSpeed:
    from tokenmill import bench_results
    from tokenmill.errors import UserError

    try:
        speed = bench_results.read_bench(file)
    except ValueError as error:
        raise UserError(str(error)) from error
    if speed.model != digest:
        raise UserError(f"{file}: was measured with another model than --model names; run 'tokenmill bench' with it")
    return speed


def _as_measured(
    dry_runs: JobDryRuns, options: EngineOptions, speed: MeasuredSpeed, on: str, price: float | None, workers: int
) -> dict[str, Any]:
    """Time and cost on a measured machine; each worker computes its part."""
    seconds = dry_runs.seconds(options, speed, workers)
    basis = f"measured {speed.measured_at}, {output.arithmetic(speed)}, batch {speed.batch}"
    several = on if workers == 1 else f"{on} x {workers}"
    return _entry(dry_runs.amount(options), several, seconds, price, workers, basis)


def _bound_entry(amount: InputEstimate, bound: HardwareBound) -> dict[str, Any]:
    replicas, work = bound.replicas, bound.work
    price = replicas.price_per_hour
    share = work.sum_seconds / work.estimate.seconds if work.sum_seconds else 0.0
    communication = f", {share:.0%} of it communication" if share else ""
    priced = "" if price is None else f", {price:g} an hour"
    basis = f"lower bound, batch {work.estimate.sequences}{communication}{priced}"
    return _entry(amount, str(replicas), work.estimate.seconds, price, bound.parts, basis)


def _entry(
    amount: InputEstimate, on: str, seconds: float | None, price: float | None, workers: int, basis: str
) -> dict[str, Any]:
    cost = None if price is None or seconds is None else workers * seconds / 3600 * price
    tokens = amount.prompt_tokens + amount.expected_tokens
    return {
        "on": on,
        "seconds": seconds,
        "cost": cost,
        "cost_per_million_tokens": None if cost is None or not tokens else cost / tokens * 1e6,
        "cost_per_million_output_tokens": (
            None if cost is None or not amount.expected_tokens else cost / amount.expected_tokens * 1e6
        ),
        "basis": basis,
    }


def _show(amount: InputEstimate, times: list[dict[str, Any]]) -> None:
    codes = ", ".join(f"{code.value} {count}" for code, count in sorted(amount.reasons.items()))
    copies = amount.rows - amount.rejected - amount.unique
    rows = [
        ("rows", output.count(amount.rows), ""),
        ("  invalid", output.count(amount.rejected), codes),
        ("  copies", output.count(copies), "answered once"),
        ("  computed", output.count(amount.unique), ""),
        ("input tokens", output.count(amount.prompt_tokens), "counted" if amount.exact else "estimated from a sample"),
        ("  shared", output.count(amount.shared_prefix_tokens), "read from the prefix cache, not computed again"),
        ("output tokens", output.count(amount.expected_tokens), "expected"),
        ("  at most", output.count(amount.max_tokens), "if every answer is as long as it may be"),
    ]
    console = output.stdout()
    console.print(output.table(None, ("", "count", ""), rows, right=("count",)))
    if times:
        cells = [
            (
                entry["on"],
                None if entry["seconds"] is None else output.duration(entry["seconds"]),
                None if entry["cost"] is None else f"{entry['cost']:.4f}",
                None if entry["cost_per_million_tokens"] is None else f"{entry['cost_per_million_tokens']:.4f}",
                entry["basis"],
            )
            for entry in times
        ]
        console.print()
        console.print(
            output.table(
                None, ("on", "time", "cost", "a million tokens", ""), cells, right=("time", "cost", "a million tokens")
            )
        )


def _show_capacity(bounds: list[HardwareBound]) -> None:
    columns = ("on", "weights", "KV a token", "KV a request", "requests at once", "a month")
    rows = []
    for one in bounds:
        replicas, fits, month = one.replicas, one.capacity, one.replicas.price_per_month
        rows.append((
            str(replicas), output.size(fits.weight_bytes), output.size(fits.kv_bytes_per_token),
            output.size(fits.kv_bytes_per_request), output.count(replicas.count * fits.max_requests),
            None if month is None else output.count(month),
        ))  # fmt: skip
    console = output.stdout()
    console.print()
    console.print(output.table(None, columns, rows, right=columns[1:]))
    console.print(
        f"Bytes are those on each device; requests have {output.count(bounds[0].capacity.context_tokens)} tokens."
    )
