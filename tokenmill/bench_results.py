"""Stored results of `bench` on this machine, from which `estimate` computes the time of a job."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.planner.estimates.timing import StepTimes

FILE = "measured.json"

LARGE_STEP = 2048
"""Assumed prompt tokens of a step for prefill's rate, where no step sizes were measured."""


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Speed of one model on one machine.

    Attributes:
        model: digest of its weights.  dtype, threads: of the computation (threads None: torch's choice).
        quantization, kv_dtype: of weights and KV cache.
        machine: the measured machine.  measured_at: ISO 8601, UTC.
        prefill, decode: tokens per second; decode at a batch of `batch` rows.
        step_sizes: (computed positions, seconds of such a step, less the terms below); empty: not measured.
        logit, read, pair: seconds; see `StepTimes`.
        cache_bytes: available for a KV cache there; None: not known.
        step_rows, step_tokens: of a step that `run` chooses there without options; None: those of a CPU.
        engine: that computed it (`ModelPin.engine`).  engine_options: of vLLM, see `options_key`.
    """

    model: str
    dtype: str
    threads: int | None
    machine: str
    measured_at: str
    prefill: float
    decode: float
    batch: int
    quantization: str = "none"
    kv_dtype: str = "auto"
    step_sizes: tuple[tuple[int, float], ...] = ()
    logit: float = 0.0
    read: float = 0.0
    pair: float = 0.0
    cache_bytes: int | None = None
    step_rows: int | None = None
    step_tokens: int | None = None
    engine: str = "tokenmill"
    engine_options: str = ""

    @property
    def times(self) -> StepTimes:
        """The durations of steps; rough ones for results of an earlier version."""
        if not self.step_sizes:
            step = self.batch / self.decode
            return StepTimes({self.batch: step, self.batch + LARGE_STEP: step + LARGE_STEP / self.prefill})
        return StepTimes(dict(self.step_sizes), self.logit, self.read, self.pair)


def this_machine() -> str:
    """A name for the hardware, so that another machine with the same home folder doesn't use these results."""
    return f"{platform.node()} {platform.machine()} {os.cpu_count()} cores"


def store_result(speed: MeasuredSpeed, cache: Path) -> Path:
    """Store a measurement in the model cache; it replaces one of the same model, options and machine."""
    path = cache / FILE
    others = [result for result in _read(path) if _key(result) != _key(speed)]
    cache.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=cache, prefix=".measured-")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump([asdict(result) for result in [*others, speed]], file, indent=2)
    Path(name).replace(path)
    return path


def find_result(
    cache: Path,
    *,
    model: str,
    dtype: str,
    threads: int | None,
    quantization: str,
    kv_dtype: str,
    engine: str = "tokenmill",
    engine_options: str = "",
) -> MeasuredSpeed | None:
    """The latest measurement of these weights with these options on this machine, or None."""
    wanted = (model, dtype, threads, quantization, kv_dtype, engine, engine_options, this_machine())
    return next((result for result in _read(cache / FILE) if _key(result) == wanted), None)


def read_bench(path: Path) -> MeasuredSpeed:
    """Read the output of 'tokenmill bench --json', from this or another machine; raises ValueError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return _speed({name: document[name] for name in MeasuredSpeed.__slots__ if name in document})
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: is not what 'tokenmill bench --json' prints ({error})") from error


def _speed(entry: dict[str, Any]) -> MeasuredSpeed:
    sizes = tuple((int(tokens), float(seconds)) for tokens, seconds in entry.get("step_sizes", ()))
    return MeasuredSpeed(**(entry | {"step_sizes": sizes}))


def options_key(options: Mapping[str, Any]) -> str:
    """vLLM's options as one text, the same for equal ones; "": none."""
    return json.dumps(options, sort_keys=True) if options else ""


def _key(speed: MeasuredSpeed) -> tuple[str, str, int | None, str, str, str, str, str]:
    return (
        speed.model, speed.dtype, speed.threads, speed.quantization, speed.kv_dtype, speed.engine, speed.engine_options,
        speed.machine,
    )  # fmt: skip


def _read(path: Path) -> list[MeasuredSpeed]:
    """The stored measurements; none if the file is missing or invalid, since they can be measured again."""
    if not path.is_file():
        return []
    try:
        return [_speed(entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError):
        return []
