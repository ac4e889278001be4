"""The choice of a model's engine: this project's kernels, vLLM, or transformers' code in this project's engine.

vLLM's pins differ from those of other packages, so it has an environment of its own, in which tokenmill is installed
too. A command whose model needs it goes on there, before it has begun anything.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, Literal

from engine.engine import resolve_device
from engine.errors import EngineError, ModelNotFound
from engine.models.load import architecture_of, describe_model, is_native
from engine.vllm.process import ENVIRONMENT, preload_variable
from schemas.models import EngineName
from schemas.settings.settings import Engine
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.job_options import ChosenModel
from tokenmill.errors import ModelError
from workers.model.loaded_model import model_path

INSTALL: Final = (
    "install it in an environment of its own (make install-vllm, or pip install 'tokenmill[engine,gateway,vllm]') and "
    "set TOKENMILL_VLLM__PYTHON to its Python"
)

ENTERED: Final = "TOKENMILL_ENTERED_VLLM"
"""Set in the processes of a command that went on in vLLM's environment."""

_LIST: Final = "from vllm import ModelRegistry; print(*ModelRegistry.get_supported_archs())"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine that computes a model, and why, in one line."""

    engine: EngineName
    why: str


def choose_engines(models: Sequence[ChosenModel], options: EngineOptions) -> tuple[ChosenModel, ...]:
    """The models, each with its engine. Where one needs vLLM and this is not its environment, the command goes on there
    and this function does not return. Raises `ModelError`."""
    chosen = tuple(
        replace(model, engine=choose_engine(model_path(model.source.path), options.engine, options.vllm_python).engine)
        for model in models
    )
    if options.vllm_given and all(model.engine != "vllm" for model in chosen):
        raise ModelError("--engine-option is for vLLM, which computes none of these models; give --engine vllm")
    if any(model.engine == "vllm" for model in chosen):
        _enter_vllm(options)
    return chosen


def choose_engine(path: Path, wanted: Engine, vllm_python: Path | None) -> EngineChoice:
    """The engine of the model at `path`: the wanted one, or the first that computes it.

    Raises `ModelError` where that engine, or none, can compute it; the message says what to install.
    """
    if wanted == "vllm":
        if vllm_interpreter(vllm_python) is None:
            raise ModelError(f"--engine vllm: vLLM is not installed here; {INSTALL}")
        return EngineChoice("vllm", "as wanted")
    if wanted != "transformers":
        if (own := refusal(path, "tokenmill")) is None:
            return EngineChoice("tokenmill", "its own code knows this architecture")
        if wanted == "tokenmill":
            raise ModelError(f"--engine tokenmill: {own}; vllm or transformers may compute it: give auto")
    if wanted == "auto" and (why := _why_vllm(path, vllm_python)) is not None:
        return EngineChoice("vllm", why)
    refused = refusal(path, "transformers")
    if refused is None:
        return EngineChoice(
            "transformers", "as wanted" if wanted == "transformers" else "transformers' code, since no other is here"
        )
    if wanted == "transformers":
        raise ModelError(f"--engine transformers: {refused}")
    missing = f"vLLM may: {INSTALL}" if vllm_interpreter(vllm_python) is None else "vLLM doesn't know it, either"
    raise ModelError(f"{refused}; {missing}")


def refusal(path: Path, engine: Literal["tokenmill", "transformers"]) -> str | None:
    """Why this project's own code, or transformers' code in its engine, can't compute the model, in one line; None: it
    can, as far as config and headers show it. Raises `ModelNotFound`."""
    try:
        if engine == "tokenmill" and not is_native(path):
            return f"{architecture_of(path)} is not among the architectures of tokenmill's own code"
        describe_model(path, own_models=engine == "tokenmill")
    except ModelNotFound:
        raise
    except EngineError as error:
        return str(error)
    return None


def computed_by(path: Path, vllm_python: Path | None) -> dict[EngineName, str]:
    """For each engine, "yes" if it computes the model, or why not. Raises `ModelError`, `ModelNotFound`."""
    interpreter = vllm_interpreter(vllm_python)
    if interpreter is None:
        vllm = "not installed here"
    elif not path.is_dir():
        vllm = "it is given no GGUF files here"
    else:
        vllm = "yes" if _why_vllm(path, vllm_python) else f"it doesn't know {architecture_of(path)}"
    own, others = refusal(path, "tokenmill"), refusal(path, "transformers")
    return {"tokenmill": own or "yes", "vllm": vllm, "transformers": others or "yes"}


def vllm_interpreter(python: Path | None) -> Path | None:
    """The interpreter that can import vLLM: this one, or the settings'; None: there is none."""
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    return python


def _why_vllm(path: Path, python: Path | None) -> str | None:
    """Why vLLM computes the model; None: it doesn't, or isn't installed."""
    interpreter = vllm_interpreter(python)
    if interpreter is None or not path.is_dir():
        return None
    architecture = architecture_of(path)
    return f"vLLM knows {architecture}" if architecture in _vllm_architectures(interpreter) else None


@cache
def _vllm_architectures(interpreter: Path) -> frozenset[str]:
    """The architectures that vLLM computes. Raises `ModelError` when it can't be asked."""
    done = subprocess.run(
        [interpreter, "-c", _LIST], env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise ModelError(f"vLLM can't be imported by {interpreter}: {lines[-1]}")
    return frozenset(done.stdout.split())


def _enter_vllm(options: EngineOptions) -> None:
    """Go on in vLLM's environment, with the libraries that its CPU build wants loaded first."""
    interpreter = vllm_interpreter(options.vllm_python)
    assert interpreter is not None, "vLLM was chosen"
    is_here = interpreter == Path(sys.executable)
    preload = preload_variable(interpreter.parent.parent) if resolve_device(options.device).type == "cpu" else None
    if is_here and preload is None:
        return
    if ENTERED in os.environ:  # the interpreter can't import vLLM: it would go on there for ever
        raise ModelError(f"{interpreter} can't import vLLM; {INSTALL}")
    environment = os.environ | {ENTERED: "1"} | ({} if preload is None else {"LD_PRELOAD": preload})
    sys.stdout.flush()
    os.execve(interpreter, [str(interpreter), "-P", "-m", "tokenmill", *sys.argv[1:]], environment)
