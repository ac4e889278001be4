"""A table that an installation answers, as tests stop and kill it: python installation_program.py PLACE FOLDER OUT"""

import sys

import polars as pl

import tokenmill as tm

place, folder, out = sys.argv[1:]
frame = pl.DataFrame({"item": [f"number {n}" for n in range(20)]})
where = {"url": place} if place.startswith("http") else {"root": place}
answered = tm.map(
    frame, prompt="{{ item }}?", model="tiny", temperature=1.0, max_tokens=20, output_dir=folder or None, **where
)
answered.write_parquet(out)
