"""What must be true of a process before vLLM is imported in it: environment variables, and libraries loaded first."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PRELOADED: Final = ("libtcmalloc_minimal.so.4", "libiomp5.so")
"""Libraries with which vLLM's CPU build is a fifth faster, where they are there."""

ENVIRONMENT: Final[Mapping[str, str]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker's loop steps the engine; a process more only adds copies
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # one is reserved otherwise, which halves the engine on two cores
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # each start warns of its own binding of threads
}
"""Defaults of vLLM's variables; those that the process has already stay."""


def prepare_process() -> None:
    """Set the environment variables that vLLM reads when it is imported or started."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def preload_variable(prefix: Path) -> str | None:
    """The value of LD_PRELOAD for a process that runs vLLM on a CPU; None: nothing is missing in it. `prefix`: of the
    environment that vLLM is installed in."""
    given = os.environ.get("LD_PRELOAD", "")
    missing = [path for name in PRELOADED if name not in given and (path := _library(name, prefix)) is not None]
    return ":".join([*map(str, missing), *filter(None, [given])]) if missing else None


def _library(name: str, prefix: Path) -> Path | None:
    folders = (prefix / "lib", Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))
    return next((folder / name for folder in folders if (folder / name).exists()), None)
