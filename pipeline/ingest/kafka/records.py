"""Sorting of records into groups of input lines: records of one job, resent records, and refused records.

A pure function of the records, the settings and the digests seen before, so it can be tested on any input. A record's
value is one input line; the planner validates its request, row by row. Only records that can be part of no job are
refused here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import orjson
from pydantic import ValidationError

from pipeline.ingest.validation import InvalidSubmission
from pipeline.planner.readers.jsonl import BLANK, parse_json
from pipeline.tracing import TRACEPARENT, read_traceparent
from schemas.jobs.job import MetadataValue
from schemas.jobs.job_options import JobOptions
from schemas.requests.errors import RowError
from schemas.requests.limits import Limits

JOB_LABEL: Final = "job"
REPLY_TO: Final = "reply_to"
OPTION_HEADERS: Final = ("tier", "model", "deadline", "output_expires_after")
OWN_HEADERS: Final = (*OPTION_HEADERS, JOB_LABEL, REPLY_TO)
DIGEST_BYTES: Final = 16
_MAX_LABEL_CHARS: Final = 512

Headers = Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class Record:
    """A received record. `timestamp` in milliseconds since 1970, as producer or broker set it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()

    @property
    def traceparent(self) -> str | None:
        """The producer's trace context; None: not given."""
        return next((read_traceparent(value) for name, value in self.headers if name == TRACEPARENT), None)

    @property
    def size(self) -> int:
        """Bytes of key and value."""
        return len(self.key or b"") + len(self.value or b"")


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The headers, as received, that records of one job share, in addition to their tenant."""

    tier: str | None = None
    model: str | None = None
    deadline: str | None = None
    output_expires_after: str | None = None
    job: str | None = None

    def options(self) -> JobOptions:
        """The job's options; raises pydantic's ValidationError."""
        given = {name: value for name in OPTION_HEADERS if (value := getattr(self, name)) is not None}
        metadata: dict[str, MetadataValue] = {} if self.job is None else {JOB_LABEL: self.job}
        return JobOptions(**given, metadata=metadata)


@dataclass(frozen=True, slots=True)
class AcceptedRecord:
    """A record that becomes a row. `line`: its value on one line. `digest`: equal in resends."""

    record: Record
    line: bytes
    digest: bytes
    reply_to: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A record that can't be part of any job."""

    record: Record
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SortedRecords:
    """Sorted records: each is in a group, refused, or a resend of an earlier one."""

    groups: dict[GroupKey, list[AcceptedRecord]] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    resent: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RecordRules:
    """Limits of records. `max_value_bytes`: a longer value is refused."""

    tenant: str
    max_value_bytes: int
    reply_topics: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)


def sort_records(records: Sequence[Record], rules: RecordRules, seen: Collection[bytes] = ()) -> SortedRecords:
    """Sort records, which are in the order of their offsets. `seen`: digests of earlier requests."""
    done, here = SortedRecords(), set[bytes]()
    headers: dict[
        tuple[tuple[str, bytes | None], ...], tuple[GroupKey, str | None]
    ] = {}  # cache: most records have the same
    for record in records:
        own = tuple(header for header in record.headers if header[0] in OWN_HEADERS)
        try:
            if own not in headers:
                headers[own] = read_headers(own, rules.reply_topics)
            group, reply_to = headers[own]
            value = check_value(record.value, rules)
        except InvalidSubmission as unfit:
            done.refused.append(Refused(record, unfit.code, str(unfit)))
            continue
        digest = _digest(rules.tenant, group.job, value)
        if digest is not None and (digest in here or digest in seen):
            done.resent.append(record.offset)
            continue
        if digest is not None:
            here.add(digest)
        assert record.value is not None
        accepted = AcceptedRecord(record, one_line(record.value), digest or b"", reply_to)
        done.groups.setdefault(group, []).append(accepted)
    return done


def read_headers(headers: Headers, reply_topics: Collection[str]) -> tuple[GroupKey, str | None]:
    """Parse the headers; unknown headers are ignored. Raises `InvalidSubmission`."""
    found: dict[str, str] = {}
    for name, raw in headers:
        if name not in OWN_HEADERS or raw is None:
            continue
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise InvalidSubmission("bad_header", f"header {name} is not UTF-8; send it as text") from None
        if found.setdefault(name, text) != text:
            raise InvalidSubmission("bad_header", f"header {name} comes twice, with different values; send one")
    reply_to = found.pop(REPLY_TO, None)
    if reply_to is not None and reply_to not in reply_topics:
        raise InvalidSubmission(
            "bad_header", f"header reply_to is {reply_to[:80]!r}, which is not among the allowed topics"
        )
    label = found.get(JOB_LABEL)
    if label is not None and not 0 < len(label) <= _MAX_LABEL_CHARS:
        raise InvalidSubmission(
            "bad_header", f"header job has {len(label)} characters, but must have 1 to {_MAX_LABEL_CHARS}"
        )
    group = GroupKey(**found)
    try:
        group.options()
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        raise InvalidSubmission("bad_header", f"header {detail['loc'][0]}: {detail['msg']}") from None
    return group, reply_to


def check_value(value: bytes | None, rules: RecordRules) -> dict[str, Any]:
    """The JSON object in a value; raises `InvalidSubmission`."""
    if value is None:
        raise InvalidSubmission("no_value", "the record has no value; send a request as a JSON object")
    if len(value) > rules.max_value_bytes:
        raise InvalidSubmission(
            "too_large",
            f"the value has {len(value)} bytes, but at most {rules.max_value_bytes} are taken; put large requests "
            "into a file and send a job by reference",
        )
    parsed = parse_json(one_line(value), rules.limits)
    if parsed is BLANK:
        raise InvalidSubmission("no_value", "the value is blank; send a request as a JSON object")
    if isinstance(parsed, RowError):
        raise InvalidSubmission(parsed.code.value, parsed.message)
    if not isinstance(parsed, dict):
        raise InvalidSubmission("invalid_json", "the value is JSON, but not an object; send a request as a JSON object")
    return parsed


def one_line(value: bytes) -> bytes:
    """The same JSON on one line: line ends occur only between its tokens, where a space is equivalent."""
    return value.replace(b"\r", b" ").replace(b"\n", b" ")


def _digest(tenant: str, label: str | None, value: dict[str, Any]) -> bytes | None:
    """The digest of a request, equal for resends: same tenant and label, custom_id, url and body. None without a
    custom_id."""
    if not isinstance(value.get("custom_id"), str):
        return None
    identity = [tenant, label, value["custom_id"], value.get("url"), value.get("body")]
    return blake2b(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS), digest_size=DIGEST_BYTES).digest()
