"""What is written is what is: the command line's page, the error table, and the links between pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import STATUS_CODES

REPOSITORY = Path(__file__).parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "examples/*.md", "benchmarks/*.md", "infra/**/*.md")
    for path in REPOSITORY.glob(pattern)
)


def test_given_the_command_line_when_its_page_is_made_again_then_it_says_what_the_committed_one_says() -> None:
    made = subprocess.run(
        [sys.executable, REPOSITORY / "docs/make_cli.py"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    written = (REPOSITORY / "docs/cli.md").read_text(encoding="utf-8")
    assert words(made) == words(written), "run: python docs/make_cli.py > docs/cli.md"


def words(page: str) -> list[str]:
    """The page's words; how typer lays help out, and how it writes types, differs between its versions."""
    return re.sub(r"<[^>]*>|[\[\](){}|]", " ", page).split()


def test_given_the_error_codes_when_the_table_is_read_then_each_is_there_with_its_status() -> None:
    text = (REPOSITORY / "docs/errors.md").read_text(encoding="utf-8")

    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE))
    assert rows == {code.value: str(status) for code, status in STATUS_CODES.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_given_a_page_when_its_links_are_followed_then_the_files_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))

    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []
