"""What the command line tells its user when something can't be done: one line, and an exit code."""

from __future__ import annotations

from types import FrameType

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Raised when a command can't do what was asked. The message is one line: what, where, what to do."""

    exit_code = EXIT_FAILED


class ModelError(UserError):
    """Raised when a model can't be found or fetched."""


class InputUnusable(UserError):
    """Raised when an input can't be read at all, or a job's folder isn't one."""


class Interrupted(UserError):
    """Raised when the user stopped a run; what was committed stays."""

    exit_code = EXIT_INTERRUPTED


class StoppedWatching(Exception):
    """Raised when the user has seen enough of a job that others work at: nothing was interrupted, and that is said."""


class KeyboardInterruption(KeyboardInterrupt):
    """Ctrl-C. A plain `KeyboardInterrupt` that has passed through text given to `exec` (as many libraries do while they
    are imported) makes Python end the process by the signal, whatever has caught it since; this one has it exit."""


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """What to do about SIGINT when there is nothing to be finished first."""
    raise KeyboardInterruption


def interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C is what ended it: libraries make another error of what is raised while they are imported (before
    Python 3.12 each class with a `__set_name__` does)."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:  # one may be its own
        causes.append(cause)
    return any(isinstance(one, KeyboardInterrupt) for one in causes)


def explain(error: Exception) -> str:
    """An error as one line. Those that were raised on purpose speak for themselves; others say how to learn more."""
    text = " ".join(str(error).split())
    if isinstance(error, UserError) or _ours(error):
        return text or type(error).__name__
    return f"unexpected {type(error).__name__}: {text}; run again with --debug to see where"


def _ours(error: Exception) -> bool:
    """Whether the error comes from one of our rooms (each has a tree of its own; the roof knows them by where they
    were defined, so that this check loads none of them)."""
    rooms = ("schemas", "engine", "pipeline", "workers")
    return any(kind.__module__.split(".")[0] in rooms for kind in type(error).__mro__)
