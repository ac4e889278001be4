"""Writes the items of the two tasks beside it, from the standard library alone. Always gives the same files.

choices.jsonl: 200 beginnings with two to four endings each, of which one is right: counting, calendar and alphabet,
sums, opposites, word order. opposites.jsonl: 40 words, and the opposite of each, which a model is to generate.

    python examples/evaluation/make_items.py
"""

from __future__ import annotations

import calendar
import itertools
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OF_EACH_KIND = 40
OPPOSITES = (
    "hot cold, big small, fast slow, up down, open closed, happy sad, light dark, old young, hard soft, early late, "
    "left right, rich poor, strong weak, wet dry, high low, full empty, first last, good bad, long short, clean dirty"
)
NOUNS = ["dog", "girl", "farmer", "teacher", "king", "doctor", "bird", "boy"]
VERBS = ["saw", "found", "followed", "loved", "heard"]
ADJECTIVES = ["old", "little", "red", "quiet", "hungry"]

Item = dict[str, Any]


def item(draw: random.Random, kind: str, text: str, right: str, *wrong: str) -> Item:
    choices = draw.sample([right, *wrong], k=1 + len(wrong))
    return {"kind": kind, "text": text, "choices": choices, "answer": choices.index(right)}


def counting(draw: random.Random) -> Iterator[Item]:
    for step in (1, 2, 5, 10):
        for start in range(1, 11):
            numbers = [start + step * i for i in range(5)]
            right, text = numbers.pop(), ", ".join(map(str, numbers)) + ","
            yield item(draw, "counting", text, str(right), str(right + step), str(right - 2 * step), str(right + 3))


def order(draw: random.Random) -> Iterator[Item]:
    """What comes after: two to four choices."""
    for names, what in (
        (list(calendar.day_name), "day after"),
        (list(calendar.month_name)[1:], "month after"),
        (list(string.ascii_uppercase), "letter after"),
    ):
        for here, after in itertools.pairwise(names):
            wrong = draw.sample([name for name in names if name not in (here, after)], k=draw.randint(1, 3))
            yield item(draw, "order", f"The {what} {here} is", after, *wrong)


def sums(draw: random.Random) -> Iterator[Item]:
    for a in range(1, 10):
        for b in range(a, 10):
            wrong = draw.sample([n for n in range(2, 20) if n != a + b], k=3)
            yield item(draw, "sums", f"{a} + {b} =", str(a + b), *map(str, wrong))


def opposites(draw: random.Random) -> Iterator[Item]:
    pairs = words_and_opposites()
    for word, right in pairs:
        wrong = draw.sample([other for other, _ in pairs if other not in (word, right)], k=2)
        yield item(draw, "opposites", f"The opposite of {word} is", right, *wrong)


def sentences(draw: random.Random) -> Iterator[Item]:
    """The same words in their order, and twice not."""
    for verb in VERBS:
        for adjective in ADJECTIVES:
            for noun, other in (draw.sample(NOUNS, k=2), draw.sample(NOUNS, k=2)):
                right = f"the {adjective} {noun} {verb} the {other}."
                wrong = (f"the {noun} {adjective} the {verb} {other}.", f"{adjective} the {noun} {verb} {other} the.")
                yield item(draw, "sentences", "Yesterday", right, *wrong)


def chosen(draw: random.Random) -> list[Item]:
    kinds = (counting, order, sums, opposites, sentences)
    return [one for kind in kinds for one in draw.sample(list(kind(draw)), k=OF_EACH_KIND)]


def words_and_opposites() -> list[tuple[str, str]]:
    """Both directions of each pair."""
    pairs = [pair.split() for pair in OPPOSITES.split(", ")]
    return [(word, other) for one, two in pairs for word, other in ((one, two), (two, one))]


def main() -> None:
    generated = [{"word": word, "opposite": opposite} for word, opposite in words_and_opposites()]
    for name, items in (("choices", chosen(random.Random(20))), ("opposites", generated)):
        lines = "".join(json.dumps(one) + "\n" for one in items)
        Path(__file__).with_name(f"{name}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
