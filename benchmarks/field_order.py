"""Tables whose unique column stands first: rows per second as written, and with `{% fields %}`, in turn.

    python -m benchmarks.field_order [--model demo] [--rounds 3] [--json benchmarks/results/field-order.json]

"reviews": of descriptions, in random order. "tickets" and "offers": five and four columns of which some depend on
others (a product's category, a category's team). The template has the unique column first and a question last; with
`{% fields %}` each row's fields are ordered so that rows share long prefixes. "best order": the template with the
columns in the one order for all rows that shares most characters, of all their permutations: its hits are what the
chosen orders must reach. All answer by `Literal["yes", "no"]`, so nearly all work is in the prompts. The seconds are
the engine's, from the first step to the last: loading the model is not in them. An answer may differ, since the
prompt does.

`planning`: seconds of processor time to order the fields of as many rows of each table as `--plan-rows`, and their
share of what those rows take at the measured rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

import tokenmill as tm
from tokenmill.frames.field_order import order_fields, shared_characters

QUESTION = "\nDoes the first text speak of what the others say? Answer yes or no."

WORDS = (
    "light", "strong", "cotton", "steel", "small", "quiet", "warm", "handle", "bottle", "lamp", "chair", "kettle",
    "blue", "battery", "screen", "folds", "washes", "lasts", "shines", "weighs", "fits", "with", "for", "two", "years",
)  # fmt: skip


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def reviews(rows: int) -> pa.Table:
    """Reviews of 10 to 30 words, each of one of rows / 10 descriptions of 100 words."""
    chance = random.Random(0)
    texts = [f"Product {n}: {_text(chance, 100)}" for n in range(max(1, rows // 10))]
    return pa.table(
        {
            "review": [f"{n} {_text(chance, chance.randint(10, 30))}" for n in range(rows)],
            "description": [chance.choice(texts) for _ in range(rows)],
        }
    )


def tickets(rows: int) -> pa.Table:
    """Messages about products: a product has a category, a category a team with its rules; a plan stands alone."""
    chance = random.Random(1)
    teams = [f"Team {n}: {_text(chance, 40)}" for n in range(4)]
    categories = [(f"Category {n}: {_text(chance, 20)}", chance.choice(teams)) for n in range(8)]
    products = [(f"Product {n}: {_text(chance, 60)}", *chance.choice(categories)) for n in range(max(1, rows // 8))]
    chosen = [chance.choice(products) for _ in range(rows)]
    return pa.table(
        {
            "message": [f"{n} {_text(chance, chance.randint(10, 30))}" for n in range(rows)],
            "plan": [chance.choice(("free", "team", "company")) for _ in range(rows)],
            "product": [product for product, _, _ in chosen],
            "category": [category for _, category, _ in chosen],
            "team": [team for _, _, team in chosen],
        }
    )


def offers(rows: int) -> pa.Table:
    """Offers of sellers: a seller has a city, a city has terms."""
    chance = random.Random(2)
    cities = [(f"City {n}", f"Terms {n}: {_text(chance, 80)}") for n in range(6)]
    sellers = [(f"Seller {n}: {_text(chance, 15)}", *chance.choice(cities)) for n in range(max(1, rows // 6))]
    chosen = [chance.choice(sellers) for _ in range(rows)]
    return pa.table(
        {
            "offer": [f"{n} {_text(chance, chance.randint(8, 20))}" for n in range(rows)],
            "city": [city for _, city, _ in chosen],
            "seller": [seller for seller, _, _ in chosen],
            "terms": [terms for _, _, terms in chosen],
        }
    )


TABLES: dict[str, Callable[[int], pa.Table]] = {"reviews": reviews, "tickets": tickets, "offers": offers}


def written(columns: Sequence[str]) -> str:
    """The template with these columns in this order."""
    return "".join(f"{name}: {{{{ {name} }}}}\n" for name in columns) + QUESTION


def lines_of(table: pa.Table) -> list[list[str]]:
    """Each row's fields as prompts have them."""
    return [[f"{name}: {value}\n" for name, value in row.items()] for row in table.to_pylist()]


def best_order(table: pa.Table) -> list[str]:
    """The columns in the order that shares most characters, the same for all rows; by trying all."""
    lines = lines_of(table)
    orders = itertools.permutations(range(len(table.column_names)))
    best = max(orders, key=lambda order: shared_characters(lines, [order] * len(lines)))
    return [table.column_names[i] for i in best]


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


def measure_planning(table: pa.Table, rate: float) -> dict[str, float]:
    """Order the fields of this table; `rate` rows/s is what its job was measured to have."""
    lines = lines_of(table)
    begun = time.process_time()
    order_fields(lines)
    seconds = time.process_time() - begun
    return {"rows": len(lines), "seconds": seconds, "share_of_the_job": seconds * rate / len(lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--plan-rows", type=int, default=100_000)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "model": args.model,
        "rows": args.rows,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "tables": {},
    }
    for name, make in TABLES.items():
        table = make(args.rows)
        columns, best = table.column_names, best_order(table)
        prompts = {
            "written": written(columns),
            "fields": "{% fields " + ", ".join(columns) + " %}\n" + QUESTION,
            "best order": written(best),
        }
        rounds: list[dict[str, Any]] = []
        for _ in range(args.rounds):
            found: dict[str, Any] = {way: measure(table, prompt, args.model) for way, prompt in prompts.items()}
            found["ratio"] = found["fields"]["rows_per_second"] / found["written"]["rows_per_second"]
            found["hits_of_best_order"] = found["fields"]["cached"] / found["best order"]["cached"]
            rounds.append(found | {"load": os.getloadavg()[0]})
        rate = statistics.median(found["fields"]["rows_per_second"] for found in rounds)
        summary = {
            "columns": columns,
            "best order": best,
            **{key: _spread([found[key] for found in rounds]) for key in ("ratio", "hits_of_best_order")},
            "planning": measure_planning(make(args.plan_rows), rate),
        }
        report["tables"][name] = summary | {"rounds": rounds}
        print(name, json.dumps(summary), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
