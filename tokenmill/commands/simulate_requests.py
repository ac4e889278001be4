"""`tokenmill simulate-requests`: a simulation of prefill and decode workers, against chunked prefill."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tokenmill import output
from tokenmill.config import cli_options
from tokenmill.config.cli_options import Debug, Json
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.simulator.serving.comparison import ComparedDeployment, Machines

PublishedModel = Literal["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b"]
"""The names in `PUBLISHED_MODELS`, whose import would slow down --help."""

RequestMix = Literal["chat", "mixed", "varied", "8k", "32k", "chat+8k", "chat+32k"]
"""The names in `REQUEST_MIXES`."""

MACHINES = re.compile(r"(?P<count>\d{1,4})x(?:(?P<devices>\d{1,3})x)?(?P<name>[a-z0-9]+)")


def _price(given: str) -> tuple[str, float]:
    """DEVICE=PRICE."""
    name, _, price = given.partition("=")
    found = cli_options.price(price)
    if not found:
        raise typer.BadParameter(f"{given!r}: costs are compared; give a price above 0")
    return name, found


def simulate_requests(
    whole: Annotated[
        str,
        typer.Option(metavar="WORKERS", help="Workers of whole requests: COUNTxDEVICE, or COUNTxDEVICESxDEVICE."),
    ] = "4xh100",
    prefill: Annotated[
        str | None,
        typer.Option(metavar="WORKERS", help="Prefill workers. Default: --whole is divided, in each possible way."),
    ] = None,
    decode: Annotated[str | None, typer.Option(metavar="WORKERS", help="Decode workers, likewise.")] = None,
    model: Annotated[PublishedModel, typer.Option(help="A published model's shape.")] = "llama-3.1-8b",
    bytes_per_parameter: Annotated[float, typer.Option(min=0.25, max=4, help="2 for 16 bits, 1 for 8 bits.")] = 2.0,
    bytes_per_kv_element: Annotated[float, typer.Option(min=0.25, max=4, help="Of the KV cache, likewise.")] = 2.0,
    mix: Annotated[
        RequestMix | None, typer.Option(help="Lengths of prompts and answers. [default: chat+8k]", show_default=False)
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="Median of prompts; in place of --mix.")
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, max=8_192, help="Median of answers, with --prompt-tokens. Default: 200.")
    ] = None,
    cached: Annotated[float, typer.Option(min=0, max=0.99, help="Share of each prompt in the prefix cache.")] = 0.0,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-3, max=1e5, help="Requests a second at --whole. Default: 70 % of its goodput."),
    ] = None,
    offline: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="So many requests arrive at once, as a job's rows do.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=86_400, help="For which requests arrive. Default: 60.")
    ] = None,
    gigabits: Annotated[float, typer.Option(min=1e-3, help="A second, of each worker's link.")] = 100.0,
    handover_ms: Annotated[
        float, typer.Option(min=0, max=60_000, help="Of a split, beside the transfer: the lane, a round trip.")
    ] = 5.0,
    ttft: Annotated[float, typer.Option(min=1e-3, max=3_600, help="Target: seconds until the first token.")] = 1.0,
    itl_ms: Annotated[float, typer.Option(min=1, max=60_000, help="Target: mean time between tokens.")] = 50.0,
    in_time: Annotated[float, typer.Option(min=0.01, max=1, help="Share of requests for the goodput.")] = 0.9,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE=PRICE", help="Of an hour of a device. Default: the price book's. Repeat."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the requests: the same seed gives the same result.")] = 0,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Compare workers that compute whole requests with prefill and decode workers, at equal cost.

    A worker's steps take as long as a roofline of the device says; requests arrive at random, at each deployment in
    proportion to its price. "Split where it pays" decides for each request by its size and the workers' load; "always
    split" sends every prompt to the prefill workers. "In time" are the requests that keep both targets: their rate is
    the goodput at these arrivals. Max goodput is the highest rate of arrivals at which enough requests do.
    """
    from pipeline.lane.placement import LatencyTargets
    from pipeline.planner.estimates.capacity import DoesNotFit
    from pipeline.planner.estimates.published_models import PUBLISHED_MODELS
    from pipeline.simulator.serving import comparison
    from pipeline.simulator.serving.link import LinkSettings
    from pipeline.simulator.serving.requests import REQUEST_MIXES, LengthDistribution
    from tokenmill.errors import UserError

    if (prefill is None) != (decode is None):
        raise typer.BadParameter("give --prefill and --decode, or none of them")
    if offline is not None and (rate is not None or seconds is not None):
        raise typer.BadParameter("with --offline all requests arrive at once; leave out --rate and --seconds")
    if mix is not None and prompt_tokens is not None:
        raise typer.BadParameter("give --mix or --prompt-tokens, not both")
    if answer_tokens is not None and prompt_tokens is None:
        raise typer.BadParameter("give --answer-tokens with --prompt-tokens; --mix has lengths of its own")
    split = None if prefill is None or decode is None else (_machines(prefill), _machines(decode))
    settings = comparison.ComparisonSettings(
        replace(
            PUBLISHED_MODELS[model], bytes_per_parameter=bytes_per_parameter, bytes_per_kv_element=bytes_per_kv_element
        ),
        REQUEST_MIXES[mix or "chat+8k"]
        if prompt_tokens is None
        else (LengthDistribution(1.0, prompt_tokens, answer_tokens or 200),),
        LatencyTargets(ttft, itl_ms / 1000),
        LinkSettings(gigabits * 1e9 / 8, handover_ms / 1000),
        cached_share=cached,
        seconds=seconds or 60.0,
        requests_at_once=offline,
        in_time_share=in_time,
        seed=seed,
    )
    machines = [_machines(whole), *(split or ())]
    devices, given = {one.hardware.name for one in machines}, dict(map(_price, price or ()))
    if unknown := given.keys() - devices:
        raise typer.BadParameter(f"--price {min(unknown)}: no such device is compared")
    prices = _prices(devices, given)
    compared = comparison.candidates(settings, prices, machines[0], split)
    try:
        found = comparison.compare_deployments(compared, settings, rate, output.say)
    except DoesNotFit as error:
        raise UserError(str(error)) from error
    if as_json:
        output.print_json({"deployments": [asdict(one) for one in found], "prices": prices, "seed": seed})
        return
    _show(found)


def _machines(given: str) -> Machines:
    """Workers as they are typed."""
    from pipeline.planner.estimates.capacity import HARDWARE
    from pipeline.simulator.serving.comparison import Machines

    match = MACHINES.fullmatch(given.strip().lower())
    if match is None or match["name"] not in HARDWARE:
        raise typer.BadParameter(
            f"{given!r}: give workers as 4xh100, or as 2x4xh100; devices are {', '.join(HARDWARE)}"
        )
    count, shared = int(match["count"]), int(match["devices"] or 1)
    if not count or not shared:
        raise typer.BadParameter(f"{given!r}: there is no worker, or no device in it")
    return Machines(count, HARDWARE[match["name"]], shared)


def _prices(devices: set[str], given: dict[str, float]) -> dict[str, float]:
    """Prices of these devices by the hour. Raises `UserError` where one is not known."""
    from tokenmill.errors import UserError
    from tokenmill.local.pricing import load_price_book

    settings = read_settings()
    book, instance = load_price_book(settings.price_book), settings.instance
    prices = {}
    for name in sorted(devices):
        found = book.find(name, instance.region, instance.market)
        if name not in given and found is None:
            raise UserError(f"the price book has no price of {name}; give --price {name}=PRICE")
        prices[name] = given.get(name, 0.0 if found is None else found.per_hour)
    return prices


def _show(found: list[ComparedDeployment]) -> None:
    first = ("workers", "price an hour", "arrivals/s")
    latencies = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
    columns = (
        *first,
        *latencies,
        "output tokens/s",
        "split",
        "in time",
        "in time/s",
        "max goodput/s",
        "goodput for 1.00",
    )
    rows = []
    for one in found:
        report, is_offline = one.report, one.goodput is None
        seconds = (report.ttft_p50, report.ttft_p99, report.itl_p50, report.itl_p99)
        rows.append((
            one.name, f"{one.price_per_hour:.2f}", "at once" if is_offline else f"{one.requests_per_second:.2f}",
            *map(output.duration, seconds), output.count(report.output_tokens_per_second),
            f"{report.placements.get('split', 0) / report.requests:.0%}",
            None if is_offline else f"{report.in_time_share:.1%}",
            None if is_offline else f"{report.in_time_per_second:.2f}",
            None if is_offline else f"{one.goodput:.2f}", output.count(one.goodput_per_price),
        ))  # fmt: skip
    output.stdout().print(output.table(None, columns, rows, right=columns[1:]))
