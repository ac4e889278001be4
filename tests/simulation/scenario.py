"""The scenario of a seed: a job's input, its plan, its processes, and the faults with their times.

A scenario can be written down whole, so a stored history stays what it is when other scenarios are drawn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

CALLS = ("disk.write_new", "disk.sync_file", "disk.link", "disk.sync_folder", "disk.unlink", "disk.rename",
         "disk.make_folder", "store.create", "store.read", "store.info", "store.list", "store.open", "store.delete",
         "queue.put", "queue.take", "heartbeats.beat", "heartbeats.workers", "engine.step", "clock.sleep", "clock.now",
         "disk.remove_folder", "store.replace")  # fmt: skip

WEIGHTS = {
    "kill": 8, "power": 6, "pause": 4, "stop": 2, "lose": 2, "double": 3, "late": 2, "reorder": 1, "jump": 2, "full": 2,
    "forget": 2, "damage": 1, "plan": 1, "cancel": 1, "slow": 4, "fail": 2, "break": 1, "fresh": 1,
}  # fmt: skip
"""How often each kind of fault is drawn."""

WORDS = 60
STOPS = tuple(f" w{word:02d}" for word in range(0, WORDS, 7))


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes at the `nth` call of `call` ("": of any). `amount`: seconds."""

    kind: str
    call: str
    nth: int
    amount: float


@dataclass(frozen=True, slots=True)
class Poison:
    """The row's request can't be computed: at its `token`th token (from 1) the step fails, or, when it
    `kills`, the process ends."""

    row: int
    token: int
    kills: bool


KINDS = ("completion", "chat", "copy", "long", "blank", "broken", "unsupported", "twice")
"""Of lines."""


@dataclass(frozen=True, slots=True)
class Style:
    """How lines are drawn.

    Attributes:
        prefix: of what makes a custom_id.  models: that bodies may name.  weights: how often each kind comes.
        short: all alike, and answered in two steps.
    """

    prefix: str = ""
    models: tuple[str, ...] = ("tiny",)
    weights: tuple[int, ...] = (40, 20, 12, 4, 3, 5, 4, 4)
    short: bool = False


PLAIN = Style()


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input, as it is written; blank when `text` is empty. What can be computed, or only be refused by a
    worker, has a url and a body; `error` is the code under which the line must fail."""

    text: str
    custom_id: str | None = None
    url: str | None = None
    body: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that is fixed before a history begins.

    Attributes:
        deadline: of the job, in seconds from the beginning; None: it has none.
        planners, dispatchers, workers: processes; planners and dispatchers race when there are two.
        step_seconds: what a step of an engine takes.
        threaded: workers have a second thread; without it all that they do waits for each other.
    """

    seed: int
    lines: tuple[Line, ...]
    segment_rows: int
    shard_rows: int
    shard_tokens: int
    planners: int
    dispatchers: int
    workers: int
    max_num_seqs: int
    step_seconds: float
    checkpoint_seconds: float
    max_open_shards: int
    backlog: int
    deadline: float | None
    faults: tuple[Fault, ...]
    threaded: bool = False
    poison: tuple[Poison, ...] = ()

    @property
    def poisonous(self) -> dict[int, Poison]:
        """Row -> what its line does: also of copies, which are computed apart in other segments."""
        return {at: poison for poison in self.poison for at in self.copies(poison.row)}

    def copies(self, row: int) -> list[int]:
        """All rows with the same request as this one."""
        line = self.lines[row]
        return [at for at, other in enumerate(self.lines) if (other.url, other.body) == (line.url, line.body)]

    def to_json(self) -> str:
        """The scenario as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def smaller(self) -> Iterator[Scenario]:
        """Scenarios with one thing less."""
        for at in range(len(self.faults)):
            yield replace(self, faults=self.faults[:at] + self.faults[at + 1 :])
        for name in ("planners", "dispatchers", "workers"):
            if getattr(self, name) > 1:
                yield replace(self, **{name: getattr(self, name) - 1})
        if self.deadline is not None:
            yield replace(self, deadline=None)
        for at in reversed(range(len(self.lines))):
            if len(self.lines) > 1:
                yield replace(self, lines=self.lines[:at] + self.lines[at + 1 :])

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """The scenario that `to_json` wrote."""
        values = json.loads(text)
        values["lines"] = tuple(Line(**line) for line in values["lines"])
        values["faults"] = tuple(Fault(**fault) for fault in values["faults"])
        values["poison"] = tuple(Poison(**poison) for poison in values.get("poison", ()))
        return cls(**values)


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = random.Random(f"{seed}/scenario")
    rows = chance.randint(4, 14)
    lines = tuple(draw_lines(chance, rows))
    return Scenario(
        seed=seed,
        lines=lines,
        segment_rows=chance.choice((3, 6, 100)),
        shard_rows=chance.randint(2, 5),
        shard_tokens=chance.choice((30, 80, 100_000)),
        planners=chance.choice((1, 1, 2)),
        dispatchers=chance.choice((1, 1, 1, 2)),
        workers=chance.choice((1, 2, 2, 3)),
        max_num_seqs=chance.choice((2, 4, 8)),
        step_seconds=chance.choice((0.02, 0.1, 0.4)),
        checkpoint_seconds=chance.choice((0.0, 0.3, 1.0, 5.0)),
        max_open_shards=chance.randint(1, 3),
        backlog=chance.randint(1, 4),
        deadline=chance.uniform(1.0, 60.0) if chance.random() < 0.15 else None,
        faults=tuple(_faults(chance)),
        threaded=chance.random() < 0.85,
        poison=tuple(draw_poison(chance, lines)),
    )


def draw_poison(chance: random.Random, lines: tuple[Line, ...]) -> list[Poison]:
    """Rows of these lines that are poison, if any are."""
    valid = [row for row, line in enumerate(lines) if line.body is not None and line.error is None]
    count = min(len(valid), chance.choices((0, 1, 2), (80, 17, 3))[0])
    return [Poison(row, chance.randint(1, 6), chance.random() < 0.7) for row in sorted(chance.sample(valid, count))]


def _faults(chance: random.Random) -> list[Fault]:
    faults = []
    for _ in range(chance.choice((0, 1, 2, 3, 4, 6, 8))):
        kind = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind in ("lose", "double", "late"):
            call, nth = "queue.put", chance.randint(1, 8)
        elif kind == "full":
            call = chance.choice(("disk.write_new", "disk.sync_file", "disk.link", "disk.make_folder"))
            nth = chance.randint(1, 8) if call == "disk.make_folder" else chance.randint(4, 60)
        elif kind in ("fail", "break"):
            call, nth = "engine.step", chance.randint(1, 60)
        elif chance.random() < 0.5:
            call, nth = "", int(10 ** chance.uniform(0.5, 3.1))
        else:
            call = chance.choice(CALLS)
            nth = chance.randint(1, 40)
        amount = chance.choice((0.1, 2.0, 8.0, 15.0, 40.0)) if kind == "pause" else round(chance.uniform(0.2, 20.0), 2)
        faults.append(Fault(kind, call, nth, 3600.0 if kind == "jump" else amount))
    return faults


def draw_lines(chance: random.Random, rows: int, style: Style = PLAIN) -> list[Line]:
    """Lines of an input."""
    lines: list[Line] = []
    for row in range(rows):
        custom_id = f"id-{style.prefix}{row}"
        kind = chance.choices(KINDS, style.weights)[0]
        valid = [line for line in lines if line.body is not None]
        if kind in ("copy", "twice") and not valid:
            kind = "completion"
        if kind == "blank" and row not in (0, rows - 1):
            lines.append(Line(""))
        elif kind == "broken":
            lines.append(Line('{"custom_id": "id', error="invalid_json"))
        elif kind == "twice":
            other = chance.choice(valid)
            lines.append(_line(other.custom_id or "", other.url or "", other.body or {}, "duplicate_custom_id"))
        elif kind == "copy":
            other = chance.choice(valid)
            lines.append(_line(custom_id, other.url or "", other.body or {}, other.error))
        else:
            url, body = _request(chance, row, kind, style)
            error = {"long": "context_length_exceeded", "unsupported": "unsupported_parameter"}.get(kind)
            lines.append(_line(custom_id, url, body, error))
    return lines


def _request(chance: random.Random, row: int, kind: str, style: Style) -> tuple[str, dict[str, Any]]:
    if style.short:
        return "/v1/completions", {"model": "tiny", "max_tokens": 2, "temperature": 0, "prompt": f"{row:04d}"}
    words = "".join(chance.choice("abcdefgh ") for _ in range(chance.randint(1, 12)))
    body: dict[str, Any] = {"model": "tiny", "max_tokens": chance.randint(1, 24), "temperature": 0}
    if len(style.models) > 1:
        body["model"] = chance.choice(style.models)
    if kind == "long":
        body["max_tokens"] = 500
    if kind == "unsupported":
        body["stream"] = True
    if chance.random() < 0.4:
        body["stop"] = [chance.choice(STOPS)]
    if chance.random() < 0.15:
        body["n"] = 2
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": f"{row} {words}"}]
        return "/v1/chat/completions", body
    body["prompt"] = f"{row} {words}."
    return "/v1/completions", body


def _line(custom_id: str, url: str, body: dict[str, Any], error: str | None = None) -> Line:
    text = json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})
    return Line(text, custom_id, url, None if error and error != "context_length_exceeded" else body, error)
