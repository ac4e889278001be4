"""Selection of an input's files, and the source that reads them as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.planner.ports import InputError, RowSource, SourceFile
from pipeline.planner.readers import decompression
from pipeline.planner.readers.arrow import ArrowColumns
from pipeline.planner.readers.arrow_streams import CONTINUATION, FILE_MAGIC
from pipeline.planner.readers.columns import ColumnSource
from pipeline.planner.readers.csv import CsvColumns
from pipeline.planner.readers.decompression import decompressed
from pipeline.planner.readers.jsonl import JsonlSource, refuse_other_formats
from pipeline.planner.readers.parquet import ParquetColumns
from schemas.jobs.inputs import InputFormat
from schemas.requests.limits import Limits

_TEXT: Final = {".jsonl": InputFormat.JSONL, ".ndjson": InputFormat.JSONL, ".csv": InputFormat.CSV}
SUFFIXES: Final = (
    _TEXT
    | {text + packed: kind for text, kind in _TEXT.items() for packed in decompression.SUFFIXES}
    | {".parquet": InputFormat.PARQUET, ".arrow": InputFormat.ARROW, ".feather": InputFormat.ARROW}
)
"""The end of a name -> the format."""

FORMATS: Final = ".jsonl, .csv (also with .gz or .zst behind), .parquet or .arrow"
"""The formats, for messages."""

_OTHER_COMPRESSED: Final = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4")


def choose_files(uri: str, names: Sequence[str], *, folder: bool) -> tuple[InputFormat, tuple[str, ...]]:
    """The format of an input and those of `names` that belong to it, in reading order.

    Args:
        names: the one file, or everything directly inside a folder.
    Raises:
        InputError: nothing there can be read, or formats are mixed.
    """
    found: dict[str, InputFormat] = {}
    for name in sorted(names):
        kind = format_of_name(name)
        if kind is not None:
            found[name] = kind
        elif name.lower().endswith(_OTHER_COMPRESSED) and (
            not folder or any(suffix in name.lower() for suffix in SUFFIXES)
        ):
            raise InputError(f"{name}: only .jsonl and .csv are read compressed, as .gz or .zst; decompress it first")
    if not found:
        where = f"{uri} holds no" if folder else f"{uri} is no"
        raise InputError(f"{where} {FORMATS} file; rename the file or name another")
    kinds = sorted(set(found.values()))
    if len(kinds) > 1:
        raise InputError(f"{uri} mixes {' and '.join(kinds)} files; submit them as jobs of their own")
    return kinds[0], tuple(found)


def suffix_of(name: str) -> str | None:
    """The one of `SUFFIXES` with which a name ends, in any case."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), None)


def format_of_name(name: str) -> InputFormat | None:
    """The format by the end of a name."""
    suffix = suffix_of(name)
    return None if suffix is None else SUFFIXES[suffix]


def format_of_upload(start: bytes, name: str) -> InputFormat:
    """The format of a file by its first four bytes, or more; of text by the name, which is JSONL if it says nothing."""
    if start.startswith(b"PAR1"):
        return InputFormat.PARQUET
    if start.startswith((FILE_MAGIC[:4], CONTINUATION)):
        return InputFormat.ARROW
    return InputFormat.CSV if format_of_name(name) is InputFormat.CSV else InputFormat.JSONL


def open_source(files: Sequence[SourceFile], kind: InputFormat, limits: Limits, model: str | None = None) -> RowSource:
    """The files as one input.

    Args:
        model: the model of rows with `prompt`, `messages` or `input` columns.
    Raises:
        InputError: a file can't be read, lacks columns, or is in another format.
    """
    match kind:
        case InputFormat.PARQUET:
            return ColumnSource([ParquetColumns(file) for file in files], limits, model)
        case InputFormat.ARROW:
            return ColumnSource([ArrowColumns(file) for file in files], limits, model)
        case InputFormat.CSV:
            return ColumnSource([CsvColumns(file, limits) for file in files], limits, model)
        case InputFormat.JSONL:
            texts = [decompressed(file) for file in files]
            for text in texts:
                refuse_other_formats(text)
            return JsonlSource(texts, limits)
        case InputFormat.STEP:
            raise InputError(
                f"{files[0].name}: describes steps of tokenmill.pipeline, whose rows are made of columns; call "
                "the pipeline's run or retry_failed with its output_dir"
            )
