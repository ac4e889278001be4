"""`tokenmill estimate`: tokens, time and cost, before anything runs."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import options, output
from tokenmill.options import Debug, DType, Input, Json, KvDType, Model, Quantize
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from engine.models.base import ModelSpec
    from pipeline.planner import InputEstimate
    from schemas.job import InputRef, JobSettings, ModelPin
    from tokenmill.measured import MeasuredSpeed

DEVICES = ("b200", "h200", "h100", "a100", "l40s", "l4", "t4")
"""The names in `pipeline.planner.capacity.HARDWARE`, which takes longer to import than --help may take."""


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
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            parser=options.price,
            metavar="PRICE",
            help="For the cost. Default: of this machine the configured one, of devices a typical one.",
        ),
    ] = None,
    dtype: Annotated[DType, typer.Option(help="For the time on this machine: what 'run' would compute in.")] = "auto",
    quantize: Annotated[Quantize, typer.Option(help="For the time on this machine, likewise.")] = "none",
    kv_dtype: Annotated[KvDType, typer.Option(help="For the time on this machine, likewise.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="For the time on this machine.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows of the input.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Count the tokens of every prompt, not of a sample.")] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Say how many tokens a job has, how long it takes and what it costs. Nothing is computed.

    The time on this machine comes from the last 'tokenmill bench' with this model; that on other hardware is a lower
    bound, from its arithmetic and its memory.
    """
    from engine.engine import resolve_device, resolve_model_dtype
    from engine.models.load import describe_model
    from schemas.job import ModelPin
    from tokenmill import job_options, measured
    from workers.model_host import dtype_name, model_digest, model_path

    settings = read_settings()
    wanted = job_options.job_settings(
        settings, tier="standard", seed=0, on_invalid="row", limit=limit, max_output_tokens=None
    )
    inputs = job_options.read_input(input_)
    chosen = job_options.choose_model(model, settings.model_cache)
    path = model_path(chosen.source.path)
    spec = describe_model(path, dtype=resolve_model_dtype(path, dtype, resolve_device("auto"))).spec
    pin = ModelPin(name=chosen.name, source=str(path), dtype=dtype_name(spec), quantization=quantize, kv_dtype=kv_dtype)
    amount = _measure(inputs, pin, wanted, path, exact=exact)
    speed = measured.recall(
        settings.model_cache, model=model_digest(path), dtype=pin.dtype, threads=threads, quantization=quantize,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    times = []
    if speed is not None:
        times.append(_here(amount, speed, settings.price_per_hour if price_per_hour is None else price_per_hour))
    times += [_elsewhere(amount, spec, name, price_per_hour) for name in hardware or []]
    if as_json:
        output.print_json({**asdict(amount), "times": times})
        return
    _show(amount, times)
    if speed is None:
        output.say("no time for this machine yet: 'tokenmill bench --model MODEL' measures it")


def _measure(inputs: InputRef, pin: ModelPin, wanted: JobSettings, path: Path, *, exact: bool) -> InputEstimate:
    """The input, read and validated as planning would, in a temporary place."""
    from pipeline.adapters.folder import FolderStore
    from pipeline.adapters.system import SystemClock, SystemRandomness
    from pipeline.planner import measure, open_source
    from pipeline.ports import World
    from schemas.job import Job
    from tokenmill.inputs import open_input
    from tokenmill.job_options import token_counter

    clock = SystemClock()
    job = Job(id="estimate", input=inputs, models=(pin,), settings=wanted, created_at=clock.now())
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder, FolderStore(Path(folder)) as store:
        world = World(store, clock, SystemRandomness(), Path(folder))
        source = open_source(open_input(inputs).files(), inputs.format, wanted.limits, pin.name)
        return measure(source, job, world, counter=token_counter(path), exact=exact)


def _here(amount: InputEstimate, speed: MeasuredSpeed, price: float | None) -> dict[str, Any]:
    """Time and cost on this machine, as measured."""
    seconds = amount.computed_prompt_tokens / speed.prefill + amount.expected_tokens / speed.decode
    cost = None if price is None else seconds / 3600 * price
    basis = f"measured {speed.measured_at}, {output.arithmetic(speed)}, batch {speed.batch}"
    return {"on": "this machine", "seconds": seconds, "cost": cost, "basis": basis}


def _elsewhere(amount: InputEstimate, spec: ModelSpec, name: str, price: float | None) -> dict[str, Any]:
    """The least time and cost on one device; seconds None where the model doesn't fit."""
    from pipeline.planner.capacity import HARDWARE, DoesNotFit, ModelShape, bound

    try:
        least = bound(
            ModelShape(spec.num_parameters, spec.num_layers, spec.num_kv_heads, spec.head_dim),
            HARDWARE[name],
            requests=amount.unique,
            prompt_tokens=amount.prompt_tokens,
            computed_prompt_tokens=amount.computed_prompt_tokens,
            output_tokens=amount.expected_tokens,
            price_per_hour=price,
        )
    except DoesNotFit as error:
        return {"on": name, "seconds": None, "cost": None, "basis": str(error)}
    hourly = HARDWARE[name].price_per_hour if price is None else price
    basis = f"lower bound, batch {least.sequences}, {hourly:g} an hour"
    return {"on": name, "seconds": least.seconds, "cost": least.cost, "basis": basis}


def _show(amount: InputEstimate, times: list[dict[str, Any]]) -> None:
    codes = ", ".join(f"{code.value} {count}" for code, count in sorted(amount.reasons.items()))
    copies = amount.rows - amount.rejected - amount.unique
    rows = [
        ("rows", output.count(amount.rows), ""),
        ("  invalid", output.count(amount.rejected), codes),
        ("  copies", output.count(copies), "answered once"),
        ("  computed", output.count(amount.unique), ""),
        ("input tokens", output.count(amount.prompt_tokens), "counted" if amount.exact else "estimated from a sample"),
        ("  shared", output.count(amount.shared_prefix_tokens), "prefixes that are computed once"),
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
                entry["basis"],
            )
            for entry in times
        ]
        console.print()
        console.print(output.table(None, ("on", "time", "cost", ""), cells, right=("time", "cost")))
