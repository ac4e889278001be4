"""Writes requests.jsonl, the input of the demo, from the texts in texts.toml. Always gives the same file.

A slice of real batch work: shared system prompts, short labels and long prose, greedy and seeded sampling, scoring,
several choices, stop strings, exact duplicates, and a few lines that are wrong in the ways that real files are.

    python examples/make_requests.py > examples/requests.jsonl
"""

from __future__ import annotations

import json
import random
import sys
import tomllib
from pathlib import Path
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "demo"

Line = dict[str, Any]


def line(custom_id: str, url: str, **body: Any) -> Line:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **body}}


def chat(custom_id: str, system: str | None, *turns: str, **body: Any) -> Line:
    """A chat request; turns alternate between user and assistant."""
    messages = [{"role": "system", "content": system.strip()}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return line(custom_id, CHAT, messages=messages, **body)


def flat(examples: list[list[str]]) -> list[str]:
    """Examples as the turns of a conversation."""
    return [turn for pair in examples for turn in pair]


def short_answers(texts: dict[str, Any]) -> list[Line]:
    """Labels, extraction, translation and questions: long shared prompts, a few tokens of answer."""
    lines: list[Line] = []
    labels, urgency, extract, translate = (texts[name] for name in ("classify", "urgency", "extract", "translate"))
    sorted_ones = "".join(f"Message: {message}\nLabel: {label}\n\n" for message, label in labels["examples"])
    for i, message in enumerate(labels["messages"]):
        prompt = f"{labels['instruction']}\n\n{sorted_ones}Message: {message}\nLabel:"
        lines.append(line(f"label-{i:02}", COMPLETIONS, prompt=prompt, temperature=0, max_tokens=4, stop=["\n"]))
        asked = {"logprobs": True, "top_logprobs": 3} if i % 4 == 0 else {}
        turns = [*flat(urgency["examples"]), message]
        lines.append(chat(f"urgency-{i:02}", urgency["system"], *turns, temperature=0, max_tokens=2, **asked))
    for i, note in enumerate(extract["notes"]):
        turns = [*flat(extract["examples"]), note]
        lines.append(chat(f"extract-{i:02}", extract["system"], *turns, temperature=0, max_tokens=64))
    for language, examples in translate["examples"].items():
        system = translate["system"].format(language=language)
        for i, sentence in enumerate(translate["sentences"]):
            sampling = {"temperature": 0.3, "top_p": 0.9, "seed": 100 + i, "max_tokens": 32}
            lines.append(chat(f"translate-{language.lower()}-{i:02}", system, *flat(examples), sentence, **sampling))
    for i, question in enumerate(texts["answer"]["questions"]):
        asked_for = texts["answer"]["question"].format(question=question)
        turn = f"{texts['answer']['manual'].strip()}\n\n{asked_for}"
        lines.append(chat(f"manual-{i:02}", None, turn, temperature=0, max_tokens=40))
    return lines


def long_answers(texts: dict[str, Any]) -> list[Line]:
    """Summaries, prose, code and stories: here decoding is the work."""
    lines: list[Line] = []
    for i, text in enumerate(texts["summarise"]["texts"]):
        lines.append(chat(f"summary-{i:02}", texts["summarise"]["system"], text, temperature=0, max_tokens=56))
    for i, prompt in enumerate(texts["complete"]["prompts"]):
        lines.append(line(f"continue-{i:02}", COMPLETIONS, prompt=prompt, temperature=0, max_tokens=48))
        sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 7 * i, "n": 2 if i % 4 == 3 else 1}
        lines.append(line(f"sample-{i:02}", COMPLETIONS, prompt=prompt, max_tokens=64, **sampling))
    for i, task in enumerate(texts["write"]["tasks"]):
        lines.append(chat(f"write-{i:02}", None, task, temperature=0, repetition_penalty=1.1, max_tokens=96 + 8 * i))
        if i % 4 == 2:
            sampling = {"temperature": 1.0, "top_k": 40, "min_p": 0.05, "presence_penalty": 0.3, "seed": 1000 + i}
            lines.append(chat(f"vary-{i:02}", None, task, **sampling, max_completion_tokens=160))
    for i, turns in enumerate(texts["conversations"]["turns"]):
        lines.append(chat(f"talk-{i:02}", None, *turns, temperature=0.7, seed=i, max_tokens=80))
    return lines


def scores(texts: dict[str, Any]) -> list[Line]:
    """Nothing is generated: the log-probabilities of the prompt's own tokens are the answer."""
    return [
        line(f"score-{i:02}-{j}", COMPLETIONS, prompt=start + end, max_tokens=0, echo=True, logprobs=0, temperature=0)
        for i, (start, *ends) in enumerate(texts["scores"]["endings"])
        for j, end in enumerate(ends)
    ]


def wrong_lines() -> list[tuple[str, str]]:
    """Where each bad line goes (behind which custom_id) and the line itself."""
    hello = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    log = "\n".join(
        f"2025-02-{1 + n // 1440:02} {n // 60 % 24:02}:{n % 60:02} pump 3: {n * 37 % 500} l/min" for n in range(900)
    )
    bad: list[tuple[str, Line | str]] = [
        ("label-05", '{"custom_id": "cut-off", "method": "POST", "url": "/v1/chat/compl'),
        ("label-20", {"method": "POST", "url": CHAT, "body": {"model": MODEL, **hello}}),
        ("urgency-11", chat("urgency-03", None, "This custom_id was used before.", max_tokens=2)),
        ("extract-07", chat("unknown-parameter", None, "Hello!", max_tokens=8, tempreature=0.5)),
        ("manual-02", chat("below-zero", None, "Hello!", max_tokens=8, temperature=-1)),
        ("manual-09", chat("streamed", None, "Hello!", max_tokens=8, stream=True)),
        ("summary-03", line("nothing-said", CHAT, messages=[], max_tokens=8)),
        ("summary-08", line("wrong-door", "/v1/images/generations", prompt="a lighthouse at dawn")),
        ("continue-10", chat("far-too-long", None, "Which pump is failing?\n" + log, max_tokens=64)),
        ("write-04", chat("wants-a-picture", None, "Hello!", max_tokens=8, modalities=["text", "image"])),
    ]
    return [(after, text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)) for after, text in bad]


def main() -> None:
    texts = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
    lines = short_answers(texts) + long_answers(texts) + scores(texts)
    copies = [entry for entry in lines if entry["custom_id"] in {"label-01", "manual-04", "write-02", "sample-05"}]
    lines += [{**entry, "custom_id": f"{entry['custom_id']}-again"} for entry in copies]
    random.Random(20250301).shuffle(lines)

    wrong = wrong_lines()
    for entry in lines:
        print(json.dumps(entry, ensure_ascii=False), file=sys.stdout)
        for after, text in wrong:
            if after == entry["custom_id"]:
                print(text, file=sys.stdout)


if __name__ == "__main__":
    main()
