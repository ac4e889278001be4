"""Reads how a model that generates scores pairs: by the logits of two tokens behind the prompt, as Qwen3-Reranker.

vLLM's `classifier_from_token` in config.json names the two by their spellings, a `LogitScore` of sentence-transformers
by their ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.checkpoints.config import usable
from engine.errors import UnsupportedModel
from engine.models.encoders.classifier import ClassifierSettings, named_activation
from engine.models.encoders.settings import LOGIT_SCORE, MODULES, SettingsReader, is_classifier

TOKENS: Final = "classifier_from_token"
_LOGITS: Final = "causal_logits"


@dataclass(frozen=True, slots=True)
class TokenScoreSettings:
    """How pairs are scored by tokens.

    Attributes:
        tokens: what means no, and what means yes: each a token's spelling or id.
        settings: of the scores; they lack the ids of `tokens`.
    """

    tokens: tuple[str, str] | tuple[int, int]
    settings: ClassifierSettings


def token_score_settings(path: Path, given: tuple[str, str] | None = None) -> TokenScoreSettings | None:
    """How the model at `path` scores pairs by tokens; None: nothing says that it does. `given`: the tokens' spellings,
    which replace what its files name.

    Raises:
        UnsupportedModel: the settings can't be read, or are not supported.
    """
    if path.is_file():
        if given is None:
            return None
        return TokenScoreSettings(given, ClassifierSettings((), "identity", "sigmoid", pooling=None))
    reader = SettingsReader(path)
    tokens = given or _named_in_config(path) or _named_in_modules(path, reader)
    if tokens is None:
        return None
    if is_classifier(path):
        raise UnsupportedModel(
            f"{path} has a head for labels (…ForSequenceClassification), which gives its scores; leave the tokens for "
            "them out, or name the architecture …ForCausalLM in config.json"
        )
    max_tokens, lower_case = reader.transformer()
    prompts, default = reader.prompts()
    return TokenScoreSettings(
        tokens,
        ClassifierSettings(
            labels=(),
            probability="identity",
            score=named_activation(path, reader) or "sigmoid",
            max_tokens=max_tokens,
            lower_case=lower_case,
            files=tuple(reader.read),
            pooling=None,
            instruction=None if default is None else prompts[default] or None,
        ),
    )


def _named_in_config(path: Path) -> tuple[str, str] | None:
    file = path / "config.json"
    if not file.is_file():
        return None
    with usable(file):
        config = json.loads(file.read_bytes())
        tokens, method = config.get(TOKENS), config.get("method")
    if tokens is None:
        return None
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UnsupportedModel(f'{file}: {TOKENS} must be a list of two tokens, such as ["no", "yes"]')
    if len(tokens) != 2 or method not in (None, "from_2_way_softmax"):
        raise UnsupportedModel(f"{file}: scores are made of two tokens here, but {TOKENS} or method names others")
    return tokens[0], tokens[1]


def _named_in_modules(path: Path, reader: SettingsReader) -> tuple[int, int] | None:
    if not (path / MODULES).is_file():
        return None
    modules = reader.modules()
    if [kind for kind, _ in modules] != ["Transformer", LOGIT_SCORE]:
        reader.read.remove(MODULES)
        return None
    name = f"{modules[1][1]}/config.json"
    config = reader.object(name)
    ids: list[Any] = [config.get("false_token_id"), config.get("true_token_id")]
    if not all(type(number) is int and number >= 0 for number in ids) or modules[0][1]:
        raise UnsupportedModel(
            f"{path / name}: scores are made of two tokens here, so true_token_id and false_token_id must be ids, and "
            "the transformer beside this folder"
        )
    if config.get("module_input_name", _LOGITS) != _LOGITS:
        raise UnsupportedModel(f"{path / name}: module_input_name must be {_LOGITS}")
    return ids[0], ids[1]
