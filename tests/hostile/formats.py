"""Attacks by compressed, CSV and Arrow files: uploads that become batches."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from tests.hostile import format_files as made
from tests.hostile.attack import Answer, Attack, Target
from tests.hostile.client import CHAT, COMPLETIONS, flood, line, run_file
from tests.hostile.parquet import AT_ONCE, ENDS, refused


def _each(target: Target, suffix: str, files: Iterable[bytes], endpoint: str = COMPLETIONS) -> list[Answer]:
    """Each file as a batch of its own."""
    more = {"tokenmill": {"model": "demo", "max_output_tokens": 16}}
    return flood(
        (
            partial(run_file, target, data, f"h{number}{suffix}", endpoint, seconds=120, **more)
            for number, data in enumerate(files)
        ),
        AT_ONCE,
    )


def damaged_streams(target: Target) -> list[Answer]:
    return _each(target, ".jsonl", made.damaged_streams(line("a")), CHAT)


def gzip_line_of_2_gb(target: Target) -> list[Answer]:
    return _each(target, ".jsonl.gz", [made.gzip_line(line("a"), 2_000)], CHAT)


def zstd_of_8_gb(target: Target) -> list[Answer]:
    return _each(target, ".jsonl.zst", [made.zstd_lines(line("a"), 8_000)], CHAT)


def zstd_window_of_2_gb(target: Target) -> list[Answer]:
    return _each(target, ".jsonl.zst", [made.huge_window()], CHAT)


def broken_csv(target: Target) -> list[Answer]:
    return _each(target, ".csv", made.broken_csv())


def broken_csv_rows(target: Target) -> list[Answer]:
    return _each(target, ".csv", [made.broken_rows()])


def gzip_csv_field_of_2_gb(target: Target) -> list[Answer]:
    return _each(target, ".csv.gz", [made.gzip_line(made.CSV_HEADER + b'a,"', 2_000)])


def arrow_bombs(target: Target) -> list[Answer]:
    bombs = [made.arrow_dictionary_bomb(1, 5_000), made.arrow_dictionary_bomb(9, 4_096), made.arrow_view_bomb(1, 5_000)]
    return _each(target, ".arrow", [*bombs, made.arrow_batch_bomb(1_024), made.arrow_declared_terabytes()])


def arrow_outside_offsets(target: Target) -> list[Answer]:
    return _each(target, ".arrow", [made.arrow_outside_offsets()])


def mutated_arrow(target: Target) -> list[Answer]:
    return _each(target, ".arrow", made.mutated_arrow(target.seed, target.uploaded_files), CHAT)


TABLE: Final = (
    Attack("formats: damaged gzip and zstd", damaged_streams, refused(r"decompressed"), quick=True),
    Attack("formats: gzip, a line of 2 GB", gzip_line_of_2_gb, refused(r"line is longer")),
    Attack("formats: zstd, 8 GB in kilobytes", zstd_of_8_gb, refused(r"decode to more|too large")),
    Attack("formats: zstd, a window of 2 GB", zstd_window_of_2_gb, refused(r"window|memory")),
    Attack("formats: CSV without clear rows", broken_csv, refused(r"quote|column|header|empty|longer")),
    Attack("formats: CSV, broken rows", broken_csv_rows, refused(r"cells|UTF-8|quotes|null|carriage"), quick=True),
    Attack("formats: gzip, a CSV field of 2 GB", gzip_csv_field_of_2_gb, refused(r"row is longer")),
    Attack("formats: Arrow bombs", arrow_bombs, refused(r"byte|memory|large|long")),
    Attack("formats: Arrow, offsets outside of texts", arrow_outside_offsets, refused(r"decoded")),
    Attack("formats: mutated Arrow files", mutated_arrow, ENDS, limit_seconds=400),
)
