"""A table whose answers are judged, as tests of kills run it: python judged_table_program.py MODEL FOLDER ROWS OUT"""

import sys
import zlib

import polars as pl

import tokenmill as tm

model, folder, rows, out = sys.argv[1:]


def validate(answer: str, row: dict[str, str]) -> bool:
    return zlib.crc32((answer + row["item"]).encode()) % 3 == 0


frame = pl.DataFrame({"item": [f"number {n}" for n in range(int(rows))]})
answered = tm.map(
    frame, prompt="{{ item }}?", model=f"tiny={model}", temperature=1.0, seed=7, max_tokens=12, output_dir=folder,
    validate=validate, max_tries=3,
)  # fmt: skip
answered.write_parquet(out)
