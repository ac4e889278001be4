"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer


def price(given: str) -> float:
    """A price from 0; JSON has neither infinity nor NaN."""
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{given!r} is no price; give a number from 0")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, for programs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]

Input = Annotated[
    str, typer.Argument(metavar="INPUT", help="JSONL or Parquet: a file, or a folder of files. One request a line.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="What answers: 'demo', a folder, a GGUF file, or a hub name (owner/name). NAME=MODEL gives it the name "
        "that the requests use.",
    ),
]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="The job's folder, as given to 'run --output'.")]

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu"]
Tier = Literal["standard", "bulk"]
OnInvalid = Literal["row", "job"]
