"""The command line: it registers the commands, and turns every error into one line and an exit code.

0: done (failed rows included). 1: the job could not run. 2: bad usage. 130: interrupted.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from tokenmill.commands import (
    autoscale,
    bench,
    canary,
    chat,
    deadletters,
    estimate,
    gc,
    keys,
    models,
    prices,
    quantize,
    release,
    run,
    serve,
    simulate,
    simulate_requests,
    submit,
)
from tokenmill.commands.experiments import commands as experiments
from tokenmill.commands.jobs import show
from tokenmill.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    StoppedWatching,
    UserError,
    explain,
    interrupted,
)
from tokenmill.output import say

app = typer.Typer(
    name="tokenmill",
    help="Turns files of LLM requests into tables of answers, and loses nothing on the way.",
    epilog="Answers go to Parquet, progress to stderr. Each command explains itself: tokenmill COMMAND --help.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tokenmill {version('tokenmill')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Show the help when no command is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


app.command("run", short_help="Answer a file of requests, into Parquet.")(run.run)
app.command("submit", short_help="Submit a file to an installation that runs elsewhere.")(submit.submit)
app.command("serve", short_help="Answer HTTP, and what is dropped into a folder; all in one process.")(serve.serve)
app.command("worker", short_help="Compute shards that a dispatcher dispatches.")(serve.worker)
app.command("dispatcher", short_help="Plan jobs and dispatch their shards.")(serve.dispatcher)
app.add_typer(deadletters.app, name="deadletters", short_help="Dead letters: input that could not become a request.")
app.command("gc", short_help="Remove expired objects from a root.")(gc.collect)
app.command("intake", short_help="Ingest jobs from a bucket, Kafka or Celery.")(serve.intake)
app.command("chat", short_help="Talk to a model that is served.")(chat.chat)
app.command("autoscale", short_help="Decide how many workers there should be.")(autoscale.autoscale)
app.command("gateway", short_help="Serve HTTP for OpenAI's clients.")(serve.gateway)
app.add_typer(keys.app, name="keys", short_help="API keys for HTTP.")
app.command("estimate", short_help="Tokens, time and cost before anything runs.")(estimate.estimate)
app.command("simulate", short_help="A day of an installation in seconds.")(simulate.simulate)
app.command("simulate-requests", short_help="Prefill and decode workers against chunked prefill.")(
    simulate_requests.simulate_requests
)
app.add_typer(prices.app, name="prices", short_help="What machines cost by the hour.")
app.add_typer(show.app, name="jobs", short_help="Jobs in local folders, and in roots.")
app.add_typer(models.app, name="models", short_help="Models in the local cache.")
app.add_typer(release.app, name="release", short_help="New versions of models, compared before they are served.")
app.add_typer(experiments.app, name="experiment", short_help="The scheduler's weights, compared on live traffic.")
app.add_typer(canary.app, name="canary", short_help="What a model must answer before it is served.")
app.command("quantize", short_help="A quantized checkpoint of a model, and what it costs.")(quantize.quantize)
app.command("bench", short_help="Throughput of this machine.")(bench.bench)


def main(arguments: Sequence[str] | None = None, stopped: Callable[[], bool] = lambda: False) -> int:
    """Run one command; the process's exit code. Never raises, and prints a traceback only with --debug.

    Args:
        stopped: whether a stop signal has arrived while the command was starting. Any error then is the result of it:
            libraries replace exceptions that are raised while they are imported (before Python 3.12 each class with a
            `__set_name__` does).
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Not standalone: typer would print a box of many lines and exit by itself.
        code = app(args=given, prog_name="tokenmill", standalone_mode=False)
    except typer.TyperException as error:
        return _usage(error)
    except StoppedWatching as ended:
        say(str(ended))
        return EXIT_INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output is gone
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001  # the outermost handler: every error is reported
        if stopped():
            return EXIT_OK
        if interrupted(error):
            say("interrupted")
            return EXIT_INTERRUPTED
        return _failed(error, debug="--debug" in given)
    if code == EXIT_INTERRUPTED:  # typer's code for a KeyboardInterrupt in a command
        say("interrupted")
    return code if isinstance(code, int) else EXIT_OK


def _usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "tokenmill"
    message = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    if path == "tokenmill run" and message.startswith("No such option"):
        message = _sampling_hint(getattr(error, "option_name", "")) or message
    say(f"error: {message}; see '{path} --help'")
    return EXIT_USAGE


def _sampling_hint(option: str) -> str | None:
    """The message for an option that `run` lacks and that is a sampling parameter; None: it is none."""
    from tokenmill.frames.options import Sampling

    name = option.removeprefix("--").replace("-", "_")
    if name not in Sampling.__annotations__:
        return None
    return f"No such option: {option}; with --prompt give --sampling {name}=VALUE, else {name} in each request's body"


def _failed(error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    say(f"error: {explain(error)}")
    return error.exit_code if isinstance(error, UserError) else EXIT_FAILED
