"""The leader's side of the rank group: starts the rank processes, sends commands and monitors them.

The leader is the engine's own process and the first rank. Any error during a collective computation leaves the ranks
out of step, so nothing is retried: the rank group ends, and so does the engine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
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
from engine.parallel.encoding import encode
from engine.parallel.loading import rank_device
from engine.parallel.messages import Answer, Failed, JoinGroup, Message
from engine.parallel.process_group import RankGroups

RANK_MODULE = "engine.parallel.rank"
"""The program of the other ranks' processes."""

LOOK_SECONDS: Final = 0.2
"""Seconds between two liveness checks of a rank that is waited for."""

BLAME_SECONDS: Final = 2.0
"""Seconds after a lost connection for a rank to be found dead, or to report its error."""

REPORT_SECONDS: Final = 0.2
"""Seconds after a rank's report for another one to be found dead."""

END_SECONDS: Final = 5.0
"""Seconds for a rank to end by itself."""

logger = get_logger(__name__)


class Rank:
    """Another rank's process, and the connection to it. Sending fails after `timeout` seconds in which the rank reads
    nothing."""

    def __init__(self, number: int, timeout: float) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):  # which they aren't where some library has set a timeout for all new sockets
            end.setblocking(True)
        # Of the kernel, because a `Connection` writes without asking Python's sockets.
        seconds, part = divmod(timeout, 1)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(part * 1e6)))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", RANK_MODULE, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the leader
            )
        self.line: Any = Connection(ours.detach())

    @property
    def death(self) -> str | None:
        """Description of how it ended; None: it is alive."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"rank {self.number} (process {self.process.pid}) {how}"

    def end(self) -> None:
        """End the process and wait for it."""
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
        size: number of ranks, those of all stages together.
        device: the kind; each rank uses the GPU with its number.
        threads: total of all ranks, on a CPU; None: the processor's cores.
        timeout: seconds that a rank waits for the others in a collective computation.
        stages: of the pipeline.

    Raises:
        EngineError: there are too few GPUs, or a rank can't be started.
    """

    def __init__(
        self, size: int, device: torch.device, threads: int | None = None, timeout: float = 120.0, stages: int = 1
    ) -> None:
        if device.type == "cuda" and size > torch.cuda.device_count():
            raise EngineError(f"{size} GPUs are requested, but {torch.cuda.device_count()} are to be seen here")
        self.size = size
        self._timeout = timeout
        self._lost: str | None = None
        self._dead = threading.Event()
        threads = max(1, (threads or torch.get_num_threads()) // size) if device.type == "cpu" else threads
        folder = Path(tempfile.mkdtemp(prefix="tokenmill-ranks-"))
        self._ranks: list[Rank] = []
        self._end = weakref.finalize(self, _end_all, self._ranks, folder)
        try:
            self._ranks += [Rank(number, timeout) for number in range(1, size)]
            for rank in self._ranks:
                self.receive(rank)
            for rank in self._ranks:
                joining = JoinGroup(rank.number, size, stages, device.type, folder / "meeting", timeout, threads)
                rank.line.send_bytes(encode(joining))
            if threads is not None:
                torch.set_num_threads(threads)
            own = rank_device(device.type, 0)
            self.groups = RankGroups.join(0, size, stages, own, folder / "meeting", timeout)
            for rank in self._ranks:
                self.receive(rank)
        except BaseException:
            self.close()
            raise
        if device.type == "cuda":
            for rank in self._ranks:
                threading.Thread(target=_watch, args=(rank.process, self.groups, self._dead), daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Of the other ranks' processes."""
        return [rank.process.pid for rank in self._ranks]

    def send(self, message: Message, *, to_own_stage: bool = False) -> None:
        """Send a command to all other ranks, or to those of the leader's stage. Raises `EngineLost` when one has ended,
        or reads no commands."""
        if self._lost is not None:
            raise EngineLost(self._lost)
        command = encode(message)
        try:
            for rank in self._ranks[: self.groups.stage.size - 1] if to_own_stage else self._ranks:
                rank.line.send_bytes(command)
        except BlockingIOError as error:
            raise self._lose(TimeoutError(f"a rank has read no command for {self._timeout:g} seconds")) from error
        except OSError as error:
            raise self._lose(error) from error

    def receive_all(self) -> list[Answer]:
        """Of each of the other ranks."""
        return [self.receive(rank) for rank in self._ranks]

    def receive(self, rank: Rank) -> Answer:
        """Wait for a rank's answer, without a time-out. Raises `EngineLost` when the rank has ended."""
        try:
            while not rank.line.poll(LOOK_SECONDS):
                if rank.death is not None:
                    raise EOFError
            answer: Answer = rank.line.recv()
            return answer
        except (EOFError, OSError) as error:
            raise self._lose(error) from error

    def check(self) -> None:
        """Check that all ranks are alive. Raises `EngineLost` when one is not.

        On GPUs ranks synchronise in kernels, so the host detects nothing by itself. When a rank has died the kernels
        that wait for it are released, and results computed from their output look like any other result.
        """
        if self._lost is not None:  # by a later step, perhaps, which knows the reason
            raise EngineLost(self._lost)
        if self._dead.is_set() or any(rank.death is not None for rank in self._ranks):
            raise self._lose(RuntimeError("a rank has ended"))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Context of a collective computation. Raises `EngineLost` for any error in it, and from then on."""
        if self._lost is not None:
            raise EngineLost(self._lost)
        try:
            yield
        except EngineLost:
            raise
        except Exception as error:
            raise self._lose(error) from error
        except BaseException:  # an interrupt of this process, in any state of the other ranks
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
        """Find the failed rank: one that ended without a report, else the first one that reports an error, else
        unknown. What ranks report may be only that another one has closed its connections, which the system does before
        it reports that one's end."""
        until = time.monotonic() + BLAME_SECONDS
        reports: dict[int, str] = {}
        while time.monotonic() < until:
            for rank in self._ranks:
                if rank.number not in reports and (said := _last_word(rank)) is not None:
                    reports[rank.number] = f"rank {rank.number}: {said}"
                    until = min(until, time.monotonic() + REPORT_SECONDS)
                elif rank.number not in reports and rank.death is not None:
                    return rank.death
            time.sleep(0.05)
        cause = min(reports, key=lambda number: (_CLOSED in reports[number], number), default=None)
        return f"{type(error).__name__}: {error}" if cause is None else reports[cause]


_CLOSED = "onnection"
"""In what a rank reports when another one has closed its connections."""


def _last_word(rank: Rank) -> str | None:
    try:
        if rank.line.poll():
            said = rank.line.recv()
            return said.reason if isinstance(said, Failed) else None
    except (EOFError, OSError):
        pass  # it died without a report: `Rank.death` describes how
    return None


def _end_all(ranks: list[Rank], folder: Path) -> None:
    for rank in ranks:
        rank.end()
    shutil.rmtree(folder, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes], groups: RankGroups, dead: threading.Event) -> None:
    """Abort kernels that wait for a dead rank, which would wait for ever; their output is undefined."""
    process.wait()
    dead.set()
    groups.abort()
