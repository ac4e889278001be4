"""Starts a server that ends with the tests, however they end: run as `python guard.py PIPE COMMAND…`.

This process becomes the server. A grandchild keeps the reading end of a pipe whose writing end only the tests
have. When that closes, because they are done, were interrupted or were killed, it kills the server's process group.
(The kernel's own death signal depends on the thread that started the process, and a test's threads end earlier.)
"""

from __future__ import annotations

import os
import signal
import sys


def watch(pipe: int, group: int) -> None:
    """Wait for the pipe's end, then for nothing more."""
    os.setsid()
    if os.fork():
        os._exit(0)
    while os.read(pipe, 1):
        pass
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os._exit(0)


def main() -> None:
    pipe, command = int(sys.argv[1]), sys.argv[2:]
    group = os.getpgrp()
    watcher = os.fork()
    if not watcher:
        watch(pipe, group)
    os.waitpid(watcher, 0)
    os.close(pipe)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and so would the server
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
