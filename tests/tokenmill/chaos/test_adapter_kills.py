"""512 rows of 16 adapters of the demo model, and others of none, shuffled: in runs that preempt, draft and are killed,
each has the tokens of transformers' model with the adapter merged into its weights.

The weights are those that the loader reads from the demo model's file, in float32. The reference computes one row at a
time, and each answer whole: its tokens are greedy if each is the best one behind those before it.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.models.gguf import GGUFCheckpoint
from schemas.settings.settings import load_settings
from tests.engine.oracle import TIE
from tests.tokenmill.chaos.killing import attack, run_undisturbed
from tests.tokenmill.chaos.running import Setup
from tokenmill.models.sources import find
from workers.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ADAPTERS = [f"a{number}" for number in range(16)]
ROWS_OF_EACH, ROWS_OF_BASE, MAX_TOKENS = 32, 64, 8
BASE = "demo"


@dataclass(frozen=True, slots=True)
class Work:
    """Adapters in `folder`, beside a file of requests; and what each row asks, as (model, text)."""

    demo: Path
    folder: Path
    rows: list[tuple[str, str]]

    @property
    def source(self) -> Path:
        return self.folder / "requests.jsonl"


def read_demo(path: Path) -> Any:
    """transformers' model with the weights of the file, in float32."""
    checkpoint = GGUFCheckpoint(path)
    weights = {name: torch.empty(checkpoint.shape(name)) for name in checkpoint.names}
    for name, into in weights.items():
        checkpoint.read(name, into)
    model = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32).eval()
    left = model.load_state_dict(weights, strict=False)
    assert (left.missing_keys, left.unexpected_keys) == (["lm_head.weight"], []), "it is the embedding's"
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def reference() -> Any:
    source = find("demo", load_settings().model_cache)
    if source is None:
        pytest.skip("NOT TESTED HERE: the demo model, which is not in the cache: tokenmill models pull demo")
    return source.path, read_demo(source.path)


@pytest.fixture(scope="module")
def work(reference: Any, adapters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    """The same texts go to all adapters, so that blocks of the cache or drafts of another one would be found out."""
    demo, model = reference
    folder = tmp_path_factory.mktemp("work")
    for number, name in enumerate(ADAPTERS):
        adapters.make_adapter(model, folder / name, number, rank=16)
    counts = dict.fromkeys(ADAPTERS, ROWS_OF_EACH) | {BASE: ROWS_OF_BASE}
    rows = [(name, f"Numbers: {n}, {n + 1}, {n},") for name, count in counts.items() for n in range(count)]
    random.Random(7).shuffle(rows)
    made = Work(demo, folder, rows)
    with made.source.open("w") as file:
        for row, (name, text) in enumerate(rows):
            body = {
                "model": name, "prompt": text, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True
            }  # fmt: skip
            line = {"custom_id": f"id-{row}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    yield made
    for weights in folder.glob("*/*.safetensors"):
        weights.unlink()


@pytest.fixture
def setup(work: Work, folder: Path) -> Setup:
    """Four places for adapters, and a KV cache for about half of the rows that may run at once. Answers are expected to
    have a token, so more rows are admitted than it has room for."""
    given = [part for name in ADAPTERS for part in ("--adapter", f"{name}={work.folder / name}")]
    options = (*given, "--max-loras", "4", "--threads", "1", "--max-num-seqs", "64", "--kv-cache-memory", "32MB")
    variables = {
        "PLAN__MAX_SHARD_ROWS": "32", "PLAN__ANSWER_FRACTION": "0.1", "KV_BLOCK_SIZE": "8", "MAX_MODEL_LEN": "128"
    }  # fmt: skip
    named = tuple((f"TOKENMILL_{name}", value) for name, value in variables.items())
    return Setup(f"{BASE}={work.demo}", folder, options, named)


def check_against(model: Any, work: Work, adapters: ModuleType, out: Path) -> int:
    """Compare the answers with those of the merged models; return the number of tokens where another one is as good."""
    tokenizer, ties = Tokenizer.load(work.demo), 0
    results = pq.read_table(out / "results").sort_by("row").to_pylist()
    assert [row["row"] for row in results] == list(range(len(work.rows)))
    for name in (BASE, *ADAPTERS):
        if name != BASE:
            adapters.merge_adapter(model, work.folder / name)
        for (_, text), row in ((asked, row) for asked, row in zip(work.rows, results, strict=True) if asked[0] == name):
            assert (row["status"], row["model"]) == ("succeeded", name), row["error_message"]
            prompt, answer = token_ids(row, tokenizer, text)
            ties += count_ties(model, prompt, answer, row["finish_reason"] == "stop", f"row {row['row']}, {name}")
        if name != BASE:
            adapters.merge_adapter(model, work.folder / name, sign=-1)
    return ties


def token_ids(row: dict[str, Any], tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """Those of a row's prompt, and of its answer, with the end token if it has ended."""
    response = json.loads(row["response"])
    (prompt,) = tokenizer.encode_batch([text], add_special_tokens=True)
    answer = list(response["choices"][0]["token_ids"])
    if row["finish_reason"] == "stop" and answer[-1:] != [tokenizer.eos_token_id]:
        answer.append(tokenizer.eos_token_id)
    return list(map(int, prompt)), answer


@torch.inference_mode()
def count_ties(model: Any, prompt: list[int], answer: list[int], has_ended: bool, where: str) -> int:
    """Assert that each token of the answer is the best one, or as good as the best one, and count the latter."""
    assert has_ended or len(answer) == MAX_TOKENS, where
    logits = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
    chosen, best = logits.gather(1, torch.tensor(answer)[:, None])[:, 0], logits.max(1).values
    assert (best - chosen).max() < TIE, f"{where}: {answer}, transformers says {logits.argmax(1).tolist()}"
    return int((chosen < best).sum())


def test_given_rows_of_16_adapters_when_preempted_drafted_and_killed_then_each_has_the_tokens_of_its_merged_model(
    reference: Any, work: Work, setup: Setup, adapters: ModuleType
) -> None:
    calm = run_undisturbed(setup, work.source, setup.folder / "calm")
    assert read_manifest(setup.folder / "calm")["engine"]["preemptions"] > 0
    ties = check_against(reference[1], work, adapters, setup.folder / "calm")
    print(f"{ties} tokens of {calm.tokens} where transformers has another one as good")
    assert ties < 10
    answers = {(name, text): calm.answers[row][-1] for row, (name, text) in enumerate(work.rows)}
    first = work.rows[0][1]
    assert len({str(answers[name, text]) for name, text in answers if text == first}) > len(ADAPTERS) // 2

    drafting = replace(setup, options=(*setup.options, "--speculate", "ngram"))
    drafted = run_undisturbed(drafting, work.source, setup.folder / "drafted")
    manifest = read_manifest(setup.folder / "drafted")
    assert manifest["usage"]["accepted"] > 0
    assert manifest["engine"]["preemptions"] > 0
    assert drafted.answers == calm.answers

    report = attack(drafting, work.source, drafted, random.Random(5), 3, signal.SIGKILL)
    assert (report["kills"], report["kills_in_startup"]) == (3, 1)


def read_manifest(out: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return manifest
