"""`tokenmill prices`: the price book, for estimates and costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug, Json
from tokenmill.errors import EXIT_USAGE
from tokenmill.local.pricing import load_price_book, price_of_worker
from tokenmill.settings import read_settings

app = typer.Typer(help="Prices of machines: list them, check a book.", rich_markup_mode=None)
Book = Annotated[
    Path | None,
    typer.Argument(
        metavar="[BOOK]", help="A file of prices. Default: TOKENMILL_PRICE_BOOK, else the one that comes along."
    ),
]


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Show the help when no command is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


@app.command("list", short_help="The prices of a book.")
def list_prices(book: Book = None, as_json: Json = False, _debug: Debug = False) -> None:
    """List what machines cost by the hour, where and by which market, since when and who says so."""
    found = load_price_book(book or read_settings().price_book)
    if as_json:
        output.print_json(found.model_dump(mode="json"))
        return
    rows = [
        (one.instance_type, one.region, one.market, f"{one.per_hour:g}", one.as_of.isoformat(), one.source)
        for one in sorted(found.price, key=lambda one: (one.instance_type, one.region, one.market))
    ]
    columns = ("instance type", "region", "market", f"{found.currency} an hour", "as of", "source")
    output.stdout().print(output.table(None, columns, rows, right=(columns[3],)))


@app.command("check", short_help="Whether a book can be used.")
def check_prices(book: Book = None, as_json: Json = False, _debug: Debug = False) -> None:
    """Read a book, and say what an hour of a worker with these settings costs. Exit code 1: the book can't be used, or
    lacks the configured instance."""
    settings = read_settings()
    found = load_price_book(book or settings.price_book)
    price = price_of_worker(settings.model_copy(update={"price_book": book or settings.price_book}))
    if as_json:
        output.print_json({"prices": len(found.price), "currency": found.currency, "price_per_hour": price})
        return
    said = "nothing says what a worker here costs" if price is None else f"a worker here costs {price:g} an hour"
    output.say(f"{len(found.price)} prices in {found.currency}; {said}")
