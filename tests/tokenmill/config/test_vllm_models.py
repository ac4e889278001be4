"""Models that our own engine refuses, of random weights: `auto` gives them to vLLM, and they answer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.vllm.engine import VLLMEngine
from tests.tokenmill.command_processes import ROOT
from tokenmill.config.engine_choice import choose_engine
from tokenmill.errors import ModelError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"
    ),
]

PYTHON = ROOT / ".venv/bin/python"
"""Of the environment without vLLM."""

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
        "topk_method": "greedy", "norm_topk_prob": True,
    },
}  # fmt: skip
"""Models with settings that only vLLM computes."""

CONFIG = EngineConfig(dtype="bfloat16", max_model_len=256, schedule=ScheduleConfig(max_num_seqs=4))


@pytest.mark.parametrize("family", MODELS)
def test_a_model_that_only_vllm_knows_answers_through_auto(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | MODELS[family]))
    folder = tmp_path / family
    made.save_pretrained(folder)
    del made
    choice = choose_engine(folder, "auto", None)
    assert (choice.engine, choice.why) == ("vllm", f"vLLM knows {architecture(folder)}")
    with pytest.raises(ModelError):
        choose_engine(folder, "tokenmill", None)
    engine = VLLMEngine.load(folder, CONFIG)
    try:
        greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
        for number in range(6):
            engine.add(Request(str(number), as_token_ids(range(3 + number, 23 + number)), greedy))
        done = {}
        while engine.has_work:
            done.update((completion.request_id, completion) for completion in engine.step())
    finally:
        engine.close()
    assert len(done) == 6
    for completion in done.values():
        (answer,) = completion.choices
        assert completion.error is None
        assert len(answer.token_ids) == 8
        assert answer.logprobs is not None
        assert (answer.logprobs.chosen < 0).all()


def architecture(folder: Path) -> str:
    name: str = json.loads((folder / "config.json").read_text())["architectures"][0]
    return name


@pytest.fixture
def other_environment() -> dict[str, str]:
    """Variables of a process in the environment without vLLM, which knows where vLLM is."""
    if not PYTHON.exists():
        pytest.skip("NOT TESTED HERE: going on in vLLM's environment; there is no other one: make install")
    return {**os.environ, "TOKENMILL_VLLM__PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


def test_the_table_of_models_is_that_of_this_vllm(other_environment: dict[str, str], tmp_path: Path) -> None:
    program = "import os, sys, make_models as made; open(sys.argv[1], 'w').write(made.page(os.environ[sys.argv[2]]))"
    environment = other_environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'docs'}"}
    page = tmp_path / "models.md"
    subprocess.run([PYTHON, "-c", program, page, "TOKENMILL_VLLM__PYTHON"], cwd=ROOT, env=environment, check=True)
    assert page.read_text(encoding="utf-8") == (ROOT / "docs/models.md").read_text(encoding="utf-8")


def test_a_command_goes_on_in_vllms_environment(
    other_environment: dict[str, str], vllm_model_folder: Path, tmp_path: Path
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    command = (
        "run",
        "in.jsonl",
        "--model",
        f"tiny={vllm_model_folder}",
        "--output",
        "out",
        "--engine",
        "vllm",
        "--json",
    )
    done = subprocess.run(
        [PYTHON, "-m", "tokenmill", *command], cwd=tmp_path, env=other_environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["models"][0]["engine"] == "vllm"
    assert manifest["counts"]["succeeded"] == 1
    # and what can't be computed there is refused before there is a job
    for options, says in (
        (("--engine-option", "frobnicate=1"), "vLLM has no option frobnicate"),
        (("--quantize", "int8"), "--quantize is not available with vLLM"),
    ):
        refused = subprocess.run(
            [PYTHON, "-m", "tokenmill", *command[:5], "new", *command[6:], *options], cwd=tmp_path,
            env=other_environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert refused.returncode != 0
        assert says in refused.stderr
        assert not (tmp_path / "new/job.json").exists()
