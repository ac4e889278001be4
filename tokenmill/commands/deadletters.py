"""`tokenmill deadletters`: listing, showing and replaying dead letters."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug, Json, RootUrl
from tokenmill.errors import EXIT_USAGE
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.ingest.dead_letters import DeadLetter, DeadLetterEntry

app = typer.Typer(help="What could not become a request: list it, show it, send it again.", rich_markup_mode=None)

Letter = Annotated[str, typer.Argument(metavar="ID", help="Of the dead letter, as 'list' shows it.")]
SHOWN_BYTES = 2_000


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Show the help when no command is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


@app.command("list", short_help="List dead letters, the newest first.")
def list_dead_letters(
    root_url: RootUrl = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """List what could not become a request, with the reason; the newest first."""
    from pipeline.ingest.dead_letters import DeadLetters
    from tokenmill.root import open_root

    with open_root(root_url, read_settings()) as opened:
        found = list(islice(DeadLetters(opened.world).dead_letters(), limit + 1))
        url = opened.url
    shown = found[:limit]
    if as_json:
        output.print_json({"dead_letters": [_document(one) for one in shown], "more": len(found) > limit})
        return
    rows = [
        (
            one.dead_letter.id,
            one.dead_letter.at.isoformat(timespec="seconds"),
            one.dead_letter.ingest_source,
            one.dead_letter.reason_code,
            one.dead_letter.place,
            "yes" if one.replays else "no",
        )
        for one in shown
    ]
    if rows:
        output.stdout().print(output.table(None, ("id", "at", "source", "reason", "from", "replayed"), rows))
    if len(found) > limit:
        output.say(f"only the newest {limit}; --limit shows more")
    if not found:
        output.say(f"no dead letters in {url}")


@app.command("show", short_help="One dead letter, with its original.")
def show_dead_letter(letter: Letter, root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """Show why something could not become a request, where it came from, and how it began."""
    from pipeline.ingest.dead_letters import DeadLetters
    from tokenmill.root import open_root

    with open_root(root_url, read_settings()) as opened:
        dead_letters = DeadLetters(opened.world)
        found = dead_letters.find(letter)
        original = dead_letters.original(found.dead_letter)
        replays = dead_letters.replays(letter)
    dead = found.dead_letter
    beginning = original[:SHOWN_BYTES].decode(errors="backslashreplace")
    if as_json:
        sent = [replay.model_dump(mode="json", exclude={"version"}) for replay in replays]
        output.print_json(_document(found) | {"headers": _headers(dead), "original": beginning, "replayed": sent})
        return
    facts: list[tuple[str, object]] = [
        ("id", dead.id),
        ("reason", dead.reason_code),
        ("message", dead.message),
        ("source", dead.ingest_source),
        ("from", dead.place),
        ("position", dead.position),
        ("at", dead.at.isoformat(timespec="seconds")),
        *((f"header {name}", value) for name, value in _headers(dead)),
        *((f"replayed {replay.at.isoformat(timespec='seconds')}", replay.outcome) for replay in replays),
    ]
    if dead.size:
        kept = "" if dead.stored == dead.size else f", of which {output.size(dead.stored)} were kept"
        facts.append(("original", output.size(dead.size) + kept))
    console = output.stdout()
    console.print(output.table(None, ("", ""), facts))
    if beginning:
        console.print(beginning, markup=False)


@app.command("replay", short_help="Submit a dead letter to its ingest source again.")
def replay_dead_letter(
    letter: Letter,
    root_url: RootUrl = None,
    again: Annotated[bool, typer.Option("--again", help="Also if it was sent again before.")] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Submit a dead letter to its ingest source again, after the cause is corrected.

    A file is ingested again at the next sweep of its folder or bucket. A message goes to the queue or topic that it
    came from.
    """
    from pipeline.ingest.dead_letters import DeadLetters
    from tokenmill.jobs.replay import sender
    from tokenmill.root import open_root

    settings = read_settings()
    with open_root(root_url, settings) as opened:
        dead_letters = DeadLetters(opened.world)
        with sender(dead_letters.find(letter).dead_letter, settings) as send:
            outcome = dead_letters.replay(letter, send, again=again)
    if as_json:
        output.print_json({"id": letter, "outcome": outcome})
    else:
        output.say(f"{letter}: {outcome}")


def _document(found: DeadLetterEntry) -> dict[str, Any]:
    """A dead letter as JSON."""
    letter = found.dead_letter
    return letter.model_dump(mode="json", by_alias=False, include=set(_SHOWN)) | {"replays": found.replays}


_SHOWN = ("id", "ingest_source", "place", "position", "at", "recorded_at", "reason_code", "message", "size", "stored")


def _headers(letter: DeadLetter) -> list[tuple[str, str | None]]:
    return [
        (name, None if value is None else value.decode(errors="backslashreplace"))
        for name, value in letter.record_headers()
    ]
