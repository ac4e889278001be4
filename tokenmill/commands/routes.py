"""`tokenmill models route`: virtual models, whose rules choose one of several served models for each request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug, Json, RootUrl
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from schemas.virtual_models import VirtualModel

app = typer.Typer(
    help="Virtual models of a root: names that stand for several served models, and the rules that choose one for each "
    "request.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The virtual model's name in requests.")]


@app.command("set", short_help="Store a virtual model's rules.")
def set_route(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Its name and rules, as TOML (or .json).")],
    root_url: RootUrl = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Store the rules in FILE, in place of earlier ones of the same name. Single requests follow them within seconds;
    jobs that were accepted before keep the former rules."""
    from pipeline.models.virtual_models import VirtualModels
    from tokenmill.config.rule_files import read_virtual_model
    from tokenmill.root import open_root

    virtual = read_virtual_model(file)
    with open_root(root_url, read_settings()) as root:
        virtual = virtual.model_copy(update={"published_at": root.world.clock.now()})
        VirtualModels(root.world.store).publish(virtual)
    if as_json:
        output.print_json(_document(virtual))
    else:
        output.say(f"{virtual.name}: {len(virtual.rules)} rules over {', '.join(virtual.models)}")


@app.command("list", short_help="All virtual models.")
def list_routes(root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """List the virtual models of a root, and the models that may answer in their place."""
    from pipeline.models.virtual_models import VirtualModels
    from tokenmill.root import open_root

    with open_root(root_url, read_settings(), read_only=True) as root:
        found = VirtualModels(root.world.store).all()
    if as_json:
        output.print_json({"virtual_models": [_document(one) for one in found]})
        return
    rows = [(one.name, str(len(one.rules)), ", ".join(one.models)) for one in found]
    output.stdout().print(output.table(None, ("name", "rules", "models"), rows, right=("rules",)))


@app.command("show", short_help="One virtual model's rules.")
def show_route(name: Name, root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """Show the rules of a virtual model in their order. The first one that holds decides."""
    from pipeline.models.virtual_models import VirtualModels
    from tokenmill.errors import UserError
    from tokenmill.root import open_root

    with open_root(root_url, read_settings(), read_only=True) as root:
        virtual = VirtualModels(root.world.store).find(name)
        if virtual is None:
            raise UserError(f"{root.url}: has no virtual model {name}; 'tokenmill models route list' shows them")
    if as_json:
        output.print_json(_document(virtual))
        return
    for number, rule in enumerate(_document(virtual)["rules"], start=1):
        conditions = rule.get("when", {}).items()
        when = "; ".join(f"{key} {json.dumps(value)}" for key, value in conditions)
        print(f"{number}. {rule['model']}{f' if {when}' if when else ''}")


@app.command("remove", short_help="Remove a virtual model.")
def remove_route(name: Name, root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """Remove a virtual model. Open jobs keep its rules."""
    from pipeline.models.virtual_models import VirtualModels
    from tokenmill.errors import UserError
    from tokenmill.root import open_root

    with open_root(root_url, read_settings()) as root:
        if not VirtualModels(root.world.store).remove(name):
            raise UserError(f"{root.url}: has no virtual model {name}; 'tokenmill models route list' shows them")
    if as_json:
        output.print_json({"removed": name})
    else:
        output.say(f"{name} is removed")


def _document(virtual: VirtualModel) -> dict[str, Any]:
    return virtual.model_dump(mode="json", exclude_none=True)
