"""The language of a text, by its script, and for Latin script by its most frequent words. No model, no dictionary.

It is meant for a sentence or more: a text with fewer than two known words has no language, and neither has one in which
two languages have equally many.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

MAX_CHARS: Final = 4_096
"""Characters that are looked at: the first ones."""

_SCRIPTS: Final = {
    "ja": re.compile("[\u3040-\u30ff]"),  # kana; before Han, which Japanese has too
    "ko": re.compile("[\uac00-\ud7af\u1100-\u11ff]"),
    "zh": re.compile("[\u4e00-\u9fff\u3400-\u4dbf]"),
    "uk": re.compile("[іїєґІЇЄҐ]"),  # letters that Russian lacks
    "ru": re.compile("[\u0400-\u04ff]"),
    "fa": re.compile("[پچژگ]"),  # letters that Arabic lacks
    "ar": re.compile("[\u0600-\u06ff]"),
    "he": re.compile("[\u0590-\u05ff]"),
    "el": re.compile("[\u0370-\u03ff]"),
    "hi": re.compile("[\u0900-\u097f]"),
    "th": re.compile("[\u0e00-\u0e7f]"),
}
_FAMILIES: Final = {"ja": ("ja", "zh"), "uk": ("uk", "ru"), "fa": ("fa", "ar")}
"""A language with a mark of its own -> those whose letters it uses."""

_WORDS: Final = {
    "en": "the and is are was of to in that it you for with what how this have not be do does can please which on",
    "de": "der die das und ist sind nicht ich du sie wir ein eine zu den dem mit von auf für wie was auch bitte kann",
    "fr": "le la les et est sont une des du que qui dans pour pas vous nous je avec sur comment quel quelle ce cette",
    "es": "el la los las y es son una de que en por para no con cómo qué del se su está como cuál usted lo",
    "it": "il lo la gli e è sono una di che in per non con come della del nel questo cosa qual perché si anche",
    "nl": "de het een en is zijn van niet dat in op te voor met ik je wat hoe aan ook maar kan deze naar",
    "pt": "o a os as e é são uma de que em por para não com como do da no na você qual isso se",
    "pl": "i w na nie jest się z do że to jak co czy dla po od są ten ta przez jaki który proszę",
    "sv": "och det att i en är som på för med av jag du inte vad hur den har till kan ett om vi",
    "tr": "ve bir bu ne için ile mi nasıl değil da de çok daha var olan gibi ben sen nedir kadar en ama",  # noqa: RUF001
}
_STOP_WORDS: Final = {language: frozenset(words.split()) for language, words in _WORDS.items()}
_WORD = re.compile(r"[^\W\d_]+")


def language_of(text: str) -> str | None:
    """The code (ISO 639-1) of the text's language; None: it is not recognized."""
    sample = text[:MAX_CHARS]
    letters = sum(map(str.isalpha, sample))
    if not letters:
        return None
    counts = {language: len(script.findall(sample)) for language, script in _SCRIPTS.items()}
    for language, own in counts.items():
        family = _FAMILIES.get(language, (language,))
        if own and 2 * sum(counts[other] for other in set(family)) > letters:
            return language
    found = Counter[str]()
    for word in _WORD.findall(sample.lower()):
        found.update(language for language, words in _STOP_WORDS.items() if word in words)
    ranked = [*found.most_common(2), ("", 0), ("", 0)]
    (first, most), (_, next_most) = ranked[:2]
    return first if most >= 2 and most > next_most else None
