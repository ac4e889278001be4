"""Embeds a Parquet table of texts, and prints each text's nearest neighbour.

python examples/embed_texts.py MODEL            an encoder: a folder, s3://BUCKET/PREFIX or a hub name
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

OUT = Path("out/texts")
TEXTS = ("a river in Africa", "the Nile", "a loaf of bread", "a bakery")


def main(model: str = "sentence-transformers/all-MiniLM-L6-v2") -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    # Columns other than custom_id and input are carried through to the results.
    ids = [f"text-{number}" for number in range(len(TEXTS))]
    pq.write_table(
        pa.table({"custom_id": ids, "input": list(TEXTS), "text_length": [len(t) for t in TEXTS]}),
        OUT / "texts.parquet",
    )
    run = ["run", str(OUT / "texts.parquet"), "--model", f"encoder={model}", "--output", str(OUT / "job")]
    subprocess.run([sys.executable, "-m", "tokenmill", *run], check=True)
    rows = pq.read_table(OUT / "job/results").sort_by("row").to_pylist()
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -1)
    for text, nearest in zip(TEXTS, similarity.argmax(axis=1), strict=True):
        print(f"{text} -> {TEXTS[nearest]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
