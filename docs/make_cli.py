"""Writes docs/cli.md from what the command line says of itself.

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
done, failed rows included; 1 the job could not run; 2 wrong usage; 130 interrupted. [errors.md](errors.md) has the
rest.

**Input.** `run` takes INPUT as JSONL, or as Parquet with a column `custom_id` and either `body` (JSON), `prompt`,
`messages` or, for embeddings, `input`. Other columns are carried through to the results, with the prefix `input_`
where names clash. A folder stands for its `.jsonl` or `.parquet` files.

**Models.** With several `--model` each row is answered by the model that it names, one model loaded at a time.
Parquet rows name theirs in `body`; the columns `prompt`, `messages` and `input` need a job of one model.

**Deadline and cancel.** `run --deadline 6h` counts from the creation of the job; the same command later keeps that
deadline, and another deadline is refused. At the deadline, and with `jobs cancel`, the job ends with exit code 0 and
a manifest: finished rows are kept, the others get status `expired` or `cancelled`. When every row already has its
result the job is completed, and `jobs cancel` exits with 1. A `run` that is at work ends its job itself; without one
`jobs cancel` ends it.

**Retry.** `jobs retry OUT --output NEW` makes a job of the rows of OUT that failed, expired or were cancelled, with
OUT's input, models and settings; rows keep their index (`row`) and custom_id. Left out are refusals that would come
again (`invalid_json`, `invalid_request`, `duplicate_custom_id`, `unsupported_url`, `unsupported_parameter`, and
`context_length_exceeded` and `model_not_found` unless `--model` names another model); `--include-invalid` includes
them. A retry can be retried. `jobs export OUT RETRY… --merged` joins them in input order: each line once, with its
first answer, else the latest error.

**Jobs in a root.** `jobs list`, `show`, `watch`, `cancel`, `retry` and `export` also take the id of a job in the root
that `--root` or `TOKENMILL_ROOT` names ([looking at jobs](operations/looking-at-jobs.md)); an existing local folder
comes first. There `jobs retry ID` takes neither `--output` nor engine options: the retry is a job of the same root.

**Settings** that are no options come from `TOKENMILL_` variables or from `tokenmill.toml` in the current folder
(`TOKENMILL_CONFIG` names another file): `TOKENMILL_MODEL_CACHE`, `TOKENMILL_PRICE_PER_HOUR`,
`TOKENMILL_DEFAULT_MAX_TOKENS`, `TOKENMILL_MAX_OUTPUT_TOKENS__STANDARD`, `TOKENMILL_PLAN__SHARD_TOKENS`,
`TOKENMILL_CHECKPOINT_SECONDS`, `TOKENMILL_REQUEST_TIMEOUT_SECONDS`, …
[Settings](operations/settings.md) lists all of them. `TOKENMILL_INSTRUCTION_SET`
(`avx2`, `avx512`, `avx512_bf16`, `amx`) limits the native kernels' instruction set; `TOKENMILL_ATTENTION` and
`TOKENMILL_KV_BLOCK_SIZE` select a GPU's [attention backend](engine.md#attention-backends) and the tokens of a cache
block; the group `TOKENMILL_GPU__…` is described in [GPUs](gpu.md#using-one).

**Options that change answers** belong to a job's order: `--dtype`, `--quantize`, `--kv-dtype`, `--content-policy`.
The same command with another value is refused. `jobs retry` keeps them, except [content policies](content-policy.md),
which it takes from its own options. `--kv-dtype int8` needs the native kernels, `fp8` a GPU; `--quantize` needs
neither.

This page is what `--help` says; docs/make_cli.py writes it.
"""


def commands(command: Any, name: str = "") -> Iterator[str]:
    """The names of all commands, as they are typed; "" is that of all together. A group has none of its own."""
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
