"""`python -m tokenmill`, and the command `tokenmill`.

Importing the command line takes most of a short command's time, and more in commands that load an engine. So the
handlers of Ctrl-C and SIGTERM are installed first, and nothing that takes long is imported before.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; the process's exit code."""
    try:
        import signal

        from tokenmill.errors import interrupt, interrupted

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as it is behind nohup
            signal.signal(signal.SIGINT, interrupt)

        from tokenmill.processes.signals import StartupSignals, StoppedWhileStarting, on_unraisable

        sys.unraisablehook = on_unraisable
        starting = StartupSignals()
        try:
            starting.listen(sys.argv[1:])

            from tokenmill.cli import main as run

            code = run(stopped=lambda: starting.has_signal)
        except BaseException as error:
            if interrupted(error):
                raise KeyboardInterrupt from error
            if not (starting.has_signal or isinstance(error, StoppedWhileStarting)):
                raise
            code = 0
        if starting.has_signal:
            sys.stderr.write("stopping\n")
            return 0
        return code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130  # EXIT_INTERRUPTED, which may not be imported yet


if __name__ == "__main__":
    sys.exit(main())
