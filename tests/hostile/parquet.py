"""Attacks by Parquet files: uploads that become batches, and files in the inbox."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Final

from tests.hostile import parquet_files as made
from tests.hostile.attack import Answer, Attack, Expected, Target, tally
from tests.hostile.client import CHAT, COMPLETIONS, flood, run_file
from tests.hostile.objects import objects_of, outcome_of

AT_ONCE: Final = 4
"""Number of uploads that a gateway accepts from one tenant."""

DROP_SECONDS: Final = 600.0
DROPS_AT_ONCE: Final = 100

ENDS: Final = (
    Expected("job", "failed|rows_failed", message=r"\w"),
    Expected("job", "completed"),
    Expected("http", "4..", message=r"\w"),
)
"""Possible outcomes of mutated files: some remain readable."""


def refused(message: str) -> tuple[Expected, ...]:
    """The job, its rows, the upload or the batch is refused, and the message names the cause."""
    return (Expected("job", "failed|rows_failed", message=message), Expected("http", "4..", message=message))


TOO_LARGE: Final = refused(r"byte|memory|alloc|large|long|MiB")


def _each(target: Target, files: Iterable[bytes], endpoint: str = COMPLETIONS, seconds: float = 60.0) -> list[Answer]:
    """Each file as a batch of its own."""
    more = {"tokenmill": {"model": "demo", "max_output_tokens": 16}}
    return flood(
        (
            partial(run_file, target, data, f"h{number}.parquet", endpoint, seconds=seconds, **more)
            for number, data in enumerate(files)
        ),
        AT_ONCE,
    )


def sixteen_bytes(target: Target) -> list[Answer]:
    return _each(target, [made.TINY])


def mutated_uploads(target: Target) -> list[Answer]:
    return _each(target, made.mutated(target.seed, target.uploaded_files), CHAT, 180)


def mutated_drops(target: Target) -> list[Answer]:
    """Waits until each file has become a job that ended, or a dead letter."""
    objects = objects_of(target)
    jobs, dead_letters = objects.jobs(), len(objects.list("deadletters/"))
    until, sent = time.monotonic() + DROP_SECONDS, 0
    for number, data in enumerate(made.mutated(target.seed + 1, target.dropped_files)):
        objects.write(f"incoming/mutated-{target.seed}-{number:05d}.parquet", data)
        sent += 1
        while sent % DROPS_AT_ONCE == 0 and len(objects.open_jobs()) > DROPS_AT_ONCE and time.monotonic() < until:
            time.sleep(1.0)
    new: set[str] = set()
    refusals = 0
    while time.monotonic() < until:
        new, refusals = objects.jobs() - jobs, len(objects.list("deadletters/")) - dead_letters
        if len(new) + refusals >= sent and not objects.open_jobs() & new:
            break
        time.sleep(2.0)
    found = [outcome_of(objects, job) for job in sorted(new)]
    found += [Answer("dead_letter", "written", count=refusals)] * bool(refusals)
    missing = sent - len(new) - refusals
    return tally(
        found + [Answer("job", "open", message="dropped files that became no job", count=missing)] * (missing > 0)
    )


def invalid_utf8(target: Target) -> list[Answer]:
    return _each(target, made.invalid_strings()[:2]) + _each(target, made.invalid_strings()[2:], CHAT)


def invalid_column_name(target: Target) -> list[Answer]:
    return _each(target, [made.invalid_column_name()], CHAT)


def dates_out_of_range(target: Target) -> list[Answer]:
    return _each(target, made.out_of_range())


def dictionary_bomb_5_gb(target: Target) -> list[Answer]:
    return _each(target, [made.dictionary_bomb(1, 5_000)], seconds=90)


def dictionary_bomb_37_gb(target: Target) -> list[Answer]:
    return _each(target, [made.dictionary_bomb(9, 4_096)], seconds=90)


def carried_dictionary_bomb(target: Target) -> list[Answer]:
    return _each(target, [made.dictionary_bomb(1, 2_000, "note")], seconds=90)


def carried_megabytes(target: Target) -> list[Answer]:
    return _each(target, [made.carried_values(10, 16_384)], CHAT, 90)


def huge_page(target: Target) -> list[Answer]:
    return _each(target, [made.huge_page(600)], seconds=90)


def nested_types(target: Target) -> list[Answer]:
    return _each(target, [made.deep(90), made.wide(5_000)], CHAT)


def schema_mismatch(target: Target) -> list[Answer]:
    return _each(target, made.mismatched())


def encrypted_footer(target: Target) -> list[Answer]:
    return _each(target, [made.encrypted_footer()], CHAT)


def truncated(target: Target) -> list[Answer]:
    """Cut at both sides of the footer's length and in the middle of the pages."""
    good = made.bases()[0]
    return _each(target, [good[:-1], good[:-9], good[: len(good) // 2], good[:12] + b"\0" * 200 + good[212:]], CHAT)


TABLE: Final = (
    Attack("parquet: 16 bytes", sixteen_bytes, refused(r"parquet|read|decode")),
    Attack("parquet: mutated files, uploaded", mutated_uploads, ENDS, limit_seconds=400),
    Attack(
        "parquet: mutated files, dropped", mutated_drops, (*ENDS, Expected("dead_letter", "written")),
        limit_seconds=DROP_SECONDS + 60,
    ),
    Attack("parquet: invalid UTF-8 values", invalid_utf8, refused(r"utf-8|parquet|read|column")),
    Attack("parquet: invalid UTF-8 column name", invalid_column_name, refused(r"utf-8|parquet|read|column")),
    Attack("parquet: dates out of range", dates_out_of_range, refused(r"date|range|column|prompt|parquet|read|decode")),
    Attack("parquet: dictionary bomb, 5 GB", dictionary_bomb_5_gb, TOO_LARGE),
    Attack("parquet: dictionary bomb, 37 GB", dictionary_bomb_37_gb, TOO_LARGE),
    Attack("parquet: carried dictionary bomb, 2 GB", carried_dictionary_bomb, TOO_LARGE),
    Attack("parquet: 160 MiB of carried values", carried_megabytes, TOO_LARGE),
    Attack("parquet: page of 600 MB", huge_page, TOO_LARGE),
    Attack(
        "parquet: 90 nested lists, 5,000 columns", nested_types,
        (*refused(r"nest|deep|column|parquet|read|decode"), Expected("job", "completed")),
    ),
    Attack("parquet: columns of wrong types", schema_mismatch, refused(r"column|prompt|messages|custom_id|endpoint")),
    Attack("parquet: encrypted footer", encrypted_footer, refused(r"parquet|encrypt|read|decode|utf-8"), quick=True),
    Attack("parquet: truncated", truncated, refused(r"parquet|read|decode")),
)  # fmt: skip
