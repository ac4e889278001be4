"""Texts embedded per second: tokenmill and sentence-transformers in turn, in one process, on the same texts.

    python -m benchmarks.embeddings --model FOLDER --texts 4000 --rounds 5 --json results.json

Both begin with texts and end with vectors. sentence-transformers' `encode` sorts all texts by length and computes
batches of 32; ours prepares rows, keeps its usual 2,048 of them waiting, and forms batches by their length. `job` is
the whole of `tokenmill run` but loading the model: its digest, planning, checkpoints, responses as JSON, Parquet.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config import EngineConfig, ScheduleConfig
from engine.request import Request
from schemas.requests.parsing import EMBEDDINGS_URL, EmbeddingBody, parse_body
from workers.model.loaded_model import LoadedModel
from workers.translation.embeddings import EmbeddingReader
from workers.translation.requests import JobRules

PROSE = Path(__file__).parent / "workloads" / "prose.txt"
Vectors = NDArray[np.float32]


def make_texts(count: int, longest: int) -> list[str]:
    """Runs of one to eight sentences of prose, shuffled; at most `longest` words."""
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", " ".join(PROSE.read_text().split())) if len(s) > 20]
    chance = random.Random(0)
    texts = []
    for number in range(count):
        begin = chance.randrange(len(sentences))
        words = " ".join(sentences[begin : begin + chance.choice((1, 1, 1, 2, 2, 3, 5, 8))]).split()
        texts.append(f"{number}. " + " ".join(words[:longest]))
    return texts


def fitting(model: LoadedModel, texts: Sequence[str]) -> list[str]:
    """The texts that the model can take whole: others would cut the rest, ours refuses them."""
    most = EmbeddingReader(model.tokenizer, model.limits, JobRules()).max_tokens
    lengths = [len(ids) for ids in model.tokenizer.encode_batch(texts, add_special_tokens=True)]
    return [text for text, length in zip(texts, lengths, strict=True) if length <= most]


class Ours:
    """The engine, fed as a worker feeds it."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._reader = EmbeddingReader(model.tokenizer, model.limits, JobRules())

    def __call__(self, texts: Sequence[str]) -> Vectors:
        reader, engine = self._reader, self._model.engine
        bodies = [parse_body(EMBEDDINGS_URL, {"model": "m", "input": text}) for text in texts]
        assert all(isinstance(body, EmbeddingBody) for body in bodies)
        inputs = reader.encode([reader.inputs_of(body) for body in bodies if isinstance(body, EmbeddingBody)])
        waiting: list[Request] = [
            reader.request(str(at), body, prompts)
            for at, (body, prompts) in enumerate(zip(bodies, inputs, strict=True))
            if isinstance(body, EmbeddingBody)
        ][::-1]
        vectors: list[Any] = [None] * len(texts)
        while waiting or engine.has_work:
            while waiting and engine.num_waiting < 2 * self._model.max_num_seqs:
                engine.add(waiting.pop())
            for done in engine.step():
                assert done.embeddings is not None, done.error
                vectors[int(done.request_id)] = done.embeddings[0]
        return np.stack(vectors)


class Job:
    """A whole job on a folder of its own, from the loaded model on."""

    def __init__(self, model: LoadedModel, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._round = 0

    def __call__(self, texts: Sequence[str]) -> Vectors:
        import pyarrow.parquet as pq

        from schemas.jobs.job import JobSettings, Tier
        from tokenmill.config.engine_options import EngineOptions
        from tokenmill.config.inputs import pin
        from tokenmill.config.job_options import ChosenModel
        from tokenmill.local.run_job import run_job
        from tokenmill.local.run_plan import RunPlan
        from tokenmill.local.tracker import RunTracker
        from tokenmill.models.sources import ModelSource

        self._round += 1
        given, out = self._folder / "texts.jsonl", self._folder / f"out-{self._round}"
        with given.open("w") as file:
            for at, text in enumerate(texts):
                body = {"model": "m", "input": text}
                line = {"custom_id": str(at), "method": "POST", "url": EMBEDDINGS_URL, "body": body}
                file.write(json.dumps(line) + "\n")
        source = ModelSource("m", Path(self._model.source), None, 0)
        plan = RunPlan(
            pin(str(given), None),
            ChosenModel("m", source),
            out,
            Tier.STANDARD,
            JobSettings(),
            EngineOptions(dtype="float32"),
        )
        run_job(plan, RunTracker(), threading.Event(), lambda *_: self._model)
        rows = pq.read_table(out / "results", columns=["row", "embedding"]).sort_by("row")
        return np.stack(rows.column("embedding").to_numpy(zero_copy_only=False))


def measure(ways: dict[str, Callable[[Sequence[str]], Vectors]], texts: Sequence[str], rounds: int) -> dict[str, Any]:
    """Rows per second of each way, by round; what they cost in processor time, of all threads together; and how far its
    vectors are from the first way's."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    furthest: dict[str, float] = dict.fromkeys(ways, 0.0)
    for number in range(rounds + 1):  # the first warms up
        first: Vectors | None = None
        names = list(ways) if number % 2 else list(ways)[::-1]
        found = {}
        for name in names:
            begun, spent = time.perf_counter(), time.process_time()
            found[name] = ways[name](texts)
            if number:
                rates[name].append(len(texts) / (time.perf_counter() - begun))
                costs[name].append(1000 * (time.process_time() - spent) / len(texts))
        first = found[next(iter(ways))]
        for name, vectors in found.items():
            furthest[name] = max(furthest[name], float(np.abs(vectors - first).max()))
    reference = rates[next(iter(ways))]
    return {
        name: {
            "rows_per_second": rate,
            "median": statistics.median(rate),
            "best": max(rate),
            "cpu_milliseconds_per_row": costs[name],
            "times_the_first": statistics.median(mine / theirs for mine, theirs in zip(rate, reference, strict=True)),
            "furthest": furthest[name],
        }
        for name, rate in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--longest", type=int, default=150, help="words")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--budget", type=int, default=ScheduleConfig().tokens, help="tokens of a batch")
    parser.add_argument("--shared", action="store_true", help="note that others used the machine meanwhile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    config = EngineConfig(
        dtype="float32", threads=args.threads, schedule=ScheduleConfig(max_num_batched_tokens=args.budget)
    )
    model = LoadedModel.load(args.model, name="m", config=config)
    theirs = SentenceTransformer(str(args.model), device="cpu")
    texts = fitting(model, make_texts(args.texts, args.longest))
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[Sequence[str]], Vectors]] = {
            "sentence-transformers": lambda given: theirs.encode(list(given), batch_size=32, show_progress_bar=False),
            "tokenmill engine": Ours(model),
            "tokenmill job": Job(model, Path(folder)),
        }
        results = measure(ways, texts, args.rounds)
    tokens = sum(len(ids) for ids in model.tokenizer.encode_batch(texts, add_special_tokens=True))
    report = {
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
                    "shared": args.shared},
        "versions": {name: version(name) for name in ("torch", "transformers", "sentence-transformers")},
        "workload": {"texts": len(texts), "tokens": tokens, "model": args.model.name, "budget": args.budget},
        "results": results,
    }  # fmt: skip
    for name, result in results.items():
        print(
            f"{name:24} {result['median']:8.1f} rows/s (best {result['best']:.1f}), {result['times_the_first']:.2f} "
            f"times the first; {min(result['cpu_milliseconds_per_row']):.1f} ms of processor a row at best; "
            f"furthest {result['furthest']:.1e}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
