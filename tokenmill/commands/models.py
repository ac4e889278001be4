"""`tokenmill models`: listing and pulling models in the local cache, and the virtual models of a root."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from tokenmill import output
from tokenmill.commands import routes
from tokenmill.config.cli_options import Debug, EngineOption, Json
from tokenmill.errors import EXIT_USAGE, ModelError
from tokenmill.models import sources
from tokenmill.settings import read_settings

app = typer.Typer(
    help="Models in the local cache: list them, pull more, show what computes one. Virtual models of a root.",
    rich_markup_mode=None,
)
app.add_typer(routes.app, name="route", short_help="Virtual models of a root.")


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Show the help when no command is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


@app.command("list", short_help="Models in the cache.")
def list_models(as_json: Json = False, _debug: Debug = False) -> None:
    """List the models in the local cache."""
    cache = read_settings().model_cache
    found = sources.cached(cache)
    if as_json:
        output.print_json({"cache": cache, "models": [{**asdict(s), "for": sources.purpose(s)} for s in found]})
        return
    rows = [(s.name, s.revision, sources.purpose(s), output.size(s.size), s.path) for s in found]
    output.stdout().print(output.table(None, ("name", "revision", "for", "size", "path"), rows, right=("size",)))
    if not found:
        output.say(f"no models in {cache}; 'tokenmill models pull demo' gets a small one")


@app.command("pull", short_help="Fetch a model.")
def pull_model(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="'demo', a hub name (owner/name), s3://BUCKET/PREFIX, a folder or a GGUF file."
        ),
    ],
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Fetch a model into the local cache, and print where it is."""
    source = sources.pull(name, read_settings().model_cache, output.say)
    if as_json:
        output.print_json(asdict(source))
    else:
        print(source.path)


@app.command("show", short_help="What computes a model.")
def show_model(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="As in 'tokenmill run'; it is pulled if needed.")],
    engine: EngineOption = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Show a model's architecture, which engines compute it, which one would on this machine, and why, and the sampling
    parameters that its authors set."""
    from engine.models.load import architecture_of
    from tokenmill.config.engine_choice import choose_engine, computed_by
    from workers.model.generation_config import sampling_defaults
    from workers.model.loaded_model import model_path

    settings = read_settings()
    source = sources.pull(name, settings.model_cache, output.say)
    path = model_path(source.path)
    wanted = engine or settings.engine
    chosen: str | None = None
    try:
        choice = choose_engine(path, wanted, settings.vllm.python)
        chosen, why = choice.engine, choice.why
    except ModelError as error:
        if wanted != "auto":
            raise
        why = str(error)
    defaults = sampling_defaults(path)
    facts: dict[str, Any] = {
        "path": path,
        "architecture": architecture_of(path) if path.is_dir() else "GGUF",
        "size": source.size,
        "engine": chosen,
        "why": why,
        "computed_by": computed_by(path, settings.vllm.python),
        "sampling_defaults": {} if defaults is None else defaults.model_dump(exclude_none=True),
    }
    if as_json:
        output.print_json(facts)
        return
    shown = ", ".join(f"{name} {value}" for name, value in facts["sampling_defaults"].items())
    facts |= {"engine": chosen or "none"} | facts.pop("computed_by")
    facts |= {"size": output.size(source.size), "sampling_defaults": shown or "none"}
    cells = [*facts.items()]
    output.stdout().print(output.table(None, ("", ""), cells))
