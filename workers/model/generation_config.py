"""Reads the sampling parameters that a model's authors recommend: from generation_config.json beside its weights, or
from a GGUF file's keys `general.sampling.*`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from engine.checkpoints.gguf_file import GGUFFile
from schemas.requests.sampling_defaults import SamplingDefaults
from workers.errors import WorkerError

GGUF_KEYS: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def sampling_defaults(path: Path) -> SamplingDefaults | None:
    """The defaults of the model at `path` (a Hugging Face folder, or a GGUF file); None: it names none.

    As with vLLM, `do_sample` is not looked at. Raises `WorkerError` for values that no request could have.
    """
    source, named = _named(path)
    fields = {name: _number(named[name]) for name in SamplingDefaults.model_fields if named.get(name) is not None}
    if not fields:
        return None
    try:
        return SamplingDefaults.model_validate(fields)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        what = f"{detail['loc'][0]} is {str(detail['input'])[:40]}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
        raise WorkerError(f"{source}: {what}; correct it, or give --generation-config ignore") from error


def _named(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file with the values, and these by their names. Raises `WorkerError`."""
    if path.is_file():
        metadata = GGUFFile(path).metadata
        return path, {name: metadata.get(key) for key, name in GGUF_KEYS.items()}
    file = path / "generation_config.json"
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return file, {}
    except (OSError, ValueError, RecursionError) as error:
        raise WorkerError(f"{file} can't be read: {error}; correct it, or remove it") from error
    if not isinstance(found, dict):
        raise WorkerError(f"{file} holds no JSON object; correct it, or remove it")
    return file, found


def _number(value: Any) -> Any:
    """A float without the digits that come from float32, in which GGUF files hold numbers."""
    return round(value, 6) if isinstance(value, float) else value
