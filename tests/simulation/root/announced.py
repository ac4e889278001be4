"""Checks announced messages against stored objects: sent at least once, never before the commit, and identical."""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.ports import Message
from tests.simulation.machine import Broken
from tests.simulation.root.ports import Broker

RESULTS = "tokenmill.results"
EVENTS = "tokenmill.events"


class Announced:
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

    def look(self) -> None:
        """Read what is new. Raises `Broken`."""
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
                self._check_told(job, part)
        for event in self._markers("events"):
            if event not in self._events:
                raise Broken(f"I2: event {event} is marked as sent, but was not")

    def _markers(self, kind: str) -> list[str]:
        """What is marked as sent: JOB/NAME."""
        place = self._root / "announced" / kind
        jobs = sorted(os.listdir(place)) if place.is_dir() else []
        return [f"{job}/{name}" for job in jobs for name in sorted(os.listdir(place / job))]

    def judge(self, job: str, folder: Path) -> None:
        """All of a job that has ended was told."""
        for part in sorted((folder / "results").glob("*")):  # a job that was closed before it was planned has none
            self._check_told(job, part)
            event = f"{job}/{part.stem}"
            if event not in self._events:
                raise Broken(f"I7: {event} was never told")
        wanted = ["accepted", "ended"] + ["cancelling"] * _is_cancelled(folder)
        for name in wanted:
            if f"{job}/{name}" not in self._events:
                raise Broken(f"I7: {job}/{name} was never told")
        ended = json.loads(self._events[f"{job}/ended"].value or b"")
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if (ended["status"], ended["counts"]) != (manifest["status"], manifest["counts"]):
            raise Broken(f"I3: {job} was told to have ended with {ended['counts']}, but has {manifest['counts']}")

    def _result(self, message: Message) -> None:
        value = json.loads(message.value or b"")
        at = (value["job"], value["row"])
        if self._results.setdefault(at, message) != message:
            raise Broken(f"I2: row {at[1]} of {at[0]} was told twice, and not the same")
        self._by_job[at[0]][at[1]] = value

    def _event(self, message: Message) -> None:
        value = json.loads(message.value or b"")
        if self._events.setdefault(value["id"], message) != message:
            raise Broken(f"I2: event {value['id']} was told twice, and not the same")

    def _check_told(self, job: str, part: Path) -> None:
        """Each row of the part was told, as it stands there."""
        columns = ["row", "custom_id", "status"]
        told = self._by_job[job]
        table = pq.ParquetFile(io.BytesIO(part.read_bytes())).read(columns=columns, use_threads=False)
        for row in table.to_pylist():
            found = told.get(row["row"])
            if found is None:
                raise Broken(f"I2: row {row['row']} of {job} is marked as told, but was not")
            if (found["custom_id"], found["status"]) != (row["custom_id"], row["status"]):
                raise Broken(f"I2: row {row['row']} of {job} is {row}, but was told as {found['status']}")


def _is_cancelled(folder: Path) -> bool:
    path = folder / "closing.json"
    return path.exists() and json.loads(path.read_bytes())["kind"] == "cancel"
