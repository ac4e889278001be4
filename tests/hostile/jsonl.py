"""Attacks by JSONL files: uploads that become batches."""

from __future__ import annotations

import gzip
import json
from functools import partial
from typing import Final

from tests.hostile.attack import Answer, Attack, Expected, Target, tally
from tests.hostile.client import chat, create_batch, flood, line, run_file, upload
from tests.hostile.parquet import refused

MIB: Final = 1 << 20


def _each(target: Target, *files: bytes) -> list[Answer]:
    return flood((partial(run_file, target, data, "h.jsonl") for data in files), 4)


def long_lines(target: Target) -> list[Answer]:
    return _each(target, line("a") + b'{"x": "' + b"a" * (11 * MIB) + b'"}\n', b"a" * (24 * MIB))


def nesting(target: Target) -> list[Answer]:
    return _each(target, b"[" * MIB + b"\n", b'{"a":' * 200_000 + b"\n", b"[" * 60_000 + b"]" * 60_000 + b"\n")


def many_values(target: Target) -> list[Answer]:
    body = json.dumps(chat("x")).encode()[:-1]
    return _each(target, b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": '
                 + body + b', "metadata": [' + b"0," * 3_000_000 + b"0]}}\n")  # fmt: skip


def invalid_utf8(target: Target) -> list[Answer]:
    return _each(target, line("a").replace(b"row a", b"\xff\xfe\xc0\x80"), line("a").replace(b"row a", b"\\ud800"))


def nulls(target: Target) -> list[Answer]:
    return _each(target, line("a").replace(b"row", b"\0\0\0"), b"\0" * 100_000 + b"\n")


def duplicate_ids(target: Target) -> list[Answer]:
    return _each(target, line("same") * 5_000)


def huge_numbers(target: Target) -> list[Answer]:
    """Of the wrong range or of 100,000 digits."""
    values = (b"1e400", b"9" * 100_000, b"-1", b"NaN", b"1" + b"0" * 400, b"1000000000000")
    return _each(target, *(line("a").replace(b'"max_tokens": 1', b'"max_tokens": ' + value) for value in values))


def gzipped(target: Target) -> list[Answer]:
    """A good file, which is computed, and 256 MiB of zeros in 260 kB."""
    return _each(target, gzip.compress(line("a")), gzip.compress(b"\0" * (256 * MIB), 9))


def other_endpoint(target: Target) -> list[Answer]:
    return _each(
        target, line("a", url="/v1/files"), line("a", url="http://169.254.169.254/latest"), line("a", method="GET")
    )


def tiny_batches(target: Target) -> list[Answer]:
    """Hundreds of batches of one file, as fast as they are taken; all of them are cancelled again by the harness."""
    file, answer = upload(target, line("a"), "tiny.jsonl")
    if file is None:
        return [answer]
    number = 600 if target.form == "serve" else 200
    return flood((lambda: _created(target, file) for _ in range(number)), 16)


def many_rows(target: Target) -> list[Answer]:
    """100,000 rows that are all invalid."""
    return [run_file(target, b'{"custom_id": 7}\n' * 100_000, "h.jsonl", seconds=90)]


def names(target: Target) -> list[Answer]:
    """Uploads whose names lead elsewhere: they are data, and the batch is computed."""
    given = (
        "../../../etc/cron.d/x.jsonl",
        "..\\..\\x.jsonl",
        "/etc/passwd",
        "a\u202egnp.jsonl",
        "<img src=x>.jsonl",
        "a" * 5_000,
    )
    return tally(upload(target, line("a"), name)[1] for name in given)


def _created(target: Target, file: str) -> Answer:
    return create_batch(target, file)[1]


TABLE: Final = (
    Attack("jsonl: lines of 11 and 24 MiB", long_lines, refused(r"line|bytes|long")),
    Attack("jsonl: nesting bombs", nesting, refused(r"nest|depth|deep|line|json"), quick=True),
    Attack("jsonl: three million values in a row", many_values, refused(r"value|line|bytes|metadata|list|many")),
    Attack("jsonl: invalid UTF-8, half a surrogate", invalid_utf8, refused(r"utf-8|json|surrogate|line"), quick=True),
    Attack("jsonl: NULs", nulls, refused(r"json|control|line|character"), quick=True),
    Attack("jsonl: 5,000 times one custom_id", duplicate_ids, refused(r"custom_id.*used before")),
    Attack("jsonl: huge numbers", huge_numbers, refused(r"max_tokens|number|json|integer|digits|context")),
    Attack("jsonl: gzip", gzipped, (*refused(r"gzip|json|line|bytes"), Expected("job", "completed"))),
    Attack("jsonl: rows for other URLs", other_endpoint, refused(r"url|endpoint|method")),
    Attack("jsonl: 100,000 invalid rows", many_rows, refused(r"custom_id|line")),
    Attack(
        "jsonl: file names that lead elsewhere", names, (Expected("http", "200"), Expected("http", "400")), quick=True
    ),
    Attack(
        "jsonl: hundreds of tiny batches", tiny_batches,
        (Expected("http", "200"), Expected("http", "429", message=r"batch|job|limit")), limit_seconds=180,
    ),
)  # fmt: skip
