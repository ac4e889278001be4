"""The simulated machine: processes that take turns, one clock, and faults that strike at port calls.

Each thread of a process is a greenlet. Only one runs; at every port call (`Process.point`) the machine may end its
process, pause it, let another thread go on, or cut the power. Who goes on is drawn from the seed, so one seed is one
history.
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

from pipeline.ports import StoreError
from tests.simulation.scenario import Fault

START = datetime(2026, 1, 1, tzinfo=UTC)
POINT_SECONDS = 0.001
MAX_POINTS = 200_000
MAX_POISONED = 40
"""Processes that a history's rows may end before they must have been found."""


class ProcessKilled(BaseException):
    """The process is gone: SIGKILL, or the power."""


class InvariantViolated(BaseException):
    """Raised when a history violates an invariant. Nothing of the pipeline's may catch it."""


@dataclass(eq=False)
class Thread:
    """One thread of a process: it continues at `wake` (machine time), once `ready` holds."""

    run: greenlet
    wake: float = 0.0
    ready: Callable[[], bool] | None = None


@dataclass(eq=False)
class Process:
    """One process: a body that is run again after each death.

    Attributes:
        wake: machine time before which none of its threads goes on.
        dead: this life has ended; every call of it raises.
        stopping: it is to end by itself.  troubled: it met a full disk in this life.
        failing: steps of its engine that are still to fail; infinite: all of them, in this life.
        threaded: it has a second thread.  threads: those that live, the one that runs the body first.
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
    failing: float = 0
    threaded: bool = False
    open_files: set[int] = field(default_factory=set)
    threads: list[Thread] = field(default_factory=list)
    goes_first: Thread | None = None

    def point(self, call: str, about: str = "", *, locked: bool = False) -> None:
        """A port call is about to be made; `locked`: under a lock, so no other thread of the process may go on before
        it is over. Raises `ProcessKilled`."""
        if self.dead:
            raise ProcessKilled
        self.machine.at_point(self, call, about, locked)

    def sleep(self, seconds: float) -> None:
        """Let others go on, this thread for so long not. Raises `ProcessKilled`."""
        thread = self._thread()
        thread.wake = max(thread.wake, self.machine.now + seconds)
        self._yield()

    def pause(self, seconds: float, *, locked: bool) -> None:
        """Stop all threads for so long; `locked`: this one goes on before the others, which would wait for its lock and
        block the one real thread. Raises `ProcessKilled`."""
        self.wake = max(self.wake, self.machine.now + seconds)
        self.goes_first = self._thread() if locked else None
        self._yield()
        self.goes_first = None

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let others go on until `ready`. Raises `ProcessKilled`."""
        while not ready():
            thread = self._thread()
            thread.ready = ready
            self._yield()
            thread.ready = None

    def start(self, body: Callable[[], None]) -> Thread:
        """A second thread, which begins at some other turn. Raises `ProcessKilled`."""
        if self.dead:
            raise ProcessKilled

        def run() -> None:
            try:
                body()
            except ProcessKilled:
                return
            finally:
                if thread in self.threads:  # else it ended its own life, and the first thread has gone before it
                    self.threads.remove(thread)

        thread = Thread(greenlet(run, parent=self.machine.hub), wake=self.machine.now)
        self.threads.append(thread)
        return thread

    def _thread(self) -> Thread:
        if self.dead:
            raise ProcessKilled
        current = greenlet.getcurrent()
        return next(thread for thread in self.threads if thread.run is current)

    def _yield(self) -> None:
        if self.dead:
            raise ProcessKilled
        self.machine.hub.switch()
        if self.dead:
            raise ProcessKilled


class ProcessClock:
    """`Clock` as one process sees it; `stretch` makes sleeps longer, as a busy machine may."""

    def __init__(self, process: Process, at_least: float = 0.0) -> None:
        self._process = process
        self._at_least = at_least

    def now(self) -> datetime:
        machine = self._process.machine
        if self._process.threaded:  # parts are built around a read of the clock: here they may stay half built
            self._process.point("clock.now")
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
        faults: each strikes once, at its call; kinds that the machine doesn't know are in `strikes`.
        look: called at random moments, between two turns: after one of them with `look_chance`.
    """

    def __init__(
        self, seed: int, faults: tuple[Fault, ...], look: Callable[[], None], limit: float, look_chance: float = 0.03
    ) -> None:
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
        self.power_cut: Callable[[], None] = lambda: None
        self.died: Callable[[Process], None] = lambda process: None
        self.strikes: dict[str, Callable[[Process, Fault], None]] = {}
        self._look = look
        self._look_chance = look_chance
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
        if not process.dead:
            self.died(process)
        _end_threads(process)
        self._bury(process, again)

    def poison(self, process: Process, what: str) -> None:
        """What a process computes ends it. Raises `ProcessKilled`."""
        self.counters["killed by a row"] += 1
        if self.counters["killed by a row"] > MAX_POISONED:
            raise InvariantViolated(
                f"I7: {MAX_POISONED} processes ended, the last with {what}, and it is still computed"
            )
        self.record(f"POISON {what} ends {process.name}")
        self.last_fault = max(self.last_fault, self.now)
        self.kill(process, again=self.chance.uniform(0.2, 3.0))
        raise ProcessKilled

    def kill_all(self, again: float) -> None:
        """All processes die at once, the running one last; each begins anew after about so long."""
        current = greenlet.getcurrent()
        for process in sorted(self.processes, key=lambda process: _runs(process, current)):
            process.done = False
            if process.life:
                self.kill(process, again=again * (0.5 + self.chance.random()))

    def _bury(self, process: Process, again: float) -> None:
        for descriptor in process.open_files:
            os.close(descriptor)
        process.open_files.clear()
        process.wake = self.now + again
        process.stopping = process.troubled = process.threaded = False
        process.failing = 0
        process.goes_first = None

    def _live(self, process: Process, thread: Thread | None) -> None:
        """A process's turn: its life begins, or a thread of it goes on."""
        if thread is None:
            process.dead, process.life = False, process.life + 1
            thread = Thread(greenlet(lambda: self._life(process), parent=self.hub))
            process.threads = [thread]
            self.record(f"{process.name} begins life {process.life}")
        thread.run.switch()

    def _life(self, process: Process) -> None:
        life = process.life
        try:
            process.body(process)
            process.done = not process.stopping
            self._bury(process, 1.0)
        except ProcessKilled:
            return
        except Exception as error:
            if process.dead:  # raised on the way out, by what tidies up
                return
            name = type(error).__name__
            full = process.troubled and isinstance(error, StoreError)
            broken = process.failing and name == "BrokenEngineError"
            if not (full or broken):
                last = traceback.format_exc(limit=-6)
                raise InvariantViolated(f"{process.name} (life {life}) failed: {name}: {error}\n{last}") from error
            self.counters["died of a full disk" if full else "ended with a broken engine"] += 1
            self.deaths += 1
            self._bury(process, 2.0)
        finally:
            process.dead = True
            process.threads = []

    # -- turns

    def run(self) -> None:
        """Take turns until every process is done. Raises `InvariantViolated`."""
        try:
            while True:
                waiting = [process for process in self.processes if not process.done]
                if not waiting:
                    return
                turns = [turn for process in waiting for turn in _turns(process)]
                if not turns:
                    raise InvariantViolated(f"I7: {_names(waiting)} wait for themselves")
                ready = [(process, thread) for wake, process, thread in turns if wake <= self.now]
                if not ready:
                    self.now = min(wake for wake, _, _ in turns)
                    continue
                if self.now - self.last_fault > self._limit:
                    raise InvariantViolated(
                        f"I7: {self._limit:.0f} s after the last fault {_names(waiting)} have not come to an end"
                    )
                self._live(*self.chance.choice(ready))
                if self.chance.random() < self._look_chance:
                    self._look()
        finally:
            self.end()

    def end(self) -> None:
        """End what still runs."""
        for process in self.processes:
            with contextlib.suppress(Exception):
                _end_threads(process)
            for descriptor in process.open_files:
                os.close(descriptor)
            process.open_files.clear()

    def at_point(self, process: Process, call: str, about: str, locked: bool) -> None:
        """Count a port call of a process, and inject the faults that are due."""
        self.now += POINT_SECONDS
        self.calls[""] += 1
        self.calls[call] += 1
        if self.calls[""] > MAX_POINTS:
            raise InvariantViolated(f"I7: {MAX_POINTS} calls, and no end")
        self.record(f"{process.name} {call} {about}")
        for name in ("", call):
            for fault in self._due.pop((name, self.calls[name]), ()):
                if not (locked and fault.kind == "slow"):
                    self._strike(process, fault, locked)
        if process.dead:
            raise ProcessKilled
        if locked and process.threaded:
            return
        if self.chance.random() < self._switch:
            process.sleep(0.0)

    def _strike(self, process: Process, fault: Fault, locked: bool) -> None:
        if process.dead:
            return
        self._left -= 1
        self.last_fault = max(self.last_fault, self.now + fault.amount)
        self.counters[fault.kind] += 1
        self.record(f"FAULT {fault.kind} {fault.amount:g} at {process.name}")
        if fault.kind == "kill":
            self.kill(process, again=fault.amount)
            self._look()
        elif fault.kind == "power":
            self.kill_all(fault.amount)
            self.power_cut()
        elif fault.kind == "pause":
            process.pause(fault.amount, locked=locked)
        elif fault.kind == "slow":
            process.sleep(fault.amount)
        elif fault.kind == "jump":
            self.wall_offset += fault.amount * self.chance.choice((-1, 1))
        else:
            self.strikes[fault.kind](process, fault)

    def record(self, line: str) -> None:
        """Add a line to the history's trace."""
        text = f"{self.now:.3f} {line}"
        self.digest.update(text.encode())
        self.trace.append(text)


def _turns(process: Process) -> list[tuple[float, Process, Thread | None]]:
    """Who of the process can go on, and when: a new life, or threads that wait for nothing."""
    if process.dead:
        return [(process.wake, process, None)]
    return [
        (max(process.wake, thread.wake), process, thread)
        for thread in ([process.goes_first] if process.goes_first else process.threads)
        if thread.ready is None or thread.ready()
    ]


def _names(processes: list[Process]) -> str:
    return ", ".join(process.name for process in processes)


def _runs(process: Process, current: object) -> bool:
    return any(thread.run is current for thread in process.threads)


def _end_threads(process: Process) -> None:
    """End a life: its threads unwind here and now, but for the one that runs, which does so by itself."""
    process.dead = True
    current = greenlet.getcurrent()
    for thread in list(process.threads):
        if thread.run and thread.run is not current:
            thread.run.parent = current
            thread.run.throw(ProcessKilled)
