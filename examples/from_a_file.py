"""Answers a file of prompts on this machine: JSONL in, Parquet out.

python examples/from_a_file.py [MODEL]          the demo model by default; results in out/capitals
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

OUT = Path("out/capitals")


def main(model: str = "demo") -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "custom_id": country,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "capitals",
                "messages": [{"role": "user", "content": f"What is the capital of {country}? One word."}],
                "max_tokens": 8,
                "temperature": 0,
            },
        }
        for country in ("France", "Japan", "Kenya", "Peru")
    ]
    source = OUT / "requests.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    # The same command again resumes the job: committed rows are never computed twice.
    run = ["run", str(source), "--model", f"capitals={model}", "--output", str(OUT / "job")]
    subprocess.run([sys.executable, "-m", "tokenmill", *run], check=True)
    for row in pq.read_table(OUT / "job/results").sort_by("row").to_pylist():
        print(f"{row['custom_id']}: {(row['text'] or row['error_message'])!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
