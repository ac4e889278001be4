"""Rephrases the documents of a Parquet file four ways, as FinePhrase does, into a dataset with a card.

python examples/rephrase.py DOCUMENTS.parquet DATASET [MODEL]   texts are in a column `text`; jobs in out/rephrase
"""

import sys

import datasets

import tokenmill as tm

MAX_CHARACTERS = 8_000
WAYS = {
    "faq": "Rewrite the document as questions and answers that stand alone.",
    "math": "Write a mathematical word problem about the document, and solve it step by step.",
    "table": "Put the document's facts into a Markdown table; then ask a question about it, and answer that.",
    "tutorial": "Rewrite the document as a tutorial with numbered steps.",
}
CUT = "{% if text | length > N %}{{ text[:N].rpartition('\n')[0] or text[:N] }}{% else %}{{ text }}{% endif %}"

source, to, *model = sys.argv[1:]
table = datasets.Dataset.from_parquet(source)
with tm.load_model(*(model or ["demo"])) as loaded:
    for way, task in WAYS.items():  # each is a job: after a kill, the same command goes on
        table = tm.map(
            table, prompt=f"{task}\n\n" + CUT.replace("N", str(MAX_CHARACTERS)), model=loaded, max_tokens=2_048,
            temperature=1, seed=0, output_column=way, output_dir=f"out/rephrase/{way}",
        )  # fmt: skip
tm.write_dataset(table, to, job=[f"out/rephrase/{way}" for way in WAYS])
