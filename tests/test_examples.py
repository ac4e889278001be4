"""The demo's input is what its script makes, and every kind of line is in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_given_the_texts_when_the_script_runs_then_it_makes_the_committed_file() -> None:
    script = EXAMPLES / "make_requests.py"

    made = subprocess.run([sys.executable, "-X", "utf8", script], capture_output=True, check=True).stdout

    assert made == (EXAMPLES / "requests.jsonl").read_bytes()


def test_given_the_demo_when_its_lines_are_counted_then_they_show_what_the_readme_says() -> None:
    lines = (EXAMPLES / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    parsed = []
    for line in lines:
        try:
            parsed.append(json.loads(line))
        except ValueError:
            continue
    bodies = [entry["body"] for entry in parsed]
    copies = Counter(json.dumps([entry["url"], entry["body"]], sort_keys=True) for entry in parsed)

    assert len(lines) >= 200
    assert len(lines) - len(parsed) == 1
    assert {body["model"] for body in bodies} == {"demo"}
    assert {entry["url"] for entry in parsed} >= {"/v1/chat/completions", "/v1/completions"}
    assert sum(count > 1 for count in copies.values()) == 4
    assert any(body.get("n") == 2 for body in bodies)
    assert any("seed" in body for body in bodies)
    assert any("stop" in body for body in bodies)
    assert any(body.get("logprobs") for body in bodies)
