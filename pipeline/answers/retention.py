"""Retention of the answer store: by age, and by a tenant's number and bytes of answers. An object's name says both, so
none is read."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from pipeline.answers.segments import ANSWERS, KEYS, parse_name
from pipeline.ports import ObjectInfo, ObjectStore
from schemas.settings.answers import AnswerOptions


def old_answers(store: ObjectStore, options: AnswerOptions, now: datetime) -> Iterator[ObjectInfo]:
    """Objects to remove. A planner or gateway that reads one meanwhile computes the answer."""
    for tenant in store.folders(ANSWERS):
        for space in store.folders(tenant):
            yield from _beyond(store, f"{space}{KEYS}", options.max_tenant_answers, now, options)


def _beyond(store: ObjectStore, folder: str, most: int, now: datetime, options: AnswerOptions) -> Iterator[ObjectInfo]:
    """Objects of a folder that are too old, or beyond the `most` newest answers or bytes."""
    held = 0
    for info in reversed(list(store.list(folder))):
        name = parse_name(info)
        if name is None:
            continue
        if held >= most or name.at + options.retention <= now:
            yield info
        held += name.number
