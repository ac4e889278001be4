"""`tokenmill canary`: the answers that a model must give before a worker serves it."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill import output
from tokenmill.config.cli_options import (
    Debug,
    DeviceOption,
    DTypeOption,
    EngineOption,
    EngineOptionValues,
    Json,
    KvDTypeOption,
    QuantizeOption,
    RootUrl,
    Threads,
)
from tokenmill.settings import read_settings

app = typer.Typer(
    help="What a model answers to the canary prompts. Each worker's first model of a digest, dtype and quantization is "
    "recorded in the root; later ones must answer alike, or they end with exit code 71.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.callback()
def root() -> None:
    """Keep `record` a command of its own."""


@app.command("record", short_help="Write down what a model answers.")
def record(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As of 'tokenmill worker --model'.")],
    again: Annotated[bool, typer.Option("--again", help="Replace what was recorded.")] = False,
    root_url: RootUrl = None,
    dtype: DTypeOption = "auto",
    quantize: QuantizeOption = "none",
    kv_dtype: KvDTypeOption = "auto",
    device: DeviceOption = "auto",
    threads: Threads = None,
    engine: EngineOption = None,
    engine_option: EngineOptionValues = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Have the model answer the canary prompts on this machine, and record that in the root. Where it is recorded
    already the two are compared, and exit code 71 says that they differ."""
    from pipeline.models.canaries import Canaries
    from tokenmill.config.engine_choice import choose_engines
    from tokenmill.config.engine_options import engine_options
    from tokenmill.config.job_options import choose_model
    from tokenmill.processes.runtime import unique_name
    from tokenmill.root import open_root
    from tokenmill.services.readiness import Readiness
    from tokenmill.services.worker import load_any
    from workers.text.chat_options import OWN_CHAT

    settings = read_settings()
    options = engine_options(
        settings, dtype=dtype, device=device, threads=threads, max_num_seqs=32, quantize=quantize, kv_dtype=kv_dtype,
        speculate="off", engine=engine, engine_option=engine_option,
    )  # fmt: skip
    (chosen,) = choose_engines([choose_model(model, settings.model_cache)], options)
    with open_root(root_url, settings) as root:
        canaries = Canaries(root.world.store)
        loaded = load_any(chosen, options.config(), OWN_CHAT, options.vllm)
        if again:
            canaries.forget(loaded.pin())
        known = canaries.find(loaded.pin()) is not None
        Readiness(root.world, settings.warmup, unique_name(root.world.random)).load(lambda: loaded)
        made = canaries.find(loaded.pin())
    assert made is not None, "it was recorded"
    if as_json:
        facts = {"key": made.pin.key, "digest": made.pin.digest, "recorded_at": made.recorded_at.isoformat()}
        output.print_json({**facts, "recorded": not known, "tokens": sum(len(a.tokens) for a in made.answers)})
        return
    said = "answers as recorded" if known else "recorded"
    output.say(f"{chosen.name} ({made.pin.digest}, {made.pin.dtype}, {made.pin.quantization}): {said}")
