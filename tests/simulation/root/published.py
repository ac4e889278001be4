"""Checks published messages against stored objects: sent at least once, never before the commit, and identical."""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.ports import Message
from tests.simulation.machine import InvariantViolated
from tests.simulation.root.ports import Broker

RESULTS = "tokenmill.results"
EVENTS = "tokenmill.events"


class PublishedMessages:
    """Reads the topics as they grow.

    Args:
        root: the folder in which the store's objects lie.
    """

    def __init__(self, root: Path, broker: Broker) -> None:
        self._root = root
        self._broker = broker
        self._read = 0
        self._results: dict[tuple[str, int], Message] = {}
        self._events: dict[str, Message] = {}
        self._by_job: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        self._marked: set[str] = set()

    def check(self) -> None:
        """Read what is new. Raises `InvariantViolated`."""
        for message in self._broker.topics[self._read :]:
            if message.topic == RESULTS:
                self._result(message)
            elif message.topic == EVENTS:
                self._event(message)
        self._read = len(self._broker.topics)
        for name in self._markers("results"):
            if name in self._marked:
                continue
            job, _, number = name.partition("/")
            part = self._root / "jobs" / job / "results" / f"part-{number}.parquet"
            if part.exists():
                self._marked.add(name)
                self._check_published(job, part)
        for event in self._markers("events"):
            if event not in self._events:
                raise InvariantViolated(f"I2: event {event} is marked as sent, but was not")

    def _markers(self, kind: str) -> list[str]:
        """The markers of sent messages: JOB/NAME."""
        folder = self._root / "announced" / kind
        jobs = sorted(os.listdir(folder)) if folder.is_dir() else []
        return [f"{job}/{name}" for job in jobs for name in sorted(os.listdir(folder / job))]

    def judge(self, job: str, folder: Path) -> None:
        """All rows and events of a job that has ended were published."""
        for part in sorted((folder / "results").glob("*")):  # a job that was closed before it was planned has none
            self._check_published(job, part)
            event = f"{job}/{part.stem}"
            if event not in self._events:
                raise InvariantViolated(f"I7: {event} was never published")
        wanted = ["accepted", "ended"] + ["cancelling"] * _is_cancelled(folder)
        for name in wanted:
            if f"{job}/{name}" not in self._events:
                raise InvariantViolated(f"I7: {job}/{name} was never published")
        ended = json.loads(self._events[f"{job}/ended"].value or b"")
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if (ended["status"], ended["counts"]) != (manifest["status"], manifest["counts"]):
            raise InvariantViolated(
                f"I3: {job} was published as ended with {ended['counts']}, but has {manifest['counts']}"
            )

    def _result(self, message: Message) -> None:
        value = json.loads(message.value or b"")
        at = (value["job"], value["row"])
        if self._results.setdefault(at, message) != message:
            raise InvariantViolated(f"I2: row {at[1]} of {at[0]} was published twice, and not the same")
        self._by_job[at[0]][at[1]] = value

    def _event(self, message: Message) -> None:
        value = json.loads(message.value or b"")
        if self._events.setdefault(value["id"], message) != message:
            raise InvariantViolated(f"I2: event {value['id']} was published twice, and not the same")

    def _check_published(self, job: str, part: Path) -> None:
        """Each row of the part was published, as it is stored there."""
        columns = ["row", "custom_id", "status"]
        published = self._by_job[job]
        table = pq.ParquetFile(io.BytesIO(part.read_bytes())).read(columns=columns, use_threads=False)
        for row in table.to_pylist():
            found = published.get(row["row"])
            if found is None:
                raise InvariantViolated(f"I2: row {row['row']} of {job} is marked as published, but was not")
            if (found["custom_id"], found["status"]) != (row["custom_id"], row["status"]):
                raise InvariantViolated(
                    f"I2: row {row['row']} of {job} is {row}, but was published as {found['status']}"
                )


def _is_cancelled(folder: Path) -> bool:
    path = folder / "closing.json"
    return path.exists() and json.loads(path.read_bytes())["kind"] == "cancel"
