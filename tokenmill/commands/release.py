"""`tokenmill release`: comparison of a new model version with the served one, promotion and rollback."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug, Json, RootUrl, amount_of_time
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.models.registry import ModelRegistry, ReleaseState
    from schemas.models import CatalogEntry
    from schemas.releases import Bounds, ReleaseComparison
    from schemas.settings.releases import ReleaseRules
    from tokenmill.root import Root

app = typer.Typer(
    help="New versions of models: tried on copies of real work, compared with the version that is served, and then "
    "promoted or rolled back. Start workers with --candidate first.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What requests call the model.")]


@app.command("start", short_help="Begin to compare a new version.")
def start(
    version: Annotated[
        str,
        typer.Argument(
            metavar="NAME@sha256:DIGEST",
            help="The new version; the first 8 digits of its digest are enough. 'release status NAME' lists them.",
        ),
    ],
    share: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of the shards that it computes, too. Default: as the settings say."),
    ] = None,
    mirror: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the callers' requests that gateways copy to it. Default: as the settings say.",
        ),
    ] = None,
    canary: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the callers that it answers, after the comparison before that has kept all limits. "
            "Default: as the settings say.",
        ),
    ] = None,
    longest: Annotated[
        timedelta | None,
        typer.Option(parser=amount_of_time, metavar="TIME", help="Roll it back if it isn't decided by then."),
    ] = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Only compare; 'release promote' or 'rollback' ends it.")
    ] = False,
    root_url: RootUrl = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Begin a release: workers with --candidate compute copies of what the served version has answered, a dispatcher
    compares, and promotes the new version or rolls it back. No client gets what the new version computes, but for the
    share of --canary.
    """
    from pipeline.models.registry import ModelRegistry
    from tokenmill.errors import UserError
    from tokenmill.root import open_root

    settings = read_settings()
    given = {
        "share": share,
        "mirror": mirror,
        "canary": canary,
        "longest_seconds": None if longest is None else longest.total_seconds(),
    }
    rules = settings.releases.model_validate(
        settings.releases.model_dump() | {name: value for name, value in given.items() if value is not None}
    )
    if shadow and rules.canary:
        raise UserError(
            "--shadow only compares, and --canary lets the new version answer callers; leave one of them out"
        )
    with open_root(root_url, settings) as root:
        name, entry = _version(root, version)
        mode: Literal["canary", "shadow"] = "shadow" if shadow else "canary"
        release = ModelRegistry(root.world.store).begin(name, entry, rules, root.world.clock.now(), mode)
    if as_json:
        output.print_json(release.model_dump(mode="json"))
        return
    output.say(
        f"release {release.number} of {name}: {_short(release.candidate)} beside {_short(release.stable)}, "
        f"on {', '.join(_shares(rules))}"
    )


@app.command("status", short_help="How a model's release stands.")
def status(
    name: Name,
    history: Annotated[bool, typer.Option("--history", help="All releases of the model, the first one first.")] = False,
    root_url: RootUrl = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Which version is served, which there are, and how the last release stands."""
    from pipeline.models.catalog import Catalog
    from pipeline.models.registry import ModelRegistry
    from tokenmill.errors import UserError
    from tokenmill.root import open_root

    with open_root(root_url, read_settings(), read_only=True) as root:
        registry, catalog = ModelRegistry(root.world.store), Catalog(root.world.store)
        served, versions, found = catalog.find(name), catalog.versions(name), registry.history(name)
        if served is None and not versions:
            raise UserError(f"no worker has served {name} in {root.url}; 'tokenmill worker --model {name}=…' does")
        shown = [_document(root, registry, one) for one in (found if history else found[-1:])]
    if as_json:
        output.print_json({
            "model": name,
            "served": None if served is None else served.pin.digest,
            "versions": [entry.pin.digest for entry in versions],
            "releases": shown,
        })  # fmt: skip
        return
    print(f"{name} is {'not served' if served is None else served.pin.digest}")
    for entry in versions:
        print(f"  {entry.pin.digest}  {entry.pin.dtype}, {entry.pin.quantization}  from {entry.pin.source}")
    for document in shown:
        for line in _lines(document):
            print(line)


@app.command("promote", short_help="Serve the new version, without waiting.")
def promote(name: Name, root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """End the open release: the new version is served from now on, whatever was compared."""
    _end(name, "promoted", root_url, as_json=as_json)


@app.command("rollback", short_help="Keep the old version, or go back to it.")
def rollback(name: Name, root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """End the open release: the old version stays. Where none is open and the last one was promoted, the version before
    it is served again; workers that hold it must run."""
    _end(name, "rolled_back", root_url, as_json=as_json)


def _end(name: str, verdict: Literal["promoted", "rolled_back"], root_url: str | None, *, as_json: bool) -> None:
    from pipeline.models.registry import ModelRegistry, ReleaseError, ReleaseState
    from tokenmill.root import open_root

    with open_root(root_url, read_settings()) as root:
        registry, now = ModelRegistry(root.world.store), root.world.clock.now()
        last = registry.last(name)
        if last is not None and last.outcome is None:
            ended = ReleaseState(last.release, registry.end(last.release, verdict, "operator", now))
        elif verdict == "rolled_back":
            ended = registry.roll_back_promoted(name, now)
        else:
            raise ReleaseError(f"no release of {name} is open; 'tokenmill release start' begins one")
        document = _document(root, registry, ended)
    if as_json:
        output.print_json(document)
        return
    outcome = ended.outcome
    assert outcome is not None
    word = outcome.verdict.replace("_", " ")
    output.say(f"release {ended.release.number} of {name}: {word}; {_short(ended.served)} is served")


def _version(root: Root, given: str) -> tuple[str, CatalogEntry]:
    """The model's name, and the one matching version. Raises `UserError`."""
    from pipeline.models.catalog import BY_DIGEST, Catalog
    from tokenmill.errors import UserError

    name, mark, digits = given.rpartition(BY_DIGEST)
    if not mark or not name or len(digits) < 8:
        raise UserError(f"{given}: give NAME@sha256:DIGEST, with 8 digits or more of the new version's digest")
    versions = Catalog(root.world.store).versions(name)
    found = [entry for entry in versions if entry.pin.name.startswith(given)]
    if len(found) == 1:
        return name, found[0]
    known = ", ".join(_short(entry) for entry in versions) or "none"
    what = "several versions begin so" if found else "no worker has such a version"
    raise UserError(f"{given}: {what} (there are: {known}); start one with 'tokenmill worker --candidate'")


def _shares(rules: ReleaseRules) -> list[str]:
    """What the new version computes, for people."""
    found = [f"{rules.share:.3g} of the shards"]
    if rules.mirror:
        found.append(f"{rules.mirror:.3g} of the callers' requests (copies)")
    if rules.canary:
        found.append(f"{rules.canary:.3g} of the callers (after the comparison)")
    return found


def _document(root: Root, registry: ModelRegistry, state: ReleaseState) -> dict[str, Any]:
    from pipeline.models.rollout_controller import compare_release

    release, outcome = state.release, state.outcome
    comparison = outcome.comparison if outcome is not None else compare_release(root.world, release)
    canary = registry.canary(release) if release.rules.canary else None
    return {
        "release": release.number,
        "mode": release.mode,
        "model": release.name,
        "stable": release.stable.pin.digest,
        "candidate": release.candidate.pin.digest,
        "started_at": release.started_at.isoformat(),
        "canary_since": None if canary is None else canary.at.isoformat(),
        "rules": release.rules.model_dump(mode="json"),
        "verdict": None if outcome is None else outcome.verdict,
        "by": None if outcome is None else outcome.by,
        "ended_at": None if outcome is None else outcome.at.isoformat(),
        "reasons": [] if outcome is None else list(outcome.reasons),
        "comparison": None if comparison is None else comparison.model_dump(mode="json"),
    }


def _lines(document: dict[str, Any]) -> list[str]:
    from schemas.releases import ReleaseComparison

    word = "open" if document["verdict"] is None else f"{document['verdict'].replace('_', ' ')} by {document['by']}"
    lines = [f"release {document['release']} ({document['mode']}): {word}; {document['candidate']} is tried"]
    lines += [f"  {reason}" for reason in document["reasons"]]
    if document["comparison"] is not None:
        found = ReleaseComparison.model_validate(document["comparison"])
        lines.append(f"  shards: {found.rows} rows of {found.shards} shards were compared")
        lines += [f"    {line}" for line in _comparison_lines(found)]
        for name, part in (("mirror", found.mirror), ("canary", found.canary)):
            if part is not None:
                dropped = f"; {part.dropped} copies were dropped" if part.dropped else ""
                lines.append(f"  {name}: {part.rows} requests were compared{dropped}")
                lines += [f"    {line}" for line in _comparison_lines(part)]
    if document["verdict"] is None and document["rules"]["canary"]:
        since = document["canary_since"]
        share = f"{document['rules']['canary']:.3g} of the callers"
        lines.append(f"  canary: {share} {'after the comparison' if since is None else f'since {since}'}")
    return lines


def _comparison_lines(found: ReleaseComparison) -> list[str]:
    lines = [f"{found.failed} failed with the new version only" + (f"; {found.lost} were lost" if found.lost else "")]
    named: list[tuple[str, Bounds | None]] = [
        ("agreement", found.agreement),
        ("time of a token", found.latency),
        ("time to the first token", found.ttft),
        ("time between tokens", found.itl),
        ("length of answers", found.length),
    ]
    for what, bounds in named:
        if bounds is not None:
            lines.append(f"{what}: {bounds.mean:.3g} ({bounds.low:.3g} to {bounds.high:.3g})")
    if found.drift is not None:
        lines.append(f"drift of log-probabilities: {found.drift.mean:.3g} nats (most {found.drift.most:.3g})")
    return lines


def _short(entry: CatalogEntry) -> str:
    return (entry.pin.digest or entry.pin.source)[:19]
