"""`tokenmill submit`: submission of a file of requests to a running installation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from tokenmill.config.cli_options import (
    Debug,
    Json,
    MaxCost,
    MaxOutputTokens,
    OnInvalid,
    Tier,
    TruncatePrompt,
    amount_of_time,
)
from tokenmill.errors import UserError


def _amount(given: str) -> str:
    """Validate an amount of time; it is sent as written, and counts from the job's acceptance."""
    amount_of_time(given)
    return given.strip()


def submit(
    input_: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="JSONL (also .gz or .zst), Parquet, Arrow or CSV: a file; for a topic also a folder, or an s3:// or "
            "file:// URL.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="A gateway: http(s)://HOST:PORT; a root: s3://BUCKET/PREFIX, or the folder of 'tokenmill serve'; or a "
            "topic of jobs by reference: kafka://HOST[:PORT][/TOPIC].",
        ),
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="As the installation calls it.")
    ] = None,
    tier: Annotated[Tier | None, typer.Option(help="How urgent the job is. Default: the installation's.")] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            parser=_amount,
            metavar="TIME",
            help="Such as 6h, 30m or 2d, from when the job is accepted: rows without an answer by then expire.",
        ),
    ] = None,
    refuse_late: Annotated[
        bool, typer.Option("--refuse-late", help="Rather compute nothing than miss the deadline.")
    ] = False,
    max_cost: MaxCost = None,
    max_output_tokens: MaxOutputTokens = None,
    truncate_prompt: TruncatePrompt = None,
    on_invalid: Annotated[
        OnInvalid | None, typer.Option(help="An invalid line fails by itself (row), or stops the job at once (job).")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows of the input.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Of sampled requests that bring none.")] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="For a gateway, which needs to know. Default: as the first line says, else chat."
        ),
    ] = None,
    cache: Annotated[
        bool | None,
        typer.Option(
            "--cache/--no-cache",
            help="Take answers of equal requests from the answer store, and store this job's. Default: the "
            "installation's.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Report the job's progress until it has ended.")] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Hand a file of requests to an installation, and print the job's id. Each time is a new job.

    A gateway gets the file and makes a batch of it, for 24 h if there is no --deadline; the API key, if it needs one,
    is read from TOKENMILL_API_KEY, else OPENAI_API_KEY. A file goes below incoming/ of a root; a topic gets a record
    that names it. With --watch the exit code is 0 when
    all rows have ended, as for 'run', and Ctrl-C ends the watching only. S3 and Kafka are reached as TOKENMILL_S3__…
    and TOKENMILL_KAFKA__… say.
    """
    from tokenmill.jobs import submit as submission
    from tokenmill.jobs.watch import print_new_job

    if refuse_late and deadline is None:
        raise UserError("--refuse-late needs a --deadline")
    chosen: dict[str, Any] = {
        "model": model, "tier": tier, "deadline": deadline, "refuse_late": refuse_late or None, "max_cost": max_cost,
        "seed": seed, "max_output_tokens": max_output_tokens, "on_invalid": on_invalid, "limit": limit,
        "truncate_prompt": truncate_prompt, "cache": cache,
    }  # fmt: skip
    options = {name: value for name, value in chosen.items() if value is not None}
    made = submission.submit(input_, to, options, endpoint)
    print_new_job(made if not watch else replace(made, notes=()), watch=watch, as_json=as_json)
