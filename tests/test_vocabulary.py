"""The names of the product: the field's words, each public class name once, small rooms."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from pipeline.observability.metric_definitions import METRICS
from schemas.settings.settings import Settings
from tests.syntax import parsed

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("tokenmill", "workers", "pipeline", "engine", "schemas")

BANNED = frozenset({
    "asked", "asker", "beside", "door", "doors", "figures", "foreman", "heard", "letter", "letters", "mill", "outlook",
    "paper", "papers", "purses", "rehearsal", "rehearse", "shelf", "together", "told", "triage", "wishes",
})  # fmt: skip
"""Words of no field: in the name of a module, a class or a function they say nothing to a newcomer."""

ALLOWED = (("dead", "letter"), ("dead", "letters"))
"""Terms of the field that hold a banned word."""

NOT_IN_CONTRACTS = frozenset(
    {"callers", "every", "least", "most", "pace", "patience", "place", "places", "promise", "unforeseen"}
)
"""Further words that no setting, metric or label has."""

STORED = {"TOKENMILL_RELEASES__LEAST_SHARDS", "TOKENMILL_RELEASES__MOST_SHARDS"}
"""Settings whose names are keys of stored objects, which stay readable."""

MAX_MODULES = 18
"""Of a folder, subfolders aside."""


def words(name: str) -> list[str]:
    """The words of an identifier, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def banned_words(name: str, banned: frozenset[str] = BANNED) -> set[str]:
    found = words(name)
    for first, second in ALLOWED:
        for at in range(len(found) - 1, 0, -1):
            if (found[at - 1], found[at]) == (first, second):
                del found[at]
    return set(banned.intersection(found))


def setting_names(of: type[BaseModel], path: tuple[str, ...] = ("TOKENMILL_",)) -> Iterator[str]:
    for name, field in of.model_fields.items():
        inner = field.annotation
        if inspect.isclass(inner) and issubclass(inner, BaseModel):
            yield from setting_names(inner, (*path, name))
        else:
            yield (path[0] + "__".join((*path[1:], name))).upper()


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]


def definitions(path: Path) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(parsed(path)) if isinstance(node, kinds)]


def test_settings_and_metrics_have_the_fields_words_too() -> None:
    settings = set(setting_names(Settings))
    metrics = {name for metric in METRICS for name in (metric.name, *metric.labels)}
    assert "TOKENMILL_LANE__SLO__TTFT_SECONDS" in settings
    assert "tokenmill_slo_weight" in metrics
    assert settings >= STORED
    names = (settings - STORED) | metrics
    assert {name for name in names if banned_words(name.lower(), BANNED | NOT_IN_CONTRACTS)} == set()


def test_names_are_the_fields_words() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name}: {', '.join(sorted(bad))}"
        for path in modules()
        for node in definitions(path)
        if (bad := banned_words(node.name))
    ]
    found += [str(path.relative_to(REPOSITORY)) for path in modules() if banned_words(path.stem)]
    assert found == []


def test_a_public_class_name_exists_once() -> None:
    files = defaultdict(list)
    for path in modules():
        for node in definitions(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(path.relative_to(REPOSITORY)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_no_folder_is_a_heap_of_modules() -> None:
    sizes = {
        str(folder.relative_to(REPOSITORY)): len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        for folder in {path.parent for path in modules()}
    }
    assert {folder: size for folder, size in sizes.items() if size > MAX_MODULES} == {}


def test_a_banned_word_is_found_in_any_case() -> None:
    assert banned_words("KafkaDoorSettings") == {"door"}
    assert banned_words("tell_figures") == {"figures"}
    assert banned_words("DeadLetterCounts") == set()
    assert banned_words("dead_letters_of") == set()
    assert banned_words("unsent_letters") == {"letters"}
    assert banned_words("indoors") == set()
