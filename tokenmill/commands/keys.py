"""`tokenmill keys`: API keys of HTTP, and their scopes."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug, Json, RootUrl, amount_of_time
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.gateway.http.api_keys import ApiKey

app = typer.Typer(
    help="API keys for HTTP. Only their hashes are stored. As soon as one exists, requests without a key are refused.",
    no_args_is_help=True,
)


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose files and jobs the key is for.")] = "default",
    scope: Annotated[
        list[str], typer.Option(help="files, batches, inference, metrics or admin (all of them). May be repeated.")
    ] = ["files", "batches", "inference"],  # noqa: B006 - typer only reads it
    expires_in: Annotated[
        timedelta | None,
        typer.Option(parser=amount_of_time, metavar="TIME", help="Such as 90d. Default: it never expires."),
    ] = None,
    label: Annotated[str, typer.Option(help="A note for people.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Refuse requests to a model that ask for more tokens than this.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Most requests in a minute. Default: as the settings say.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Most tokens in a minute, of prompts and answers.")
    ] = None,
    running_requests: Annotated[
        int | None, typer.Option(min=1, help="Most requests to a model that are under way at once.")
    ] = None,
    running_rows: Annotated[
        int | None, typer.Option(min=1, help="Most answers that are under way at once; a request with n has n.")
    ] = None,
    running_jobs: Annotated[
        int | None, typer.Option(min=1, help="Make no batch when the tenant has so many open ones.")
    ] = None,
    stored_bytes: Annotated[
        int | None, typer.Option(min=1, help="Take no upload when the tenant's files would have more bytes.")
    ] = None,
    stored_files: Annotated[
        int | None, typer.Option(min=1, help="Take no upload when the tenant has so many files.")
    ] = None,
    root_url: RootUrl = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Make a key. It is shown once, and never again."""
    from pipeline.gateway.http.api_keys import ApiKeys, Scope
    from schemas.requests.limits import RateLimits
    from tokenmill.errors import UserError
    from tokenmill.root import open_root

    try:
        scopes = tuple(dict.fromkeys(Scope(one) for one in scope))
    except ValueError as error:
        raise UserError(f"{error}; scopes are {', '.join(Scope)}") from None
    if not 1 <= len(tenant) <= 256 or len(label) > 200:
        raise UserError("a tenant has 1 to 256 characters, and a label at most 200")
    with open_root(root_url, read_settings()) as root:
        expires = None if expires_in is None else root.world.clock.now() + expires_in
        limits = RateLimits(
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            running_requests=running_requests,
            running_rows=running_rows,
            running_jobs=running_jobs,
            stored_bytes=stored_bytes,
            stored_files=stored_files,
        )
        key, text = ApiKeys(root.world).create(
            tenant, scopes, expires_at=expires, label=label, max_tokens=max_tokens, limits=limits
        )
    if as_json:
        output.print_json({"id": key.id, "key": text, **_facts(key, revoked=False)})
        return
    print(text)
    output.say(f"key {key.id} of tenant {key.tenant} for {', '.join(key.scopes)}; keep it: it is not shown again")


@app.command("list")
def list_keys(root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """Show all keys, without their secrets."""
    from pipeline.gateway.http.api_keys import ApiKeys
    from tokenmill.root import open_root

    with open_root(root_url, read_settings(), read_only=True) as root:
        found = list(ApiKeys(root.world).listed())
    if as_json:
        output.print_json([{"id": one.key.id, **_facts(one.key, revoked=one.revoked)} for one in found])
        return
    columns = ("id", "tenant", "scopes", "created", "expires", "max tokens", "limits", "label", "state")
    rows = [
        (
            one.key.id,
            one.key.tenant,
            " ".join(one.key.scopes),
            f"{one.key.created_at:%Y-%m-%d}",
            None if one.key.expires_at is None else f"{one.key.expires_at:%Y-%m-%d}",
            one.key.max_tokens,
            _limits(one.key),
            one.key.label,
            "revoked" if one.revoked else "valid",
        )
        for one in found
    ]
    output.stdout().print(output.table(None, columns, rows, right=("max tokens",)))


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As 'keys list' shows it.")],
    root_url: RootUrl = None,
    _debug: Debug = False,
) -> None:
    """End a key. Gateways notice within seconds."""
    from pipeline.gateway.http.api_keys import ApiKeys
    from tokenmill.root import open_root

    with open_root(root_url, read_settings()) as root:
        key = ApiKeys(root.world).revoke(key_id)
    output.say(f"key {key.id} of tenant {key.tenant} is revoked")


def _limits(key: ApiKey) -> str | None:
    return ", ".join(f"{name} {most}" for name, most in key.limits.model_dump(exclude_none=True).items()) or None


def _facts(key: ApiKey, *, revoked: bool) -> dict[str, Any]:
    return key.model_dump(mode="json", exclude={"id", "digest", "version"}) | {"revoked": revoked}
