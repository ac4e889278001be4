"""vLLM engines with settings of their own, one after the other: closing one ends vLLM for its whole process."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine import Engine, Request, as_token_ids
from engine.config import LoraConfig, SpeculationConfig
from engine.errors import EngineLost, ModelNotFound, RequestRefused, UnsupportedModel
from engine.request import Completion
from engine.vllm.engine import VLLMEngine
from engine.vllm.settings import InvalidOption
from tests.adapter_files import make_adapter
from tests.engine.vllm.test_vllm_engine import CONFIG, EndsAtThird, ask, complete, prompt, tokens

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"),
]


@pytest.fixture(scope="module")
def folder(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tiny_models.make_tiny_model("llama", tmp_path_factory.mktemp("vllm"), hidden_size=64, head_dim=32)
    return made


def computed(
    folder: Path, options: dict[str, Any], *requests: Request
) -> tuple[dict[str, Completion], tuple[int, int]]:
    """These requests, computed by an engine with these options; and how many drafts it made and accepted."""
    engine = VLLMEngine.load(folder, CONFIG, options)
    try:
        done, drafts = complete(engine, *requests), engine.stats().speculation
        return done, (drafts.drafted, drafts.accepted)
    finally:
        engine.close()


def test_adapters_give_the_tokens_of_our_engine(folder: Path, tmp_path: Path) -> None:
    """Given more adapters than vLLM has at a time, of several ranks, and rows without one between them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = {
        "plain": make_adapter(model, tmp_path / "plain", 1, rank=4),
        "ranks": make_adapter(model, tmp_path / "ranks", 2, rank=8, ranks={"v_proj": 16}, alpha_pattern={"o_proj": 4}),
        "stable": make_adapter(model, tmp_path / "stable", 3, rank=3, modules=("q_proj", "down_proj"), use_rslora=True),
    }
    lora = LoraConfig(tuple((name, str(path)) for name, path in made.items()), max_loras=2)
    config = replace(CONFIG, lora=lora)
    names = [None, *made, *reversed(made)] * 2
    requests = [replace(ask(str(n), prompt(n % 3), 12), adapter=name) for n, name in enumerate(names)]
    ours = complete(Engine.load(folder, config), *requests)

    vllm = VLLMEngine.load(folder, config)
    try:
        theirs = complete(vllm, *requests)
        with pytest.raises(RequestRefused, match="there is no adapter 'other'; there are: plain, ranks, stable"):
            vllm.add(replace(ask("unknown", prompt(1)), adapter="other"))
    finally:
        vllm.close()

    assert {name: tokens(one) for name, one in theirs.items()} == {name: tokens(one) for name, one in ours.items()}
    assert len({tuple(tokens(ours[str(n)])) for n in range(0, len(names), 3)}) > 2, "else adapters change nothing"


def test_an_adapter_that_vllm_can_not_take_is_refused_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pickled = make_adapter(model, tmp_path / "pickled", 1)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    odd = make_adapter(model, tmp_path / "odd", 2, modules=("q_proj",))
    weights = load_file(odd / "adapter_model.safetensors")
    for part in ("lora_A", "lora_B"):
        weights[f"base_model.model.model.layers.0.nothing.{part}.weight"] = torch.zeros(4, 4)
    save_file(weights, odd / "adapter_model.safetensors")
    for name, error, message in (
        ("pickled", ModelNotFound, "its weights are pickled"),
        ("odd", UnsupportedModel, "vLLM can't take the adapter 'odd'"),
    ):
        with pytest.raises(error, match=message):
            VLLMEngine.load(folder, replace(CONFIG, lora=LoraConfig(((name, str(tmp_path / name)),))))
    with pytest.raises(UnsupportedModel, match="--merge-adapter is not available with vLLM"):
        VLLMEngine.load(folder, replace(CONFIG, lora=LoraConfig((("odd", str(odd)),), merge=True)))


def test_a_lane_request_gets_the_memory_of_bulk_rows(folder: Path) -> None:
    """Given a cache that bulk rows fill, and a request of the lane that needs a third of it."""
    engine = VLLMEngine.load(folder, CONFIG, {"block_size": 32, "num_gpu_blocks_override": 25})
    try:
        bulk = [ask(f"bulk {n}", prompt(n, 150), 150) for n in range(4)]
        alone = complete(engine, *bulk)
        for request in bulk:
            engine.add(request)
        while not all(sum(len(partial.token_ids) for partial in engine.partial(one)) > 30 for one in bulk):
            assert not engine.step()
        before = engine.stats().preemptions
        urgent = ask("urgent", prompt(99, 300), 5, priority=0)
        engine.add(urgent)
        (ended,) = (completion for _ in range(10) for completion in engine.step())
        assert ended.request_id == "urgent", "it did not wait for a bulk row's end"
        assert len(tokens(ended)) == 5
        assert engine.stats().preemptions > before
        done = complete(engine)
        for request in bulk:
            assert tokens(done[request.request_id]) == tokens(alone[request.request_id])
    finally:
        engine.close()


def with_and_without_drafts(folder: Path) -> Any:
    """The answers to requests without drafts and with them, and the counts of these."""
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}}
    copied = as_token_ids(prompt(3, 8).tolist() * 6)
    requests = [ask(str(n), copied[n:], 40, logprobs=1, repetition_penalty=0.5) for n in range(4)]
    stopped = replace(requests[0], request_id="stopped", watcher=lambda choice: EndsAtThird())
    return computed(folder, {}, *requests, stopped), computed(folder, options, *requests, stopped)


def test_drafts_change_no_answer_and_are_counted(folder: Path) -> None:
    """In a process of its own: vLLM 0.32 loads no other model behind one with drafts."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        (plain, none), (drafted, (made, accepted)) = pool.submit(with_and_without_drafts, folder).result()
    for name, mine in plain.items():
        other = drafted[name]
        assert tokens(mine) == tokens(other)
        assert mine.choices[0].logprobs is not None
        assert other.choices[0].logprobs is not None
        np.testing.assert_allclose(mine.choices[0].logprobs.chosen, other.choices[0].logprobs.chosen, atol=2e-3)
    assert len(tokens(drafted["stopped"])) == 3
    assert none == (0, 0)
    assert made >= accepted > 0


def with_a_rank_that_dies(folder: Path) -> tuple[list[int], str]:
    """The answer of two ranks; and what is raised when one of them has been killed."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # a processor for each
    engine = VLLMEngine.load(folder, replace(CONFIG, tensor_parallel=2))
    answer = tokens(complete(engine, ask("a", prompt(1)))["a"])
    multiprocessing.active_children()[-1].kill()
    engine.add(ask("b", prompt(2), 400))
    try:
        while engine.has_work:
            engine.step()
    except EngineLost as error:
        return answer, str(error)
    return answer, "it went on"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks want two processors")
def test_a_dead_rank_ends_the_engine(folder: Path) -> None:
    alone, _ = computed(folder, {}, ask("a", prompt(1)))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        answer, error = pool.submit(with_a_rank_that_dies, folder).result()
    assert answer == tokens(alone["a"])
    assert error.startswith("vLLM's engine has ended")


def test_models_and_options_that_vllm_can_not_use_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        VLLMEngine.load(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UnsupportedModel, match="no safetensors"):
        VLLMEngine.load(tmp_path, CONFIG)
    with pytest.raises(InvalidOption, match="no option frobnicate"):
        VLLMEngine.load(folder, CONFIG, {"frobnicate": 1})
    for changes, says in (
        ({"quantize": "int8"}, "--quantize"),
        ({"kv_dtype": "int8"}, "--kv-dtype int8"),
        ({"speculation": SpeculationConfig("ngram")}, "--speculate ngram"),
        ({"attention": "torch"}, "TOKENMILL_ATTENTION"),
        ({"max_graph_tokens": 64}, "MAX_GRAPH_TOKENS"),
    ):
        with pytest.raises(UnsupportedModel, match=says):
            VLLMEngine.load(folder, replace(CONFIG, **changes))  # type: ignore[arg-type]


def test_another_engine_can_be_loaded_after_the_first(folder: Path) -> None:
    first, _ = computed(folder, {}, ask("a", prompt(1)))
    second, _ = computed(folder, {"block_size": 32}, ask("a", prompt(1)))
    assert tokens(first["a"]) == tokens(second["a"])
