"""What structured output costs, and what it can do: 270 real JSON schemas and one model.

    python benchmarks/structured_output.py --model MODEL [--schemas FILE] [--max-tokens N] [--json FILE]

Three parts. Compiling: how many of the schemas can be, and how long each takes. Answering: the model answers a row for
each schema, and each answer that ended is checked with `jsonschema`. Masks: those answers' tokens are led through their
grammars again, 1, 16 and 128 rows at a time, and what the masks of a step cost is measured: filling them, and the
sampler's whole step with them against without (random logits of the model's vocabulary).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import torch
from throughput import machine

from engine.config import EngineConfig, ScheduleConfig
from engine.request import Request, SamplingParams, TokenMask
from engine.sampling.logits_processors import fill_masks
from engine.sampling.sampler import Sampler
from schemas.requests.errors import RowError
from workers.model.loaded_model import LoadedModel
from workers.structured.constraints import json_grammar
from workers.structured.grammar import Grammar, GrammarSource

SCHEMAS = Path(__file__).parent / "workloads" / "schemas.jsonl"
BATCHES = (1, 16, 128)
PROMPT = "Answer with one JSON object that fits this JSON schema, and nothing else: "
LONGEST_PROMPT = 2_000


def read_schemas(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Name and schema, line by line."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [(line["name"], line["schema"]) for line in lines]


def compile_all(model: LoadedModel, schemas: list[tuple[str, dict[str, Any]]]) -> tuple[dict[str, Any], list[Any]]:
    """Facts, and a grammar or None for each schema."""
    begun = time.perf_counter()
    model.grammars.compile(GrammarSource('start: "a"', "x"))
    first = time.perf_counter() - begun
    grammars: list[Grammar | None] = []
    times, refused = [], dict[str, str]()
    for name, schema in schemas:
        begun = time.perf_counter()
        try:
            grammars.append(model.grammars.compile(json_grammar(schema, name)))
        except RowError as error:
            grammars.append(None)
            refused[name] = error.message
        times.append((time.perf_counter() - begun) * 1e3)
    lenient = 0
    for name, schema in schemas:
        with contextlib.suppress(RowError):
            model.grammars.compile(json_grammar(schema, name, lenient=True))
            lenient += 1
    p50, p95, most = (round(float(p), 2) for p in np.percentile(times, [50, 95, 100]))
    facts = {
        "schemas": len(schemas),
        "compiled": len(schemas) - len(refused),
        "compiled_if_not_strict": lenient,
        "vocabulary_seconds": round(first, 3),
        "compile_ms": {"p50": p50, "p95": p95, "max": most},
        "refused": refused,
    }
    return facts, grammars


def answer(
    model: LoadedModel, schemas: list[tuple[str, dict[str, Any]]], grammars: list[Grammar | None], max_tokens: int
) -> tuple[dict[str, Any], list[tuple[Grammar, list[int]]]]:
    """Facts, and the tokens of each answer with its grammar."""
    tokenizer, requests = model.tokenizer, {}
    for at, ((_, schema), grammar) in enumerate(zip(schemas, grammars, strict=True)):
        if grammar is not None:
            text = PROMPT + json.dumps(schema)[:LONGEST_PROMPT]
            prompt = tokenizer.encode_batch([text], add_special_tokens=True)[0]
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            requests[str(at)] = Request(str(at), prompt, params, mask=grammar)
    begun = time.perf_counter()
    for request in requests.values():
        model.engine.add(request)
    done = []
    while model.engine.has_work:
        done += model.engine.step()
    seconds = time.perf_counter() - begun
    ends: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    kept = []
    for completion in done:
        at = int(completion.request_id)
        (choice,) = completion.choices
        ends[str(choice.finish_reason)] += 1
        ids = choice.token_ids.tolist()
        kept.append((requests[completion.request_id].mask, ids))
        if choice.stop_token_id is not None and (why := fault(tokenizer.decode(ids), schemas[at][1])) is not None:
            wrong[schemas[at][0]] = why
    ended = ends["stop"]
    tokens = sum(len(ids) for _, ids in kept)
    facts = {"rows": len(done), "ends": dict(ends), "valid": ended - len(wrong), "ended": ended, "wrong": wrong}
    facts |= {"tokens": tokens, "tokens_per_second": round(tokens / seconds, 1)}
    return facts, [(grammar, ids) for grammar, ids in kept if grammar is not None and ids]  # type: ignore[misc]


def fault(text: str, schema: dict[str, Any]) -> str | None:
    """What `jsonschema` finds wrong, or None."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    error = jsonschema.exceptions.best_match(validator(schema).iter_errors(value))
    return None if error is None else f"{error.json_path}: {error.message}"[:200]


def steps(answers: list[tuple[Grammar, list[int]]], batch: int) -> Iterator[list[tuple[TokenMask, int]]]:
    """Steps of a full batch: each row's mask and the token it will take; a row that ended is followed by the next."""
    rows: list[tuple[TokenMask, Iterator[int]]] = []
    following = iter(answers * (1 + 200 * batch // max(1, sum(len(ids) for _, ids in answers))))
    while True:
        step: list[tuple[TokenMask, int]] = []
        for at in range(batch):
            while True:
                if at < len(rows) and (token := next(rows[at][1], None)) is not None:
                    step.append((rows[at][0], token))
                    break
                found = next(following, None)
                if found is None:
                    return
                rows[at : at + 1] = [(found[0](0), iter(found[1]))]
        yield step


def mask_cost(answers: list[tuple[Grammar, list[int]]], batch: int, vocab: int, most: int = 300) -> dict[str, Any]:
    """Microseconds for each row of a step, over up to `most` steps."""
    fills, advances = [], []
    words = np.zeros((batch, -(-vocab // 32)), dtype=np.int32)
    for _, step in zip(range(most), steps(answers, batch), strict=False):
        words[:] = 0
        begun = time.perf_counter()
        failed = fill_masks([mask for mask, _ in step], words)
        filled = time.perf_counter()
        for mask, token in step:
            mask.advance(token)
        assert not failed, failed
        fills.append(filled - begun)
        advances.append(time.perf_counter() - filled)
    cost = {
        name: round(float(np.mean(taken)) / batch * 1e6, 1) for name, taken in (("fill", fills), ("advance", advances))
    }
    p99 = round(float(np.percentile(fills, 99)) * 1e3, 3)
    return {"batch": batch, "steps": len(fills), **cost, "fill_step_ms_p99": p99, **sampler_cost(answers, batch, vocab)}


def sampler_cost(answers: list[tuple[Grammar, list[int]]], batch: int, vocab: int, repeats: int = 40) -> dict[str, Any]:
    """Microseconds for each row of the sampler's step, greedy: without masks and with."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(batch, vocab, generator=generator)
    rows = np.arange(batch, dtype=np.int32)
    found = {}
    for name in ("without", "with"):
        sampler = Sampler(batch, vocab, (), torch.device("cpu"))
        for row in range(batch):
            grammar, ids = answers[row % len(answers)]
            mask = grammar if name == "with" else None
            known = np.array([1, *ids[: len(ids) // 2]], dtype=np.int32)
            sampler.assign(row, Request("r", known, SamplingParams(temperature=0.0), mask=mask), 0, known, 1)
        times = []
        for at in range(repeats):
            begun = time.perf_counter()
            sampler.sample(logits.clone(), rows, rows + at, rows + at)
            times.append(time.perf_counter() - begun)
        found[f"sample_{name}_masks"] = round(float(np.median(times)) / batch * 1e6, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--schemas", type=Path, default=SCHEMAS)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    schemas = read_schemas(args.schemas)
    config = EngineConfig(max_model_len=2048, schedule=ScheduleConfig(max_num_seqs=32))
    model = LoadedModel.load(args.model, name="model", config=config, digest="")
    compiled, grammars = compile_all(model, schemas)
    print("compiled", json.dumps(compiled, indent=1))
    answered, answers = answer(model, schemas, grammars, args.max_tokens)
    print("answered", json.dumps(answered, indent=1))
    costs = [mask_cost(answers, batch, model.limits.vocab_size) for batch in BATCHES]
    for cost in costs:
        print(cost)
    if args.json:
        report = {
            "machine": machine(), "model": args.model.name, "vocabulary": model.limits.vocab_size, "compiled": compiled,
            "answered": answered, "unit": "microseconds per row", "masks": costs,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
