"""From records to groups and from batches to jobs: pure functions, tried on anything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.adapters.folder.store import FolderStore
from pipeline.ingest.kafka.micro_batches import (
    KafkaBatch,
    PartitionId,
    drafts,
    original_records,
    store_groups,
    value_digest,
)
from pipeline.ingest.kafka.records import GroupKey, Record, RecordRules, sort_records
from schemas.jobs.job import Tier

RULES = RecordRules("team", max_value_bytes=1_000, reply_topics=frozenset({"replies"}))
PARTITION = PartitionId("c1", "tokenmill.requests", 3, "team")
Found = list[tuple[bytes | None, list[tuple[str, bytes | None]], int]]
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

GOOD_HEADERS = st.lists(
    st.sampled_from(
        [
            ("tier", b"bulk"),
            ("tier", b"standard"),
            ("model", b"tiny"),
            ("deadline", b"6h"),
            ("output_expires_after", b"30d"),
            ("job", b"nightly"),
            ("job", "Nächte".encode()),
            ("reply_to", b"replies"),
            ("traceparent", b"\xff\x00"),
            ("tier", None),
        ]
    ),
    max_size=4,
)
BAD_HEADERS = st.sampled_from(
    [
        ("tier", b"interactive"),
        ("tier", b"\xff"),
        ("deadline", b"soon"),
        ("output_expires_after", b"30"),
        ("reply_to", b"elsewhere"),
        ("job", b""),
    ]
)
LINES = st.builds(
    lambda name, text, indent: orjson.dumps(
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": text}},
        option=orjson.OPT_INDENT_2 if indent else None,
    ),
    st.sampled_from(["a", "b", "c", 'q"\n']),
    st.sampled_from(["x", "y"]),
    st.booleans(),
)
VALUES = st.one_of(
    LINES, st.sampled_from([None, b"", b" \n ", b"[1]", b"{", b"\xff\xfe", b'"x"', b"{" * 500, b"x" * 2_000])
)
RECORDS = st.lists(
    st.tuples(VALUES, st.one_of(GOOD_HEADERS, BAD_HEADERS.map(lambda one: [one])), st.integers(1, 9)), max_size=30
)


def numbered(found: Found, start: int = 100) -> list[Record]:
    """Records with gaps between their offsets, as compaction leaves them."""
    records, offset = [], start
    for value, headers, gap in found:
        offset += gap
        records.append(Record(offset, 1_700_000_000_000 + offset, b"k%d" % offset, value, tuple(headers)))
    return records


def stored(store: FolderStore, records: list[Record]) -> KafkaBatch:
    found = sort_records(records, RULES)
    return KafkaBatch(
        cluster=PARTITION.cluster, topic=PARTITION.topic, partition=PARTITION.partition, tenant=PARTITION.tenant,
        first=100, last=records[-1].offset, at=AT, groups=store_groups(store, PARTITION, 100, found),
        sample=records[0].offset, sample_sha256=value_digest(records[0]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderStore]:
    with FolderStore(tmp_path_factory.mktemp("records")) as store:
        yield store


@given(RECORDS)
@pytest.mark.slow
def test_given_any_records_when_they_are_sorted_then_each_is_in_one_group_and_says_the_same(found: Found) -> None:
    records = numbered(found)

    done = sort_records(records, RULES)

    accepted = [one for group in done.groups.values() for one in group]
    everywhere = [one.record.offset for one in accepted] + [one.record.offset for one in done.refused] + done.resent
    assert sorted(everywhere) == [record.offset for record in records]
    for one in accepted:
        assert b"\n" not in one.line
        assert orjson.loads(one.line) == orjson.loads(one.record.value or b"")
    for group in done.groups.values():
        offsets = [one.record.offset for one in group]
        assert offsets == sorted(offsets)
    wanted = {(key.job, orjson.loads(one.line)["custom_id"], orjson.loads(one.line)["body"]["prompt"])
              for key, group in done.groups.items() for one in group}  # fmt: skip
    assert len(wanted) == len(accepted), "two records of one job label, custom_id and body are both accepted"


@given(RECORDS)
@settings(max_examples=40, deadline=None)
@pytest.mark.slow
def test_given_a_stored_batch_when_its_jobs_are_derived_again_then_they_are_the_same_and_hold_each_line(
    store: FolderStore, found: Found
) -> None:
    records = numbered(found)
    if not records:
        return

    batch = stored(store, records)
    again = KafkaBatch.model_validate_json(batch.to_json())
    mine, theirs = drafts(store, batch), drafts(store, again)

    assert mine == theirs
    assert len({draft.job_id for draft in mine}) == len(batch.groups)
    accepted = [one for group in sort_records(records, RULES).groups.values() for one in group]
    assert sum(len(Path(draft.input.uri).read_bytes().splitlines()) for draft in mine) == len(accepted)
    back = [record for group in batch.groups for record in original_records(store, group)]
    assert sorted(back, key=lambda one: one.offset) == sorted(
        (one.record for one in accepted), key=lambda one: one.offset
    )


def test_given_headers_when_jobs_are_derived_then_they_carry_them_and_the_tenant_is_the_topics(
    store: FolderStore,
) -> None:
    headers = (
        ("tier", b"bulk"),
        ("deadline", b"2h"),
        ("output_expires_after", b"9d"),
        ("job", b"nightly"),
        ("tenant", b"somebody-else"),
    )
    value = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}'

    (draft,) = drafts(store, stored(store, [Record(100, 0, None, value, headers)]))

    assert draft.tenant == "team"
    assert draft.options.tier is Tier.BULK
    assert draft.options.metadata == {"job": "nightly"}


def test_given_batches_of_other_origins_when_their_jobs_are_derived_then_no_id_comes_twice(store: FolderStore) -> None:
    batch = stored(store, numbered([(b'{"custom_id": "a"}', [], 1), (b'{"custom_id": "b"}', [("tier", b"bulk")], 1)]))
    others = [
        batch,
        batch.model_copy(update={"first": 99}),
        batch.model_copy(update={"partition": 4}),
        batch.model_copy(update={"cluster": "c2"}),
        batch.model_copy(update={"topic": "other"}),
    ]

    ids = [draft.job_id for one in others for draft in drafts(store, one)]

    assert len(set(ids)) == len(ids) == 10


def test_given_seen_requests_when_they_come_again_in_any_order_then_none_is_accepted_twice() -> None:
    values = [orjson.dumps({"custom_id": f"c{number}", "body": {"prompt": "x"}}) for number in range(20)]
    first = sort_records([Record(n, 0, None, value) for n, value in enumerate(values)], RULES)
    seen = {one.digest for one in first.groups[GroupKey()]}
    random.Random(1).shuffle(values)

    again = sort_records([Record(100 + n, 0, None, value) for n, value in enumerate(values)], RULES, seen)
    labelled = [Record(200 + n, 0, None, value, (("job", b"other"),)) for n, value in enumerate(values)]
    other = sort_records(labelled, RULES, seen)

    assert not again.groups
    assert len(again.resent) == 20
    assert not other.resent, "another job label is another request"
