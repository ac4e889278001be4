"""Stop signals (SIGTERM, Ctrl-C) of long-running commands, from the start of the process to its end.

While a command starts, a stop signal aborts the start by an exception, so that opened resources are closed. Once its
parts run, the signal sets an event (what a worker then does: `workers/shards/worker.py`). Libraries may swallow or
replace an exception that is raised while they are imported, so the signal is also recorded, and checked at the end of
the start. Python swallows an exception in a finalizer or in the callback of a weak reference, and prints a traceback:
`on_unraisable` handles these.

Nothing that takes long is imported here: `python -m tokenmill` installs the handlers first.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Thread, Timer
from types import FrameType
from typing import Final

from tokenmill.errors import KeyboardInterruption

LONG_RUNNING: Final = frozenset({"serve", "worker", "dispatcher", "intake", "gateway"})
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StoppedWhileStarting(BaseException):
    """Raised on the main thread for a stop signal while a command starts. It is no failure."""


RAISED_AGAIN_SECONDS: Final = 0.05


def on_unraisable(raised: sys.UnraisableHookArgs) -> None:
    """`sys.unraisablehook`. `StoppedWhileStarting` is already recorded. Ctrl-C isn't, and would be lost: it is sent
    again after the finalizer."""
    if isinstance(raised.exc_value, StoppedWhileStarting):
        return
    if isinstance(raised.exc_value, KeyboardInterruption):
        again = Timer(RAISED_AGAIN_SECONDS, signal.raise_signal, (signal.SIGINT,))
        again.daemon = True
        again.start()
        return
    sys.__unraisablehook__(raised)


class StartupSignals:
    """The handler of SIGTERM while a command is loaded.

    Attributes:
        has_signal: whether a stop signal has arrived.
    """

    def __init__(self) -> None:
        self.has_signal = False

    def listen(self, arguments: Sequence[str]) -> None:
        """Install the handler, if the command is a long-running one. `arguments`: without the program's name."""
        command = next((argument for argument in arguments if not argument.startswith("-")), None)
        if command in LONG_RUNNING:
            signal.signal(signal.SIGTERM, self)

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.has_signal = True
        raise StoppedWhileStarting


class StopSignal(Event):
    """An event that a stop signal sets, once the parts of a command run; while it starts, the signal raises
    `StoppedWhileStarting`.

    Attributes:
        has_signal: whether a stop signal has arrived.  starting: whether the parts don't run yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_signal = False
        self.starting = True
        self._signals: SimpleQueue[int | None] = SimpleQueue()

    def begin(self) -> None:
        """End the start. Raises `StoppedWhileStarting` if a stop signal has arrived."""
        if self.has_signal:
            raise StoppedWhileStarting
        self.starting = False

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal. No lock is taken, because the interrupted thread may hold this event's lock or the log's."""
        if self.has_signal:
            raise KeyboardInterruption
        self.has_signal = True
        self._signals.put(number)
        if self.starting:
            raise StoppedWhileStarting

    @contextmanager
    def _listening(self) -> Iterator[None]:
        thread = Thread(target=self._listen, name="stopping", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._signals.put(None)
            thread.join()

    def _listen(self) -> None:
        import structlog

        while (number := self._signals.get()) is not None:
            structlog.get_logger(__name__).info("stopping", signal=signal.Signals(number).name)
            self.set()


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """A stop signal that SIGTERM or Ctrl-C sets; the second one ends the process at once, which is safe too. An aborted
    start ends here."""
    stop = StopSignal()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with stop._listening():
            for number in SIGNALS:
                signal.signal(number, stop.on_signal)
            if any(isinstance(handler, StartupSignals) and handler.has_signal for handler in before.values()):
                raise StoppedWhileStarting
            yield stop
    except KeyboardInterruption:
        raise
    except BaseException:
        if not (stop.starting and stop.has_signal):
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
