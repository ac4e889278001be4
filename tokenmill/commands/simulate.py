"""`tokenmill simulate`: simulation of an installation, compared with an optimal schedule."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tokenmill import output
from tokenmill.config import cli_options
from tokenmill.config.cli_options import Debug, Json
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.simulator.regional_simulation import RegionalReport, RegionReport
    from pipeline.simulator.regions import RegionSettings
    from pipeline.simulator.report import SimulationReport
    from pipeline.simulator.settings import SimulationSettings

Pattern = Literal["bursts", "ramp", "daynight", "spot-storm"]


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help='Jobs as JSON lines: {"at": 0, "rows": 1000, "prompt_tokens": 300, "output_tokens": 200, "deadline": '
            '3600}, all but the first two may be absent; {"at": 60, "interrupt": 0.2} takes machines away.',
        ),
    ] = None,
    pattern: Annotated[Pattern | None, typer.Option(help="A trace that is drawn instead. [default: daynight]")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Workers that there may be at most. [default: 8]")
    ] = None,
    regions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Installations in several regions, as TOML, with GPUs, prices by hour, outages and the regions of "
            "tenants; each job's region is chosen at its arrival.",
        ),
    ] = None,
    fixed: Annotated[bool, typer.Option("--fixed", help="All of them all the time, without the autoscaler.")] = False,
    worker: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="How fast a worker is: what 'tokenmill bench --json' has printed. Default: an assumed large GPU.",
        ),
    ] = None,
    cold_start_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds until a worker that is wished for computes. Default: of --worker, else 240."),
    ] = None,
    hours: Annotated[float, typer.Option(min=0.1, max=24 * 31, help="Of a drawn trace.")] = 24.0,
    requests_per_day: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=1e11,
            help="Of a drawn trace. Default: what a third of the workers could do; with --regions, of the smallest.",
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="That they come in. Default: 12 an hour.")] = None,
    prompt_tokens: Annotated[float, typer.Option(min=1, help="Of a drawn trace's requests, on average.")] = 300.0,
    output_tokens: Annotated[float, typer.Option(min=1, help="Likewise.")] = 200.0,
    deadlines: Annotated[
        tuple[float, float],
        typer.Option(min=1, metavar="SHORTEST LONGEST", help="Of a drawn trace's jobs that have one, in seconds."),
    ] = (3_600.0, 21_600.0),
    answer_error: Annotated[
        float, typer.Option(min=0, max=2, help="By how much answers turn out longer or shorter than estimated (sigma).")
    ] = 0.2,
    seed: Annotated[int, typer.Option(help="Of all that is drawn: the same seed gives the same result.")] = 0,
    price_per_hour: Annotated[
        float | None, typer.Option(parser=cli_options.price, metavar="PRICE", help="Of a worker, for the cost.")
    ] = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Replay a trace on a virtual clock: with the dispatcher's and the autoscaler's own decisions, and workers that
    take the time that was measured.

    The report compares the simulation with an oracle that knows all beforehand: which deadlines could be met, and
    the least worker-hours. The autoscaler's limits are those of TOKENMILL_AUTOSCALE__LIMITS, with --gpus at most.
    Requests whose callers wait are not simulated.

    With --regions, the report has each region's jobs, tokens, cost and late jobs, and the same for one region alone.
    """
    from pipeline.simulator.regional_simulation import regional_report
    from pipeline.simulator.regions import draw_regional_trace, read_regions
    from pipeline.simulator.report import report
    from pipeline.simulator.settings import SimulationSettings
    from pipeline.simulator.simulation import simulate as run_simulation
    from pipeline.simulator.trace import TraceSettings, draw_trace, read_trace
    from pipeline.simulator.worker_model import EXAMPLE, read_worker_model

    if trace is not None and pattern is not None:
        raise typer.BadParameter("give --trace or --pattern, not both")
    if deadlines[0] > deadlines[1]:
        raise typer.BadParameter(f"--deadlines {deadlines[0]:g} {deadlines[1]:g}: give the shortest first")
    if regions is not None and (gpus is not None or price_per_hour is not None):
        raise typer.BadParameter("--regions has each region's GPUs and prices: leave out --gpus and --price-per-hour")
    several = None if regions is None else read_regions(regions)
    gpus = min(one.gpus for one in several.region) if several is not None else gpus or 8
    settings = read_settings()
    model = EXAMPLE if worker is None else read_worker_model(worker)
    if cold_start_seconds is not None:
        model = model.model_copy(update={"cold_start_seconds": cold_start_seconds})
    if trace is None:
        if requests_per_day is None:
            requests_per_day = gpus / 3 * model.rows_per_second(model.batch, prompt_tokens, output_tokens) * 86_400
        requests = max(1, round(requests_per_day * hours / 24))
        how = TraceSettings(requests, hours, jobs, prompt_tokens, output_tokens, deadlines)
        if several is None:
            drawn = draw_trace(pattern or "daynight", how, seed)
        else:
            drawn = draw_regional_trace(pattern or "daynight", how, seed, several)
    else:
        drawn = read_trace(trace)
        if several is None and any(job.home or job.regions for job in drawn.jobs):
            raise typer.BadParameter(f"{trace} names regions: describe them with --regions")
    limits = settings.autoscale.limits
    simulation = SimulationSettings(
        model,
        limits.model_copy(update={"max_workers": gpus, "min_workers": min(limits.min_workers, gpus)}),
        fixed_workers=gpus if fixed else None,
        interval_seconds=settings.autoscale.interval_seconds,
        plan=settings.plan,
        answer_error=answer_error,
        seed=seed,
    )
    started = time.perf_counter()
    if several is not None:
        across = regional_report(drawn, simulation, several)
        seconds = time.perf_counter() - started
        if as_json:
            given = {**_settings(simulation, several), "regions": several.model_dump()}
            output.print_json({**asdict(across), "seed": seed, "settings": given, "simulated_in": seconds})
            return
        _show_regions(across)
        output.say(f"simulated in {output.duration(seconds)}; worker: {across.worker}")
        return
    found = report(drawn, simulation, run_simulation(drawn, simulation), price_per_hour)
    seconds = time.perf_counter() - started
    if as_json:
        output.print_json({**asdict(found), "seed": seed, "settings": _settings(simulation), "simulated_in": seconds})
        return
    _show(found)
    output.say(f"simulated {found.hours:.1f} hours in {output.duration(seconds)}; worker: {found.worker}")


def _settings(simulation: SimulationSettings, several: RegionSettings | None = None) -> dict[str, object]:
    of_region = {"max_workers"} if several is not None else set()  # each region has its own
    return {
        "worker": simulation.worker.model_dump(),
        "scaling": None if simulation.fixed_workers else simulation.scaling.model_dump(exclude=of_region),
        "interval_seconds": simulation.interval_seconds,
        "plan": simulation.plan.model_dump(),
        "answer_error": simulation.answer_error,
    }


def _show(found: SimulationReport) -> None:
    cost = "" if found.cost is None else f", cost {found.cost:,.2f}"
    rows = [
        ("trace", found.trace),
        ("came in", f"{output.count(found.requests)} requests in {output.count(found.jobs)} jobs"),
        ("computed", f"{output.count(found.tokens)} tokens, {output.count(found.tokens_per_second)} a second"),
        ("workers", f"{found.workers_mean:.1f} on average, {found.workers_peak} at most, of {found.gpus}"),
        ("paid for", f"{found.worker_hours:,.1f} worker-hours{cost}; {found.busy_share:.0%} of them with work"),
        (
            "at least, knowing all",
            f"{found.oracle_worker_hours:,.1f} worker-hours; this is {found.cost_over_oracle:.2f} times that",
        ),
        (
            "deadlines",
            f"{found.deadlines_met} of {found.deadlines} met; of the {found.deadlines_oracle} that could be met, "
            f"{found.met_of_oracle:.1%}",
        ),
        (
            "until work began",
            f"{output.duration(found.wait_p50)} (median), {output.duration(found.wait_p95)} (95 %), "
            f"{output.duration(found.wait_max)} (worst)",
        ),
        ("until a job's end", f"{output.duration(found.took_p50)} (median), {output.duration(found.took_p95)} (95 %)"),
        ("changes of the wish", f"{found.changes}; at most {found.changes_an_hour_max} within an hour"),
        (
            "machines",
            f"{found.starts} started, {found.interrupted} taken away; "
            f"{output.count(found.repeated_rows)} rows computed again",
        ),
        ("shards", f"{output.count(found.shards)}; at most {found.longest_queue} in a queue"),
    ]
    console = output.stdout()
    console.print(output.table(None, ("", ""), rows))
    hourly = found.series[:: max(1, len(found.series) // 24)]
    console.print()
    cells = [(f"{at:.1f}", wish, live, f"{backlog:,.1f}") for at, wish, live, backlog in hourly]
    columns = ("hour", "wished for", "live", "backlog, worker-hours")
    console.print(output.table(None, columns, cells, right=columns))


def _show_regions(found: RegionalReport) -> None:
    columns = ("", "jobs", "of other regions", "tokens", "worker-hours", "cost", "of it transfers", "late")
    alone = [(f"{one.name} alone{', the best' * (one.name == found.best_single)}", one) for one in found.single]
    rows = [(one.name, one) for one in found.regions] + [("all", found.total), *alone]
    cells = [_region_cells(name, one) for name, one in rows]
    output.stdout().print(output.table(found.trace, columns, cells, right=columns[1:]))
    if found.best_single is None:
        output.say("no region may take all jobs, so there is no single region to compare with")


def _region_cells(name: str, found: RegionReport) -> tuple[str, ...]:
    return (
        name,
        str(found.jobs),
        str(found.moved),
        output.count(found.tokens),
        f"{found.worker_hours:,.1f}",
        f"{found.cost:,.2f}",
        f"{found.transfer_cost:,.2f}",
        f"{found.late} of {found.deadlines}",
    )
