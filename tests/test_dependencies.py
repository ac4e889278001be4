"""Each package that the product imports is one that it declares: what comes only with another one may go with it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.syntax import parsed

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("tokenmill", "workers", "pipeline", "engine", "schemas")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def imported() -> dict[str, set[str]]:
    """Top-level modules of others, and the files that import them."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.walk(parsed(file)):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                for name in names:
                    found.setdefault(name.partition(".")[0], set()).add(str(file.relative_to(REPOSITORY)))
    return {name: files for name, files in found.items() if name not in {*sys.stdlib_module_names, *PACKAGES}}


def declared() -> set[str]:
    """Distributions that the product requires, in any extra; normalized."""
    wanted = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    return {normalized(re.split(r"[\[<>=;~! ]", one, maxsplit=1)[0]) for one in wanted}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
def test_given_the_products_imports_when_they_are_looked_up_then_each_is_of_a_declared_distribution() -> None:
    known, required = packages_distributions(), declared()
    missing = {
        name: sorted(files)
        for name, files in imported().items()
        if required.isdisjoint(normalized(one) for one in known.get(name, [name]))
    }
    assert missing == {}, "declare what is imported in pyproject.toml, and pin it in infra/images/constraints.txt"
