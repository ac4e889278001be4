"""Two ranks answer as one process does: the same tokens at float32, whatever the family and however the work is cut.

One pair of processes serves the whole file; each test loads its own model into it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine import (
    CacheConfig,
    Completion,
    Engine,
    EngineConfig,
    Request,
    SamplingParams,
    ScheduleConfig,
    SpeculationConfig,
    as_token_ids,
)
from engine.config import LoraConfig
from engine.errors import EngineError, EngineLost, OutOfMemory, UnsupportedModel
from engine.parallel.leader import _left_by, _measured
from engine.parallel.messages import ZeroBlocks
from engine.parallel.rank_group import RankGroupProcesses
from engine.runner.device_memory import MemoryUse
from tests.adapter_files import ALL, make_adapter
from tests.engine.oracle import Setting, engine_answers, make_prompts, tokens_of
from tests.engine.quant.packing import pack_awq, pack_gptq, write
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

MAX_TOKENS = 12
PLAIN = Setting(batch_size=16, chunk_size=2048, block_size=32, prefix_caching=False)
CUT = Setting(batch_size=8, chunk_size=24, block_size=16, prefix_caching=True, num_blocks=18)
"""Chunks, preemption and hits in the prefix cache."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one KV head for both": ("llama", {"num_key_value_heads": 1}),
    "llama, as many KV heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama with biases": ("llama-bias", {}),
    "llama with a tied head": ("llama-tied", {"vocab_size": 256}),
    "llama with dynamic rotation": ("llama-dynamic", {"max_position_embeddings": 64}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3-softcap", {}),
    "gemma4, layers with one KV head or two": ("gemma4", {}),
    "gemma4, inputs of layers, and layers without keys": ("gemma4-small", {}),
    "gemma4, experts beside MLPs": ("gemma4-moe", {}),
    "phi3, products stacked": ("phi3", {}),
    "glm4, one of them stacked, rows sorted": ("glm4", {}),
    "granite": ("granite", {}),
    "cohere2": ("cohere2", {}),
    "exaone4": ("exaone4", {}),
    "starcoder2, MLPs without a gate": ("starcoder2", {"sliding_window": None, "num_key_value_heads": 2}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "a shared expert": ("qwen2-moe", {"use_sliding_window": False}),
    "dense layers and mixtures": ("qwen3-moe-mixed", {}),
    "groups of experts": ("glm4-moe-grouped", {}),
    "sinks, and experts with biases": ("gpt-oss", {}),
    "scores that scale what experts read": ("llama4", {"attention_chunk_size": 256}),
    "latent attention": ("deepseek-v2", {}),
    "latent attention, queries from the input": ("deepseek-v3-halves", {}),
}

SOONER = ("llama", "gemma3", "groups of experts", "latent attention")


@pytest.fixture(scope="module")
def rank_group() -> Iterator[RankGroupProcesses]:
    rank_group = RankGroupProcesses(2, torch.device("cpu"), threads=2, timeout=HANG_SECONDS)
    yield rank_group
    rank_group.close()


ADAPTED = {
    "llama": ("llama", {}),
    "one KV head for both": ("llama", {"num_key_value_heads": 1}),
    "gemma3, heads of another order": ("gemma3-softcap", {}),
    "MLPs without a gate": ("starcoder2", {"sliding_window": None, "num_key_value_heads": 2}),
    "attention beside mixtures": ("qwen3-moe-mixed", {}),
}


@pytest.mark.parametrize("setting", [PLAIN, CUT], ids=["plain", "cut"])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_answer_as_in_one_process(
    name: str, setting: Setting, rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_models: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Given more adapters than places, of several ranks, and rows without one between them."""
    family, changes = ADAPTED[name]
    path = tiny_models.make_tiny_model(family, tmp_path / "model", **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    modules = ALL if family != "starcoder2" else ("q_proj", "k_proj", "v_proj", "o_proj")
    modules = ("q_proj", "o_proj") if "moe" in family else modules
    names = [f"a{n}" for n in range(3)]
    for n, one in enumerate(names):
        make_adapter(model, tmp_path / one, n, rank=2 + 3 * n, modules=modules)
    lora = LoraConfig(tuple((one, str(tmp_path / one)) for one in names), max_loras=2)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    plain = [Request(str(n), as_token_ids(prompt), params) for n, prompt in enumerate(prompts)]
    adapted = [replace(request, adapter=[None, *names][n % 4]) for n, request in enumerate(plain)]

    def answers(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
        done = list(engine.run(requests))
        assert [completion.error for completion in done] == [None] * len(done)
        return {completion.request_id: tokens_of(completion) for completion in done}

    one, two = alone(path, setting, lora=lora), shared(path, rank_group, setting, lora=lora)
    here, without = answers(one, adapted), answers(one, plain)

    assert answers(two, adapted) == here
    assert sum(here[name] != without[name] for name in here) > len(plain) / 2, "else adapters change nothing"
    assert two.stats().adapter_loads >= len(names)


def test_adapters_that_ranks_can_not_share_are_refused(
    rank_group: RankGroupProcesses, tiny_models: Any, tmp_path: Path
) -> None:
    path = tiny_models.make_tiny_model("phi3", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    folder = make_adapter(model, tmp_path / "stacked", 1, modules=("qkv_proj",))
    lora = LoraConfig((("stacked", str(folder)),))
    with pytest.raises(UnsupportedModel, match="qkv_proj, which several devices can't share with an adapter"):
        shared(path, rank_group, lora=lora)
    with pytest.raises(EngineError, match="merged adapter doesn't run under tensor parallelism"):
        shared(path, rank_group, lora=replace(lora, merge=True))
    with pytest.raises(EngineError, match="leave other parallelism out"):
        Engine.load(path, PLAIN.config(max_model_len=256, pipeline_parallel=2, lora=lora))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(seed=11, count=14, vocab_size=250, shared=40, longest=90)


def alone(path: Path, setting: Setting = PLAIN, **changes: Any) -> Engine:
    return Engine.load(path, setting.config(max_model_len=256, attention="paged-sdpa", **changes))


def shared(path: Path, rank_group: RankGroupProcesses, setting: Setting = PLAIN, **changes: Any) -> Engine:
    config = setting.config(max_model_len=256, tensor_parallel=2, **changes)
    return Engine.load(path, config, rank_group)


def all_tokens(completions: list[Completion]) -> list[list[int]]:
    assert [completion.error for completion in completions] == [None] * len(completions)
    return [tokens_of(completion) for completion in completions]


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in SOONER else pytest.mark.exhaustive) for each in FAMILIES],
)
def test_every_family_answers_as_one_process_does(
    name: str, rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_models: Any, tmp_path: Path
) -> None:
    family, changes = FAMILIES[name]
    path = tiny_models.make_tiny_model(family, tmp_path / "model", **changes)
    wanted = all_tokens(engine_answers(alone(path), prompts, MAX_TOKENS))
    engine = shared(path, rank_group, CUT)
    assert all_tokens(engine_answers(engine, prompts, MAX_TOKENS, expected_tokens=1)) == wanted
    stats = engine.stats()
    # Prefixes are shared less where the rotation follows the length, and blocks behind a window are free again.
    assert stats.preemptions > 0 or family in ("llama-dynamic", "phi3", "exaone4")
    assert stats.cached > 0
    assert stats.free_blocks == stats.total_blocks
    assert len({tuple(tokens) for tokens in wanted}) > len(prompts) // 2, "answers must depend on the prompts"


EXPERT_FAMILIES = (
    "mixtral",
    "a shared expert",
    "dense layers and mixtures",
    "groups of experts",
    "sinks, and experts with biases",
    "scores that scale what experts read",
    "gemma4, experts beside MLPs",
)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if "shared" in each else pytest.mark.exhaustive) for each in EXPERT_FAMILIES]
)
def test_ranks_with_whole_experts_answer_as_one_process_does(
    name: str, rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_models: Any, tmp_path: Path
) -> None:
    family, changes = FAMILIES[name]
    path = tiny_models.make_tiny_model(family, tmp_path / "model", **changes)
    wanted = all_tokens(engine_answers(alone(path), prompts, MAX_TOKENS))
    engine = shared(path, rank_group, CUT, expert_parallel=True)
    assert all_tokens(engine_answers(engine, prompts, MAX_TOKENS, expected_tokens=1)) == wanted
    assert len({tuple(tokens) for tokens in wanted}) > len(prompts) // 2, "answers must depend on the prompts"


@pytest.mark.exhaustive
def test_experts_that_are_placed_by_counts_answer_as_neighbours_do(
    rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_models: Any, tmp_path: Path
) -> None:
    family, changes = FAMILIES["dense layers and mixtures"]
    path = tiny_models.make_tiny_model(family, tmp_path / "model", **changes)
    neighbours = shared(path, rank_group, PLAIN, expert_parallel=True)
    wanted = all_tokens(engine_answers(neighbours, prompts, MAX_TOKENS))
    load = neighbours.expert_load()
    assert load is not None
    rows = load.rows
    assert load.ranks is not None
    assert load.ranks.tolist() == [[0, 0, 0, 1, 1, 1]] * 4
    # Each token is computed by three of six experts in layer 1, the only mixture.
    assert rows.shape == (4, 6)
    assert rows.sum(1).tolist() == [0, 3 * neighbours.stats().computed, 0, 0]
    rows[1] = 100, 100, 0, 0, 0, 0  # neighbours
    np.save(tmp_path / "counts.npy", rows)
    placed = shared(path, rank_group, PLAIN, expert_parallel=True, expert_counts=str(tmp_path / "counts.npy"))
    assert all_tokens(engine_answers(placed, prompts, MAX_TOKENS)) == wanted
    load = placed.expert_load()
    assert load is not None
    assert load.ranks is not None
    assert load.ranks[1].tolist() == [0, 1, 0, 0, 1, 1]
    held = placed._runner._inner._model.own._decoder.experts.held  # type: ignore[attr-defined]
    assert held[1] == (0, 2, 3)


@pytest.mark.exhaustive
def test_four_ranks_with_whole_experts_answer_as_one_process_does(
    prompts: list[list[int]], tiny_models: Any, tmp_path: Path
) -> None:
    family, changes = FAMILIES["a shared expert"]
    path = tiny_models.make_tiny_model(family, tmp_path / "model", **changes, num_experts=8)
    wanted = all_tokens(engine_answers(alone(path), prompts, MAX_TOKENS))
    four = RankGroupProcesses(4, torch.device("cpu"), threads=4, timeout=HANG_SECONDS)
    try:
        config = CUT.config(max_model_len=256, tensor_parallel=4, expert_parallel=True)
        engine = Engine.load(path, config, four)
        assert all_tokens(engine_answers(engine, prompts, MAX_TOKENS, expected_tokens=1)) == wanted
        # A token alone has three experts, so that one rank at least has no rows of it.
        assert all_tokens(engine_answers(engine, prompts[:1], MAX_TOKENS)) == wanted[:1]
    finally:
        four.close()


def test_choices_log_probabilities_and_scored_prompts_are_the_same(
    rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_model: Callable[[str], Path]
) -> None:
    params = SamplingParams(
        max_tokens=5, temperature=0.8, top_p=0.9, n=3, seed=5, logprobs=4, prompt_logprobs=2, repetition_penalty=1.2
    )
    requests = [Request(str(i), as_token_ids(prompt), params) for i, prompt in enumerate(prompts[:4])]
    path = tiny_model("qwen3")
    one, two = (
        {done.request_id: done for done in engine.run(requests)} for engine in (alone(path), shared(path, rank_group))
    )
    assert one.keys() == two.keys() == {request.request_id for request in requests}
    for name, wanted in one.items():
        got = two[name]
        for left, right in zip(wanted.choices, got.choices, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()
            assert left.logprobs is not None
            assert right.logprobs is not None
            np.testing.assert_allclose(left.logprobs.chosen, right.logprobs.chosen, atol=1e-4)
        assert wanted.prompt_logprobs is not None
        assert got.prompt_logprobs is not None
        np.testing.assert_allclose(wanted.prompt_logprobs.chosen, got.prompt_logprobs.chosen, atol=1e-4)


def test_copied_blocks_are_copied_on_both_ranks(
    rank_group: RankGroupProcesses, tiny_model: Callable[[str], Path]
) -> None:
    prompt, path = [3 + at % 40 for at in range(30)], tiny_model("gemma3")
    params = SamplingParams(max_tokens=8, temperature=0.0, n=3, ignore_eos=True)
    requests = [Request("a", as_token_ids(prompt), params)]
    answers = []
    engines = alone(path), shared(path, rank_group, replace(CUT, chunk_size=64, num_blocks=60))
    for engine in engines:
        done = sorted(engine.run(requests), key=lambda one: one.request_id)
        answers.append([choice.token_ids.tolist() for one in done for choice in one.choices])
    assert answers[0] == answers[1]
    assert engines[1].stats().prompt == 30 + 2


def test_no_step_is_pickled(
    rank_group: RankGroupProcesses,
    prompts: list[list[int]],
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor zeroed and copied blocks. The other ranks unpickle nothing either (`test_encoding`)."""
    path = tiny_model("gemma3")
    params = SamplingParams(max_tokens=8, temperature=0.0, n=2, ignore_eos=True)
    requests = [Request("a", as_token_ids(prompts[0]), params)]
    wanted = [choice.token_ids.tolist() for choice in next(iter(alone(path).run(requests))).choices]
    engine = shared(path, rank_group)

    def refuse(message: object) -> bytes:
        raise AssertionError(f"{message} is pickled")

    monkeypatch.setattr("engine.parallel.encoding.pickle.dumps", refuse)
    monkeypatch.setattr("multiprocessing.connection._ForkingPickler.dumps", refuse)
    got = [choice.token_ids.tolist() for choice in next(iter(engine.run(requests))).choices]
    assert got == wanted
    with pytest.raises(AssertionError, match=r"LoadShare.* is pickled"):
        shared(path, rank_group)


def test_drafted_tokens_do_not_change_answers(
    rank_group: RankGroupProcesses, tiny_model: Callable[[str], Path]
) -> None:
    prompts = [[5, 6, 7, 8] * 12, [9, 10, 11] * 9]
    path = tiny_model("llama")
    wanted = all_tokens(engine_answers(alone(path), prompts, 24))
    engine = shared(path, rank_group, speculation=SpeculationConfig("ngram"))
    assert all_tokens(engine_answers(engine, prompts, 24)) == wanted
    assert engine.stats().speculation.sources["ngram"].num_drafted > 0


def test_bfloat16_is_as_near_as_rounding_allows(
    rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model("llama")
    exact, rounded = (scores(alone(path, dtype=dtype), prompts[:4]) for dtype in ("float32", "bfloat16"))
    parallel = scores(shared(path, rank_group, dtype="bfloat16"), prompts[:4])
    assert np.abs(parallel - exact).mean() < 1.5 * np.abs(rounded - exact).mean()


PACKINGS: dict[str, Callable[[str, torch.Tensor], Any]] = {
    "awq, groups of 16": lambda _, weight: pack_awq(weight),
    "gptq, groups of 16": lambda _, weight: pack_gptq(weight),
    "gptq, groups that the ranks cut": lambda _, weight: pack_gptq(weight, group=weight.shape[1] // 3),
    "gptq, 8 bits, a factor a row": lambda _, weight: pack_gptq(weight, bits=8, group=-1),
}


def settings_of(name: str) -> dict[str, Any]:
    method = name.split(",", maxsplit=1)[0]
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    group = -1 if "row" in name else 32 if "cut" in name else 16
    return {
        "quant_method": "gptq",
        "bits": 8 if "8 bits" in name else 4,
        "group_size": group,
        "desc_act": False,
        "sym": True,
    }


def weights_for(tiny_models: Any, folder: Path, family: str = "llama") -> Path:
    """Wide enough for groups."""
    sizes = {"hidden_size": 96, "intermediate_size": 96, "vocab_size": 256}
    made: Path = tiny_models.make_tiny_model(family, folder, **sizes)
    return made


@pytest.mark.parametrize(
    ("name", "family", "expert_parallel"),
    [
        *((name, "llama", False) for name in PACKINGS),
        ("gptq, groups that the ranks cut", "mixtral", False),
        pytest.param("gptq, groups that the ranks cut", "mixtral", True, marks=pytest.mark.exhaustive),
        pytest.param("awq, groups of 16", "mixtral", True, marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_checkpoints_answer_as_one_process_does(
    name: str,
    family: str,
    expert_parallel: bool,
    rank_group: RankGroupProcesses,
    prompts: list[list[int]],
    tiny_models: Any,
    tmp_path: Path,
) -> None:
    folder = weights_for(tiny_models, tmp_path / "plain", family)

    def pack(module: str, weight: torch.Tensor) -> Any:
        return None if module.endswith(".gate") else PACKINGS[name](module, weight)  # routers stay as they are

    write(folder, tmp_path / "packed", settings_of(name), pack)
    wanted = all_tokens(engine_answers(alone(tmp_path / "packed"), prompts, MAX_TOKENS))
    engine = shared(tmp_path / "packed", rank_group, expert_parallel=expert_parallel)
    assert all_tokens(engine_answers(engine, prompts, MAX_TOKENS)) == wanted


@pytest.mark.parametrize("inputs", ["calibrated", "as they come"])
def test_int8_checkpoints_with_int8_inputs_answer_as_one_process_does(
    inputs: str, rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_models: Any, tmp_path: Path
) -> None:
    library = pytest.importorskip("tests.engine.quant.library")
    how = library.INT8_STATIC if inputs == "calibrated" else library.INT8_TOKENS
    folder = weights_for(tiny_models, tmp_path / "plain")
    library.compress(folder, tmp_path / "packed", {"all": library.group(library.INT8_ROWS, how)}, "int-quantized")
    one, two = alone(tmp_path / "packed"), shared(tmp_path / "packed", rank_group)
    if inputs == "calibrated":
        wanted = all_tokens(engine_answers(one, prompts, MAX_TOKENS))
        assert all_tokens(engine_answers(two, prompts, MAX_TOKENS)) == wanted
        return
    # Each rank rounds its own part of a row, by that part's largest: no two numbers are the same, and none is worse.
    exact, rounded, parallel = (scores(engine, prompts[:6]) for engine in (alone(folder), one, two))
    assert 0 < np.abs(parallel - exact).mean() < 1.2 * np.abs(rounded - exact).mean()


def scores(engine: Engine, prompts: list[list[int]]) -> np.ndarray[Any, Any]:
    """Log-probabilities of the prompts' tokens, one after the other."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, temperature=0.0)
    requests = [Request(str(i), as_token_ids(prompt), params) for i, prompt in enumerate(prompts)]
    done = {one.request_id: one for one in engine.run(requests)}
    parts = [done[request.request_id].prompt_logprobs for request in requests]
    return np.concatenate([part.chosen[1:] for part in parts if part is not None])


def test_weights_in_activation_order_are_refused_by_name_unless_they_are_made_dense(
    rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_models: Any, tmp_path: Path
) -> None:
    folder = weights_for(tiny_models, tmp_path / "plain")
    settings = {**settings_of("gptq"), "desc_act": True}
    write(folder, tmp_path / "packed", settings, lambda _, weight: pack_gptq(weight, shuffled=True))
    with pytest.raises(EngineError, match=r"o_proj.weight is stored in activation order.*--quantize dense"):
        shared(tmp_path / "packed", rank_group)
    wanted = all_tokens(engine_answers(alone(tmp_path / "packed", quantize="dense"), prompts, MAX_TOKENS))
    engine = shared(tmp_path / "packed", rank_group, quantize="dense")
    assert all_tokens(engine_answers(engine, prompts, MAX_TOKENS)) == wanted


def test_each_rank_holds_its_share_and_no_more(
    rank_group: RankGroupProcesses, tiny_models: Any, tmp_path: Path
) -> None:
    path = tiny_models.make_tiny_model(
        "llama", tmp_path / "large", vocab_size=20_000, hidden_size=384, intermediate_size=1536, num_hidden_layers=6
    )
    whole = (path / "model.safetensors").stat().st_size
    engine = shared(path, rank_group)
    resident = engine._runner._inner._model.resident  # type: ignore[attr-defined]
    # This process has memory to use again, from the models of other tests; the other rank has not.
    assert len(resident) == 2
    assert 0.4 * whole < resident[1] < 0.6 * whole, f"{resident[1]} of {whole} bytes"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "3 attention heads can't be shared evenly by 2",
        ),
        ("llama", {"intermediate_size": 81}, "an MLP of 81 columns can't be shared evenly by 2"),
        ("qwen3-moe", {"moe_intermediate_size": 33}, "experts of 33 columns can't be shared evenly by 2"),
        ("olmoe", {}, "norms over all heads can't be shared evenly by 2"),
        ("phi", {}, "phi models are computed by transformers' code, which can't be shared"),
    ],
)
def test_models_that_can_not_be_cut_are_refused(
    family: str, changes: dict[str, Any], message: str, rank_group: RankGroupProcesses, tiny_models: Any, tmp_path: Path
) -> None:
    path = tiny_models.make_tiny_model(family, tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModel, match=message):
        shared(path, rank_group)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {}, "expert_parallel is set, but llama models have no experts; leave --expert-parallel out"),
        ("qwen3-moe", {"num_experts": 5}, "5 experts can't be shared evenly by 2 devices; give a --tensor-parallel"),
    ],
)
def test_models_whose_experts_can_not_be_distributed_are_refused(
    family: str, changes: dict[str, Any], message: str, rank_group: RankGroupProcesses, tiny_models: Any, tmp_path: Path
) -> None:
    path = tiny_models.make_tiny_model(family, tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModel, match=message):
        shared(path, rank_group, expert_parallel=True)


def test_counts_of_another_model_are_refused_before_it_is_loaded(
    rank_group: RankGroupProcesses, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    np.save(tmp_path / "counts.npy", np.ones((1, 2), dtype=np.int64))
    with pytest.raises(EngineError, match=r"has shape \[1, 2\], but the model has 3 layers with 4 experts"):
        shared(tiny_model("qwen3-moe"), rank_group, expert_parallel=True, expert_counts=str(tmp_path / "counts.npy"))


def test_counts_without_expert_parallelism_are_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(EngineError, match="expert_counts is set, but expert_parallel is not"):
        Engine.load(tiny_model("mixtral"), EngineConfig(expert_counts="counts.npy"))


def test_experts_are_not_distributed_over_one_rank(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(EngineError, match=r"expert_parallel is set, but tensor_parallel is 1, .* of 2 or more"):
        Engine.load(tiny_model("mixtral"), EngineConfig(expert_parallel=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_dtype": "int8"}, "kv_dtype 'int8' is of the native kernels"),
        ({"instruction_set": "avx2"}, "instruction_set 'avx2' is of the native kernels"),
        ({"attention": "native"}, "attention 'native' doesn't run under"),
        ({"speculation": SpeculationConfig("draft", "somewhere")}, "speculate 'draft' doesn't run under"),
        ({"speculation": SpeculationConfig("eagle3", "somewhere")}, "speculate 'eagle3' doesn't run under"),
    ],
)
def test_settings_that_several_ranks_can_not_follow_are_refused(
    changes: dict[str, Any], message: str, rank_group: RankGroupProcesses, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(EngineError, match=message):
        shared(tiny_model("llama"), rank_group, **changes)


def test_non_finite_blocks_are_zeroed_on_every_rank(
    rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_models: Any, tmp_path: Path
) -> None:
    poison = 255

    def edit(model: Any) -> None:
        model.model.embed_tokens.weight[poison].fill_(float("nan"))
        model.lm_head.weight[poison].zero_()  # it is never answered

    path = tiny_models.make_tiny_model("llama", tmp_path / "model", edit=edit)
    wanted = all_tokens(engine_answers(alone(path), prompts, MAX_TOKENS))
    engine = shared(path, rank_group, CUT)
    for _ in range(3):  # until every block has held it
        failed = engine_answers(engine, [[poison, 5 + n] * 45 for n in range(4)], MAX_TOKENS)
        assert {one.choices[0].finish_reason.value for one in failed} == {"error"}
    assert all_tokens(engine_answers(engine, prompts, MAX_TOKENS)) == wanted


def test_pooled_states_are_the_same(
    rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_model: Callable[[str], Path]
) -> None:
    params = SamplingParams(max_tokens=0, temperature=0.0)
    requests = [Request(str(i), as_token_ids(p), params, pooling="mean") for i, p in enumerate(prompts[:5])]
    path = tiny_model("qwen3")
    one, two = (
        {done.request_id: done.pooled for done in e.run(requests)} for e in (alone(path), shared(path, rank_group, CUT))
    )
    for name, wanted in one.items():
        got = two[name]
        assert wanted is not None
        assert got is not None
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_the_memory_limit_is_the_total_of_all_ranks(
    rank_group: RankGroupProcesses, tiny_model: Callable[[str], Path]
) -> None:
    config = EngineConfig(
        dtype="float32", max_model_len=64, cache=CacheConfig(memory_bytes=1 << 20, prefix_caching=False)
    )
    one = Engine.load(tiny_model("llama"), config)
    two = Engine.load(tiny_model("llama"), replace(config, tensor_parallel=2), rank_group)
    # Each has half of the heads and half of the memory.
    assert two.stats().total_blocks == one.stats().total_blocks


def test_all_ranks_compute_the_largest_step_collectively(
    rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_model: Callable[[str], Path]
) -> None:
    """As on GPUs before the cache is made; the ranks are synchronized afterwards, and no expert's rows are counted."""
    path = tiny_model("qwen3-moe")
    engine = shared(path, rank_group, expert_parallel=True)
    own = engine._runner._inner._model.own  # type: ignore[attr-defined]
    uses = _measured(own, EngineConfig(schedule=ScheduleConfig(5, 70)), rank_group)
    assert len(uses) == 2
    assert all(use.total > 0 for use in uses)
    load = engine.expert_load()
    assert load is not None
    assert load.rows.shape == (3, 4)
    assert load.rows.sum() == 0
    wanted = all_tokens(engine_answers(alone(path), prompts[:3], MAX_TOKENS))
    assert all_tokens(engine_answers(engine, prompts[:3], MAX_TOKENS)) == wanted


def test_on_gpus_the_cache_takes_what_the_fullest_rank_has_left() -> None:
    gib = 1 << 30
    uses = [MemoryUse(80 * gib, gib, 20 * gib), MemoryUse(80 * gib, 3 * gib, 21 * gib)]
    assert _left_by(uses, CacheConfig(gpu_memory_utilization=0.5)).memory_bytes == 16 * gib
    with pytest.raises(OutOfMemory, match="leaves nothing of 25%"):
        _left_by(uses, CacheConfig(gpu_memory_utilization=0.25))


@pytest.mark.parametrize(
    ("family", "expert_parallel"),
    [("llama", False), pytest.param("mixtral", True, marks=pytest.mark.exhaustive)],
)
def test_a_step_in_which_a_rank_dies_gives_no_tokens(
    family: str, expert_parallel: bool, tiny_models: Any, tmp_path: Path
) -> None:
    """On GPUs only the host reports a dead rank: the pending collectives of the others are aborted, and they go on."""
    changes = {"sliding_window": None} if family == "mixtral" else {}
    path = tiny_models.make_tiny_model(family, tmp_path / "model", **changes)
    rank_group = RankGroupProcesses(2, torch.device("cpu"), threads=2, timeout=HANG_SECONDS)
    engine = shared(path, rank_group, expert_parallel=expert_parallel)
    engine.add(Request("a", as_token_ids([3, 4, 5]), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))
    assert engine.step() == []
    model = engine._runner._inner._model  # type: ignore[attr-defined]
    logits, (rank,) = model.logits, rank_group._ranks

    def last(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        rank.process.kill()
        rank.process.wait()
        return found  # type: ignore[no-any-return]

    model.logits = last
    with pytest.raises(EngineLost, match="was killed by SIGKILL"):
        engine.step()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_engine_when_its_time_is_over(tiny_model: Callable[[str], Path]) -> None:
    rank_group = RankGroupProcesses(2, torch.device("cpu"), threads=2, timeout=8)
    engine = shared(tiny_model("llama"), rank_group)
    engine.add(Request("a", as_token_ids([3, 4, 5]), SamplingParams(max_tokens=50, temperature=0.0)))
    engine.step()
    (pid,) = rank_group.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineLost, match=r"the engine lost a rank: .*[Tt]im"):
        engine.step()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.exhaustive
def test_a_rank_that_reads_no_commands_does_not_stop_the_leader_for_ever() -> None:
    """Steps ahead are sent before the results of the one before are waited for."""
    rank_group = RankGroupProcesses(2, torch.device("cpu"), threads=2, timeout=8)
    (pid,) = rank_group.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineLost, match="a rank has read no command for 8 seconds"):
        rank_group.send(ZeroBlocks(0, [0] * 1_000_000))
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.exhaustive
def test_a_killed_rank_ends_the_engine_within_seconds_with_an_error(
    rank_group: RankGroupProcesses, prompts: list[list[int]], tiny_model: Callable[[str], Path]
) -> None:
    """The last test of this file: this pair of ranks can't compute afterwards."""
    engine = shared(tiny_model("llama"), rank_group, CUT)
    (pid,) = rank_group.pids
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), as_token_ids(prompt), SamplingParams(max_tokens=50, temperature=0.0)))
    engine.step()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=rf"rank 1 \(process {pid}\) was killed by SIGKILL"):
        engine.step()
    with pytest.raises(EngineLost, match="was killed by SIGKILL"):
        engine.step()
    with pytest.raises(EngineLost, match="was killed by SIGKILL"):
        shared(tiny_model("llama"), rank_group)
