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

Results go to stdout (a table, or with `--json` one JSON document), progress and messages to stderr. Exit codes: 0 done,
failed rows included; 1 the job could not run; 2 wrong usage; 130 interrupted. [errors.md](errors.md) has the rest.

`run` takes INPUT as JSONL, or as Parquet with a column `custom_id` and either `body` (JSON), `prompt`, `messages` or,
to be embedded, `input`; other columns are carried through to the results, with the prefix `input_` where their names
are taken. A folder stands for the `.jsonl` or the `.parquet` files in it.

`run` with several `--model` answers each row by the model that it names, one model loaded at a time. Parquet rows name
theirs in `body`; the columns `prompt`, `messages` and `input` need a job of one model. `jobs retry` keeps all models.

`run --deadline 6h` counts from when the job is made: the same command later goes on with the deadline that stands. At
the deadline, and with `jobs cancel`, the job ends: what is finished is kept, also inside of shards, and each other row
gets status `expired` or `cancelled`. That is an end like any other (exit code 0, a manifest, and the same command finds
it); a closing that comes when every row has its result changes nothing: the job is completed, and `jobs cancel` exits
with 1. It has a run that is at the job end it, and else ends the job itself. Another deadline is another order, and is
refused.

`jobs retry OUT --output NEW` makes a job of the rows of OUT that failed, expired or were cancelled, with the input,
model and settings of OUT. Rows keep their index (`row`) and custom_id. Refusals of the line (`invalid_json`,
`invalid_request`, `duplicate_custom_id`, `unsupported_url`, `unsupported_parameter`) would only come again and are left
out, and so are those of the model (`context_length_exceeded`, `model_not_found`) unless `--model` names another;
`--include-invalid` tries them all the same. A retry can be retried. `jobs export OUT RETRY… --merged` joins them, in
input order: each line of OUT once, with the first answer that there is, else with the latest reason why there is none.

`jobs list`, `show`, `watch`, `cancel`, `retry` and `export` also take jobs in the root of an installation
([operations.md](operations.md#looking-at-jobs)): JOB is an existing local folder, else the id of a job in the root that
`--root` or `TOKENMILL_ROOT` names. `jobs retry ID` takes no `--output` there, and no options of engines: the retry is a
job of the same root.

Settings that are no options come from `TOKENMILL_` variables or from `tokenmill.toml` in the current folder
(`TOKENMILL_CONFIG` names another file): `TOKENMILL_MODEL_CACHE`, `TOKENMILL_PRICE_PER_HOUR`,
`TOKENMILL_DEFAULT_MAX_TOKENS`, `TOKENMILL_MAX_OUTPUT_TOKENS__STANDARD`, `TOKENMILL_PLAN__SHARD_TOKENS`,
`TOKENMILL_CHECKPOINT_SECONDS`, `TOKENMILL_REQUEST_TIMEOUT`, … All of them are in
`schemas/settings/settings.py` and `schemas/requests/limits.py`. `TOKENMILL_INSTRUCTION_SET` (`avx2`, `avx512`,
`avx512_bf16`, `amx`) has the native kernels compute with less than the processor has;
`TOKENMILL_ATTENTION` names what attends on a GPU, and
`TOKENMILL_KV_BLOCK_SIZE` the tokens of a block of its cache ([architecture.md](architecture.md#attention-on-a-gpu)). On
a CUDA device `TOKENMILL_GPU__MEMORY_UTILIZATION` (0.9) bounds what is taken of its memory,
`TOKENMILL_GPU__CUDA_GRAPHS=false` launches every step anew, `TOKENMILL_GPU__GRAPH_TOKENS` (512) says up to which size
steps are recorded as graphs, and `TOKENMILL_GPU__PLAN_AHEAD=false` computes one step after the other.

`--quantize` and `--kv-dtype` change answers, so they belong to the order like `--dtype`: the same command with another
value is refused, and `jobs retry` keeps them. `--kv-dtype int8` needs the native kernels, `fp8` a GPU; `--quantize`
needs neither. `--content-policy` belongs to the order, too; `jobs retry` judges by what it is given itself
([content-policy.md](content-policy.md)).

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
