"""A pipeline of three columns, as tests of kills run it: python pipeline_program.py MODEL FOLDER ROWS OUT"""

import sys
import zlib
from typing import Literal

import polars as pl

import tokenmill as tm

model, folder, rows, out = sys.argv[1:]


def validate(answer: str, row: dict[str, str]) -> bool:
    return zlib.crc32((answer + row["item"]).encode()) % 3 == 0


frame = pl.DataFrame({"item": [f"number {n}" for n in range(int(rows))]})
made = tm.pipeline(
    [
        tm.step("answer", prompt="{{ item }}?", temperature=1.0, seed=7, max_tokens=12, validate=validate, max_tries=3),
        tm.step("grade", prompt="{{ item }}: {{ answer }}", output=Literal["yes", "no"], temperature=0, max_tokens=9),
        tm.filter(lambda row: row["grade"] == "yes"),
        tm.step("short", prompt="{{ answer }}!", temperature=0, max_tokens=6),
    ],
    model=f"tiny={model}",
)
made.run(frame, output_dir=folder).write_parquet(out)
