"""`tokenmill gc`: removing from a root what nobody needs any more."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from tokenmill import output
from tokenmill.commands.serve import RootUrl
from tokenmill.options import Debug, Json, amount_of_time
from tokenmill.settings import read_settings


def collect(
    root_url: RootUrl = None,
    output_expires_after: Annotated[
        timedelta | None,
        typer.Option(
            parser=amount_of_time,
            metavar="TIME",
            help="Remove results of jobs that ended longer ago, such as 30d. Default: results are kept.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Remove what nobody needs any more: leftovers of jobs that have ended and, if asked for, results that are old.

    A job that is open is never touched, and a job's order and outcome stay for ever. It may be stopped at any moment;
    the next one goes on. Safe while everything else runs.
    """
    from pipeline.retention import Collector, RetentionSettings
    from tokenmill.root import open_root

    with open_root(root_url, read_settings()) as root:
        found = Collector(root.world, RetentionSettings(outputs=output_expires_after), dry_run=dry_run).run()
    if as_json:
        output.print_json(
            {
                "dry_run": dry_run,
                "objects": {kind.value: number for kind, number in sorted(found.objects.items())},
                "bytes": {kind.value: number for kind, number in sorted(found.num_bytes.items())},
                "jobs": found.jobs,
            }
        )
        return
    rows = [
        (kind.value.replace("_", " "), output.count(number), output.size(found.num_bytes[kind]))
        for kind, number in sorted(found.objects.items())
    ]
    if rows:
        output.stdout().print(output.table(None, ("kind", "objects", "size"), rows, right=("objects", "size")))
    verb = "would be removed" if dry_run else "removed"
    output.say(f"{output.count(found.objects.total())} objects {verb}; results of {len(found.jobs)} jobs")
