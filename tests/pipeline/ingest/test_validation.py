"""Validation of tenants' URIs, for all ingest sources."""

from __future__ import annotations

import pytest

from pipeline.ingest.validation import InvalidSubmission, check_uri

PREFIXES = ("s3://bucket/team/", "file:///data/team/")


@pytest.mark.parametrize(
    "uri", ["s3://bucket/team/a.jsonl", "s3://bucket/team/x/y z.parquet", "file:///data/team/a.jsonl"]
)
def test_given_a_uri_below_a_prefix_when_it_is_checked_then_it_passes(uri: str) -> None:
    check_uri(uri, PREFIXES)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/team/",
        "s3://bucket/teammate/a.jsonl",
        "s3://other/team/a.jsonl",
        "/data/team/a.jsonl",
        "file:///etc/passwd",
        "file:///data/team/../../etc/passwd",
        "file:///data/team/%2e%2e/secret",
        "file:///data/team//a.jsonl",
        "file://host/data/team/a.jsonl",
        "http://bucket/team/a.jsonl",
        "s3://[bucket/a",
    ],
)
def test_given_a_uri_that_leads_elsewhere_when_it_is_checked_then_it_is_refused(uri: str) -> None:
    with pytest.raises(InvalidSubmission):
        check_uri(uri, PREFIXES)


def test_given_no_prefixes_when_a_local_file_is_named_then_it_is_refused() -> None:
    with pytest.raises(InvalidSubmission, match="none is configured"):
        check_uri("file:///data/a.jsonl", ())
