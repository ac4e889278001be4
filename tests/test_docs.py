"""The docs match the code: the command line's page, the error table, and the links between pages."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipeline.observability.metric_definitions import METRICS
from schemas.requests.errors import STATUS_CODES, RowError, RowErrorCode
from schemas.requests.parsing import BODIES, parse_body
from schemas.requests.tokenizing import TOKENIZER_BODIES, parse_tokenizing

REPOSITORY = Path(__file__).parent.parent
OF_VLLM = "TOKENMILL_VLLM__"
"""Begins the names of vLLM's own options, which are not ours to list."""

NOT_SETTINGS = {"TOKENMILL_API_KEY", "TOKENMILL_CONFIG", "TOKENMILL_NATIVE_CACHE", "TOKENMILL_SCREENSHOTS"}
METRICS_PAGE = REPOSITORY / "docs/operations/metrics-and-alerts.md"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*.md", "infra/**/*.md")
    for path in REPOSITORY.glob(pattern)
)


@pytest.mark.slow
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


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_given_the_metric_definitions_when_their_table_is_made_again_then_it_is_the_committed_one() -> None:
    written = METRICS_PAGE.read_text(encoding="utf-8")
    assert script("make_metrics").page_with_table(written) == written, "run: python docs/make_metrics.py"


def test_given_the_settings_when_their_page_is_made_again_then_it_is_the_committed_one() -> None:
    made = script("make_settings")

    assert made.page() == made.PAGE.read_text(encoding="utf-8"), "run: python docs/make_settings.py"
    assert "| `TOKENMILL_KAFKA__BATCH_SECONDS` | `2.0` |" in made.page()


def test_given_the_schemas_when_the_table_of_parameters_is_made_again_then_it_is_the_committed_one() -> None:
    made = script("make_parameters").page()

    written = (REPOSITORY / "docs/parameters.md").read_text(encoding="utf-8")
    assert made == written, "run: python docs/make_parameters.py > docs/parameters.md"
    assert "| `allowed_token_ids` | vLLM | works | works |" in made
    assert "| `stream` | OpenAI, vLLM | works | only `false`, `null` |" in made


BODIES_OF: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/classify": {"input": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("url", BODIES_OF)
def test_given_a_verdict_of_the_table_when_the_parameter_is_sent_then_that_becomes_of_it(url: str) -> None:
    made = script("make_parameters")
    named = made._by_url(json.loads(made.NAMES.read_text(encoding="utf-8"))["parameters"])[url]
    assert BODIES_OF.keys() == made.SERVED.keys() - {"/v1/batches"}

    def refusal(name: str, value: Any) -> RowErrorCode | None:
        body = {"model": "m", **BODIES_OF[url], name: value}
        try:
            parse_tokenizing(url, body) if url in TOKENIZER_BODIES else parse_body(url, body)
        except RowError as error:
            return error.code if error.param == name or name in error.message else None
        return None

    for name in named:
        http, batch = made.verdicts(url, name)
        in_line = http if batch is None else batch
        unsupported = refusal(name, "no such") is RowErrorCode.UNSUPPORTED_PARAMETER
        assert unsupported == (in_line == "refused" or in_line.startswith("only")), (name, in_line)
        if in_line.startswith("only"):
            assert refusal(name, None) is None, name


def test_given_every_text_of_the_repository_when_it_names_a_variable_then_it_is_a_setting() -> None:
    known = {variable for variable, _, _ in script("make_settings").rows()}
    groups = {variable[: end.start()] for variable in known for end in re.finditer("__", variable)}

    unknown = {
        f"{path.relative_to(REPOSITORY)}: {variable}"
        for path in (*PAGES, *(REPOSITORY / "infra").rglob("*.tf"), REPOSITORY / "compose.yaml")
        for variable in re.findall(r"TOKENMILL_[A-Z0-9_]*[A-Z0-9]", path.read_text(encoding="utf-8"))
        if variable not in known | groups | NOT_SETTINGS and not variable.startswith(OF_VLLM)
    }
    assert unknown == set()
    shortened = {name for path in PAGES for name in re.findall(r"`(__[A-Z_]+[A-Z])", path.read_text(encoding="utf-8"))}
    assert {
        name for name in shortened if not any(each.endswith(name) or f"{name}__" in each for each in known)
    } == set()


def test_given_the_queries_of_the_metrics_page_when_their_names_are_read_then_each_is_a_metric() -> None:
    section = METRICS_PAGE.read_text(encoding="utf-8").partition("<!-- metrics")[0]

    exported = {metric.name for metric in METRICS}
    exported |= {
        f"{metric.name}_{end}" for metric in METRICS if metric.kind == "histogram" for end in ("bucket", "sum", "count")
    }
    queried = set(re.findall(r"tokenmill_[a-z_]+[a-z]", section))
    assert len(queried) >= 10
    assert queried <= exported


def words(page: str) -> list[str]:
    """The page's words; how typer lays help out, and how it writes types, differs between its versions."""
    return re.sub(r"<[^>]*>|[\[\](){}|]", " ", page).split()


def test_given_the_error_codes_when_the_table_is_read_then_each_is_there_with_its_status() -> None:
    text = (REPOSITORY / "docs/errors.md").read_text(encoding="utf-8")

    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE))
    assert rows == {code.value: str(status) for code, status in STATUS_CODES.items()}
    (urls,) = re.findall(r"^\| `unsupported_url` \| 400 \| not (.*); or the model", text, re.MULTILINE)
    assert set(re.split(", | or ", urls)) == BODIES.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_given_a_page_when_its_links_are_followed_then_the_files_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))

    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_given_a_page_when_its_links_name_a_heading_then_the_page_there_has_it(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))

    missing = [
        f"{link}#{anchor}"
        for link, anchor in links
        if "://" not in link and anchor not in anchors(page.parent / link if link else page)
    ]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_given_pages_when_they_name_tests_then_these_exist() -> None:
    named = {
        (page.name, name) for page in PAGES for name in re.findall(r"\btests/[\w/]+\.py\b", page.read_text("utf-8"))
    }

    assert len(named) >= 40
    assert [one for one in sorted(named) if not (REPOSITORY / one[1]).exists()] == []
