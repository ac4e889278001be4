"""A table whose unique column stands first: rows per second as written, and with `{% fields %}`, in turn.

    python -m benchmarks.field_order [--model demo] [--rounds 3] [--json benchmarks/results/field-order.json]

200 reviews of 20 descriptions, in random order. The template has the review first, then the description, then a
question; with `{% fields review, description %}` each row's fields are ordered so that the rows of one description
share it as their prefix. Both answer by `Literal["yes", "no"]`, so nearly all work is in the prompts. The seconds are
the engine's, from the first step to the last: loading the model is not in them. An answer may differ between the two,
since the prompt does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

import tokenmill as tm

QUESTION = "\nDoes the review speak of the product that is described? Answer yes or no."
WRITTEN = "review: {{ review }}\ndescription: {{ description }}\n" + QUESTION
FIELDS = "{% fields review, description %}\n" + QUESTION

WORDS = (
    "light", "strong", "cotton", "steel", "small", "quiet", "warm", "handle", "bottle", "lamp", "chair", "kettle",
    "blue", "battery", "screen", "folds", "washes", "lasts", "shines", "weighs", "fits", "with", "for", "two", "years",
)  # fmt: skip


def reviews(rows: int, descriptions: int) -> pa.Table:
    """A table [rows] of reviews, 10 to 30 words each, of so many descriptions of 100 words."""
    chance = random.Random(0)
    texts = [f"Product {n}: " + " ".join(chance.choices(WORDS, k=100)) for n in range(descriptions)]
    written = [f"{n} " + " ".join(chance.choices(WORDS, k=chance.randint(10, 30))) for n in range(rows)]
    shuffled = texts * (rows // descriptions)
    chance.shuffle(shuffled)
    return pa.table({"review": written[: len(shuffled)], "description": shuffled})


def measure(table: pa.Table, prompt: str, model: str) -> dict[str, Any]:
    """One run, of a new job."""
    with tempfile.TemporaryDirectory() as folder:
        answered = tm.map(
            table, prompt=prompt, model=model, output=Literal["yes", "no"], temperature=0, output_dir=folder
        )
        manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    assert answered["answer_error"].null_count == len(answered)
    seconds = manifest["engine_seconds"]
    usage = {name: manifest["usage"][name] for name in ("prompt", "cached", "completion")}
    return {"rows_per_second": len(answered) / seconds, "engine_seconds": seconds, **usage}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--descriptions", type=int, default=20)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    table = reviews(args.rows, args.descriptions)
    rounds = []
    for number in range(args.rounds):
        written, fields = measure(table, WRITTEN, args.model), measure(table, FIELDS, args.model)
        ratio = fields["rows_per_second"] / written["rows_per_second"]
        rounds.append({"written": written, "fields": fields, "ratio": ratio, "load": os.getloadavg()[0]})
        print(
            f"round {number}: {written['rows_per_second']:.2f} rows/s as written, {fields['rows_per_second']:.2f} with "
            f"fields, {ratio:.2f} times as fast",
            flush=True,
        )
    ratios = [one["ratio"] for one in rounds]
    report = {
        "model": args.model,
        "rows": table.num_rows,
        "descriptions": args.descriptions,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rounds": rounds,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report["ratio"]))


if __name__ == "__main__":
    main()
