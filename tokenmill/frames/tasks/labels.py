"""`tokenmill.classify`: a text to a classifier, or to a model that generates with labels as choices; and its label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.prompts import RowText
from tokenmill.frames.tasks.chat import messages_of
from tokenmill.frames.tasks.task import ORIGIN, USAGE, FormerAnswer, Task

if TYPE_CHECKING:
    from schemas.requests.parsing import Body

PROBABILITY, PROBABILITIES = "_probability", "_probabilities"
SUFFIXES = ("", PROBABILITY, PROBABILITIES, "_error", *USAGE, *ORIGIN)


def label_task(
    text: RowText, text_pair: RowText | None, system: RowText | None, labels: Sequence[str] | None,
    body: Mapping[str, Any], adapter_column: str | None = None,
) -> Task:  # fmt: skip
    """The task of labelling a text. `labels`: of a model that generates; None: the classifier has its own. `body`: the
    request's other fields. Raises `InvalidCall`."""
    from schemas.requests.parsing import CLASSIFY_URL

    results = ("response",)
    if labels is None:
        if adapter_column is not None:
            raise InvalidCall("adapter_column: adapters are of models that generate; leave it out, or give labels")
        if system is not None:
            raise InvalidCall("system: a classifier reads no system message; leave it out, or give labels")
        texts = {"text": text} if text_pair is None else {"text": text, "text_pair": text_pair}
        return Task(CLASSIFY_URL, texts, _input_of, body, SUFFIXES, results, _of_classifier, _of_results)
    if text_pair is not None:
        raise InvalidCall("text_pair: a model that generates reads one text; write both into text, or leave out labels")
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels) or not labels:
        raise InvalidCall("labels: must be a list of texts with at least one")
    texts = {"text": text} if system is None else {"system": system, "text": text}
    body = {**body, "choices": list(labels)}
    return Task(
        CLASSIFY_URL, texts, messages_of, body, SUFFIXES, results, _of_choices, lambda _: LabelAnswers(tuple(labels)),
        ordered="text", adapter_column=adapter_column,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LabelAnswers:
    """Labels and their probabilities; see `Answers`."""

    labels: tuple[str, ...]
    former: tuple[str, ...] = ("", PROBABILITIES)

    def columns(self, results: pa.Table, errors: list[str | None]) -> dict[str, pa.Array]:
        """The most probable label as an enum, its probability, and those of all labels as a struct."""
        if not self.labels:  # unknown, as no row has one
            empty = pa.nulls(len(errors), pa.dictionary(pa.int32(), pa.string()))
            return {"": empty, PROBABILITY: pa.nulls(len(errors), pa.float64()), PROBABILITIES: pa.nulls(len(errors))}
        failed = np.array([error is not None for error in errors], dtype=np.bool_)
        probabilities = np.zeros((len(errors), len(self.labels)))
        for row, response in enumerate(results["response"].to_pylist()):
            if not failed[row]:
                probabilities[row] = orjson.loads(response)["data"][0]["probs"]
        best = probabilities.argmax(axis=1).astype(np.int32)
        each = [pa.array(values) for values in probabilities.T]
        indices = pa.array(best, mask=failed)
        return {
            "": pa.DictionaryArray.from_arrays(indices, pa.array(self.labels, pa.string())),
            PROBABILITY: pa.array(probabilities[np.arange(len(errors)), best], mask=failed),
            PROBABILITIES: pa.StructArray.from_arrays(each, list(self.labels), mask=pa.array(failed)),
        }

    def former_answer(self, cells: Mapping[str, Any]) -> FormerAnswer | None:
        """The label with the probabilities of all."""
        label, given = cells[""], cells[PROBABILITIES]
        if label not in self.labels or not isinstance(given, dict):
            return None
        values = [given.get(name) for name in self.labels]
        if not all(isinstance(value, float) for value in values):
            return None
        data = {"index": 0, "label": label, "probs": values, "num_classes": len(self.labels)}
        return FormerAnswer({"object": "list", "data": [data]}, text=label)


def _input_of(texts: Mapping[str, str]) -> dict[str, Any]:
    return {"input": texts["text"] if len(texts) == 1 else [[texts["text"], texts["text_pair"]]]}


def _of_classifier(path: Path, _body: Body) -> LabelAnswers:
    from engine.models.encoders.classifier import classifier_settings

    settings = classifier_settings(path)
    if settings is None:
        raise InvalidCall(
            f"model: {path} has no head for labels (…ForSequenceClassification); choose a classifier, or give labels "
            "to a model that generates"
        )
    if len(set(settings.labels)) < len(settings.labels):
        raise InvalidCall(f"model: {path} has two labels with one name; name each in id2label of its config.json")
    return LabelAnswers(settings.labels)


def _of_results(results: pa.Table) -> LabelAnswers:
    """The labels of a classifier, from its answers: each names the most probable one only, so another is called by its
    number, as transformers does it."""
    names: dict[int, str] = {}
    count = 0
    for response in results["response"].drop_null().to_pylist():
        (answer,) = orjson.loads(response)["data"]
        names[int(np.argmax(answer["probs"]))], count = answer["label"], answer["num_classes"]
    labels = tuple(names.get(number, f"LABEL_{number}") for number in range(count))
    if len(set(labels)) < len(labels):
        raise InvalidCall("model: has two labels with one name; name each in id2label of its config.json")
    return LabelAnswers(labels)


def _of_choices(path: Path, body: Body) -> LabelAnswers:
    from engine.models.load import describe_shape
    from schemas.requests.parsing import ClassifyBody

    assert isinstance(body, ClassifyBody)
    if not describe_shape(path)[0].generates:
        raise InvalidCall(f"labels: {path} generates nothing; leave them out if it is a classifier with its own")
    return LabelAnswers(body.choices)
