"""Records of a newer tokenmill with the same format version: orders with an unknown field are refused, reports are read
without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.ledger.ledger import LedgerError, parse_stored
from schemas.jobs.events import read_event
from schemas.stored import StoredModel, StoredReport
from schemas.workers.lane import event_json, request_json
from schemas.workers.lane import read_event as read_lane_event
from schemas.workers.lane import read_request as read_lane_request
from tests.schemas.golden_samples import EVENTS, LANE, RECORDS, REQUEST, SUMMARY

SAMPLES: dict[str, StoredModel] = RECORDS | {"part-summary": SUMMARY}
REPORTS = {
    "manifest", "progress", "attempt", "end", "run", "heartbeat", "canary-failure", "release-drift", "shadow-head",
    "part-summary", "figures", "scaling", "unreadable", "planning-failure", "cascade",
    "experiment-slice", "experiment-block", "release-requests",
}  # fmt: skip
ORDERS_WITHIN = {
    "manifest": {"counts", "models"},
    "progress": {"counts"},
    "canary-failure": {"pin"},
    "part-summary": {"counts"},
}
"""Parts of a report that are read as strictly as a job: the weights, and sums that must hold."""

OPEN = {
    "adapters",
    "metadata",
    "engine",
    "versions",
    "accounted",
    "worked",
    "tiers",
    "speeds",
    "pools",
    "policies",
    "texts",
    "rejected",
}
"""Whose keys are data."""


def objects(raw: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """All JSON objects in it that have fields, and where they are."""
    if isinstance(raw, dict):
        if not path or path[-1] not in OPEN:
            yield path, raw
        for key, value in raw.items():
            yield from objects(value, (*path, key))
    elif isinstance(raw, list):
        for number, value in enumerate(raw):
            yield from objects(value, (*path, number))


def with_more(record: StoredModel) -> Iterator[tuple[tuple[str | int, ...], bytes]]:
    """The record with an unknown field, once in each of its objects, and where."""
    for path, _ in objects(json.loads(record.to_json())):
        raw = json.loads(record.to_json())
        inner = raw
        for step in path:
            inner = inner[step]
        inner["unheard_of"] = {"more": 1}
        yield path, json.dumps(raw).encode()


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_given_a_report_with_unknown_fields_when_it_is_read_then_known_fields_are_read(name: str) -> None:
    record, read = SAMPLES[name], 0
    for path, data in with_more(record):
        if ORDERS_WITHIN.get(name, set()).isdisjoint(map(str, path)):
            assert parse_stored("a report", data, type(record)) == record, path
            read += 1
        else:
            with pytest.raises(LedgerError, match="unheard_of"):
                parse_stored("a report", data, type(record))
    assert read, "nothing was tried"


@pytest.mark.parametrize("name", sorted(set(SAMPLES) - REPORTS))
def test_given_an_order_with_an_unknown_field_anywhere_when_it_is_read_then_it_is_refused(name: str) -> None:
    record = SAMPLES[name]
    for path, data in with_more(record):
        if name == "release-outcome" and "comparison" in path:
            assert parse_stored("an outcome", data, type(record)) == record, "the compared metrics are a report"
            continue
        with pytest.raises(LedgerError, match="unheard_of"):
            parse_stored("an order", data, type(record))


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_given_a_report_of_a_later_format_version_then_it_is_refused(name: str) -> None:
    record = SAMPLES[name]
    later = json.loads(record.to_json()) | {"version": 2}
    with pytest.raises(LedgerError, match="format version 2"):
        parse_stored("a report", json.dumps(later).encode(), type(record))


def test_given_counts_by_a_status_that_is_not_known_then_they_are_refused_since_they_would_not_add_up() -> None:
    raw = json.loads(SUMMARY.to_json())
    raw["counts"] |= {"postponed": 1, "total": raw["counts"]["total"] + 1}
    with pytest.raises(LedgerError, match="postponed"):
        parse_stored("a part", json.dumps(raw).encode(), type(SUMMARY))


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_given_an_event_with_unknown_fields_when_it_is_read_then_known_fields_are_read(name: str) -> None:
    event = EVENTS[name]
    assert read_event(json.dumps(json.loads(event.to_json()) | {"unheard_of": 1})) == event
    with pytest.raises(ValueError, match="unheard_of"):
        read_event(json.dumps(json.loads(event.to_json()) | {"type": "job.unheard_of"}))


def test_given_lane_messages_with_an_unknown_field_then_they_are_refused() -> None:
    for event in LANE.values():
        with pytest.raises(ValueError, match="unheard_of"):
            read_lane_event(json.dumps(json.loads(event_json(event)) | {"unheard_of": 1}))
    with pytest.raises(ValueError, match="unheard_of"):
        read_lane_request(json.dumps(json.loads(request_json(REQUEST)) | {"unheard_of": 1}))


def test_given_a_report_then_it_is_immutable() -> None:
    assert all(issubclass(type(SAMPLES[name]), StoredReport) for name in REPORTS)
    with pytest.raises(ValueError, match="frozen"):
        SUMMARY.part = 2  # type: ignore[misc]
