"""The word to stop (SIGTERM, Ctrl-C), from a long-running command's first moment to its last.

While a command starts, the word breaks the start off: it is raised, so that what has been opened is closed in order.
Once its parts work, it is an event that they look at. Libraries may swallow what is raised while they are imported, or
raise something else in its place; so it is also written down, and looked at where a start ends. Python swallows what is
raised in a finalizer or in the callback of a weak reference, and prints a traceback: `on_unraisable` takes its place.

Nothing that takes long is imported here: `python -m tokenmill` listens for the word before all else.
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
    """Raised on the main thread when the word to stop comes while a command starts. It is no failure."""


RAISED_AGAIN_SECONDS: Final = 0.05


def on_unraisable(raised: sys.UnraisableHookArgs) -> None:
    """`sys.unraisablehook`. `StoppedWhileStarting` is written down where it was raised. Ctrl-C is not, and would be
    lost: it is sent again when the finalizer is over."""
    if isinstance(raised.exc_value, StoppedWhileStarting):
        return
    if isinstance(raised.exc_value, KeyboardInterruption):
        again = Timer(RAISED_AGAIN_SECONDS, signal.raise_signal, (signal.SIGINT,))
        again.daemon = True
        again.start()
        return
    sys.__unraisablehook__(raised)


class StartupSignals:
    """What to do about SIGTERM while a command is loaded.

    Attributes:
        asked: the word has come.
    """

    def __init__(self) -> None:
        self.asked = False

    def listen(self, arguments: Sequence[str]) -> None:
        """From now on, if this is the start of a long-running command. `arguments`: without the program's name."""
        command = next((argument for argument in arguments if not argument.startswith("-")), None)
        if command in LONG_RUNNING:
            signal.signal(signal.SIGTERM, self)

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        raise StoppedWhileStarting


class StopSignal(Event):
    """Set by the word to stop, once the parts of a command work; while it starts, the word is raised
    (`StoppedWhileStarting`).

    Attributes:
        asked: the word has come.  starting: the parts don't work yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self.starting = True
        self._heard: SimpleQueue[int | None] = SimpleQueue()

    def begin(self) -> None:
        """The parts begin to work. Raises `StoppedWhileStarting` if they are not to."""
        if self.asked:
            raise StoppedWhileStarting
        self.starting = False

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Takes no lock: the thread that it interrupts may hold any, that of this event and those of the log too."""
        if self.asked:
            raise KeyboardInterruption
        self.asked = True
        self._heard.put(number)
        if self.starting:
            raise StoppedWhileStarting

    @contextmanager
    def _listening(self) -> Iterator[None]:
        thread = Thread(target=self._listen, name="stopping", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._heard.put(None)
            thread.join()

    def _listen(self) -> None:
        import structlog

        while (number := self._heard.get()) is not None:
            structlog.get_logger(__name__).info("told to stop", signal=signal.Signals(number).name)
            self.set()


@contextmanager
def until_told() -> Iterator[StopSignal]:
    """Set by SIGTERM or Ctrl-C; the second one ends the process at once, which is safe too. A start that is broken off
    ends here."""
    stop = StopSignal()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with stop._listening():
            for number in SIGNALS:
                signal.signal(number, stop.on_signal)
            if any(isinstance(handler, StartupSignals) and handler.asked for handler in before.values()):
                raise StoppedWhileStarting
            yield stop
    except KeyboardInterruption:
        raise
    except BaseException:
        if not (stop.starting and stop.asked):
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
