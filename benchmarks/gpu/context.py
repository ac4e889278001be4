"""What a stage is given (device, time, sizes), and how it times work, gives up in time and writes errors down."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu.roofline import Rates

T = TypeVar("T")

Part = tuple[str, dict[str, Any]]
"""A finding under its name; one that could not be made has "error" or "skipped" instead of numbers."""


class Skipped(Exception):
    """Raised when a part can't be made here, by no mistake of the code: a library is not installed."""


class OutOfTime(Skipped):
    """Raised when the rest of the stage's time is too short for what comes next."""


@dataclass(frozen=True, slots=True)
class Context:
    """A stage's circumstances.

    Attributes:
        device: where it runs.  dry: on a CPU with tiny shapes, to try every line.
        deadline: on time.monotonic (seconds), when the stage must have ended.
        window: seconds of a steady state that count.
        rates: of this machine, as the stage `machine` measured them; None: not known yet.
        batch: rows of the running batch.
        settings: fields of `EngineConfig` by name, on top of what a stage chooses.
        folder: for models, prompts and logs.
        gguf: a model in a GGUF file to check, too.  vllm: folder in which `carry unpack` put vLLM.
    """

    device: torch.device
    dry: bool
    deadline: float
    folder: Path
    window: float = 10.0
    rates: Rates | None = None
    batch: int = 256
    settings: Mapping[str, Any] = field(default_factory=dict)
    gguf: Path | None = None
    vllm: Path | None = None

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def need(self, seconds: float) -> None:
        """Raise `OutOfTime` where less than that is left."""
        if self.left() < seconds:
            raise OutOfTime(f"needs about {seconds:.0f} s, but {max(0.0, self.left()):.0f} s are left")

    def sized(self, full: T, tiny: T) -> T:
        """The one for a GPU, or that of a dry run."""
        return tiny if self.dry else full


def tried(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` finds, or why it found nothing: the parts after it go on."""
    try:
        return work()
    except Skipped as reason:
        return {"skipped": str(reason)}
    except Exception as error:  # noqa: BLE001 - a failed part is a finding, and is written down as one
        lines = traceback.format_exception(error)
        return {"error": f"{type(error).__name__}: {error}", "traceback": "".join(lines)[-4000:]}


def parts(work: Mapping[str, Callable[[], dict[str, Any]]]) -> Iterator[Part]:
    """Each of these, tried in order."""
    for name, one in work.items():
        yield name, tried(one)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int = 20, warmups: int = 3) -> list[float]:
    """Seconds that each of `repeats` runs takes on the device, by its own clock where it has one."""
    for _ in range(warmups):
        work()
    synchronize(device)
    if device.type != "cuda":
        found = []
        for _ in range(repeats):
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
        return found
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    return [one.elapsed_time(other) / 1e3 for one, other in pairwise(marks)]


def median_seconds(work: Callable[[], object], device: torch.device, *, repeats: int = 20, warmups: int = 3) -> float:
    """The median of `seconds_of`."""
    return statistics.median(seconds_of(work, device, repeats=repeats, warmups=warmups))


def free_memory(device: torch.device) -> None:
    """Give back what the last part held, for the next one is as large."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
