"""`tokenmill.write_dataset`: a table as a dataset of the Hugging Face hub, a folder of Parquet with a card."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.adapters.folder.store import FolderStore
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import PipelineError
from schemas.jobs.outcome import Manifest
from schemas.models import ModelPin
from tokenmill import output
from tokenmill.errors import InvalidCall, UserError
from tokenmill.frames.data.kinds import open_frame
from tokenmill.frames.records import CallRecord, read_record

MAX_FILE_BYTES: Final = 500 << 20
"""Of a file's rows in memory, as the hub recommends it."""

_SPLIT: Final = re.compile(r"\w+(\.\w+)*")
_SIZES: Final = (
    (10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"),
)  # fmt: skip
"""The hub's categories: fewer rows than that."""


def write_dataset(
    table: Any,
    folder: str | os.PathLike[str],
    *,
    job: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    split: str = "train",
) -> Path:
    """Write a table as a dataset: Parquet in `data/`, and `README.md` as its card.

    `datasets.load_dataset(folder)` reads it, and `hf upload NAME folder --repo-type dataset` publishes it. The card has
    the model with its digest, the templates, parameters, counts, tokens, and the cost if a price is set.

    Args:
        table: of any kind that `tokenmill.map` takes, as a call returned it or changed since. Enums become texts, those
            of a `datasets.Dataset` stay a `ClassLabel`.
        folder: of the dataset; it must be new or empty, and appears whole.
        job: the `output_dir` of the call that made the columns, or of several calls.
        split: the split's name.

    Returns:
        The folder.

    Raises:
        InvalidCall: an argument can't be used, or a job has not ended.  UserError: the folder can't be written.

    Example:
        >>> tm.write_dataset(rated, "reviews-rated", job="rated")  # doctest: +SKIP
    """
    to = Path(folder).expanduser()
    if not isinstance(split, str) or not _SPLIT.fullmatch(split):
        raise InvalidCall(f"split: is {split!r}, but must be a name such as 'train'")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InvalidCall(f"folder: {to} is there already; give another one, or remove it")
    given = [job] if isinstance(job, str | os.PathLike) else list(job)
    if not given:
        raise InvalidCall("job: must be the output_dir of at least one call")
    jobs = [_read_job(Path(one).expanduser()) for one in given]
    rows = open_frame(table).to_arrow()
    if repeated := sorted({name for name in rows.column_names if rows.column_names.count(name) > 1}):
        raise InvalidCall(f"data: has several columns {repeated[0]!r}; rename all but one")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as scratch:
            made = Path(scratch) / "dataset"
            (made / "data").mkdir(parents=True)
            _write_files(rows, made / "data", split)
            (made / "README.md").write_text(dataset_card(to.name, rows, jobs, split), encoding="utf-8")
            made.replace(to)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{to}: can't be written: {error}") from error
    return to


def _read_job(folder: Path) -> tuple[CallRecord, Manifest]:
    try:
        record = read_record(folder)
        with FolderStore(folder, read_only=True) as store:
            manifest = JobLedger(store).manifest()
    except (InvalidCall, PipelineError) as error:
        raise InvalidCall(f"job: {error}") from error
    if manifest is None:
        raise InvalidCall(f"job: {folder} has not ended; the same call goes on there")
    return record, manifest


def _write_files(table: pa.Table, folder: Path, split: str) -> None:
    count = max(1, min(table.num_rows, -(-table.nbytes // MAX_FILE_BYTES)))
    for number in range(count):
        first, end = (table.num_rows * at // count for at in (number, number + 1))
        path = folder / f"{split}-{number:05}-of-{count:05}.parquet"
        pq.write_table(table.slice(first, end - first), path, compression="zstd")


def dataset_card(name: str, table: pa.Table, jobs: Sequence[tuple[CallRecord, Manifest]], split: str) -> str:
    """The card: metadata that the hub reads, the jobs, and the columns."""
    size = next((size for limit, size in _SIZES if table.num_rows < limit), "n>1T")
    head = f"""---
configs:
- config_name: default
  data_files:
  - split: {split}
    path: data/{split}-*.parquet
size_categories:
- {size}
tags:
- synthetic
- tokenmill
---

# {_cell(name)}

{output.count(table.num_rows)} rows, with columns that a language model made, by tokenmill {version("tokenmill")}.
"""
    columns = ["## Columns", "", "| column | type | nulls |", "|--|--|--|"]
    for field, column in zip(table.schema, table.columns, strict=True):
        columns.append(f"| {_code(field.name)} | {_code(str(field.type))} | {output.count(column.null_count)} |")
    return "\n".join([head, *(_section(record, manifest) for record, manifest in jobs), *columns, ""])


def _section(record: CallRecord, manifest: Manifest) -> str:
    counts, usage = manifest.counts, manifest.usage
    rows = {
        "requests": _code(record.url),
        "rows": f"{output.count(counts.total)}: {output.count(counts.succeeded)} succeeded, "
        f"{output.count(counts.total - counts.succeeded)} failed, {output.count(manifest.reused)} of a former job",
        "tokens": f"{output.count(usage.prompt)} of prompts ({output.count(usage.cached)} cached), "
        f"{output.count(usage.completion)} of answers",
        "time": f"{output.duration(manifest.busy_seconds)} of workers",
    }
    if manifest.cost is not None:
        rows["cost"] = f"{manifest.cost:.4g}"
    if record.adapter_column is not None:
        rows["adapter of each row"] = f"named by the column {_code(record.adapter_column)}"
    rows |= {_cell(name): _code(orjson.dumps(value).decode()) for name, value in record.body.items()}
    lines = [f"## {_code(record.column)}", "", "| | |", "|--|--|"]
    for model in manifest.models:
        lines += [f"| model | {_model(model)} |", f"| digest | {_code(str(model.digest))} |"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    for name, template in record.texts.items():
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", template)), 0)
        lines += ["", f"`{name}`:", "", f"{fence}jinja", template, fence]
    return "\n".join([*lines, ""])


def _model(pin: ModelPin) -> str:
    """The model's name, without the folders of this machine; revision and arithmetic."""
    name = Path(pin.name).name if Path(pin.name).is_absolute() or Path(pin.name).exists() else pin.name
    revision = "" if pin.revision is None else f" at {_code(pin.revision)}"
    return f"{_code(name)}{revision}, {output.arithmetic(pin)}"


def _code(text: str) -> str:
    """The text as code in a table's cell."""
    mark = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    padded = f" {text} " if len(mark) > 1 else text
    return f"{mark}{_cell(padded)}{mark}"


def _cell(text: str) -> str:
    return re.sub(r"\s", " ", text).replace("|", "\\|")
