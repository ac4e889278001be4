"""A replica's process: it gets one task over its line, does it, and ends with the command that started it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from tokenmill.errors import EXIT_FAILED, explain
from tokenmill.processes.replicas import END_SECONDS, ReplicaConnection


def _end_with_command() -> None:
    """stdin's end means that the command is gone: end in order, and if that takes too long, at once."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(EXIT_FAILED)


def main() -> None:
    """What the process does; the number of its socket is its one argument."""
    threading.Thread(target=_end_with_command, daemon=True).start()
    connection: Any = Connection(int(sys.argv[1]))
    line = ReplicaConnection(connection)
    try:
        task = line.task()
        task.function(line, *task.arguments)
    except Exception as error:  # noqa: BLE001 - the command says it as it says its own
        with suppress(EOFError, OSError):  # if there is anybody to tell
            line.call("fail", explain(error))
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
