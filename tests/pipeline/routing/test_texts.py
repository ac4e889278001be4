"""The language of a text and the complexity of a request, without a model."""

# ruff: noqa: RUF001 - letters of other scripts are what is tested

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from pipeline.routing.complexity import complexity, has_code, has_maths
from pipeline.routing.language import language_of
from pipeline.routing.requests import RoutedRequest
from schemas.jobs.job import Tier
from schemas.requests.parsing import CHAT_URL, parse_body

SENTENCES = {
    "en": "Please explain how the water cycle works and what it has to do with the sea.",
    "de": "Bitte erkläre mir, wie der Wasserkreislauf funktioniert und was das mit dem Meer zu tun hat.",
    "fr": "Expliquez comment le cycle de l'eau fonctionne et ce qui se passe dans la mer.",
    "es": "Por favor, explica cómo funciona el ciclo del agua y qué tiene que ver con el mar.",
    "it": "Spiega come funziona il ciclo dell'acqua e che cosa c'entra con il mare, per favore.",
    "nl": "Leg uit hoe de kringloop van het water werkt en wat dat met de zee te maken heeft.",
    "pt": "Explique como funciona o ciclo da água e o que isso tem a ver com o mar, não só com os rios.",
    "pl": "Proszę wyjaśnij, jak działa obieg wody i co to ma wspólnego z morzem oraz co jest w rzekach.",
    "sv": "Förklara hur vattnets kretslopp fungerar och vad det har med havet att göra.",
    "tr": "Su döngüsü nasıl çalışır ve bu deniz için ne kadar önemli bir şey?",
    "ru": "Объясните, пожалуйста, как работает круговорот воды.",
    "uk": "Поясніть, будь ласка, як працює кругообіг води і що з цим пов'язано.",
    "el": "Εξήγησε πώς λειτουργεί ο κύκλος του νερού.",
    "he": "הסבר כיצד פועל מחזור המים.",
    "ar": "اشرح كيف تعمل دورة الماء في الطبيعة.",
    "fa": "لطفا توضیح دهید که چرخه آب چگونه کار می‌کند.",
    "hi": "कृपया बताइए कि जल चक्र कैसे काम करता है।",
    "th": "อธิบายว่าวัฏจักรของน้ำทำงานอย่างไร",
    "ja": "水の循環がどのように働くか説明してください。",
    "zh": "请解释水循环是如何运作的。",
    "ko": "물의 순환이 어떻게 작동하는지 설명해 주세요.",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_a_sentence_has_its_language(language: str) -> None:
    assert language_of(SENTENCES[language]) == language


@pytest.mark.parametrize("text", ["", "42 + 7", "Hello", "Zürich", "xyzzy plugh", "de"])
def test_a_text_with_too_few_known_words_has_none(text: str) -> None:
    assert language_of(text) is None


def test_a_quoted_foreign_word_does_not_decide() -> None:
    assert language_of("What does the word 水 mean, and is it the same in Japanese?") == "en"


CODE = "Why does this fail?\ndef f(x):\n    return x + 1;\nprint(f('a'));"


@pytest.mark.parametrize("text", [CODE, "```\nx\n```", "SELECT name FROM users WHERE id = 7;\nDROP TABLE users;"])
def test_code_has_marks(text: str) -> None:
    assert has_code(text)


@pytest.mark.parametrize("text", ["Solve x^2 + y^2 = 9.", r"What is \frac{1}{2}?", "Show that $a_n = 2$", "∑ and √"])
def test_maths_has_marks(text: str) -> None:
    assert has_maths(text)


@pytest.mark.parametrize("text", ["Import taxes are high; let me return to that.", "It costs $5 or $6.", "a = b?"])
def test_prose_has_no_marks(text: str) -> None:
    assert not has_code(text)
    assert not has_maths(text)


def request(text: str = "hello", tokens: int = 10, turns: int = 1, **body: Any) -> RoutedRequest:
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}] * (turns - 1)
    parsed = parse_body(CHAT_URL, {"model": "auto", "messages": messages, **body})
    return RoutedRequest(parsed, tokens, "t", Tier.BULK, datetime(2026, 1, 1, tzinfo=UTC))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_the_score_is_the_sum_of_the_documented_points() -> None:
    assert complexity(request()) == 0
    assert complexity(request(tokens=1_250)) == 12
    assert complexity(request(tokens=10**6)) == 30
    assert complexity(request(CODE)) == 20
    assert complexity(request(r"\sqrt{2} and \frac{1}{2}")) == 20
    assert complexity(request(turns=3)) == 4
    assert complexity(request(turns=30)) == 10
    assert complexity(request(tools=[TOOL])) == 10
    assert complexity(request(response_format={"type": "json_object"})) == 10
    everything = request(CODE + r" \frac{1}{2}", 10**6, 30, tools=[TOOL], response_format={"type": "json_object"})
    assert complexity(everything) == 100
