"""Retention of the answer store: by age, and by a tenant's number and bytes of answers. An object's name says both, so
none is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from pipeline.answers.segments import ANSWERS, HTTP, KEYS, parse_name
from pipeline.ports import ObjectInfo, ObjectStore
from schemas.settings.answers import AnswerOptions


@dataclass(slots=True)
class OldAnswers:
    """Objects of a folder to remove; `kept_bytes` is the size of the others."""

    old: list[ObjectInfo] = field(default_factory=list)
    kept_bytes: int = 0


def old_answers(store: ObjectStore, options: AnswerOptions, now: datetime) -> Iterator[ObjectInfo]:
    """Objects to remove. A planner or gateway that reads one meanwhile computes the answer."""
    for tenant in store.folders(ANSWERS):
        for space in store.folders(tenant):
            yield from _beyond(store, f"{space}{KEYS}", options.max_tenant_answers, now, options).old
            yield from old_responses(store, space, options, now).old


def old_responses(store: ObjectStore, space: str, options: AnswerOptions, now: datetime) -> OldAnswers:
    """Answers over HTTP of one space that are to be removed."""
    return _beyond(store, f"{space}{HTTP}", options.max_tenant_bytes, now, options)


def _beyond(store: ObjectStore, folder: str, most: int, now: datetime, options: AnswerOptions) -> OldAnswers:
    """What is too old, or beyond the `most` newest answers or bytes."""
    found, held = OldAnswers(), 0
    for info in reversed(list(store.list(folder))):
        name = parse_name(info)
        if name is None:
            continue
        if held >= most or name.at + options.retention <= now:
            found.old.append(info)
        else:
            found.kept_bytes += info.size
        held += name.number
    return found
