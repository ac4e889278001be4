"""A cancel at a job's last step: the job completes, and the command reports it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_given_a_job_that_lacks_only_its_manifest_when_cancelled_then_it_is_completed_and_the_exit_code_says_so(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, more: tuple[str, ...]
) -> None:
    out = folder / "out"
    run = ("run", write_lines(chat("a")), "--model", f"tiny={model_folder}", "-o", out)
    assert tokenmill(*run).code == 0
    (out / "manifest.json").unlink()

    late = tokenmill("jobs", "cancel", out, *more)

    assert late.code == 1
    assert f"{out}: the job ended before it could be cancelled (completed)" in late.error
    assert late.out == ""
    assert tokenmill("jobs", "show", out, "--json").json()["status"] == "completed"
    again = tokenmill("jobs", "cancel", out)
    assert (again.code, "has ended already (completed)" in again.error) == (1, True)
