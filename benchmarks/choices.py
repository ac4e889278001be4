"""Rows classified per second: choices that are scored, and the same labels decoded under a constraint, in turn.

    python -m benchmarks.choices model.gguf --prompt-tokens 30 200 --label-tokens 1 3 8 --json results.json

One process holds the model and computes both ways on the same prompts (token ids) with the same four labels, greedy:
`bulk` gives the engine all rows at once, `single` one row at a time, as a quiet interactive lane does. Rates count the
engine's seconds alone. Labels begin with different tokens, and no two prompts begin alike, but for an instruction of
`--shared-tokens` in front of all, which the prefix cache has before the first row.

Labels agree where the one that greedy decoding writes is also the most probable one as a whole. Of one token each they
must, but for near ties. Of several tokens they need not: decoding is bound to its first token, and may spell a label by
other tokens than the tokenizer's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.embeddings import make_texts
from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.request import Completion, Request
from schemas.workers.lane import LaneRequest
from workers.lane.requests import LaneReader
from workers.model.loaded_model import LoadedModel
from workers.text.tokenizer import Tokenizer
from workers.translation.choices import classified_by_choices

LETTERS = ("A", "B", "C", "D")  # which no other tokens spell
WORDS = ("river", "table", "seven", "green", "house", "music", "paper", "stone", "water", "light", "garden", "winter")


def make_prompts(tokenizer: Tokenizer, rows: int, tokens: int, shared: int = 0) -> list[list[int]]:
    """Runs of prose of exactly so many tokens, each of which begins with its number, behind `shared` tokens that are
    the same in all."""
    texts = make_texts(rows, 40)
    several = [f"{at}. " + " ".join(texts[(at + step) % rows] for step in range(tokens)) for at in range(rows)]
    several.append(" ".join(texts[step % rows] for step in range(shared + 1)))
    *own, instruction = (ids.tolist() for ids in tokenizer.encode_batch(several, add_special_tokens=False))
    return [instruction[:shared] + ids[:tokens] for ids in own]


def make_labels(tokenizer: Tokenizer, tokens: int) -> list[str]:
    """Four labels of so many tokens each, behind a prompt that ends without a blank."""
    several = ("".join(f" {WORDS[(4 * step + at) % len(WORDS)]}" for step in range(tokens)) for at in range(4))
    labels = list(LETTERS if tokens == 1 else several)
    assert [len(ids) for ids in tokenizer.encode_batch(labels, add_special_tokens=False)] == [tokens] * 4, labels
    return labels


class Bench:
    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._reader = LaneReader(model)
        self._runs = 0

    def run(
        self, way: str, prompts: list[list[int]], labels: list[str], together: int, shared: int
    ) -> tuple[float, list[str]]:
        """Rows per second with so many rows at a time, and the rows' labels. The prompts' first `shared` tokens are
        computed before."""
        self._runs += 1
        if shared:
            first = self._reader.prepare(self._request("decoded", -1, prompts[0][:shared], labels))
            self.model.engine.add(first.request)
            list(self._complete())
        prepared = [self._reader.prepare(self._request(way, at, ids, labels)) for at, ids in enumerate(prompts)]
        done: dict[str, Completion] = {}
        started = time.perf_counter()
        for at in range(0, len(prepared), together):
            for row in prepared[at : at + together]:
                self.model.engine.add(row.request)
            done |= {one.request_id: one for one in self._complete()}
        seconds = time.perf_counter() - started
        found = []
        for row in prepared:
            request: Request = row.request
            completion = done[request.request_id]
            if way == "choices":
                body: Any = row.body
                found.append(classified_by_choices(body, request, completion)[0]["label"])
            else:
                found.append(self.model.tokenizer.decode(completion.choices[0].token_ids))
        return len(prompts) / seconds, found

    def _complete(self) -> Iterator[Completion]:
        while self.model.engine.has_work:
            yield from self.model.engine.step()

    def _request(self, way: str, at: int, ids: list[int], labels: list[str]) -> LaneRequest:
        body: dict[str, Any] = {"model": "m", "input": ids, "choices": labels}
        url = "/v1/classify"
        if way == "decoded":
            url, body = "/v1/completions", {"model": "m", "prompt": ids, "temperature": 0, "max_tokens": 64}
            body["structured_outputs"] = {"choice": labels}
        # The owner is the run, so that nothing is read from the prefix cache of an earlier one.
        return LaneRequest(id=f"{self._runs}-{at}", tenant=f"t{self._runs}", model="m", url=url, body=body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--single-rows", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[30, 200])
    parser.add_argument("--shared-tokens", type=int, default=0)
    parser.add_argument("--label-tokens", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=CacheConfig().block_tokens)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    schedule, cache = ScheduleConfig(max_num_seqs=args.max_num_seqs), CacheConfig(block_size=args.block_size)
    config = EngineConfig(schedule=schedule, cache=cache, max_model_len=1024)
    bench = Bench(LoadedModel.load(args.model, name="m", config=config))
    results = []
    for tokens in args.prompt_tokens:
        for size in args.label_tokens:
            labels = make_labels(bench.model.tokenizer, size)
            for mode, rows, together in (("bulk", args.rows, args.rows), ("single", args.single_rows, 1)):
                prompts = make_prompts(bench.model.tokenizer, rows, tokens, args.shared_tokens)
                rates: dict[str, list[float]] = {"choices": [], "decoded": []}
                answers: dict[str, list[str]] = {}
                for _ in range(args.rounds):
                    for way, measured in rates.items():
                        rate, answers[way] = bench.run(way, prompts, labels, together, args.shared_tokens)
                        measured.append(rate)
                same = sum(a == b for a, b in zip(answers["choices"], answers["decoded"], strict=True)) / rows
                ratio = statistics.median(rates["choices"]) / statistics.median(rates["decoded"])
                shown = ", ".join(
                    f"{way} {statistics.median(found):.1f} rows/s ({min(found):.1f} to {max(found):.1f})"
                    for way, found in rates.items()
                )
                case = f"prompt {args.shared_tokens} + {tokens}, labels {size}, {mode}"
                print(f"{case}: {shown}, x {ratio:.2f}, {same:.0%} same", flush=True)
                result = {
                    "shared_tokens": args.shared_tokens,
                    "prompt_tokens": tokens,
                    "label_tokens": size,
                    "mode": mode,
                    "rates": rates,
                }
                results.append({**result, "ratio": ratio, "same_labels": same})
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
