"""A pipeline over rows of two adapters and of none, as a test of kills runs it, beside folders a0 and a1:
python adapter_pipeline_program.py MODEL FOLDER OUT"""

import sys

import polars as pl

import tokenmill as tm

model, folder, out = sys.argv[1:]
frame = pl.DataFrame({"n": range(96), "customer": [None, "a0", "a1"] * 32})
made = tm.pipeline(
    [
        tm.step(
            "reply", prompt="number {{ n }}", adapters={"a0": "a0", "a1": "a1"}, adapter_column="customer",
            temperature=1.0, seed=7, max_tokens=12,
        ),
        tm.step("short", prompt="{{ reply }}!", temperature=0, max_tokens=6),
        tm.step("base", prompt="{{ reply }}?", temperature=0, max_tokens=6, adapters={}),
    ],
    model=f"tiny={model}",
    dtype="float32",
    adapters={"x": "a1"},
    max_loras=1,
)  # fmt: skip
made.run(frame, output_dir=folder).write_parquet(out)
