"""Embeds a table of texts, and prints each text's nearest neighbour.

python examples/embed_texts.py MODEL            an encoder: a folder, s3://BUCKET/PREFIX or a hub name
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa

import tokenmill as tm

TEXTS = ("a river in Africa", "the Nile", "a loaf of bread", "a bakery")


def main(model: str = "sentence-transformers/all-MiniLM-L6-v2") -> None:
    # The same call again reads the results that are there.
    table = tm.embed(pa.table({"text": TEXTS}), column="text", model=model, output_dir="out/texts/job")
    vectors = np.array(table["embedding"].to_pylist(), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -1)
    for text, nearest in zip(TEXTS, similarity.argmax(axis=1), strict=True):
        print(f"{text} -> {TEXTS[nearest]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
