"""`tokenmill gc`: garbage collection in a root."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug, Json, RootUrl, amount_of_time
from tokenmill.settings import read_settings


def collect(
    root_url: RootUrl = None,
    output_expires_after: Annotated[
        timedelta | None,
        typer.Option(
            parser=amount_of_time,
            metavar="TIME",
            help="Remove results of jobs that ended longer ago, such as 30d, unless the job itself says how long they "
            "are kept. Default: TOKENMILL_RETENTION__OUTPUTS, else they are kept.",
        ),
    ] = None,
    deadletters_expire_after: Annotated[
        timedelta | None,
        typer.Option(
            parser=amount_of_time,
            metavar="TIME",
            help="Remove dead letters that are older. Default: TOKENMILL_RETENTION__DEADLETTERS, else they are kept.",
        ),
    ] = None,
    intake_expires_after: Annotated[
        timedelta | None,
        typer.Option(
            parser=amount_of_time,
            metavar="TIME",
            help="Remove what intakes keep to know an event again, when it is older: longer than any source repeats "
            "events. Default: TOKENMILL_RETENTION__INTAKE, 30d.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Remove expired objects: leftovers of jobs that have ended, results and stored answers past their retention and,
    on request, older results and dead letters.

    A job that is open is never touched, and a job's order and outcome stay for ever. It may be stopped at any moment;
    the next one goes on. Safe while everything else runs; 'serve' and 'dispatcher' do it once a day by themselves.
    """
    from pipeline.maintenance.retention import RetentionSweep
    from tokenmill.root import open_root, retention_settings

    settings = read_settings()
    periods = retention_settings(settings, output_expires_after, deadletters_expire_after, intake_expires_after)
    with open_root(root_url, settings) as root:
        found = RetentionSweep(root.world, periods, dry_run=dry_run).run()
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
