"""`tokenmill models route`: rules from a file, stored in a root."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.models.catalog import Catalog
from schemas.models import CatalogEntry
from tests.pipeline.made_jobs import PIN
from tokenmill.config.rule_files import MAX_BYTES

RULES = """
name = "auto"

[[rules]]
model = "large"
when = { prompt_tokens = { min = 2000 }, languages = ["en"], hours = "06:00-22:00" }

[[rules]]
model = "tiny"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    with FolderStore(folder) as store:
        for name in ("tiny", "large"):
            Catalog(store).publish(CatalogEntry(pin=PIN.model_copy(update={"name": name}), max_model_len=512))
    return folder


@pytest.mark.slow
def test_rules_are_stored_shown_and_removed(root: Path, tmp_path: Path, tokenmill: Any) -> None:
    def route(*arguments: Any, code: int = 0) -> Any:
        done = tokenmill("models", "route", *arguments, "--root", root)
        assert done.code == code, done.err
        return done

    file = tmp_path / "auto.toml"
    file.write_text(RULES)
    stored = json.loads(route("set", file, "--json").out)
    assert (stored["name"], len(stored["rules"]), "published_at" in stored) == ("auto", 2, True)
    file.with_suffix(".json").write_text(json.dumps({"name": "b", "rules": [{"model": "large"}]}))
    route("set", file.with_suffix(".json"))
    assert [one["name"] for one in json.loads(route("list", "--json").out)["virtual_models"]] == ["auto", "b"]
    shown = route("show", "auto").out.splitlines()
    assert shown == [
        '1. large if prompt_tokens {"min": 2000}; languages ["en"]; hours "06:00-22:00"',
        "2. tiny",
    ]
    route("remove", "auto")
    assert "auto" not in route("list").out
    for command in ("show", "remove"):
        assert "has no virtual model auto" in route(command, "auto", code=1).err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (RULES.replace("tiny", "gone"), "'gone' is not served here (large, tiny)"),
        (RULES.replace("min = 2000", "minimum = 2"), "rules.0.when.prompt_tokens.minimum: Extra inputs"),
        ('name = "auto"\nrules = []', "rules: Tuple should have at least 1 item"),
        ("name = ", "is not TOML"),
        ("#" * (MAX_BYTES + 1), "bytes; make it shorter"),
    ],
)
@pytest.mark.slow
def test_a_file_with_a_mistake_is_refused_with_its_place(
    root: Path, tmp_path: Path, tokenmill: Any, text: str, why: str
) -> None:
    file = tmp_path / "auto.toml"
    file.write_text(text)
    refused = tokenmill("models", "route", "set", file, "--root", root)
    assert refused.code == 1
    assert why in refused.err
    assert json.loads(tokenmill("models", "route", "list", "--root", root, "--json").out) == {"virtual_models": []}
