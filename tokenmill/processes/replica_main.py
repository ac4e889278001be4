"""The main module of a replica's process: it receives one task, executes it, and ends with its command."""

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
    """Wait for stdin's end, when the command is gone; then stop gracefully, and if that takes too long, at once."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(EXIT_FAILED)


def main() -> None:
    """Execute the task that arrives on the socket whose number is the one argument."""
    threading.Thread(target=_end_with_command, daemon=True).start()
    connection: Any = Connection(int(sys.argv[1]))
    line = ReplicaConnection(connection)
    try:
        task = line.task()
        task.function(line, *task.arguments)
    except Exception as error:  # noqa: BLE001 - the command reports it like its own errors
        with suppress(EOFError, OSError):  # the command may be gone
            line.call("fail", explain(error))
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
