"""The scenario of a seed for a whole root: jobs of several tenants that arrive under faults, and the processes.

Like the scenario of one job it can be written down whole, so that a stored history stays what it is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from tests.simulation.scenario import Fault, Line, Poison, Scenario, Style, draw_lines, draw_poison

MODELS = ("tiny", "other")
TENANTS = ("ada", "bob", "cyd")
KAFKA_TENANT = "kim"

CALLS = ("store.create", "store.read", "store.info", "store.list", "store.open", "store.delete", "store.replace",
         "queue.put", "queue.take", "heartbeats.beat", "heartbeats.workers", "engine.step", "clock.sleep", "clock.now",
         "lease.renew", "messages.send", "ingest.settle", "kafka.commit", "disk.link", "disk.sync_folder")  # fmt: skip

WEIGHTS = {
    "kill": 10, "restart": 3, "pause": 6, "stop": 4, "slow": 4, "lose": 3, "double": 3, "late": 3, "reorder": 2,
    "forget": 4, "away": 3, "split": 3, "unled": 2, "refuse": 4, "after": 4, "silent": 3, "mute": 3, "jump": 1,
    "fail": 2, "break": 1, "power": 3,
}  # fmt: skip
"""How often each kind of fault is drawn. Those of the machine, and:
    restart     all processes die, and queues, beats and lease are empty
    forget      the server is emptied of queues, beats and lease;  away: it can't be reached for a while
    split       each dispatcher believes that it holds the lease, for a while;  unled: whose it is, is forgotten
    refuse      the store fails, and has done nothing;  after: it fails, and the call has taken effect
    silent      a message is not confirmed, and was not sent;  mute: it is not confirmed, and was sent
    power       the power is cut (of a folder; a bucket loses nothing that it acknowledged), and all begin anew
"""


@dataclass(frozen=True, slots=True)
class Drop:
    """A file of requests, dropped in a tenant's folder.

    Attributes:
        at: seconds from the beginning.  deadline: seconds from its acceptance.  model: given for the whole file.
        told: its events, each a second and the number of the intake that receives it; empty, where events get lost.
        cancel_at, retry: when its user cancels it, and whether what failed is tried again as a new job.
        remove_at: when a user removes the job, in any state.
    """

    name: str
    tenant: str
    tier: str
    at: float
    lines: tuple[Line, ...]
    told: tuple[tuple[float, int], ...]
    model: str | None = None
    deadline: float | None = None
    cancel_at: float | None = None
    retry: bool = False
    remove_at: float | None = None
    poison: tuple[Poison, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordLine:
    """A record on the topic of requests, at a second from the beginning. `tier`: its header."""

    at: float
    line: Line
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class RootScenario:
    """All that is fixed before a history begins.

    Attributes:
        folder: the root is a folder, whose disk forgets what was not synced; else a bucket.
        worker_models: for each worker, the model that it serves.
        kept: seconds for which results are retained; None: for ever.
        flood: a history without faults, with more of one tenant's and tier's work than of all others'.
    """

    seed: int
    folder: bool
    drops: tuple[Drop, ...]
    records: tuple[RecordLine, ...]
    segment_rows: int
    shard_rows: int
    intakes: int
    foremen: int
    announcers: int
    collectors: int
    worker_models: tuple[str, ...]
    max_num_seqs: int
    step_seconds: float
    checkpoint_seconds: float
    max_open_shards: int
    backlog: int
    kept: float | None
    threaded: bool
    flood: bool
    faults: tuple[Fault, ...]

    def to_json(self) -> str:
        """The scenario as JSON."""
        return json.dumps({"root": asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RootScenario:
        """The scenario that `to_json` wrote."""
        values = json.loads(text)["root"]
        values["drops"] = tuple(_drop(drop) for drop in values["drops"])
        values["records"] = tuple(RecordLine(**{**one, "line": Line(**one["line"])}) for one in values["records"])
        values["faults"] = tuple(Fault(**fault) for fault in values["faults"])
        values["worker_models"] = tuple(values["worker_models"])
        return cls(**values)

    def as_job(self, lines: tuple[Line, ...], poison: tuple[Poison, ...] = ()) -> Scenario:
        """One of its jobs, as the watch and the oracle of one job need it."""
        return Scenario(
            seed=self.seed, lines=lines, segment_rows=self.segment_rows, shard_rows=self.shard_rows,
            shard_tokens=100_000, planners=self.foremen, dispatchers=self.foremen,
            workers=max(2, len(self.worker_models)),  # what one alone may lose is not what several may
            max_num_seqs=self.max_num_seqs, step_seconds=self.step_seconds,
            checkpoint_seconds=self.checkpoint_seconds, max_open_shards=self.max_open_shards, backlog=self.backlog,
            deadline=None, faults=(), threaded=self.threaded, poison=poison,
        )  # fmt: skip

    def smaller(self) -> Iterator[RootScenario]:
        """Scenarios with one thing less."""
        for at in range(len(self.faults)):
            yield replace(self, faults=self.faults[:at] + self.faults[at + 1 :])
        for at in reversed(range(len(self.drops))):
            yield replace(self, drops=self.drops[:at] + self.drops[at + 1 :])
        for at in reversed(range(len(self.records))):
            yield replace(self, records=self.records[:at] + self.records[at + 1 :])
        for name in ("intakes", "foremen", "announcers", "collectors"):
            if getattr(self, name) > (name != "collectors"):
                yield replace(self, **{name: getattr(self, name) - 1})
        for at, model in enumerate(self.worker_models):
            left = self.worker_models[:at] + self.worker_models[at + 1 :]
            if model in left:
                yield replace(self, worker_models=left)
        for at, drop in enumerate(self.drops):
            for simpler in _simpler(drop):
                yield replace(self, drops=(*self.drops[:at], simpler, *self.drops[at + 1 :]))


def _simpler(drop: Drop) -> Iterator[Drop]:
    for name in ("deadline", "cancel_at", "remove_at"):
        if getattr(drop, name) is not None:
            yield replace(drop, **{name: None})
    if drop.retry:
        yield replace(drop, retry=False)
    for at in reversed(range(len(drop.told))):
        yield replace(drop, told=drop.told[:at] + drop.told[at + 1 :])
    for row in reversed(range(len(drop.lines))):
        if len(drop.lines) > 1 and not drop.poison:
            yield replace(drop, lines=drop.lines[:row] + drop.lines[row + 1 :])


def _drop(values: dict[str, object]) -> Drop:
    lines, poison, events = values.pop("lines"), values.pop("poison"), values.pop("told")
    assert isinstance(lines, list)
    assert isinstance(poison, list)
    assert isinstance(events, list)
    return Drop(
        **values,  # type: ignore[arg-type]
        lines=tuple(Line(**line) for line in lines),
        poison=tuple(Poison(**one) for one in poison),
        told=tuple((at, intake) for at, intake in events),
    )


def draw_root(seed: int) -> RootScenario:
    """The scenario of a seed."""
    chance = random.Random(f"{seed}/root")
    flood = chance.random() < 0.06
    models = MODELS[: chance.choice((1, 1, 2))]
    intakes = chance.choice((1, 2, 2))
    drops = _flood(chance) if flood else tuple(_drops(chance, models, intakes))
    workers = [*models, *(chance.choice(models) for _ in range(chance.choice((0, 1, 1, 2))))]
    quiet = chance.random() < 0.08  # nothing but a server that is emptied: no work at all may be done twice then
    one = flood or quiet
    if quiet:
        drops = tuple(_undisturbed(drop) for drop in drops)
        workers += [models[0]]
    return RootScenario(
        seed=seed,
        folder=not flood and chance.random() < 0.12,
        drops=drops,
        records=() if flood else tuple(_records(chance)),
        segment_rows=chance.choice((3, 6, 100)),
        shard_rows=1 if flood else chance.randint(1, 4),
        intakes=intakes,
        foremen=1 if one else chance.choice((1, 2, 2)),
        announcers=chance.choice((1, 1, 2)),
        collectors=0 if flood else chance.choice((0, 1, 1)),
        worker_models=models if flood else tuple(workers),
        max_num_seqs=4 if flood else chance.choice((2, 4, 8)),
        step_seconds=chance.choice((0.05, 0.1, 0.4)),
        checkpoint_seconds=chance.choice((0.3, 1.0, 5.0)),
        max_open_shards=1 if flood else chance.randint(1, 3),
        backlog=chance.randint(1, 3),
        kept=chance.uniform(30.0, 90.0) if not flood and chance.random() < 0.15 else None,
        threaded=chance.random() < 0.85,
        flood=flood,
        faults=() if flood else tuple(_forgets(chance) if quiet else _faults(chance)),
    )


def _drops(chance: random.Random, models: tuple[str, ...], intakes: int) -> Iterator[Drop]:
    for number in range(chance.randint(1, 4)):
        lines = tuple(draw_lines(chance, chance.randint(1, 6), Style(f"d{number}-", models)))
        at = round(chance.choice((0.0, chance.uniform(0.0, 30.0))), 2)
        events = []
        for _ in range(chance.choice((0, 1, 2, 3))):
            later = chance.choice((0.0, 0.05, chance.uniform(0.0, 20.0)))
            events.append((round(at + later, 2), chance.randrange(intakes)))
        plain = all(f'"{MODELS[1]}"' not in line.text for line in lines)
        yield Drop(
            name=f"drop-{number}.jsonl",
            tenant=chance.choice(TENANTS),
            tier=chance.choice(("standard", "standard", "bulk")),
            at=at,
            lines=lines,
            told=tuple(sorted(events)),
            model=models[0] if plain and chance.random() < 0.4 else None,
            deadline=float(chance.randint(1, 60)) if chance.random() < 0.12 else None,
            cancel_at=round(at + chance.uniform(0.0, 25.0), 2) if chance.random() < 0.15 else None,
            retry=chance.random() < 0.3,
            remove_at=round(at + chance.uniform(0.5, 25.0), 2) if chance.random() < 0.06 else None,
            poison=tuple(draw_poison(chance, lines)) if chance.random() < 0.4 else (),
        )


def _records(chance: random.Random) -> Iterator[RecordLine]:
    if chance.random() < 0.5:
        return
    at = 0.0
    lines = draw_lines(chance, chance.randint(1, 7), Style("k-", weights=(40, 20, 12, 4, 0, 0, 4, 0)))
    for line in lines:
        at += chance.choice((0.0, 0.1, chance.uniform(0.0, 8.0)))
        yield RecordLine(round(at, 2), line, chance.choice((None, None, "bulk")))
        if chance.random() < 0.15:  # a producer that was not sure
            yield RecordLine(round(at, 2), line, None)


def _flood(chance: random.Random) -> tuple[Drop, ...]:
    """Much of one tenant, and a little of another behind it; now and then the little is the less urgent."""
    bulk = chance.random() < 0.5

    def drop(number: int, tenant: str, tier: str, rows: int) -> Drop:
        lines = tuple(draw_lines(chance, rows, Style(f"d{number}-", weights=(1, 0, 0, 0, 0, 0, 0, 0), short=True)))
        return Drop(f"drop-{number}.jsonl", tenant, tier, 0.0, lines, ((0.0, 0),))

    few = drop(1, "zoe", "bulk" if bulk else "standard", 3)
    return (drop(0, "ada", "standard", 48 if bulk else 24), few)


def _undisturbed(drop: Drop) -> Drop:
    """All of its rows are answered, if nothing is in the way."""
    return replace(drop, poison=(), deadline=None, cancel_at=None, remove_at=None)


def _forgets(chance: random.Random) -> Iterator[Fault]:
    for _ in range(chance.randint(1, 3)):  # while something is computed
        yield Fault("forget", "engine.step", chance.randint(1, 50), 0.0)


def _faults(chance: random.Random) -> Iterator[Fault]:
    for _ in range(chance.choice((0, 1, 2, 3, 4, 6, 8))):
        kind = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind in ("lose", "double", "late"):
            call, nth = "queue.put", chance.randint(1, 12)
        elif kind in ("silent", "mute"):
            call, nth = "messages.send", chance.randint(1, 20)
        elif kind in ("split", "unled"):
            call, nth = "lease.renew", chance.randint(1, 30)
        elif kind in ("fail", "break"):
            call, nth = "engine.step", chance.randint(1, 60)
        elif chance.random() < 0.5:
            call, nth = "", int(10 ** chance.uniform(0.5, 3.4))
        else:
            call, nth = chance.choice(CALLS), chance.randint(1, 60)
        amount = chance.choice((0.1, 2.0, 8.0, 15.0, 40.0)) if kind == "pause" else round(chance.uniform(0.2, 20.0), 2)
        yield Fault(kind, call, nth, 3600.0 if kind == "jump" else amount)
