"""Every architecture of the installed transformers either answers, as a tiny random model, or is refused in one line
that says why and names the engine that may compute it; and docs/models.md says the same."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine import Engine, EngineConfig, Request, SamplingParams, as_token_ids
from engine.checkpoints.config import usable
from engine.errors import UnsupportedModel
from schemas.models import EngineName
from tests.tokenmill.command_processes import ROOT
from tokenmill.config.engine_choice import INSTALL, choose_engine
from tokenmill.errors import ModelError
from workers.model.loaded_model import load_engine

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_spec("vllm") is not None, reason="these are about environments without vLLM"),
]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_models", ROOT / "docs/make_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["make_models"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made: Any = _script()
ROWS = {
    cells[0]: cells[1:]
    for line in (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines()
    if len(cells := [cell.strip() for cell in re.split(r"(?<!\\\\)\|", line)][1:-1]) == 5
    and cells[0] not in ("architecture", "---")
}
"""Architecture -> tokenmill, vLLM, transformers, why not here."""


@pytest.mark.parametrize("kind", made.architectures())
def test_it_answers_or_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    # Given a tiny random model, or where transformers makes none so small, its config
    config = made.tiny_config(kind)
    whole = made.is_of_text(config)
    if whole:
        try:
            with usable(tmp_path):
                made.make_tiny_model(config, tmp_path)
        except UnsupportedModel:
            whole = False
    config.save_pretrained(tmp_path)
    # When an engine is chosen for it where there is no vLLM, and asked
    engine: EngineName | None = None
    refused = ""
    try:
        engine = choose_engine(tmp_path, "auto", None).engine
        if whole:
            _check_answers(tmp_path, engine)
    except ModelError as error:
        refused = str(error)
        assert refused.endswith(f"; vLLM may: {INSTALL}")
    except UnsupportedModel as error:
        refused = str(error)
        assert refused.endswith("; vLLM may compute it: give --engine vllm")
    # Then it answers, or one line says why it doesn't; and the page says the same
    assert "\n" not in refused
    says = [_says(name, engine) for name in made.architectures()[kind] for engine in ("tokenmill", "transformers")]
    if refused:
        assert not any(says)
    else:
        assert engine is not None
        assert _says(made.architectures()[kind][0], engine)


def _says(architecture: str, engine: str) -> bool:
    own, _, others, _ = ROWS[architecture]
    return bool(own if engine == "tokenmill" else others)


def _check_answers(folder: Path, engine: EngineName) -> None:
    config = EngineConfig(dtype="float32", max_model_len=64, threads=1, own_models=engine == "tokenmill")
    loaded = load_engine(folder, config, engine, str)
    assert isinstance(loaded, Engine)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    done = loaded.run([Request(str(i), as_token_ids(range(5 + i, 12 + i)), params) for i in range(2)])
    assert sorted(len(completion.choices[0].token_ids) for completion in done if completion.error is None) == [4, 4]


def test_every_row_is_of_an_architecture_that_an_engine_knows() -> None:
    ours = {name for names in made.architectures().values() for name in names}
    assert ours <= ROWS.keys()
    for name, (own, vllm, others, why) in ROWS.items():
        assert own or vllm or others or why, name
        assert (own or others) == "" or why == "", name
