"""The model in the forms that the peers read, made once from ours and kept.

All come from the same weights: a GGUF model is dequantized to bfloat16, and everything else is made from that.
llama.cpp makes its files from the GGUF file with its own tool.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import catalog
from benchmarks.peers.catalog import Environment
from benchmarks.peers.environments import Unavailable, run_step

HERE = Path(__file__).parent


def identity(model: Path) -> str:
    """A short name for these weights: another file of the same name, size and time is taken for the same."""
    files = sorted(model.iterdir()) if model.is_dir() else [model]
    facts = "|".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    return f"{model.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:10]}"


@dataclass(frozen=True, slots=True)
class Forms:
    """Makes and keeps forms of `model` (a GGUF file or a folder of safetensors) under `root`.

    `python_of` gives the Python of an environment, installing it where necessary; `gguf` is the model as a GGUF file
    where `model` is a folder.
    """

    model: Path
    root: Path
    python_of: Callable[[Environment], Path]
    limit: float
    gguf: Path | None = None

    def path(self, form: str) -> Path:
        """The file or folder of a form; makes it on first use. Raises `Unavailable`."""
        if form == catalog.SAFETENSORS and self.model.is_dir():
            return self.model
        kept = self.root / identity(self.model) / form
        made = kept / "model.gguf" if form.startswith("gguf") else kept / "model" if form == catalog.W8A8 else kept
        if kept.exists():
            return made
        unfinished = kept.with_name(f"{form}.{os.getpid()}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self._run(self._command(form, unfinished), form, kept.parent / f"{form}.log")
        unfinished.rename(kept)
        return made

    def _run(self, command: list[str], form: str, log: Path) -> None:
        ours = {"PYTHONPATH": str(HERE.parents[1])} if form == catalog.W8A8 else {}
        run_step(command, log, self.limit, f"making {form}", os.environ | {"HF_HUB_OFFLINE": "1"} | ours)

    def _command(self, form: str, folder: Path) -> list[str]:
        if form == catalog.SAFETENSORS:
            python = self.python_of(catalog.TRANSFORMERS)
            return [str(python), str(HERE / "to_safetensors.py"), str(self.model), str(folder)]
        if form == catalog.W8A8:
            quantize = [sys.executable, "-m", "tokenmill", "quantize", str(self.path(catalog.SAFETENSORS))]
            return [*quantize, "--to", "int8", "--output", str(folder / "model")]
        if form in (catalog.OPENVINO_FP16, catalog.OPENVINO_INT8):
            python = self.python_of(catalog.OPENVINO)
            export = [str(python), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
            source = ["--model", str(self.path(catalog.SAFETENSORS)), "--task", "text-generation-with-past"]
            return [*export, *source, "--weight-format", form.removeprefix("openvino-"), str(folder)]
        python = self.python_of(catalog.LLAMACPP)
        if form == catalog.GGUF_BF16:
            source_file = self.gguf or self.model
            if source_file.is_dir():
                raise Unavailable("llama.cpp reads GGUF files: give one with --gguf")
        else:
            source_file = self.path(catalog.GGUF_BF16)
        kind = form.removeprefix("gguf-").upper()
        quantize = [str(python), str(HERE / "llamacpp_quantize.py"), "--allow-requantize"]
        return [*quantize, str(source_file), str(folder / "model.gguf"), kind]
