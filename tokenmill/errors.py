"""Errors of the command line: one line for the user, and an exit code."""

from __future__ import annotations

from types import FrameType

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Raised when a command can't be executed. The message is one line: problem, location, remedy."""

    exit_code = EXIT_FAILED


class ModelError(UserError):
    """Raised when a model can't be found or fetched."""


class InputUnusable(UserError):
    """Raised when an input can't be read, or a folder holds no job."""


class InvalidCall(UserError, ValueError):
    """Raised when a function of the Python interface is called with arguments that it can't take."""


class Interrupted(UserError):
    """Raised when the user stopped a run; its committed results stay."""

    exit_code = EXIT_INTERRUPTED


class StoppedWatching(Exception):
    """Raised when the user stops watching a job, which goes on elsewhere."""


class KeyboardInterruption(KeyboardInterrupt):
    """Ctrl-C. After a plain `KeyboardInterrupt` has passed through `exec` (as many libraries use it while they are
    imported), Python ends the process by the signal, even if it was caught; with this subclass the process exits."""


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """The handler of SIGINT while no work must be completed first."""
    raise KeyboardInterruption


def interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C is the cause of the error: libraries replace exceptions that are raised while they are imported
    (before Python 3.12 each class with a `__set_name__` does)."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:  # one may be its own
        causes.append(cause)
    return any(isinstance(one, KeyboardInterrupt) for one in causes)


def explain(error: Exception) -> str:
    """An error as one line. An unexpected one refers to --debug."""
    text = " ".join(str(error).split())
    if isinstance(error, UserError) or _ours(error):
        return text or type(error).__name__
    return f"unexpected {type(error).__name__}: {text}; run again with --debug to see where"


def _ours(error: Exception) -> bool:
    """Whether the error's class is defined in one of our packages. Their names are compared, so that none is
    imported."""
    packages = ("schemas", "engine", "pipeline", "workers")
    return any(kind.__module__.split(".")[0] in packages for kind in type(error).__mro__)
