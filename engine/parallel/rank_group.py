"""The leader's side: rank processes are started, told what to do, and watched.

The leader is the engine's own process and the first rank. Whatever goes wrong while ranks compute together leaves them
out of step, so nothing is tried again: the team ends, and so does the engine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from engine.errors import EngineError, EngineLost
from engine.logs import get_logger
from engine.parallel.loading import rank_device
from engine.parallel.messages import Answer, Failed, JoinGroup, Message
from engine.parallel.process_group import RankGroup

LOOK_SECONDS: Final = 0.2
"""Between two looks at whether a rank that is waited for still lives."""

BLAME_SECONDS: Final = 2.0
"""After ranks lost each other, for a rank to be seen dead, or to say why."""

END_SECONDS: Final = 5.0
"""A rank gets so long to end by itself."""

logger = get_logger(__name__)


class Rank:
    """Another rank's process, and the line to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):  # which they aren't where some library has set a timeout for all new sockets
            end.setblocking(True)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.parallel.rank", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the leader
            )
        self.line: Any = Connection(ours.detach())

    @property
    def death(self) -> str | None:
        """How it ended; None: it lives."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"rank {self.number} (process {self.process.pid}) {how}"

    def end(self) -> None:
        """Have it end, and wait for that."""
        self.line.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RankGroupProcesses:
    """The ranks of an engine, the leader included. They end when this object is closed, dropped, or its process is
    gone.

    Args:
        size: how many.  device: the kind; each rank takes the GPU with its number.
        threads: of all ranks together, on a CPU; None: the processor's cores.
        timeout: seconds that a rank waits for the others when they compute together.

    Raises:
        EngineError: there are not so many GPUs, or a rank can't be started.
    """

    def __init__(self, size: int, device: torch.device, threads: int | None = None, timeout: float = 120.0) -> None:
        if device.type == "cuda" and size > torch.cuda.device_count():
            raise EngineError(f"{size} GPUs are asked for, but {torch.cuda.device_count()} are to be seen here")
        self.size = size
        self._timeout = timeout
        self._lost: str | None = None
        self._dead = threading.Event()
        threads = max(1, (threads or torch.get_num_threads()) // size) if device.type == "cpu" else threads
        folder = Path(tempfile.mkdtemp(prefix="tokenmill-ranks-"))
        self._ranks: list[Rank] = []
        self._end = weakref.finalize(self, _end_all, self._ranks, folder)
        try:
            self._ranks += [Rank(number) for number in range(1, size)]
            for rank in self._ranks:
                self.answer(rank)
            for rank in self._ranks:
                rank.line.send(JoinGroup(rank.number, size, device.type, folder / "meeting", timeout, threads))
            if threads is not None:
                torch.set_num_threads(threads)
            self.group = RankGroup(0, size, rank_device(device.type, 0), folder / "meeting", timeout)
            for rank in self._ranks:
                self.answer(rank)
        except BaseException:
            self.close()
            raise
        if device.type == "cuda":
            for rank in self._ranks:
                threading.Thread(target=_watch, args=(rank.process, self.group, self._dead), daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Of the other ranks' processes."""
        return [rank.process.pid for rank in self._ranks]

    def tell(self, message: Message) -> None:
        """Have all other ranks do something. Raises `EngineLost` when one is gone."""
        if self._lost is not None:
            raise EngineLost(self._lost)
        try:
            for rank in self._ranks:
                rank.line.send(message)
        except OSError as error:
            raise self._lose(error) from error

    def answers(self) -> list[Answer]:
        """Of each of the other ranks."""
        return [self.answer(rank) for rank in self._ranks]

    def answer(self, rank: Rank) -> Answer:
        """What a rank answers, however long it takes. Raises `EngineLost` when it is gone."""
        try:
            while not rank.line.poll(LOOK_SECONDS):
                if rank.death is not None:
                    raise EOFError
            answer: Answer = rank.line.recv()
            return answer
        except (EOFError, OSError) as error:
            raise self._lose(error) from error

    def check(self) -> None:
        """All ranks have been there until now. Raises `EngineLost` when one was not.

        On GPUs ranks meet in queues of kernels: the host learns of nothing. When a rank has died the kernels that wait
        for it are let go, and whatever is computed from what they leave looks like any other result.
        """
        if self._dead.is_set() or any(rank.death is not None for rank in self._ranks):
            raise self._lose(RuntimeError("a rank has ended"))

    @contextmanager
    def together(self) -> Iterator[None]:
        """While the ranks compute together. Raises `EngineLost` for whatever goes wrong, and from then on."""
        if self._lost is not None:
            raise EngineLost(self._lost)
        try:
            yield
        except EngineLost:
            raise
        except Exception as error:
            raise self._lose(error) from error
        except BaseException:  # an interrupt of this process, wherever the others are now
            self._lost = "the ranks were interrupted in the middle of a step"
            self.close()
            raise

    def close(self) -> None:
        """End the other ranks."""
        self._lost = self._lost or "the ranks were ended"
        self._end()

    def _lose(self, error: Exception) -> EngineLost:
        self._lost = f"the engine lost a rank: {self._blame(error)}"
        logger.error("the ranks of an engine are out of step", reason=self._lost)
        self.close()
        return EngineLost(self._lost)

    def _blame(self, error: Exception) -> str:
        """Which rank it was: one that says so itself, else one that is dead, else nobody knows."""
        until = time.monotonic() + BLAME_SECONDS
        while True:
            for rank in self._ranks:
                said = _last_word(rank)
                if said is not None or rank.death is not None:
                    return f"rank {rank.number}: {said}" if said is not None else str(rank.death)
            if time.monotonic() > until:
                return f"{type(error).__name__}: {error}"
            time.sleep(0.05)


def _last_word(rank: Rank) -> str | None:
    try:
        if rank.line.poll():
            said = rank.line.recv()
            return said.reason if isinstance(said, Failed) else None
    except (EOFError, OSError):
        pass  # it died without a last word: `Rank.death` has how
    return None


def _end_all(ranks: list[Rank], folder: Path) -> None:
    for rank in ranks:
        rank.end()
    shutil.rmtree(folder, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes], group: RankGroup, dead: threading.Event) -> None:
    """Kernels that wait for a dead rank wait for ever, unless they are told; then what they leave is garbage."""
    process.wait()
    dead.set()
    group.abort()
