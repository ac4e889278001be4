"""Rows with adapters beside each other: each has the tokens of transformers with its adapter merged by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import (
    CacheConfig,
    Engine,
    EngineConfig,
    Request,
    SamplingParams,
    ScheduleConfig,
    SpeculationConfig,
    as_token_ids,
)  # fmt: skip
from engine.adapters.adapter import open_adapter
from engine.adapters.merged import MergedWeights
from engine.config import LoraConfig
from engine.errors import EngineError, RequestRefused, UnsupportedModel
from engine.models.load import open_model
from engine.native.shapes import ShapeTable
from engine.quant.quantize import write_quantized
from engine.quant.writing import Scheme
from engine.scheduler.resume import ANSWERED
from tests.engine.oracle import Answer, check_equal, greedy_answer, make_prompts, tokens_of

pytestmark = pytest.mark.slow

TinyModel = Callable[[str], Path]
MAX_TOKENS = 12
NGRAM = SpeculationConfig("ngram")
PATHS = ["auto", "paged-sdpa"]


class Work:
    """A tiny model with adapters of several ranks, prompts with and without one, and transformers' answers."""

    def __init__(self, path: Path, adapters: ModuleType, tmp_path: Path, modules: Sequence[str] = ()) -> None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        modules = modules or adapters.ALL
        self.path = path
        self.folders = [
            adapters.make_adapter(model, tmp_path / "a0", 0, rank=4, modules=modules),
            adapters.make_adapter(model, tmp_path / "a1", 1, rank=16, modules=("q_proj", "v_proj", "qkv_proj")),
            adapters.make_adapter(
                model, tmp_path / "a2", 2, rank=7, modules=modules, ranks={"down_proj": 2}, use_rslora=True,
                alpha_pattern={"up_proj": 3}, target_modules="all-linear",
            ),
            adapters.make_adapter(model, tmp_path / "a3", 3, rank=33, modules=modules),
        ]  # fmt: skip
        self.prompts = make_prompts(seed=7, count=15, vocab_size=257, shared=20, longest=40)
        self.names = [None if i % 5 == 4 else f"a{i % 4}" for i in range(15)]
        self.want: list[Answer] = []
        for prompt, name in zip(self.prompts, self.names, strict=True):
            folder = None if name is None else self.folders[int(name[1])]
            if folder is not None:
                adapters.merge_adapter(model, folder)
            self.want.append(greedy_answer(model, prompt, MAX_TOKENS, (2,)))
            if folder is not None:
                adapters.merge_adapter(model, folder, sign=-1)

    def engine(self, max_loras: int = 4, num_blocks: int = 60, **changes: Any) -> Engine:
        named = tuple((f"a{i}", str(folder)) for i, folder in enumerate(self.folders))
        config = {
            "dtype": "float32", "max_model_len": 128, "cache": CacheConfig(num_blocks=num_blocks, block_size=8),
            "schedule": ScheduleConfig(max_num_seqs=7, max_num_batched_tokens=48),
        }  # fmt: skip
        return Engine.load(self.path, EngineConfig(**{**config, "lora": LoraConfig(named, max_loras), **changes}))

    def requests(self) -> list[Request]:
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        return [
            Request(str(i), as_token_ids(prompt), params, adapter=name, expected_tokens=1)
            for i, (prompt, name) in enumerate(zip(self.prompts, self.names, strict=True))
        ]

    def check(self, engine: Engine) -> None:
        done = {completion.request_id: completion for completion in engine.run(self.requests())}
        assert check_equal(self.want, [done[str(i)] for i in range(len(self.prompts))]) < 2
        engine.scheduler.check_integrity()


def _private_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@pytest.fixture(scope="module")
def work(tiny_model: TinyModel, adapters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(tiny_model("llama"), adapters, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("max_loras", [4, 1])
def test_each_row_has_the_tokens_of_its_merged_adapter(work: Work, attention: str, max_loras: int) -> None:
    engine = work.engine(max_loras, attention=attention)
    work.check(engine)
    assert engine.stats().cached > 0  # of the prefix that all prompts share, only by rows with the same adapter


def test_rows_are_preempted_resumed_and_drafted_with_their_adapters(work: Work) -> None:
    tight = CacheConfig(num_blocks=18, block_size=4, prefix_caching=False)
    ahead, drafting = work.engine(3, cache=tight, async_scheduling=True), work.engine(3, cache=tight, speculation=NGRAM)
    for engine in (ahead, drafting):
        work.check(engine)
        assert engine.stats().preemptions > 0
    assert ahead.stats().steps_ahead > 0
    assert drafting.stats().speculation.drafted > 0
    # An interrupted answer goes on with its adapter.
    at = next(i for i, name in enumerate(work.names) if name and len(work.want[i].token_ids) == MAX_TOKENS)
    one = work.requests()[at]
    ahead.add(one)
    for _ in range(5):
        ahead.step()
    left = ahead.partial(one)
    assert len(left[0].token_ids) > 0
    ahead.cancel(one.request_id)
    while ahead.has_work:
        ahead.step()
    resumed = Request(one.request_id, one.prompt_token_ids, one.params, adapter=one.adapter, partial=left)
    (again,) = ahead.run([resumed])
    assert again.choices[0].finish_reason in ANSWERED
    check_equal(work.want[at : at + 1], [again])


@pytest.mark.parametrize("family", ["phi3", "cohere", "gemma3", "glm4", "mixtral", "granite", "nemotron"])
def test_other_families_and_stacked_modules(
    family: str, tiny_model: TinyModel, adapters: ModuleType, tmp_path: Path
) -> None:
    modules = (*adapters.ALL, "qkv_proj", "gate_up_proj")
    work = Work(tiny_model(family), adapters, tmp_path, modules)
    for attention in PATHS:
        work.check(work.engine(2, attention=attention))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_bases_add_the_same_low_rank_products(
    work: Work, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a base that the kernels multiply as integers, and one with the same rounded weights by torch's operators:
    monkeypatch.setattr(ShapeTable, "int8_is_faster", lambda *_: True)
    engine = work.engine(4, quantize=quantize)
    plain = work.engine(4, quantize=quantize, attention="paged-sdpa")
    request = work.requests()[0]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=256)

    def logprobs(engine: Engine, adapter: str | None) -> torch.Tensor:
        (done,) = engine.run([Request("r", request.prompt_token_ids, params, adapter=adapter)])
        found = done.choices[0].logprobs or done.choices[0].end_logprobs
        assert found is not None
        order = found.top_ids[0].argsort()
        return torch.from_numpy(found.top[0][order])

    # when a token is computed with an adapter, they agree as they do without.
    for adapter in (None, "a0", "a3"):
        near = (logprobs(engine, adapter) - logprobs(plain, adapter)).abs().mean()
        far = (logprobs(engine, adapter) - logprobs(plain, "a1")).abs().mean()
        assert near < far / 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_tokens_and_logprobs_alone_and_in_any_batch(work: Work, dtype: str) -> None:
    # Steps of several rows and few of each adapter compute B (A x) before their products, those of one row within them.
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=3)
    requests = [replace(request, params=params) for request in work.requests()]
    batched, alone = work.engine(4, dtype=dtype), work.engine(1, dtype=dtype)
    done = {completion.request_id: completion for completion in batched.run(requests)}
    assert "native" in batched.attention_name
    for request in requests:
        (one,) = alone.run([request])
        assert tokens_of(one) == tokens_of(done[request.request_id])
        found, expected = (completion.choices[0].logprobs for completion in (one, done[request.request_id]))
        assert found is not None
        assert expected is not None
        assert (found.top == expected.top).all()


def test_many_adapters_go_through_few_places(work: Work, adapters: ModuleType, tmp_path: Path) -> None:
    # Given 200 adapters of 400 kB, 8 places, and room for 8 more in memory:
    model = AutoModelForCausalLM.from_pretrained(work.path, dtype=torch.float32)
    named = tuple((f"c{i}", str(adapters.make_adapter(model, tmp_path / f"c{i}", i, rank=48))) for i in range(200))
    engine = work.engine(lora=LoraConfig(named, max_loras=8, cache_bytes=8 * 600_000))
    loader = engine._adapters
    assert loader is not None
    of_one = max(packed.nbytes for packed in loader._packed.values())
    assert 300_000 < of_one < 600_000
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)

    # when rows come in the planner's order,
    names = [name for name, _ in named for _ in range(3)]
    for i, name in enumerate(names):
        engine.add(Request(str(i), as_token_ids(work.prompts[i % 8]), params, adapter=name))
    done, before, most = {}, _private_bytes(), 0
    while engine.has_work:
        done.update((one.request_id, tokens_of(one)) for one in engine.step())
        assert engine.scheduler.places.num_used <= 8
        engine.scheduler.check_integrity()
        most = max(most, _private_bytes())
    assert len(done) == len(names)
    assert len({tuple(tokens) for tokens in done.values()}) > 100
    # each is read once, but for those that showed their size before,
    assert max(loader.loads.values()) <= 2
    assert engine.stats().adapter_loads == loader.loads.total() <= 208
    # and memory does not grow with them.
    assert most - before < 40 * of_one


def test_adapters_that_lost_their_place_are_not_read_again(work: Work) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0)

    def loads(cache_bytes: int) -> int:
        engine = work.engine(lora=LoraConfig(tuple((f"a{i}", str(work.folders[i])) for i in range(4)), 1, cache_bytes))
        for turn in range(3):
            for name in ("a0", "a1", "a2"):
                list(engine.run([Request(f"{name}-{turn}", as_token_ids(work.prompts[0]), params, adapter=name)]))
        return engine.stats().adapter_loads

    assert loads(1 << 30) == 4  # a3 is the largest: it was loaded first
    assert loads(0) == 10


@pytest.mark.parametrize(("family", "attention"), [("llama", "auto"), ("llama", "paged-sdpa"), ("phi3", "auto")])
def test_a_merged_adapter_is_a_part_of_the_weights(
    family: str, attention: str, tiny_model: TinyModel, adapters: ModuleType, tmp_path: Path
) -> None:
    work = Work(tiny_model(family), adapters, tmp_path, (*adapters.ALL, "qkv_proj", "gate_up_proj"))
    for name in ("a1", "a2"):
        lora = LoraConfig(((name, str(work.folders[int(name[1])])),), merge=True)
        engine = work.engine(lora=lora, attention=attention)
        ours = [i for i, named in enumerate(work.names) if named == name]
        requests = [replace(work.requests()[i], adapter=None) for i in ours]
        done = {one.request_id: one for one in engine.run(requests)}
        assert check_equal([work.want[i] for i in ours], [done[str(i)] for i in ours]) < 2
        engine.scheduler.check_integrity()
        with pytest.raises(RequestRefused, match=f"there is no adapter {name!r}; there are: none"):
            engine.add(Request("r", as_token_ids([5, 6, 7]), adapter=name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_merged_weights_are_those_of_peft_to_the_bit(work: Work, adapters: ModuleType, dtype: str) -> None:
    # Given the weights that PEFT's merge_and_unload gives: W += (B @ A) * factor, of a float32 B A,
    model = AutoModelForCausalLM.from_pretrained(work.path, dtype=getattr(torch, dtype))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapters.merge_adapter(model, work.folders[2])
    opened = open_model(work.path)
    assert opened.decoder is not None
    # when the adapter is merged as weights are read, then each is equal, those that it doesn't change too.
    merged = MergedWeights(opened.weights, open_adapter("a2", work.folders[2], opened.decoder), opened.decoder, "none")
    changed = 0
    for name in merged.names:
        want = model.get_parameter(name).data
        read = torch.empty_like(want)
        merged.read(name, read)
        assert torch.equal(read, want), name
        changed += not torch.equal(want, before[name])
    assert changed == 7 * opened.decoder.num_layers


def test_an_adapter_is_merged_into_dense_weights_only(work: Work, tiny_model: TinyModel, tmp_path: Path) -> None:
    a0 = ("a0", str(work.folders[0]))
    merged = LoraConfig((a0,), merge=True)
    with pytest.raises(UnsupportedModel, match="a0 can't be merged into weights that are quantized to int4 at load"):
        work.engine(lora=merged, quantize="int4")
    with pytest.raises(EngineError, match="one adapter can be merged, but there are 2"):
        work.engine(lora=LoraConfig((a0, ("a1", str(work.folders[1]))), merge=True))
    # A quantized checkpoint takes one if it is dequantized.
    quantized = tmp_path / "int8"
    quantized.mkdir()
    write_quantized(work.path, quantized, Scheme("int8"))
    with pytest.raises(UnsupportedModel, match=r"which is int8: .*--quantize dense, which takes 4 bytes for each of"):
        Engine.load(quantized, EngineConfig(dtype="float32", lora=merged))
    request = work.requests()[0]
    answers = [
        next(Engine.load(quantized, EngineConfig(dtype="float32", quantize="dense", lora=lora)).run([one]))
        for lora, one in ((merged, replace(request, adapter=None)), (LoraConfig((a0,)), request))
    ]
    assert tokens_of(answers[0]) == tokens_of(answers[1])


def test_an_unknown_adapter_is_refused_with_the_names_that_there_are(work: Work, tiny_model: TinyModel) -> None:
    engine = work.engine()
    request = Request("r", as_token_ids([5, 6, 7]), adapter="b0")
    with pytest.raises(RequestRefused, match="there is no adapter 'b0'; there are: a0, a1, a2, a3"):
        engine.add(request)
    with pytest.raises(EngineError, match="'a0' is given twice"):
        work.engine(lora=LoraConfig((("a0", str(work.folders[0])),) * 2))
    with pytest.raises(EngineError, match="max_loras is 0"):
        work.engine(0)
    with pytest.raises(UnsupportedModel, match="which transformers' code computes"):
        work.engine(own_models=False)
