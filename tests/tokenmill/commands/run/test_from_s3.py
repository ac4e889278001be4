"""`run` and its like with an input in S3: the same answers as from a file, and never of another state of the object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers.moto import MotoServer

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(s3_server: MotoServer, unique_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket that the command line can reach."""
    name = unique_name()[-40:].strip("-")
    s3_server.make_bucket(name)
    for variable, value in (
        ("AWS_ACCESS_KEY_ID", s3_server.access_key),
        ("AWS_SECRET_ACCESS_KEY", s3_server.secret_key),
        ("AWS_DEFAULT_REGION", s3_server.region),
        ("TOKENMILL_S3__ENDPOINT", s3_server.endpoint),
        ("TOKENMILL_PLAN__FIRST_SEGMENT_ROWS", "3"),
        ("TOKENMILL_PLAN__SEGMENT_ROWS", "4"),
    ):
        monkeypatch.setenv(variable, value)
    return name


def answers(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["row"], row["custom_id"], row["text"], row["error_code"]) for row in rows]


@pytest.mark.exhaustive
def test_an_object_is_answered_as_the_same_file_is(
    s3_server: MotoServer, bucket: str, folder: Path, model_folder: Path, chat: Any, write_lines: Any, tokenmill: Any,
    results: Any,
) -> None:  # fmt: skip
    # Given more rows than the first segment has, so that a process of its own reads the rest,
    source = write_lines(*[chat(f"r{n}", f"number {n}") for n in range(10)], "not json")
    s3_server.client().put_object(Bucket=bucket, Key="in/rows.jsonl", Body=source.read_bytes())
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1)
    url = f"s3://{bucket}/in/rows.jsonl"
    assert tokenmill("run", source, "--output", "alone", *engine).code == 0
    assert tokenmill("run", url, "--output", "out", *engine).code == 0
    assert answers(results(folder / "out")) == answers(results(folder / "alone"))
    assert "was done before" in tokenmill("run", url, "--output", "out", *engine).err
    # a prefix is a folder,
    assert tokenmill("run", f"s3://{bucket}/in/", "--output", "prefix", *engine).code == 0
    assert len(results(folder / "prefix")) == 11
    # it is estimated,
    amount = tokenmill("estimate", url, "--model", f"tiny={model_folder}", "--json").json()
    assert amount["rows"] == tokenmill("estimate", source, "--model", f"tiny={model_folder}", "--json").json()["rows"]
    # and another object in its place is another job.
    s3_server.client().put_object(Bucket=bucket, Key="in/rows.jsonl", Body=source.read_bytes() + b"\n")
    other = tokenmill("run", url, "--output", "out", *engine)
    assert (other.code, "holds job" in other.error, "input.etag was" in other.error) == (1, True, True)


@pytest.mark.exhaustive
def test_a_job_from_s3_that_was_cut_off_is_cancelled_and_tried_again(
    s3_server: MotoServer, bucket: str, folder: Path, model_folder: Path, chat: Any, write_lines: Any, tokenmill: Any,
    results: Any,
) -> None:  # fmt: skip
    source = write_lines(*[chat(f"r{n}", f"number {n}") for n in range(10)])
    url = f"s3://{bucket}/rows.jsonl"
    s3_server.client().put_object(Bucket=bucket, Key="rows.jsonl", Body=source.read_bytes())
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1)
    assert tokenmill("run", url, "--output", "out", *engine).code == 0
    alone = answers(results(folder / "out"))
    out = folder / "out"
    for path in (*out.glob("plan/0000[12].json"), *out.glob("results/part-*.parquet"), out / "manifest.json"):
        path.unlink()  # as if it had been killed when the first segment stood
    assert tokenmill("jobs", "cancel", "out").code == 0
    assert {row["status"] for row in results(out)} == {"cancelled"}
    assert len(results(out)) == 10, "those that were not planned yet, too"
    assert tokenmill("jobs", "retry", "out", "--output", "new", "--threads", 1).code == 0
    assert answers(results(folder / "new")) == alone
    s3_server.client().put_object(
        Bucket=bucket, Key="rows.jsonl", Body=source.read_bytes().replace(b"number", b"figure")
    )
    changed = tokenmill("jobs", "retry", "out", "--output", "newer")
    assert (changed.code, "is not what" in changed.error) == (1, True)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("s3://{bucket}/nothing.jsonl", "no such"),
        ("s3://{bucket}/empty/", "empty/"),
        ("s3://no-such-bucket-anywhere/rows.jsonl", "no such object"),
        ("s3://no-such-bucket-anywhere/rows/", "no such bucket"),
        ("https://host/rows.jsonl?X-Amz-Signature=secret", "inputs come from a path or from s3://bucket/key"),
    ],
)
def test_an_invalid_input_is_an_error_of_one_line(
    bucket: str, model_folder: Path, tokenmill: Any, given: str, why: str
) -> None:
    ended = tokenmill("run", given.format(bucket=bucket), "--output", "out", "--model", f"tiny={model_folder}")
    assert (ended.code, why in ended.error, "secret" in ended.err) == (1, True, False), ended.err
    assert not Path("out").exists()
