"""`tokenmill.score`: a query and a document to a reranker, and how well they fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.prompts import RowText
from tokenmill.frames.tasks.task import ORIGIN, USAGE, FormerAnswer, Task

if TYPE_CHECKING:
    from schemas.requests.parsing import Body
    from workers.text.chat_options import ChatOptions

SUFFIXES = ("", "_error", *USAGE, *ORIGIN)


def score_task(query: RowText, document: RowText, body: Mapping[str, Any], chat: ChatOptions) -> Task:
    """The task of scoring a pair. `body`: the request's other fields."""
    from schemas.requests.parsing import SCORE_URL

    def answers(path: Path, _body: Body) -> ScoreAnswers:
        _check_model(path, chat)
        return ScoreAnswers()

    return Task(
        SCORE_URL, {"query": query, "document": document}, _sides_of, body, SUFFIXES, ("response",), answers,
        lambda _: ScoreAnswers(), chat=chat,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScoreAnswers:
    """Scores; see `Answers`."""

    former: tuple[str, ...] = ("",)

    def columns(self, results: pa.Table, errors: list[str | None]) -> dict[str, pa.Array]:
        """The scores, float64."""
        scores = [
            None if error is not None else float(orjson.loads(response)["data"][0]["score"])
            for response, error in zip(results["response"].to_pylist(), errors, strict=True)
        ]
        return {"": pa.array(scores, pa.float64())}

    def former_answer(self, cells: Mapping[str, Any]) -> FormerAnswer | None:
        """The score."""
        score = cells[""]
        if not isinstance(score, float):
            return None
        return FormerAnswer({"object": "list", "data": [{"index": 0, "object": "score", "score": score}]})


def _sides_of(texts: Mapping[str, str]) -> dict[str, Any]:
    return {"queries": texts["query"], "documents": texts["document"]}


def _check_model(path: Path, chat: ChatOptions) -> None:
    from engine.models.encoders.classifier import classifier_settings
    from engine.models.encoders.token_scores import token_score_settings
    from workers.errors import TokenizerError
    from workers.model.score_tokens import scores_by_tokens
    from workers.text.tokenizer import Tokenizer

    settings = classifier_settings(path)
    if settings is None and token_score_settings(path, chat.score_tokens) is None:
        raise InvalidCall(
            f"model: {path} has no head for scores (…ForSequenceClassification), and no tokens for them; choose a "
            "reranker, such as BAAI/bge-reranker-base, or name the score_tokens of one that generates, such as "
            "Qwen/Qwen3-Reranker-0.6B"
        )
    if settings is None:
        try:
            scores_by_tokens(path, Tokenizer.load(path, chat), chat)
        except TokenizerError as error:
            raise InvalidCall(f"model: {error}") from error
    if settings is not None and len(settings.labels) > 1:
        raise InvalidCall(f"model: {path} tells {len(settings.labels)} labels apart and gives no score; use classify")
