"""A run with a spending limit: it keeps its results, records the reason for the other rows, and a retry goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]

ROWS, ROWS_PER_PART = 20, 5


@pytest.fixture
def job(
    folder: Path, model_folder: Path, chat: Chat, write_lines: Write, monkeypatch: pytest.MonkeyPatch
) -> tuple[object, ...]:
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", str(ROWS_PER_PART))
    path = write_lines(*(chat(f"r{n}", text=f"number {n}", max_tokens=4) for n in range(ROWS)))
    return "run", path, "--model", f"tiny={model_folder}", "-o", folder / "out"


def rows(out: Path) -> Counter[str | None]:
    return Counter(pq.read_table(out / "results")["error_code"].to_pylist())


@pytest.mark.slow
def test_given_a_limit_when_it_is_passed_then_no_further_shard_is_begun_and_a_retry_answers_the_rest(
    tokenmill: Cli, folder: Path, job: tuple[object, ...], model_folder: Path
) -> None:
    limited = tokenmill(*job, "--price-per-hour", "36", "--max-cost", "1e-9", "--json")

    manifest = limited.json()
    assert limited.code == 0
    assert f"has reached its spending limit of 1e-09 and cost {manifest['cost']:.4g}: what was under way" in limited.err
    assert rows(folder / "out") == {None: ROWS_PER_PART, "spend_limit": ROWS - ROWS_PER_PART}
    assert (manifest["status"], manifest["counts"]["cancelled"]) == ("cancelled", ROWS - ROWS_PER_PART)
    assert manifest["cost"] == pytest.approx(manifest["busy_seconds"] / 100)
    assert manifest["cost"] > 1e-9
    (spending,) = manifest["spending"]
    assert (spending["model"], spending["cost"]) == ("tiny", manifest["cost"])
    assert tokenmill("jobs", "show", folder / "out", "--json").json()["tokenmill"]["cost"] == manifest["cost"]
    assert "cost limit" in tokenmill("jobs", "show", folder / "out").out

    retry = ("jobs", "retry", folder / "out", "-o", folder / "more", "--price-per-hour", "36")
    same = tokenmill(*retry, "--json").json()
    assert same["counts"]["succeeded"] == ROWS_PER_PART, "a retry may cost as much as the first job might"
    again = tokenmill(*retry, "--fresh", "--max-cost", "1000", "--json").json()
    assert (again["status"], again["counts"]["succeeded"]) == ("completed", ROWS - ROWS_PER_PART)


@pytest.mark.slow
def test_given_a_tiny_limit_when_a_job_would_fit_one_shard_then_a_small_shard_measures_the_cost_and_the_job_ends(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    """Given requests that share a prompt, which would all be one shard without a limit."""
    shared = "the same words for each of them, " * 12
    given = 150
    path = write_lines(*(chat(f"r{n}", f"{shared}{n}", max_tokens=100, ignore_eos=True) for n in range(given)))
    run = ("run", path, "-m", f"tiny={model_folder}", "--price-per-hour", "36", "--max-cost", "1e-6", "--json")

    manifest = tokenmill(*run, "-o", folder / "out").json()

    assert (manifest["status"], manifest["ended_by"]) == ("cancelled", "spend")
    # On a slow machine the first checkpoint shows a cost beyond the limit, before a row has ended.
    assert manifest["counts"]["succeeded"] <= 40, "some 4,000 tokens, of more than a hundred a row"
    assert manifest["busy_seconds"] > 0
    assert sum(rows(folder / "out").values()) == given


@pytest.mark.slow
def test_given_a_job_smaller_than_what_shows_its_cost_then_the_summary_says_that_it_cost_more_than_its_limit(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    run = ("run", write_lines(chat("a")), "-m", f"tiny={model_folder}", "--price-per-hour", "36", "-o", folder / "out")

    ended = tokenmill(*run, "--max-cost", "1e-9")

    assert ended.code == 0
    assert "more than its limit of 1e-09" in ended.err
    assert "cost limit" in ended.err


@pytest.mark.slow
def test_given_a_limit_and_no_price_then_nothing_is_begun(
    tokenmill: Cli, folder: Path, job: tuple[object, ...]
) -> None:
    refused = tokenmill(*job, "--max-cost", "1")
    assert refused.code == 1
    assert "--max-cost can't be enforced" in refused.error
    assert not (folder / "out" / "job.json").exists()
    assert "may cost nothing" in tokenmill(*job, "--max-cost", "0").error
