"""The oracle checks a history independently: it has the input, computes each answer itself, and reads the store with
pyarrow and json. It shares no code with the ledger's, the results' or the manifest's readers.

At random moments, after each death and at the end (`look`):
    I4  all that lies under results/ is a whole Parquet file under a part's name
    I1  no row is in two parts or twice in one, none is unknown, and each has the text and status that its line requires
    I2  a part that was seen never changes; none whose creation was acknowledged vanishes; nor does the manifest
    I3  the counts of progress.json and manifest.json sum to their total
    I1  the manifest stands only when all rows are there; a row is cancelled or expired only if closing.json says so
    I7  a job that is open is marked as such
At the end (`judge`):
    I1  one row for each line that isn't blank
    I3  the manifest's outcome, counts and token sums follow from the rows, its files' sizes and sha256 from the bytes
    I5  repeated work: with one worker, no more was sampled twice than what was in no log when a life ended, and that is
        an interval's work; no more is reported as repeated than was, and no less than what the logs prove
    I6  who is blamed: rows that are poison, and no other, unless it was there each time
    I7  the job has ended (the machine checks how soon), and when its order comes once more, no temporary, no checkpoint
        and no marker is left behind
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.simulation.machine import InvariantViolated
from tests.simulation.oracle_leftovers import check_ended, check_marker
from tests.simulation.scenario import Line, Scenario
from tests.simulation.watch import Watch

FIRST_CHARACTER = 4
FIRST_WORD = 256
WORDS = 60
END = FIRST_WORD + WORDS - 1
PART = re.compile(r"part-\d{5}\.parquet")
COINCIDENT_DEATHS = (5, 3)
"""An innocent row may be blamed when so many lives ended while it was computed, so many of them while nothing else was:
two in silence, one or more with other rows in the batch, and alone until it is certain."""
COINCIDENT_FAILURES = (2, 1)
"""Likewise for steps that failed."""


@dataclass(frozen=True)
class ExpectedResult:
    """What a row's result must be."""

    status: str
    error: str | None
    custom_id: str | None
    texts: tuple[str, ...] = ()
    finish: str | None = None
    prompt_tokens: int = 0
    sampled: int = 0


def expected(line: Line) -> ExpectedResult:
    """Works a line's result out."""
    if line.error is not None:
        return ExpectedResult("failed", line.error, line.custom_id)
    assert line.body is not None
    body = line.body
    if "messages" in body:
        prompt = [1, *_ids("user\n" + body["messages"][0]["content"]), 2, *_ids("\n"), 3, *_ids("assistant:")]
    else:
        prompt = _ids(body["prompt"])
    text, finish, sampled = _answer(len(prompt), prompt[-1], body["max_tokens"], body.get("stop", []))
    choices = body.get("n", 1)
    return ExpectedResult("succeeded", None, line.custom_id, (text,) * choices, finish, len(prompt), sampled * choices)


def _ids(text: str) -> list[int]:
    return [FIRST_CHARACTER + ord(character) for character in text]


def _answer(known: int, last: int, most: int, stops: list[str]) -> tuple[str, str, int]:
    """Text, finish reason, and tokens sampled: each depends on the previous token and on its position."""
    text = ""
    for sampled in range(1, most + 1):
        last = FIRST_WORD + (last * 31 + known * 7) % WORDS
        known += 1
        if last == END:
            return text, "stop", sampled
        word = f" w{last - FIRST_WORD:02d}"
        if word in stops:
            return text, "stop", sampled
        text += word
    return text, "length", most


@dataclass
class Oracle:
    """Watches one history.

    Attributes:
        folder: the job's, in the store.
        costs: row -> tokens of its prompt and of its answer, if nothing goes wrong.
        blamed: rows with an engine error.  coincidences: of them, those that were with what happened each time.
        over_the_bound: more was lost than `repeated_at_most`, which goes by the intervals that were logged.
        alone: no other job's rows are computed in the same engines, so that what was sampled is known.
    """

    scenario: Scenario
    folder: Path
    acknowledged: set[str]
    prefix: str
    watch: Watch
    parts: dict[str, bytes] = field(default_factory=dict)
    rows: dict[int, str] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    records: dict[str, bytes] = field(default_factory=dict)
    outcome: str = "unfinished"
    looks: int = 0
    costs: dict[int, tuple[int, int]] = field(default_factory=dict)
    blamed: set[int] = field(default_factory=set)
    coincidences: int = 0
    over_the_bound: bool = False
    poisonous: set[int] = field(default_factory=set)
    alone: bool = True

    def __post_init__(self) -> None:
        self.wanted = {row: expected(line) for row, line in enumerate(self.scenario.lines) if line.text}
        self.costs = {row: (want.prompt_tokens, want.sampled) for row, want in self.wanted.items()}
        for row, poison in self.scenario.poisonous.items():
            want = self.wanted[row]
            if want.sampled >= poison.token * len(want.texts):
                self.wanted[row] = ExpectedResult("failed", "engine_error", want.custom_id)
                self.poisonous.add(row)
        self.watch.costs.update((row, want.sampled) for row, want in self.wanted.items() if want.error is None)

    # -- at any moment

    def look(self) -> None:
        """Check what a reader sees now. Raises `InvariantViolated`."""
        self.looks += 1
        results = self.folder / "results"
        standing = {path.name: path for path in results.iterdir()} if results.is_dir() else {}
        for key in self.acknowledged:
            mine = key.startswith(self.prefix)
            path = self.folder / key.removeprefix(self.prefix) if mine else self.folder.parent.parent / key
            if not path.is_file():
                raise InvariantViolated(f"I2: {key} was reported to stand, and is gone")
        for name in self.parts:
            if name not in standing:
                raise InvariantViolated(f"I2: results/{name} is gone")
        for name, path in sorted(standing.items()):
            data = path.read_bytes()
            if self.parts.setdefault(name, data) != data:
                raise InvariantViolated(f"I2: results/{name} has changed")
            if self.parts[name] is data:
                self._read_part(name, data)
        self._check_records()
        if self.alone:  # in a root a sweep may take the marker of a job that is just being made, and makes it again
            check_marker(self.folder)

    def forget(self) -> None:
        """The job begins anew: nothing that stood must stand any longer."""
        self.acknowledged.clear()
        self.parts.clear()
        self.rows.clear()
        self.records.clear()
        self.blamed.clear()
        self.coincidences = 0

    def power_was_cut(self, unsynced: set[str], records: set[str]) -> None:
        """Names in results/, and next to it, that may be gone: their creation was not acknowledged."""
        for name in unsynced & self.parts.keys():
            if not (self.folder / "results" / name).exists():
                del self.parts[name]
                self.rows = {row: part for row, part in self.rows.items() if part != name}
        for name in records & self.records.keys():
            if not (self.folder / name).exists():
                del self.records[name]

    def _read_part(self, name: str, data: bytes) -> None:
        if not PART.fullmatch(name):
            raise InvariantViolated(f"I4: results/{name} is no part")
        try:
            rows = pq.ParquetFile(io.BytesIO(data)).read(use_threads=False).to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise InvariantViolated(f"I4: results/{name} is not a whole Parquet file: {error}") from error
        if [row["row"] for row in rows] != sorted({row["row"] for row in rows}):
            raise InvariantViolated(f"I1: the rows of results/{name} repeat, or are out of order")
        for row in rows:
            at = row["row"]
            if at in self.rows:
                raise InvariantViolated(f"I1: row {at} is in {self.rows[at]} and in {name}")
            self.rows[at] = name
            self._check_row(at, row)

    def _check_row(self, at: int, row: dict[str, Any]) -> None:
        want = self.wanted.get(at)
        if want is None:
            raise InvariantViolated(f"I1: row {at} has a result, but no line")
        if row["custom_id"] != want.custom_id:
            raise InvariantViolated(f"I1: row {at} bears {row['custom_id']!r} instead of {want.custom_id!r}")
        if self._closed(row["status"], row["error_code"]):
            return
        if row["error_code"] == "engine_error":
            self._check_blame(at, row["error_message"])
            return
        if (row["status"], row["error_code"]) != (want.status, want.error):
            raise InvariantViolated(
                f"I1: row {at} ended as {row['status']} ({row['error_code']}: {row['error_message']})"
            )
        if want.error is not None:
            return
        found = (row["text"], row["finish_reason"], row["prompt_tokens"], row["completion_tokens"])
        if found != (want.texts[0], want.finish, want.prompt_tokens, want.sampled):
            raise InvariantViolated(f"I1: row {at} is {found}, but should be {want}")
        choices = json.loads(row["response"])["choices"]
        texts = tuple(c["text"] if "text" in c else c["message"]["content"] for c in choices)
        if texts != want.texts:
            raise InvariantViolated(f"I1: row {at}: its response says {texts}, but should say {want.texts}")

    def _check_blame(self, at: int, why: str) -> None:
        """A row may be blamed if it is poison, or was there each time when something else happened."""
        self.blamed.add(at)
        if at in self.poisonous:
            return
        watch, same = self.watch, self.scenario.copies(at)
        counted = (watch.deaths, watch.lonely_deaths, COINCIDENT_DEATHS)
        if "died" not in why:
            counted = (watch.failures, watch.lonely_failures, COINCIDENT_FAILURES)
        together, alone, least = counted
        if not any(together[row] >= least[0] and alone[row] >= least[1] for row in same):
            raise InvariantViolated(
                f"I6: row {at} is blamed ({why}), but was there {max(together[row] for row in same)} times only, "
                f"{max(alone[row] for row in same)} alone"
            )
        self.coincidences += 1

    def _closed(self, status: str, error: str | None) -> bool:
        """Whether the row ended so because the job was closed."""
        if (status, error) not in (("cancelled", "batch_cancelled"), ("expired", "batch_expired")):
            return False
        closing = _parse("closing.json", _bytes(self.folder / "closing.json") or b"{}")
        return closing.get("kind") == {"cancelled": "cancel", "expired": "expire"}[status]

    def _check_records(self) -> None:
        for name in ("job.json", "closing.json", "manifest.json"):
            data = _bytes(self.folder / name)
            if name in self.records and data != self.records[name]:
                raise InvariantViolated(f"I2: {name} has changed or is gone")
            if data is None or name in self.records:
                continue
            self.records[name] = data
            record = _parse(name, data)
            if name == "manifest.json":
                _check_sum(name, record["counts"])
                if self._missing():
                    raise InvariantViolated(f"I1: manifest.json stands, but rows {self._missing()} have no result")
        progress = _bytes(self.folder / "progress.json")
        if progress is not None:
            try:
                counts = json.loads(progress)["counts"]
            except ValueError:  # a cache that a power cut tore
                return
            _check_sum("progress.json", counts)

    def _missing(self) -> list[int]:
        return [] if self._is_closed_unplanned() else sorted(self.wanted.keys() - self.rows.keys())

    def _is_closed_unplanned(self) -> bool:
        """Whether the job was closed before any of it was planned: it has no rows then."""
        data = self.records.get("manifest.json")
        if data is None or self.rows or not (self.folder / "closing.json").exists():
            return False
        if any((self.folder / "plan").glob("*.json")):
            return False
        manifest = _parse("manifest.json", data)
        return manifest["counts"]["total"] == 0 and manifest["status"] in ("cancelled", "expired")

    # -- at the end

    def judge(self) -> None:
        """Check the outcome."""
        self.look()
        if "manifest.json" not in self.records:
            raise InvariantViolated("I7: the job has no outcome")
        if self._missing():
            raise InvariantViolated(f"I1: rows {self._missing()} have no result")
        manifest = _parse("manifest.json", self.records["manifest.json"])
        self.outcome = manifest["status"]
        self._check_files(manifest)
        self._check_counts(manifest)
        root = self.folder.parent.parent
        left = sorted(str(path.relative_to(root)) for path in (root / ".tmp").rglob("*"))
        if left:
            raise InvariantViolated(f"I7: a sweep leaves {left}")
        check_ended(self.folder)

    def _check_files(self, manifest: dict[str, Any]) -> None:
        listed = {entry["path"]: entry for entry in manifest["files"]}
        if listed.keys() != {f"results/{name}" for name in self.parts}:
            raise InvariantViolated(f"I3: the manifest lists {sorted(listed)}")
        for name, data in self.parts.items():
            entry = listed[f"results/{name}"]
            facts = (len(data), hashlib.sha256(data).hexdigest(), list(self.rows.values()).count(name))
            if (entry["size"], entry["sha256"], entry["rows"]) != facts:
                raise InvariantViolated(f"I3: the manifest's entry of {name} is not what its bytes are")

    def _check_counts(self, manifest: dict[str, Any]) -> None:
        if self._is_closed_unplanned():
            return
        counts = manifest["counts"]
        statuses: Counter[str] = Counter()
        answered = set[int]()
        for data in self.parts.values():
            rows = pq.ParquetFile(io.BytesIO(data)).read(columns=["row", "status"], use_threads=False).to_pylist()
            statuses.update(row["status"] for row in rows)
            answered |= {row["row"] for row in rows if row["status"] == "succeeded"}
        shown = {name: counts.get(name, 0) for name in ("succeeded", "failed", "expired", "cancelled")}
        if counts["total"] != len(self.wanted) or {k: v for k, v in shown.items() if v} != dict(statuses):
            raise InvariantViolated(f"I3: the manifest counts {counts}, but there are {dict(statuses)}")
        ended = next((name for name in ("cancelled", "expired") if statuses[name]), "completed")
        if manifest["status"] != ended:
            raise InvariantViolated(f"I3: the job ended as {manifest['status']}, but its rows say {ended}")
        usage = manifest["usage"]
        computed = self._computed(answered)
        facts = (sum(want.prompt_tokens for want in computed), sum(want.sampled for want in computed))
        prompt, completion = usage.get("prompt", 0), usage.get("completion", 0)
        # A row that failed in the engine cost something, too: its prompt, and some of an answer.
        more = [self.costs[row] for row in self.blamed]
        most = [fact + sum(cost[at] for cost in more) for at, fact in enumerate(facts)]
        if not (facts[0] <= prompt <= most[0] and facts[1] <= completion <= most[1]):
            raise InvariantViolated(f"I3: the manifest's usage is {usage}, but should be {facts}, or up to {most}")
        if not self.watch.blind:
            self._check_repeated(completion, usage.get("repeated", 0), manifest.get("repeated_at_most", 0))

    def _check_repeated(self, committed: int, repeated: int, at_most: int) -> None:
        """Compare tokens that were sampled twice with the logs, and the reported count with them."""
        watch = self.watch
        wasted = watch.sampled - committed
        if self.alone and repeated > max(0, wasted):
            raise InvariantViolated(f"I5: {repeated} tokens are reported as repeated, but {wasted} were")
        proven = watch.durable_when_whole - committed
        if repeated < proven and not self.coincidences:
            raise InvariantViolated(
                f"I5: {repeated} tokens are reported as repeated, but logs and parts prove {proven}"
            )
        if (
            not self.alone
            or self.scenario.workers > 1
            or self.outcome != "completed"
            or watch.failures
            or self.poisonous
        ):
            return
        lost = sum(life.lost for life in watch.lives.values())
        if wasted > lost:
            raise InvariantViolated(
                f"I5: {wasted} tokens were sampled twice, but {lost} only were in no log when a life ended"
            )
        for (name, number), life in watch.lives.items():
            # An interval, what the second thread was late with this checkpoint and the next, and two steps.
            seconds = self.scenario.checkpoint_seconds + 2 * life.waited + 2 * self.scenario.step_seconds
            most = math.ceil(seconds / self.scenario.step_seconds) * self.scenario.max_num_seqs
            if life.lost > most:
                raise InvariantViolated(
                    f"I5: {name} lost {life.lost} tokens in life {number}, which is more than {most}"
                )
        self.over_the_bound = wasted > at_most

    def _computed(self, answered: set[int]) -> list[ExpectedResult]:
        """One for each request that was computed: copies within a segment are not."""
        seen: dict[tuple[int, str], ExpectedResult] = {}
        for row, want in self.wanted.items():
            line = self.scenario.lines[row]
            if row in answered:
                name = json.dumps([line.url, line.body], sort_keys=True)
                seen.setdefault((row // self.scenario.segment_rows, name), want)
        return list(seen.values())


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parse(name: str, data: bytes) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise InvariantViolated(f"I4: {name} is not whole: {error}") from error
    return record


def _check_sum(name: str, counts: dict[str, int]) -> None:
    parts = sum(value for key, value in counts.items() if key != "total")
    if parts != counts.get("total", 0):
        raise InvariantViolated(f"I3: the counts of {name} do not sum to their total: {counts}")
