"""A table in and out, as tests of kills run it: python table_program.py MODEL FOLDER ROWS OUT.parquet [FORMER]"""

import sys
from typing import Literal

import polars as pl

import tokenmill as tm

model, folder, rows, out, *former = sys.argv[1:]
frame = pl.DataFrame({"item": [f"number {n}" for n in range(int(rows))]})
answered = tm.map(
    frame, prompt="{{ item }}?", model=f"tiny={model}", output=Literal["yes", "no"], temperature=1.0, seed=7,
    max_tokens=20, output_dir=folder, reuse=former[0] if former else None,
)  # fmt: skip
answered.write_parquet(out)
