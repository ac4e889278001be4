"""Each kind of bad line ends as its own row with code, line and message, and never harms its neighbours."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from pipeline.planner import InputError, InvalidInput, choose_files

GOOD_BEFORE, GOOD_AFTER = 0, 2


def variant(tools: Any, **changes: Any) -> bytes:
    """A good line with some of its members changed; None removes one."""
    line = json.loads(tools.line("bad")) | changes
    return json.dumps({name: value for name, value in line.items() if value is not None}).encode()


CASES = {
    "not json": (lambda t: b'{"custom_id": "x", ', "invalid_json", "the line is not JSON"),
    "two objects": (lambda t: b"{} {}", "invalid_json", "the line is not JSON"),
    "nan": (lambda t: t.line("bad", temperature=float("nan")), "invalid_json", "the line is not JSON"),
    "infinity": (lambda t: t.line("bad", temperature=float("inf")), "invalid_json", "the line is not JSON"),
    "not utf-8": (lambda t: b'{"custom_id": "\xff\xfe"}', "invalid_json", "not UTF-8: byte 16 is 0xff"),
    "lone surrogate": (lambda t: rb'{"custom_id": "\ud800"}', "invalid_json", "the line is not JSON"),
    "20 MB": (lambda t: t.line("bad", "x" * 20_000_000), "invalid_json", "longer than 10485760 bytes"),
    "bomb of lists": (lambda t: b"[" * 200_000, "invalid_json", "nests brackets deeper than 64"),
    "bomb of objects": (lambda t: b'{"a":' * 100_000, "invalid_json", "nests brackets deeper than 64"),
    "deep but closed": (lambda t: b"[" * 65 + b"]" * 65, "invalid_json", "nests brackets deeper than 64"),
    "a list": (lambda t: b"[1]", "invalid_json", "holds a list, but must hold a JSON object"),
    "a number": (lambda t: b"17", "invalid_json", "holds 17, but must hold"),
    "null": (lambda t: b"null", "invalid_json", "holds null"),
    "no custom_id": (lambda t: variant(t, custom_id=None), "invalid_request", "custom_id is missing"),
    "numeric custom_id": (lambda t: variant(t, custom_id=7), "invalid_request", "must be a string"),
    "repeated custom_id": (lambda t: t.line("first"), "duplicate_custom_id", "used before, on line 1"),
    "repeated and worse": (lambda t: t.line("first", temperature=-1), "duplicate_custom_id", "on line 1"),
    "wrong url": (lambda t: variant(t, url="/v1/images"), "unsupported_url", "url is '/v1/images'"),
    "chat as embeddings": (lambda t: variant(t, url="/v1/embeddings"), "invalid_request", "input is missing"),
    "wrong method": (lambda t: variant(t, method="GET"), "invalid_request", "must be 'POST'"),
    "body of text": (lambda t: variant(t, body="x"), "invalid_request", "must be an object"),
    "unknown parameter": (lambda t: t.line("bad", colour="red"), "unsupported_parameter", "colour is not"),
    "unknown member": (lambda t: variant(t, priority=1), "unsupported_parameter", "priority is not"),
    "stream": (lambda t: t.line("bad", stream=True), "unsupported_parameter", "a batch has no stream"),
    "tools": (lambda t: t.line("bad", tools=[{}]), "invalid_request", "tools[0].type is missing; add it"),
    "max_tokens 0 on chat": (lambda t: t.line("bad", max_tokens=0), "invalid_request", "must be 1 or more"),
    "max_tokens over the cap": (lambda t: t.line("bad", max_tokens=10**6), "invalid_request", "at most 131072"),
    "huge number": (lambda t: t.line("bad", max_tokens=10**30), "invalid_request", "max_tokens is 1e+30: too large"),
    "min_tokens over the cap": (lambda t: t.line("bad", min_tokens=10**6), "invalid_request", "at most 131072"),
    "negative temperature": (lambda t: t.line("bad", temperature=-1), "invalid_request", "must be 0 or more"),
    "empty messages": (lambda t: t.line("bad", messages=[]), "invalid_request", "messages is empty"),
    "other model": (lambda t: t.line("bad", model="gpt"), "model_not_found", "run with --model gpt=MODEL"),
    "no model": (lambda t: t.line("bad", model=""), "invalid_request", "model is empty"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_line_between_good_ones_is_refused_alone(case: str, tools: Any) -> None:
    make, code, message = CASES[case]
    planned = tools.plan(tools.line("first") + b"\n" + make(tools) + b"\n" + tools.line("last", "other") + b"\n")
    assert {row["row"] for row in planned.rows} == {GOOD_BEFORE, GOOD_AFTER}
    assert planned.error_of.keys() == {1}
    found, text = planned.error_of[1]
    assert found == code
    assert text.startswith("line 2 of the input: ")
    assert message in text
    assert "\n" not in text
    assert len(text) < 500
    (row,) = planned.rejected
    assert (row["status"], row["attempt"], row["text"]) == ("failed", None, None)
    assert row["status_code"] == (404 if code == "model_not_found" else 400)


def test_brackets_in_strings_do_not_nest(tools: Any) -> None:
    planned = tools.plan(tools.line("code", '[[{{"\\' * 500))
    assert [row["custom_id"] for row in planned.rows] == ["code"]


def test_a_hostile_line_of_escaped_quotes_takes_linear_time(tools: Any) -> None:
    """Given 4 MB of an unterminated string full of escapes after many brackets, reading stays quick (a backtracking
    scan would take hours)."""
    planned = tools.plan(b"[{" * 40 + b'"' + b'\\"[' * 1_400_000 + b"\n" + tools.line("good"))
    assert planned.error_of[0][0] == "invalid_json"
    assert [row["row"] for row in planned.rows] == [1]


def test_a_refused_row_keeps_what_is_known_of_it(tools: Any) -> None:
    planned = tools.plan(tools.line("mine", stream=True))
    assert (planned.rejected[0]["custom_id"], planned.rejected[0]["model"]) == ("mine", "demo")


def test_an_empty_file_is_a_job_without_rows(tools: Any) -> None:
    for data in (b"", b"\n", b"\xef\xbb\xbf", b" \r\n\t\n"):
        planned = tools.plan(data)
        assert (planned.summary.total, planned.shards, planned.rejected) == (0, {}, [])
        assert [segment.last for segment in planned.sink.committed] == [True]


@pytest.mark.slow
def test_a_file_of_only_bad_lines_is_planned(tools: Any) -> None:
    planned = tools.plan(b"x\n" * 5000)
    assert (planned.summary.total, planned.summary.rejected, planned.shards) == (5000, 5000, {})
    assert [row["row"] for row in planned.rejected] == list(range(5000))


def test_on_invalid_job_plans_nothing_and_lists_the_errors(tools: Any) -> None:
    """Given 3 bad lines and room for 2 errors, then nothing is committed, and the first 2 are listed."""
    bad = b"x\n" + tools.line("a") + b"\n" + tools.line("a") + b"\n" + tools.line("b", stream=True)
    sink = tools.sink()
    job = tools.job(on_invalid="job", plan={"max_invalid_errors": 2})
    with pytest.raises(InvalidInput, match="3 lines are invalid; the first is line 1: the line is not JSON") as stopped:
        tools.plan(bad, job, sink=sink)
    assert stopped.value.count == 3
    assert [(error.line, error.code, error.param) for error in stopped.value.errors] == [
        (1, "invalid_json", None),
        (3, "duplicate_custom_id", "custom_id"),
    ]
    assert (sink.committed, sink.rejected, sink.shards) == ([], [], {})


def test_on_invalid_job_commits_no_segment_before_the_last_line_was_read(tools: Any) -> None:
    """Given a bad line in the last of many segments, then none of the others is committed."""
    lines = [tools.line(str(number)) for number in range(9)] + [b"x"]
    sink = tools.sink()
    with pytest.raises(InvalidInput):
        tools.plan(b"\n".join(lines), tools.job(on_invalid="job", plan={"segment_rows": 2}), sink=sink)
    assert sink.committed == []
    good = tools.plan(b"\n".join(lines[:-1]), tools.job(on_invalid="job", plan={"segment_rows": 2}))
    assert [segment.index for segment in good.sink.committed] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "is compressed twice"),
        ('{"custom_id": "a"}'.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b"PAR1....PAR1", "is a Parquet file"),
        (b"ARROW1\0\0", "is an Arrow file"),
        (b"\xff\xff\xff\xff\x10\0\0\0", "is an Arrow stream"),
    ],
)
def test_a_file_that_is_plainly_something_else_is_one_error_and_not_one_a_line(
    start: bytes, message: str, tools: Any
) -> None:
    with pytest.raises(InputError, match=f"file-1.jsonl {message}"):
        tools.source(tools.line("a"), start)


@pytest.mark.parametrize(
    ("names", "folder", "message"),
    [
        (["a.jsonl.bz2"], False, r"a\.jsonl\.bz2: only \.jsonl and \.csv are read compressed, as \.gz or \.zst"),
        (["a.parquet.gz"], False, "decompress it first"),
        (["d/a.jsonl", "d/b.jsonl.xz"], True, "decompress it first"),
        (["a.tsv"], False, r"is no \.jsonl, \.csv"),
        (["d/notes.txt"], True, r"holds no \.jsonl, \.csv"),
        (["d/a.jsonl", "d/b.parquet"], True, "mixes jsonl and parquet files"),
    ],
)
def test_an_input_of_the_wrong_kind_is_refused(names: list[str], folder: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose_files("in", names, folder=folder)


def test_a_folder_is_read_in_order_of_names() -> None:
    assert choose_files("d", ["d/b.jsonl", "d/a.jsonl", "d/x.txt"], folder=True)[1] == ("d/a.jsonl", "d/b.jsonl")
