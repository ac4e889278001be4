"""Selection of an input's files, and the source that reads them as one."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.planner.ports import InputError, RowSource, SourceFile
from pipeline.planner.readers.jsonl import JsonlSource, refuse_other_formats
from pipeline.planner.readers.parquet import ParquetSource
from schemas.jobs.inputs import InputFormat
from schemas.requests.limits import Limits

COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4")
SUFFIXES = {".jsonl": InputFormat.JSONL, ".ndjson": InputFormat.JSONL, ".parquet": InputFormat.PARQUET}


def choose_files(uri: str, names: Sequence[str], *, folder: bool) -> tuple[InputFormat, tuple[str, ...]]:
    """The format of an input and those of `names` that belong to it, in reading order.

    Args:
        names: the one file, or everything directly inside a folder.
    Raises:
        InputError: nothing there can be read, or formats are mixed.
    """
    found: dict[str, InputFormat] = {}
    for name in sorted(names):
        if name.lower().endswith(COMPRESSED):
            if not folder or any(suffix in name.lower() for suffix in SUFFIXES):
                raise InputError(f"{name}: compressed input is not supported; decompress it first")
            continue
        for suffix, kind in SUFFIXES.items():
            if name.lower().endswith(suffix):
                found[name] = kind
    if not found:
        where = f"{uri} holds no" if folder else f"{uri} is no"
        raise InputError(f"{where} .jsonl or .parquet file; rename the file or name another")
    formats = set(found.values())
    if len(formats) > 1:
        raise InputError(f"{uri} mixes .jsonl and .parquet files; submit them as two jobs")
    return formats.pop(), tuple(found)


def open_source(files: Sequence[SourceFile], kind: InputFormat, limits: Limits, model: str | None = None) -> RowSource:
    """The files as one input.

    Args:
        model: the model of Parquet rows with `prompt` or `messages` columns.
    Raises:
        InputError: a Parquet file can't be read or lacks columns, or a JSONL file has another format.
    """
    if kind is InputFormat.PARQUET:
        return ParquetSource(files, limits, model)
    for file in files:
        refuse_other_formats(file)
    return JsonlSource(files, limits)
