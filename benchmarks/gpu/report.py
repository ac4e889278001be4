"""One JSON file for all stages: each stage writes its own entry, part by part, and leaves the others alone."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.roofline import Rates

FILE = "gpu.json"


class Report:
    """The entry of one stage in `folder`/gpu.json.

    Parts that an earlier run of the stage left are dropped when it begins.
    """

    def __init__(self, folder: Path, stage: str, **about: Any) -> None:
        self._path = folder / FILE
        self._stage = stage
        self._begun = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._entry: dict[str, Any] = {"begun": stamp, **about, "ended": False, "seconds": 0.0, "parts": {}}
        self._write()

    def add(self, name: str, finding: dict[str, Any]) -> None:
        """Keep a part, at once."""
        self._entry["parts"][name] = finding
        self._write()

    def end(self, error: str | None = None) -> None:
        """The stage is over; `error`: why it came to no good end."""
        self._entry["ended"] = error is None
        if error is not None:
            self._entry["error"] = error
        self._write()

    def _write(self) -> None:
        self._entry["seconds"] = round(time.monotonic() - self._begun, 3)
        whole = read(self._path.parent)
        whole["stages"][self._stage] = self._entry
        write(self._path.parent, whole)


def read(folder: Path) -> dict[str, Any]:
    """The whole file; empty, if there is none yet."""
    path = folder / FILE
    if not path.exists():
        return {"stages": {}}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write(folder: Path, whole: dict[str, Any]) -> None:
    """Replace the file in one piece: a killed stage leaves what was there."""
    path = folder / FILE
    rest = path.with_suffix(".part")
    rest.write_text(json.dumps(finite(whole), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    rest.replace(path)


def finite(value: Any) -> Any:
    """The same for JSON: numbers that are none become text, so that they are seen."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value


def end_unfinished(folder: Path, stage: str, error: str) -> None:
    """Write down why a stage's process ended that could not do so itself."""
    whole = read(folder)
    entry = whole["stages"].setdefault(stage, {"parts": {}, "seconds": 0.0})
    entry["ended"] = False
    entry.setdefault("error", error)
    write(folder, whole)


def measured_rates(folder: Path, dry: bool) -> Rates | None:
    """What the stage `machine` found on this machine; None: it has not been run here."""
    entry = read(folder)["stages"].get("machine", {})
    found = entry.get("parts", {})
    try:
        if entry["dry_run"] is not dry:
            return None
        fp8 = found.get("fp8", {}).get("operations_per_second")
        return Rates(found["copy"]["bytes_per_second"], found["bf16"]["operations_per_second"], fp8)
    except KeyError:
        return None
