"""`tokenmill run` and `estimate` of the same requests in each format: the answers are the same."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

Cli = Callable[..., Any]
Results = Callable[[Path], list[dict[str, Any]]]

PROMPTS = ["Once upon a time", 'He said "no", and left', "two\nlines", "Once upon a time"]


def rows() -> list[dict[str, str]]:
    """As a table: bodies in JSON, and a column to carry."""
    return [
        {
            "custom_id": f"r{number}",
            "body": json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}),
            "note": f"n{number}",
        }
        for number, prompt in enumerate(PROMPTS)
    ]


def jsonl() -> bytes:
    made = (
        {"custom_id": row["custom_id"], "method": "POST", "url": "/v1/completions", "body": json.loads(row["body"])}
        for row in rows()
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


def write(path: Path) -> None:
    """The requests in the format of the file's name."""
    table = pa.Table.from_pylist(rows())
    match "".join(path.suffixes):
        case ".jsonl":
            path.write_bytes(jsonl())
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(jsonl()[:200]) + gzip.compress(jsonl()[200:]))
        case ".jsonl.zst":
            path.write_bytes(pa.Codec("zstd").compress(jsonl(), asbytes=True))
        case ".csv":
            with path.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, table.column_names)
                writer.writeheader()
                writer.writerows(rows())
        case ".arrow":
            with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
        case ".feather":
            pyarrow.feather.write_feather(table, path, compression="zstd")
        case ".parquet":
            pq.write_table(table, path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "suffixes",
    [
        pytest.param((".jsonl", ".jsonl.gz", ".csv"), id="lines"),
        pytest.param(
            (".jsonl", ".jsonl.zst", ".csv", ".arrow", ".feather", ".parquet"), id="all", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_given_the_same_requests_in_each_format_when_run_then_the_answers_are_the_same(
    suffixes: tuple[str, ...], tokenmill: Cli, folder: Path, model_folder: Path, results: Results
) -> None:
    answers, sums = {}, {}
    for suffix in suffixes:
        path, out = folder / f"in{suffix}", folder / f"out{suffix}"
        write(path)
        model = ("--model", f"tiny={model_folder}")
        estimated = tokenmill("estimate", path, *model, "--json").json()
        sums[suffix] = (estimated["rows"], estimated["unique"], estimated["prompt_tokens"])
        ended = tokenmill("run", path, *model, "--output", out, "--dtype", "float32")
        assert ended.code == 0, ended.err
        found = results(out)
        assert [row.get("note") for row in found] == [None if "jsonl" in suffix else f"n{n}" for n in range(4)]
        answers[suffix] = [(row["custom_id"], row["row"], row["status"], row["text"]) for row in found]
        exported = folder / f"{suffix}.out.jsonl"
        assert tokenmill("jobs", "export", out, "--to", exported).code == 0
        assert len(exported.read_text().splitlines()) == len(PROMPTS)
    assert len({str(found) for found in answers.values()}) == 1, answers
    assert len(set(sums.values())) == 1, sums
    assert all(status == "succeeded" for _, _, status, _ in answers[".csv"])


def test_given_a_damaged_compressed_input_when_run_then_one_line_names_file_and_remedy(
    tokenmill: Cli, folder: Path, model_folder: Path
) -> None:
    path = folder / "in.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl())[:-5])
    ended = tokenmill("run", path, "--model", f"tiny={model_folder}", "--output", folder / "out")
    assert ended.code == 1
    assert "in.jsonl.gz: can't be decompressed as gzip" in ended.error
    assert "Truncated compressed stream; compress it anew" in ended.error
