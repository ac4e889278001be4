"""The simulated machine: processes that take turns, one clock, and faults that strike at port calls.

Each process is a greenlet. Only one runs; at every port call (`Process.point`) the machine may end it, pause it, let
another go on, or cut the power. Who goes on is drawn from the seed, so one seed is one history.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from greenlet import greenlet

from tests.simulation.scenario import Fault

START = datetime(2026, 1, 1, tzinfo=UTC)
POINT_SECONDS = 0.001
MAX_POINTS = 200_000


class Killed(BaseException):
    """The process is gone: SIGKILL, or the power."""


class Broken(BaseException):
    """Raised when a history breaks a promise. Nothing of the pipeline's may catch it."""


@dataclass(eq=False)
class Process:
    """One process: a body that is run again after each death.

    Attributes:
        wake: machine time before which it does not go on.  dead: this life has ended; every call of it raises.
        stopping: it was asked to end by itself.  troubled: it met a full disk in this life.
        open_files: descriptors to be closed at death.
    """

    name: str
    machine: Machine
    body: Callable[[Process], None]
    life: int = 0
    wake: float = 0.0
    dead: bool = True
    done: bool = False
    stopping: bool = False
    troubled: bool = False
    open_files: set[int] = field(default_factory=set)
    run: greenlet | None = None

    def point(self, call: str, about: str = "") -> None:
        """A port call is about to be made. Raises `Killed`."""
        if self.dead:
            raise Killed
        self.machine.at_point(self, call, about)

    def sleep(self, seconds: float) -> None:
        """Let others go on, for so long at least. Raises `Killed`."""
        if self.dead:
            raise Killed
        self.wake = max(self.wake, self.machine.now + seconds)
        self.machine.hub.switch()
        if self.dead:
            raise Killed


class ProcessClock:
    """`Clock` as one process sees it; `stretch` makes sleeps longer, as a busy machine may."""

    def __init__(self, process: Process, at_least: float = 0.0) -> None:
        self._process = process
        self._at_least = at_least

    def now(self) -> datetime:
        machine = self._process.machine
        return START + timedelta(seconds=round(machine.now + machine.wall_offset, 6))

    def monotonic(self) -> float:
        return self._process.machine.now

    def sleep(self, seconds: float) -> None:
        self._process.point("clock.sleep")
        self._process.sleep(max(seconds, self._at_least))


class ProcessRandomness:
    """`Randomness` of one life of a process."""

    def __init__(self, seed: int, process: Process) -> None:
        self._random = random.Random(f"{seed}/{process.name}/{process.life}")

    def token(self, num_bytes: int) -> bytes:
        return self._random.randbytes(num_bytes)


class Machine:
    """Runs processes until all are done.

    Args:
        faults: each strikes once, at its call; what strikes is told to `strike`, which the owner sets.
        look: called at random moments, between two turns.
    """

    def __init__(self, seed: int, faults: tuple[Fault, ...], look: Callable[[], None], limit: float) -> None:
        self.seed = seed
        self.now = 0.0
        self.wall_offset = 0.0
        self.chance = random.Random(f"{seed}/schedule")
        self.hub = greenlet.getcurrent()
        self.processes: list[Process] = []
        self.calls: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self.trace: list[str] = []
        self.digest = hashlib.blake2b(digest_size=16)
        self.last_fault = 0.0
        self.deaths = 0
        self.sampled_when_whole = 0  # tokens, when a part was committed last
        self.power_cut: Callable[[], None] = lambda: None
        self.strikes: dict[str, Callable[[Process, Fault], None]] = {}
        self._look = look
        self._limit = limit
        self._due: dict[tuple[str, int], list[Fault]] = defaultdict(list)
        for fault in faults:
            self._due[fault.call, fault.nth].append(fault)
        self._left = len(faults)
        self._switch = self.chance.choice((0.05, 0.2, 0.5))

    # -- processes

    def add(self, name: str, body: Callable[[Process], None], delay: float = 0.0) -> Process:
        """A process that starts after `delay` seconds."""
        process = Process(name, self, body, wake=self.now + delay)
        self.processes.append(process)
        return process

    def kill(self, process: Process, *, again: float) -> None:
        """End a process's life; it begins anew `again` seconds later."""
        self.deaths += 1
        process.dead = True
        if process.run is not None and process.run is not greenlet.getcurrent() and not process.run.dead:
            process.run.parent = greenlet.getcurrent()
            process.run.throw(Killed)
        self._bury(process, again)

    def cut_power(self, fault: Fault) -> None:
        """All processes die at once, the running one last; what was not synced may be lost."""
        current = greenlet.getcurrent()
        for process in sorted(self.processes, key=lambda process: process.run is current):
            process.done = False
            if process.run is not None:
                self.kill(process, again=fault.amount * (0.5 + self.chance.random()))
        self.power_cut()

    def _bury(self, process: Process, again: float) -> None:
        for descriptor in process.open_files:
            os.close(descriptor)
        process.open_files.clear()
        process.wake = self.now + again
        process.stopping = process.troubled = False

    def _live(self, process: Process) -> None:
        """A process's turn: its life begins, or goes on."""
        if process.run is None or process.run.dead:
            process.dead, process.life = False, process.life + 1
            process.run = greenlet(lambda: self._life(process), parent=self.hub)
            self.note(f"{process.name} begins life {process.life}")
        process.run.switch()

    def _life(self, process: Process) -> None:
        life = process.life
        try:
            process.body(process)
            process.done = not process.stopping
            self._bury(process, 1.0)
        except Killed:
            return
        except Exception as error:
            if process.dead:  # raised on the way out, by what tidies up
                return
            if not (process.troubled and type(error).__name__ == "StoreError"):
                last = traceback.format_exc(limit=-6)
                raise Broken(f"{process.name} (life {life}) failed: {type(error).__name__}: {error}\n{last}") from error
            self.counters["died of a full disk"] += 1
            self.deaths += 1
            self._bury(process, 2.0)
        finally:
            process.dead = True

    # -- turns

    def run(self) -> None:
        """Take turns until every process is done. Raises `Broken`."""
        try:
            while True:
                waiting = [process for process in self.processes if not process.done]
                if not waiting:
                    return
                ready = [process for process in waiting if process.wake <= self.now]
                if not ready:
                    self.now = min(process.wake for process in waiting)
                    continue
                if self.now - self.last_fault > self._limit:
                    names = ", ".join(process.name for process in waiting)
                    raise Broken(f"I7: {self._limit:.0f} s after the last fault {names} have not come to an end")
                self._live(self.chance.choice(ready))
                if self.chance.random() < 0.03:
                    self._look()
        finally:
            self.end()

    def end(self) -> None:
        """End what still runs."""
        for process in self.processes:
            process.dead = True
            if process.run is not None and not process.run.dead:
                with contextlib.suppress(Exception):
                    process.run.throw(Killed)
            for descriptor in process.open_files:
                os.close(descriptor)
            process.open_files.clear()

    def at_point(self, process: Process, call: str, about: str) -> None:
        """What befalls a process at a port call."""
        self.now += POINT_SECONDS
        self.calls[""] += 1
        self.calls[call] += 1
        if self.calls[""] > MAX_POINTS:
            raise Broken(f"I7: {MAX_POINTS} calls, and no end")
        self.note(f"{process.name} {call} {about}")
        for name in ("", call):
            for fault in self._due.pop((name, self.calls[name]), ()):
                self._strike(process, fault)
        if process.dead:
            raise Killed
        if self.chance.random() < self._switch:
            process.sleep(0.0)

    def _strike(self, process: Process, fault: Fault) -> None:
        if process.dead:
            return
        self._left -= 1
        self.last_fault = max(self.last_fault, self.now + fault.amount)
        self.counters[fault.kind] += 1
        self.note(f"FAULT {fault.kind} {fault.amount:g} at {process.name}")
        if fault.kind == "kill":
            self.kill(process, again=fault.amount)
            self._look()
        elif fault.kind == "power":
            self.cut_power(fault)
        elif fault.kind == "pause":
            process.sleep(fault.amount)
        elif fault.kind == "jump":
            self.wall_offset += fault.amount * self.chance.choice((-1, 1))
        else:
            self.strikes[fault.kind](process, fault)

    def note(self, line: str) -> None:
        """Add a line to the history's trace."""
        text = f"{self.now:.3f} {line}"
        self.digest.update(text.encode())
        self.trace.append(text)
