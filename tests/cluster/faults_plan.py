"""The plan of a run: the order and the intervals of the faults, and the jobs that arrive meanwhile, drawn from a seed.

The whole plan is drawn before the run, so its seed repeats it. The state that a fault meets depends on the machine:
    real
processes are not as reproducible as the faults.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MODEL = "demo"
WORKERS = ("worker-1", "worker-2")
DISPATCHERS = ("dispatcher-1", "dispatcher-2")
INTAKES = ("intake-1", "intake-2")
PROCESSES = (*DISPATCHERS, *INTAKES, *WORKERS)

SILENCE = 12.0
"""A worker that is stopped for longer than this counts as dead, and its shards go to others before it continues."""

DECK = (
    ("kill", WORKERS, 4),
    ("stop", WORKERS, 4),
    ("s3 lost", (), 3),
    ("kill", DISPATCHERS, 4),
    ("cancel", (), 2),
    ("redis emptied", (), 3),
    ("broker restarted", (), 3),
    ("s3 busy", (), 3),
    ("kill", INTAKES, 3),
    ("stop", DISPATCHERS, 3),
    ("expire", (), 2),
    ("retry", (), 2),
    ("stop", INTAKES, 2),
    ("s3 slow", (), 2),
)
"""Kind, possible targets, and number among 40 faults. A shorter run takes the kinds in rotation, from the first."""

PAUSES = {"worker": ((1.0, 4.0), (SILENCE + 2, SILENCE + 6)), "dispatcher": ((7.0, 10.0),), "intake": ((8.0, 11.0),)}
"""Seconds for which a process is stopped: beyond the lease of dispatchers and the session of Kafka's consumers; of
workers also less than makes them seem dead."""

SECONDS = {
    "kill": (0.5, 3.0),  # until it is started again
    "redis emptied": (0.0, 2.0),  # until it is there again
    "broker restarted": (0.5, 3.0),
    "s3 busy": (4.0, 9.0),
    "s3 slow": (5.0, 10.0),
    "s3 lost": (5.0, 10.0),
}

SOURCES = ("bucket", "kafka records", "kafka jobs", "celery uri", "celery requests", "bucket bulk")
FILE_SOURCES = frozenset({"bucket", "bucket bulk", "kafka jobs", "celery uri"})
"""Sources of unparsed lines, whose invalid requests are failed rows. Invalid requests from Kafka are dead letters."""

WORDS = (
    *("river", "stone", "lamp", "copper", "winter", "orchard", "engine", "ladder", "silver", "harbour", "window"),
    *("cotton", "market", "island", "button", "pepper", "saddle", "thunder", "ribbon", "meadow", "anchor", "candle"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `gap` seconds after the one before. `target`: a process. `seconds`: how long it lasts."""

    number: int
    gap: float
    kind: str
    target: str
    seconds: float

    @property
    def name(self) -> str:
        """Kind, and the kind of process."""
        return f"{self.kind} {self.target.partition('-')[0]}".strip()


@dataclass(frozen=True, slots=True)
class Scale:
    """How much comes in, for a kind of worker.

    Attributes:
        rows: of a job, the least and the most.  race_rows: of one that is closed while it runs.
        max_tokens: of a row, the least and the most.
        expire_seconds: the deadline of one that is to expire.
        at_once: jobs that are open at any time, without those that belong to faults.
    """

    rows: tuple[int, int]
    race_rows: int
    max_tokens: tuple[int, int]
    expire_seconds: int
    at_once: int


SCALES = {
    "null": Scale((100, 500), 500, (4, 48), 6, 2),
    "demo": Scale((8, 30), 40, (4, 16), 12, 2),
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an input. `error`: the code under which it must fail; None: it is to be answered."""

    text: bytes
    custom_id: str | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class JobInput:
    """One input of a job and the ingest source that receives it. `label` begins each custom_id, so each result can be
    traced to its input.

    Attributes:
        role: "work", "probe" (sent when a fault strikes, to see when it is answered), or the race that it is for.
        deadline: seconds from acceptance; None: none.
    """

    label: str
    source: str
    lines: tuple[Line, ...]
    role: str = "work"
    deadline: int | None = None

    @property
    def closes(self) -> str | None:
        """Why its rows may end without an answer."""
        return {"cancel": "cancel", "retry": "cancel", "expire": "expire"}.get(self.role)

    @property
    def retries(self) -> int:
        """How many jobs may follow the first one."""
        return int(self.role == "retry")

    @property
    def rows(self) -> int:
        """Results that it must have; an invalid request from Kafka has none."""
        return sum(line.error is None or self.source in FILE_SOURCES for line in self.lines)

    @property
    def data(self) -> bytes:
        """As a file."""
        return b"".join(line.text + b"\n" for line in self.lines)


def draw_faults(seed: int, count: int) -> list[Fault]:
    """`count` faults, in the order in which they strike."""
    chance = random.Random(f"faults {seed}")
    most = max(many for _, _, many in DECK)
    rounds = [(kind, targets) for number in range(most) for kind, targets, many in DECK if number < many]
    cards: list[tuple[str, Sequence[str]]] = [rounds[at % len(rounds)] for at in range(count)]
    chance.shuffle(cards)
    return [_fault(chance, number, kind, targets) for number, (kind, targets) in enumerate(cards, 1)]


def _fault(chance: random.Random, number: int, kind: str, targets: Sequence[str]) -> Fault:
    target = chance.choice(targets) if targets else ""
    spans = PAUSES[target.partition("-")[0]] if kind == "stop" else (SECONDS.get(kind, (0.0, 0.0)),)
    return Fault(
        number, round(chance.uniform(2.0, 8.0), 2), kind, target, round(chance.uniform(*chance.choice(spans)), 2)
    )


def draw_work(seed: int, scale: Scale) -> Iterator[JobInput]:
    """An endless rotation of jobs over all ingest sources."""
    for number in itertools.count():
        rows = random.Random(f"rows {seed} {number}").randint(*scale.rows)
        yield _sending(seed, f"w{number:02d}", SOURCES[number % len(SOURCES)], rows, scale)


def draw_races(seed: int, faults: Sequence[Fault], scale: Scale) -> dict[int, JobInput]:
    """The jobs that are closed while they run, by the fault's number."""
    found = {}
    for fault in faults:
        if fault.kind in ("cancel", "expire", "retry"):
            source = "celery uri" if fault.number % 2 else "bucket"
            # All of them go before other work: they are to run when they are closed.
            deadline = scale.expire_seconds if fault.kind == "expire" else 3_600
            label = f"{fault.kind[0]}{fault.number:02d}"
            found[fault.number] = _sending(seed, label, source, scale.race_rows, scale, fault.kind, deadline)
    return found


def draw_probes(seed: int, faults: Sequence[Fault], scale: Scale) -> dict[int, JobInput]:
    """A small, urgent job for each fault, by the fault's number. 0, -1 and -2 are sent before anything strikes."""
    sources = {0: "bucket", -1: "kafka records", -2: "celery requests"}
    for fault in faults:
        usual = "bucket" if fault.number % 2 else "kafka records"
        sources[fault.number] = {"redis emptied": "celery requests", "broker restarted": "kafka records"}.get(
            fault.kind, usual
        )
    return {
        number: _sending(seed, f"p{number:02d}", source, 5, scale, "probe", 3_600) for number, source in sources.items()
    }


def _sending(
    seed: int, label: str, source: str, rows: int, scale: Scale, role: str = "work", deadline: int | None = None
) -> JobInput:
    chance = random.Random(f"{seed} {label}")
    lines: list[Line] = []
    for number in range(rows):
        luck = chance.random()
        custom_id = f"{label}/{number:05d}"
        if luck < 0.01 and role == "work" and source != "celery requests":
            lines.append(Line(f"{custom_id} is not JSON".encode(), None, "invalid_json"))
        elif luck < 0.02 and role == "work" and source in FILE_SOURCES and lines and lines[-1].error is None:
            lines.append(Line(lines[-1].text, lines[-1].custom_id, "duplicate_custom_id"))
        else:  # now and then the same request as one before, under a name of its own
            same = random.Random(f"{seed} {label} {chance.randrange(number + 1) if luck < 0.05 else number}")
            text = f"{label}: {' '.join(same.choices(WORDS, k=12))}"
            lines.append(Line(_line(custom_id, text, same.randint(*scale.max_tokens)), custom_id))
    return JobInput(label, source, tuple(lines), role, deadline)


def _line(custom_id: str, text: str, max_tokens: int) -> bytes:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0}
    body |= {"max_tokens": max_tokens, "ignore_eos": True}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()
