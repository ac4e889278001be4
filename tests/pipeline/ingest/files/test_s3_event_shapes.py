"""Events of buckets on queues, in all their formats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.ingest.files.s3_events import NotAnEvent, ObjectCreated, read_events


def s3_record(key: str, name: str = "ObjectCreated:Put", **described: Any) -> dict[str, Any]:
    return {
        "eventVersion": "2.5",
        "eventSource": "aws:s3",
        "eventName": name,
        "s3": {"bucket": {"name": "b"}, "object": {"key": key, "size": 3, "eTag": "e"} | described},
    }


def body(*records: dict[str, Any]) -> str:
    return json.dumps({"Records": records})


def test_given_s3s_own_format_then_keys_are_decoded_and_versions_read() -> None:
    events = read_events(
        body(
            s3_record("incoming/some+prompts%2B1+%C3%A9.jsonl", versionId="v1", sequencer="0055AED6DCD90281E5"),
            s3_record("incoming%2Fa.jsonl", "ObjectCreated:CompleteMultipartUpload"),
            s3_record("incoming/gone.jsonl", "ObjectRemoved:Delete"),
            s3_record("incoming/restored.jsonl", "ObjectRestore:Completed"),
            s3_record("incoming/b.jsonl", "s3:ObjectCreated:Copy"),
        )
    )
    assert events == [
        ObjectCreated("b", "incoming/some prompts+1 é.jsonl", "v1"),
        ObjectCreated("b", "incoming/a.jsonl"),
        ObjectCreated("b", "incoming/b.jsonl"),
    ]


def test_given_the_test_event_then_there_is_nothing_to_do() -> None:
    assert read_events('{"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "b"}') == []
    assert read_events(body()) == []


def test_given_an_event_through_a_topic_then_it_is_the_same() -> None:
    inner = body(s3_record("incoming/a.jsonl"))
    assert read_events(json.dumps({"Type": "Notification", "Message": inner})) == [
        ObjectCreated("b", "incoming/a.jsonl")
    ]


def test_given_an_event_of_eventbridge_then_the_key_is_taken_as_it_stands() -> None:
    event = {
        "source": "aws.s3",
        "detail-type": "Object Created",
        "detail": {"bucket": {"name": "b"}, "object": {"key": "incoming/a+b%20.jsonl", "version-id": "v", "size": 3}},
    }
    assert read_events(json.dumps(event)) == [ObjectCreated("b", "incoming/a+b%20.jsonl", "v")]
    assert read_events(json.dumps(event | {"detail-type": "Object Deleted"})) == []


@pytest.mark.parametrize(
    "poison",
    [
        "",
        "hello",
        "[]",
        "3",
        "{}",
        '{"Records": 3}',
        '{"Records": [{}]}',
        '{"Records": [{"eventName": "ObjectCreated:Put"}]}',
        '{"Records": ["x"]}',
        '{"source": "aws.s3"}',
        '{"Type": "Notification", "Message": "x"}',
    ],
)
def test_given_something_else_then_it_is_said_so(poison: str) -> None:
    with pytest.raises(NotAnEvent, match=r"^the message is "):
        read_events(poison)
