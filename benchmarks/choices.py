"""Rows classified per second: choices that are scored, and the same labels decoded under a constraint, in turn.

    python -m benchmarks.choices --model demo --rows 300 --rounds 2 --json results.json

Both run `tokenmill run` on the same conversations with the same labels, greedy. Rates count the engine's seconds, from
its first step to its last, so loading and planning are left out. Labels agree where the label that greedy decoding
takes is also the most probable one as a whole; where their first tokens differ in length or rank, it need not be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.embeddings import make_texts

LABELS = ("science", "politics", "sports", "arts")
INSTRUCTION = f"Which of these topics is the text about: {', '.join(LABELS)}? Answer with the topic alone."


def make_lines(texts: list[str], way: str) -> list[dict[str, Any]]:
    """The job's lines: classified by choices, or decoded."""
    lines = []
    for number, text in enumerate(texts):
        messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}]
        body: dict[str, Any] = {"model": "m", "messages": messages}
        if way == "choices":
            url, body = "/v1/classify", {**body, "choices": list(LABELS)}
        else:
            url = "/v1/chat/completions"
            body |= {"temperature": 0, "max_tokens": 16, "structured_outputs": {"choice": list(LABELS)}}
        lines.append({"custom_id": str(number), "method": "POST", "url": url, "body": body})
    return lines


def run(model: str, lines: list[dict[str, Any]], folder: Path) -> tuple[float, list[str]]:
    """Rows per second of the engine, and the labels in the input's order."""
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "tokenmill", "run", str(source), "--model", f"m={model}", "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["counts"]["succeeded"] == len(lines), manifest["counts"]
    table = pq.read_table(folder / "results", columns=["row", "text"]).sort_by("row")
    return len(lines) / manifest["engine_seconds"], table.column("text").to_pylist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--longest", type=int, default=40, help="words")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    texts = make_texts(args.rows, args.longest)
    rates: dict[str, list[float]] = {"choices": [], "decoded": []}
    labels: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for way, found in rates.items():
                rate, labels[way] = run(args.model, make_lines(texts, way), Path(folder) / f"{way}-{number}")
                found.append(rate)
                print(f"round {number + 1}, {way}: {rate:.1f} rows/s")
    same = sum(a == b for a, b in zip(labels["choices"], labels["decoded"], strict=True)) / args.rows
    medians = {way: statistics.median(found) for way, found in rates.items()}
    print(f"choices are {medians['choices'] / medians['decoded']:.2f} times as fast; {same:.0%} of labels are the same")
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": args.rows, "rates": rates, "same_labels": same}, indent=1) + "\n")


if __name__ == "__main__":
    main()
