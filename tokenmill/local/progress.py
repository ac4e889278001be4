"""Progress of a run on stderr: one live line in a terminal or notebook, a plain line every few seconds elsewhere.

The display takes snapshots on a thread of its own; the run never waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tokenmill.output import count, duration

PLAIN_SECONDS = 5.0
REFRESHES_PER_SECOND = 4.0
NOTEBOOK_SECONDS = 0.5
"""Between updates, which are messages to the browser."""

BAR_WIDTH = 24

LONG_ANSWER = 1000
"""Tokens of an answer, from which on it may be called long."""


@dataclass(frozen=True, slots=True)
class StepProgress:
    """The progress of a step of a pipeline.

    Attributes:
        total: its planned rows.  done: of them, those with a committed result.  failed: of these, those that failed.
        is_planned: whether all of its rows are planned.  has_ended: whether its outcome is written.
    """

    name: str
    total: int
    done: int
    failed: int
    is_planned: bool
    has_ended: bool

    def __str__(self) -> str:
        failed = f" ({count(self.failed)} failed)" if self.failed else ""
        return f"{self.name} {count(self.done)}/{count(self.total)}{'' if self.is_planned else '+'}{failed}"


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The progress of a run.

    Attributes:
        phase: the current activity, in a word or two.
        total: rows of the job; 0 while unknown.  done: rows with a result.  before: those of them from earlier runs.
            failed: those of them that failed.
        prompt_tokens, cached_tokens, output_tokens: of this run so far; cached ones were not computed again.
        running, running_tokens: answers that are computed now, and their tokens so far.
        seconds: since this run began to compute; 0 before.  seconds_left: None: not known.
        planning: whether more rows may be planned.
        price_per_hour: of this machine; None: unknown.
        steps: of a pipeline, which stand in place of the number of rows.
    """

    phase: str
    total: int = 0
    done: int = 0
    before: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    running: int = 0
    running_tokens: int = 0
    seconds: float = 0.0
    seconds_left: float | None = None
    planning: bool = False
    price_per_hour: float | None = None
    steps: tuple[StepProgress, ...] = ()

    @property
    def cost(self) -> float | None:
        """Of this run so far."""
        return None if self.price_per_hour is None else self.price_per_hour * self.seconds / 3600

    @property
    def long_answer(self) -> float | None:
        """Tokens of each running answer, where these have become much longer than those that ended; else None."""
        ended = self.done - self.before
        if ended <= 0 or not self.running:
            return None
        tokens = self.running_tokens / self.running
        is_long = tokens >= max(LONG_ANSWER, 4 * (self.output_tokens - self.running_tokens) / ended)
        return tokens if is_long else None


def describe(snapshot: RunSnapshot) -> str:
    """A snapshot as one line."""
    if snapshot.seconds <= 0:
        return snapshot.phase
    failed = f" ({count(snapshot.failed)} failed)" if snapshot.failed else ""
    more = "+" if snapshot.planning else ""
    rows = [f"{count(snapshot.done)}/{count(snapshot.total)}{more} rows{failed}"]
    words = [*(map(str, snapshot.steps) if snapshot.steps else rows)]
    if snapshot.done > snapshot.before:  # prompts, too, are counted when their rows end
        rows_per_second = (snapshot.done - snapshot.before) / snapshot.seconds
        words.append(f"{rows_per_second:,.{0 if rows_per_second >= 10 else 1}f} rows/s")
        words.append(f"{count(snapshot.prompt_tokens / snapshot.seconds)} tok/s in")
    if snapshot.output_tokens:
        words.append(f"{count(snapshot.output_tokens / snapshot.seconds)} tok/s out")
    if snapshot.prompt_tokens and snapshot.cached_tokens:
        words.append(f"{100 * snapshot.cached_tokens / snapshot.prompt_tokens:.0f} % of input cached")
    words.append(duration(snapshot.seconds))
    if snapshot.cost is not None:
        words.append(f"cost {snapshot.cost:.4g}")
    if snapshot.seconds_left is not None:
        words.append(f"about {duration(snapshot.seconds_left)} left")
    if snapshot.long_answer is not None:
        answers = "1 long answer" if snapshot.running == 1 else f"{count(snapshot.running)} long answers"
        words.append(f"{answers} of {count(snapshot.long_answer)} tokens so far")
    return "  ".join(words)


class ProgressDisplay:
    """Shows snapshots while the `with` block runs.

    Args:
        console: the output (stderr).  snapshot: called from another thread; it must be fast and thread-safe.
        interval: seconds between plain lines.
    """

    def __init__(self, console: Console, snapshot: Callable[[], RunSnapshot], interval: float = PLAIN_SECONDS) -> None:
        self._console = console
        self._snapshot = snapshot
        self._interval = interval
        self._ended = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._in_notebook: Any = None

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_jupyter:
            # Rich's own `Live` needs ipywidgets there; a display that is updated needs nothing.
            self._in_notebook = import_module("IPython.display").display(self._render(), display_id=True)
            self._start(self._update_notebook)
        elif self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()
        else:
            self._start(self._print_plainly)
        return self

    def _start(self, show: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=show, name="progress", daemon=True)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()
        if self._in_notebook is not None:
            self._in_notebook.update(self._render())  # the last state stays in the cell

    def _render(self) -> Table:
        snapshot = self._snapshot()
        line = Table.grid(padding=(0, 1))
        # Without a total the bar pulses.
        bar = ProgressBar(total=snapshot.total or None, completed=snapshot.done, width=BAR_WIDTH)
        one_line = not self._console.is_jupyter
        line.add_row(bar, Text(describe(snapshot), overflow="ellipsis" if one_line else "fold", no_wrap=one_line))
        return line

    def _update_notebook(self) -> None:
        while not self._ended.wait(NOTEBOOK_SECONDS):
            self._in_notebook.update(self._render())

    def _print_plainly(self) -> None:
        last = ""
        while not self._ended.wait(self._interval):
            text = describe(self._snapshot())
            if text != last:  # a phase without numbers is printed once
                self._console.print(Text(text))
            last = text
