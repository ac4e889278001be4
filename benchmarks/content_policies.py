"""What the content policy `rules` costs: microseconds a row, and a token of a stream.

    python -m benchmarks.content_policies --model MODEL [--json FILE]

The rules are 1,000 made-up keywords and four regexes, none of which matches, on English prose. `judged` calls the
policy alone; `prepared` is all that makes a row of a chat: body, template, tokens, and with rules the judging of what
was rendered and of the message. `streamed` is what a stream does with each token that comes alone. The best of `ROUNDS`
rounds, with and without rules in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.throughput import machine
from engine.config import EngineConfig
from engine.request import PartialChoice
from schemas.workers.lane import LaneRequest
from workers.lane.requests import LaneReader, LaneRules
from workers.lane.responses import LaneAnswer
from workers.model.loaded_model import LoadedModel, model_path
from workers.policies.loader import load_policies
from workers.policies.policy import NO_POLICIES, JudgedText, Policies

ROUNDS = 9
PROSE = Path(__file__).with_name("workloads") / "prose.txt"
REGEXES = [
    r"\b(?:\d[ -]?){13,16}\b",
    r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}\b",
    r"(?i)\bpassword\s*[:=]\s*\S{6,64}",
    r"[\w.+-]{1,64}@[\w-]{1,63}\.[a-z]{2,10}",
]


def rules(folder: Path) -> Policies:
    """A file of rules, loaded."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(6, 14))) for _ in range(1_000)]
    path = folder / "rules.toml"
    path.write_text(
        f"[[rule]]\nname = 'words'\nkeywords = {json.dumps(words)}\n"
        f"[[rule]]\nname = 'numbers'\nregexes = {json.dumps(REGEXES)}\nwindow = 64\n",
        encoding="utf-8",
    )
    return load_policies([f"rules:{path}"])


def microseconds(work: Callable[[], Any], times: int) -> float:
    """Of one call, the mean of so many."""
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return 1e6 * (time.perf_counter() - begun) / times


def judged(policies: Policies, characters: int) -> float:
    guard = policies.guard(JudgedText("row", "default", "m", "/v1/chat/completions"))
    assert guard is not None
    text = PROSE.read_text(encoding="utf-8")[:characters]
    guard.check_prompt((text,))
    return min(microseconds(lambda: guard.refuses(text), 50) for _ in range(ROUNDS))


def prepared(model: LoadedModel, policies: Policies, characters: int) -> dict[str, float]:
    text = PROSE.read_text(encoding="utf-8")[:characters]
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    request = LaneRequest("r", "m", body)
    readers = {
        "without": LaneReader(model, LaneRules(policies=NO_POLICIES)),
        "with": LaneReader(model, LaneRules(policies=policies)),
    }
    times: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(ROUNDS):
        for name, reader in readers.items():
            times[name].append(microseconds(lambda reader=reader: reader.prepare(request), 20))
    return {name: round(min(found), 1) for name, found in times.items()}


def streamed(model: LoadedModel, policies: Policies, tokens: int = 400) -> dict[str, float]:
    text = PROSE.read_text(encoding="utf-8")
    ids = model.tokenizer.encode_batch([text[: 8 * tokens]], add_special_tokens=False)[0][:tokens]
    request = LaneRequest("r", "m", {"model": "m", "messages": [{"role": "user", "content": "x"}]})
    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(ROUNDS):
        for name, chosen in (("without", NO_POLICIES), ("with", policies)):
            row = LaneReader(model, LaneRules(policies=chosen)).prepare(request)
            answer = LaneAnswer(request, row, model.tokenizer)
            begun = time.perf_counter()
            for at in range(tokens):
                answer.grow([PartialChoice(0, ids[at : at + 1])])
            times[name].append(1e6 * (time.perf_counter() - begun) / tokens)
    return {name: round(min(found), 1) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    config = EngineConfig(threads=1)
    model = LoadedModel.without_weights(model_path(args.model), name="m", config=config, num_blocks=2_000, digest=None)
    about = JudgedText("row", "default", "m", "/v1/chat/completions")
    with tempfile.TemporaryDirectory() as folder:
        policies = rules(Path(folder))
        report = {
            "machine": machine(),
            "unit": "microseconds",
            "off, a row": round(microseconds(lambda: NO_POLICIES.guard(about), 100_000), 3),
            "judged, a text": {str(length): round(judged(policies, length), 1) for length in (300, 1_000, 4_000)},
            "prepared, a row": {str(length): prepared(model, policies, length) for length in (300, 1_000, 4_000)},
            "streamed, a token": streamed(model, policies),
        }
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
