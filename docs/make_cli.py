"""Writes docs/cli.md from the `--help` of each command.

python docs/make_cli.py > docs/cli.md
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

INTRODUCTION = """\
# Command line

Results go to stdout (a table, or with `--json` one JSON document), progress and messages to stderr. Exit codes: 0
done, failed rows included; 1 the job could not run; 2 wrong usage; 130 interrupted ([errors](errors.md)).

**Input.** INPUT is JSONL, or a table in Parquet, Arrow or CSV ([input files](input-files.md)). A folder stands for its
files, all of one format.

With `run --prompt` it is any [table](tables.md#on-the-command-line), and its rows become requests.

**Models.** With several `--model` each row names its model (rows of a table in `body`). One model is loaded at a time.

**Deadline and cancel.** `run --deadline 6h` counts from the creation of the job; the same command keeps that deadline,
and another one is refused. At the deadline, and with `jobs cancel`, the job ends with exit code 0 and a manifest:
finished rows are kept, the others get status `expired` or `cancelled`. A job with all results is completed;
`jobs cancel` then exits with 1.

**Retry.** `jobs retry OUT --output NEW` makes a job of the rows of OUT that failed, expired or were cancelled, with
OUT's input, models and settings; rows keep `row` and custom_id. Refusals that would come again are left out
(`invalid_json`, `invalid_request`, `duplicate_custom_id`, `unsupported_url`, `unsupported_parameter`; without another
`--model` also `context_length_exceeded` and `model_not_found`); `--include-invalid` includes them. `jobs export OUT
RETRY… --merged` joins the jobs in input order: each line once, with its first answer, else the latest error.

**Reuse.** `run --reuse FORMER` computes only what FORMER has no answer to: the folder of a run, ended or not, or a
Parquet file of its results. The column `request_key` is equal for requests that must give equal answers: it is a hash
of the request without names, of the model's weights and arithmetic, and of the content policies, default limit and seed
where they count. A row with the key of a former succeeded one takes its answer, with 0 tokens and the former job's id
in `reused_from`, and `manifest.json` counts it in `reused`. Rows that failed are computed again. Of answers that were
sampled without a seed each is taken once. That is decided when a row is planned: a command that goes on, with or
without `--reuse`, keeps its plan.

**Jobs in a root.** `jobs list`, `show`, `watch`, `cancel`, `retry` and `export` also take the id of a job in a root
([looking at jobs](operations/looking-at-jobs.md)). There `jobs retry ID` takes neither `--output` nor engine options.
With `--json` a job is OpenAI's batch object, the same for a folder, a root and a gateway (`--url`).

**Settings** that are no options come from `TOKENMILL_` variables or from `tokenmill.toml` in the current folder
(`TOKENMILL_CONFIG` names another file): [the list](operations/settings.md). `TOKENMILL_INSTRUCTION_SET` (`avx2`,
`avx512`, `avx512_bf16`, `amx`) limits the native kernels. `TOKENMILL_ATTENTION`, `TOKENMILL_KV_BLOCK_SIZE` and
`TOKENMILL_GPU__…` are for [attention backends](engine.md#attention-backends) and [GPUs](gpu.md#using-one).

**Options that change answers** belong to a job's order: `--dtype`, `--quantize`, `--kv-dtype`, `--content-policy`.
The same command with another value is refused. `jobs retry` keeps them, except
[content policies](content-policy.md). `--kv-dtype int8` needs the native kernels, `fp8` a GPU.

docs/make_cli.py writes this page from `--help`.
"""


def commands(command: Any, name: str = "") -> Iterator[str]:
    """The names of all commands; "" is `tokenmill` itself. Groups are left out."""
    inner = getattr(command, "commands", {})
    if not name or not inner:
        yield name
    for word, one in inner.items():
        yield from commands(one, f"{name} {word}".strip())


def help_of(command: str) -> str:
    """What `tokenmill COMMAND --help` prints."""
    from tokenmill.cli import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main([*command.split(), "--help"])
    assert code == 0, command
    return text.getvalue().strip()


def render() -> str:
    """The whole page."""
    from typer.main import get_command

    from tokenmill.cli import app

    sections = [INTRODUCTION]
    for command in commands(get_command(app)):
        name = f"tokenmill {command}".strip()
        sections.append(f"## {name}\n\n```\n{help_of(command)}\n```\n")
    return "\n".join(sections)


if __name__ == "__main__":
    os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = "100"  # help is wrapped to the terminal
    sys.stdout.write(render())
