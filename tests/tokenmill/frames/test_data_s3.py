"""Tables in a bucket: the same rows as from files, the same refusals, and no secret in a message."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipeline.planner.readers import expansion
from tests.servers.moto import MotoServer
from tokenmill.errors import InvalidCall
from tokenmill.frames.data.kinds import open_frame

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(s3_server: MotoServer, unique_name: Callable[[], str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of the configured store."""
    name = unique_name()[-40:].strip("-")
    s3_server.make_bucket(name)
    for variable, value in (
        ("AWS_ACCESS_KEY_ID", s3_server.access_key),
        ("AWS_SECRET_ACCESS_KEY", s3_server.secret_key),
        ("AWS_DEFAULT_REGION", s3_server.region),
        ("TOKENMILL_S3__ENDPOINT", s3_server.endpoint),
    ):
        monkeypatch.setenv(variable, value)
    return name


def put(server: MotoServer, bucket: str, key: str, rows: list[dict[str, Any]]) -> None:
    table, out = pa.Table.from_pylist(rows), io.BytesIO()
    if key.endswith(".parquet"):
        pq.write_table(table, out)
    elif key.endswith(".csv"):
        pyarrow.csv.write_csv(table, out)
    else:
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    server.client().put_object(Bucket=bucket, Key=key, Body=out.getvalue())


def rows_at(url: str) -> list[dict[str, Any]]:
    return open_frame(url).with_columns(pa.table({})).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_given_objects_when_one_or_a_pattern_is_opened_then_rows_are_in_the_order_of_keys(
    s3_server: MotoServer, bucket: str, suffix: str
) -> None:
    for number, key in enumerate(("b", "a", "x/c", "x/y/d", "x/[e]", "x/e")):
        put(s3_server, bucket, f"t/{key}.{suffix}", [{"n": number, "text": f"{key}, ä"}])
    put(s3_server, bucket, "t/other.txt", [{"n": 9}])

    assert rows_at(f"s3://{bucket}/t/a.{suffix}") == [{"n": 1, "text": "a, ä"}]
    found = {
        pattern: [row["n"] for row in rows_at(f"s3://{bucket}/{pattern}.{suffix}")]
        for pattern in ("t/*", "t/?", "t/[ac]", "t/*/[cd]", "t/**/*", "t/**/d", "t/x/[e]", "**/y/*")
    }
    assert found == {
        "t/*": [1, 0], "t/?": [1, 0], "t/[ac]": [1], "t/*/[cd]": [2], "t/**/*": [1, 0, 4, 2, 5, 3], "t/**/d": [3],
        "t/x/[e]": [4], "**/y/*": [3],
    }  # fmt: skip


def test_given_unusable_objects_when_opened_then_the_message_says_why_and_has_no_secret(
    s3_server: MotoServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(s3_server, bucket, "a.csv", [{"x": 1}])
    put(s3_server, bucket, "b.csv", [{"y": 1}])
    put(s3_server, bucket, "many.parquet", [{"a": "x" * 10_000}] * 4_000)
    client = s3_server.client()
    client.put_object(Bucket=bucket, Key="broken.parquet", Body=b"PAR1")
    client.put_object(Bucket=bucket, Key="nested.jsonl", Body=b'{"a": 1}\n{"a": ' + b"[" * 300_000 + b"]" * 300_000)
    monkeypatch.setattr(expansion, "ALWAYS_DECODED_BYTES", 1 << 20)
    cases = {
        "missing.csv": "no such object",
        "*.parq": f"no file matches s3://{bucket}/*.parq",
        "*.csv": "/b.csv: has other columns or types than s3://",
        "many.parquet": "decode to more than",
        "broken.parquet": "is not a Parquet file",
        "nested.jsonl": "/nested.jsonl: line 2: the line nests brackets deeper than 64",
        "*": "must be files of one format",
        "in/": "is no object; give a pattern of those below it",
        "": "is no object; give a pattern of those below it",
        "a.csv?X-Amz-Signature=s3cret": "carries credentials or a signature",
    }
    for key, message in cases.items():
        with pytest.raises(InvalidCall) as raised:
            open_frame(f"s3://{bucket}/{key}")
        assert message in str(raised.value), key
        assert "s3cret" not in str(raised.value)
    for url, message in (
        ("s3://key:s3cret@bucket/a.csv", "carries credentials"),
        ("https://key:s3cret@host/a.csv?token=s3cret", "https://…: must be a path on this machine, or s3://bucket/key"),
        ("s3://no-such-bucket-here/*.csv", "no such bucket"),
    ):
        with pytest.raises(InvalidCall) as raised:
            open_frame(url)
        assert message in str(raised.value)
        assert "s3cret" not in str(raised.value)


def test_given_a_table_in_a_bucket_when_run_then_its_rows_are_answered(
    s3_server: MotoServer, bucket: str, folder: Path, model_folder: Path, tokenmill: Any
) -> None:
    put(s3_server, bucket, "in/items.parquet", [{"item": "a"}, {"item": "b"}])
    (folder / "prompt.jinja").write_text("{{ item }}?")
    arguments = ("--model", f"tiny={model_folder}", "--prompt", "prompt.jinja", "--sampling", "max_tokens=2")

    assert tokenmill("run", f"s3://{bucket}/in/*.parquet", "--output", "out", *arguments).code == 0

    found = pq.read_table(folder / "out/table.parquet").to_pylist()
    assert [(row["item"], row["answer_completion_tokens"]) for row in found] == [("a", 2), ("b", 2)]
    missing = tokenmill("run", f"s3://{bucket}/in/no.parquet", "--output", "new", *arguments)
    assert (missing.code, "no such object" in missing.error) == (1, True)
