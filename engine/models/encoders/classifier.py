"""Reads what a sequence classifier's numbers mean: its labels, and the functions that make scores of them.

A model whose architecture ends in `ForSequenceClassification` gives one number for each label (logits). Pairs are
scored as by the CrossEncoder of sentence-transformers, texts classified as by the pipeline of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoints.checkpoint import SafetensorsCheckpoint
from engine.checkpoints.config import folder_config, usable
from engine.errors import CorruptWeights, UnsupportedModel
from engine.models.encoders.settings import PROMPTS, SCORE, SettingsReader, is_classifier
from engine.request import Pooling

Activation = Literal["identity", "sigmoid", "softmax", "tanh"]

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.activation.Tanh": "tanh",
}
_OLDER_ACTIVATION: Final = "sbert_ce_default_activation_function"  # of sentence-transformers before 4.0


@dataclass(frozen=True, slots=True)
class ClassifierSettings:
    """What a classifier's numbers mean.

    Attributes:
        labels: their names, in the order of the numbers.
        pooling: "classify" by an encoder's head; "last" with a decoder, whose head is a `ScoreHead`; None: there is no
            head for labels (`tokens`).
        probability: makes probabilities of all labels' numbers.  score: makes the score of a model with one label.
        max_tokens: the longest input; None: the model's own limit.
        lower_case: texts are lowered before they are tokenized.
        instruction: of pairs whose request has none, for a chat template that reads one.
        tokens: ids of the two tokens that mean no and yes to a model that generates: the number is the second one's
            logit behind the prompt less the first one's. Then there are no labels.
        files: of these settings, relative to the model's folder; config.json is not among them.
    """

    labels: tuple[str, ...]
    probability: Activation
    score: Activation
    max_tokens: int | None = None
    lower_case: bool = False
    files: tuple[str, ...] = ()
    pooling: Pooling | None = "classify"
    instruction: str | None = None
    tokens: tuple[int, int] | None = None


class ScoreHead:
    """A decoder's head for labels: a linear layer without bias behind the last position, in float32.

    Raises:
        CorruptWeights: its weights are missing or misshapen.
    """

    def __init__(self, path: Path, num_labels: int, hidden_size: int) -> None:
        checkpoint = SafetensorsCheckpoint(path)
        if SCORE not in checkpoint.names:
            raise CorruptWeights(f"{path}: tensor {SCORE} is missing")
        if (shape := tuple(checkpoint.shape(SCORE))) != (num_labels, hidden_size):
            raise CorruptWeights(f"{path}: tensor {SCORE} is {list(shape)}, but must be {[num_labels, hidden_size]}")
        self._weight = checkpoint.tensor(SCORE).float()

    @torch.inference_mode()
    def apply(self, pooled: NDArray[np.float32], dimensions: int | None = None) -> NDArray[np.float32]:
        """Logits float32 [texts, labels] of pooled states float32 [texts, hidden]; each is computed separately, so that
        it does not depend on others."""
        rows = [torch.nn.functional.linear(row, self._weight) for row in torch.from_numpy(np.ascontiguousarray(pooled))]
        logits: NDArray[np.float32] = torch.stack(rows).numpy()
        return logits


def classifier_settings(path: Path) -> ClassifierSettings | None:
    """The settings of the model at `path`; None: it is no classifier.

    Raises:
        UnsupportedModel: they can't be read, or are not supported.
    """
    if not is_classifier(path):
        return None
    config = folder_config(path)
    with usable(path / "config.json"):
        labels = tuple(str(config.id2label[number]) for number in range(len(config.id2label)))
    if not labels:
        raise UnsupportedModel(f"{path / 'config.json'}: id2label is empty, but must name each label")
    problem = config.problem_type
    probability: Activation = "softmax"
    if problem == "regression":
        probability = "identity"
    elif problem == "multi_label_classification" or len(labels) == 1:
        probability = "sigmoid"
    reader = SettingsReader(path)
    max_tokens, lower_case = reader.transformer()
    prompts, default = reader.prompts()
    score: Activation = "sigmoid" if len(labels) == 1 else "identity"
    if (named := named_activation(path, reader)) is not None:
        score = named
    instruction = None if default is None else prompts[default] or None
    return ClassifierSettings(
        labels, probability, score, max_tokens, lower_case, tuple(reader.read), instruction=instruction
    )


def named_activation(path: Path, reader: SettingsReader) -> Activation | None:
    """The activation of scores that the files name; None: they name none."""
    with usable(path / "config.json"):
        config = json.loads((path / "config.json").read_bytes())
        section = config.get("sentence_transformers") or {}
        name: Any = section.get("activation_fn") or config.get(_OLDER_ACTIVATION)
    file = "config.json"
    if name is None and (path / PROMPTS).is_file():
        name, file = reader.object(PROMPTS).get("activation_fn"), PROMPTS
    if name is None:
        return None
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModel(f"{path / file}: the activation function {str(name)[:80]!r} is none of {known}")
    return _ACTIVATIONS[name]


def activate(logits: NDArray[np.floating[Any]], activation: Activation) -> NDArray[np.float32]:
    """The function's values, float32 [texts, labels], computed in float64."""
    exact = logits.astype(np.float64)
    if activation == "sigmoid":
        exact = np.where(exact >= 0, 1, np.exp(np.minimum(exact, 0))) / (1 + np.exp(-np.abs(exact)))
    elif activation == "softmax":
        powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
        exact = powers / powers.sum(axis=-1, keepdims=True)
    elif activation == "tanh":
        exact = np.tanh(exact)
    return exact.astype(np.float32)
