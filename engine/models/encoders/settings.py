"""Reads a model folder's embedding settings in the layout of sentence-transformers.

modules.json lists the modules in order: the transformer, a pooling, perhaps dense layers, perhaps a normalization. Each
names a folder of settings. No code is executed: modules are identified by name, and an unknown one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from engine.checkpoints.config import usable
from engine.errors import UnsupportedModel
from engine.request import Pooling

MODULES: Final = "modules.json"
_TRANSFORMER_FILES: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
PROMPTS: Final = "config_sentence_transformers.json"
LOGIT_SCORE: Final = "LogitScore"
"""The module that makes a score of two tokens' logits."""

SCORE: Final = "score.weight"
"""The tensor of a decoder's head for labels."""

_CLASSIFIER: Final = "ForSequenceClassification"
_SINGLE: Final = "model.safetensors"
_LARGEST_FILE: Final = 4 << 20
_LARGEST_SIZE: Final = 1 << 20
_FLAGS: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODES: Final[Mapping[str, Pooling]] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
_WITHOUT_PROMPT: Final[frozenset[Pooling]] = frozenset(("mean", "mean_sqrt_len", "weightedmean"))


@dataclass(frozen=True, slots=True)
class DenseSettings:
    """A linear layer behind the pooling: y = activation(W x + b).

    Attributes:
        weights: its safetensors file.  activation: by torch's name of the class ("Tanh", "Identity", …).
    """

    weights: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """The conversion of a text to a vector.

    Attributes:
        pooling: of the last hidden states.
        include_prompt: the tokens of a prompt count in the pooling, too.
        dense: layers behind it, in order.
        normalize: vectors have length 1.
        max_tokens: the longest input; None: the model's own limit.
        lower_case: texts are lowered before they are tokenized.
        prompts: prefixes of texts, by name.  default_prompt: the one that is used where none is named.
        dimensions: lengths that vectors may be truncated to; None: any.
        files: of these settings, relative to the model's folder.
    """

    pooling: Pooling
    include_prompt: bool = True
    dense: tuple[DenseSettings, ...] = ()
    normalize: bool = False
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    dimensions: tuple[int, ...] | None = None
    files: tuple[str, ...] = ()

    def size(self, hidden_size: int) -> int:
        """Size of a vector."""
        return self.dense[-1].out_features if self.dense else hidden_size


def embedding_settings(path: Path) -> EmbeddingSettings | None:
    """The settings of the model at `path`; None: it publishes none.

    Raises:
        UnsupportedModel: they can't be read, or are not supported.
    """
    if not (path / MODULES).is_file() or is_classifier(path):
        return None
    reader = SettingsReader(path)
    modules = reader.modules()
    if [kind for kind, _ in modules] == ["Transformer", LOGIT_SCORE]:  # token_scores.py reads them
        return None
    if [kind for kind, _ in modules[:2]] != ["Transformer", "Pooling"]:
        kinds = ", ".join(kind for kind, _ in modules) or "none"
        raise UnsupportedModel(f"{path / MODULES}: modules are {kinds}, but must begin with Transformer and Pooling")
    if modules[0][1]:
        raise UnsupportedModel(f"{path / MODULES}: the transformer is in {modules[0][1]}, but must be beside this file")
    pooling, include_prompt, width = reader.pooling(modules[1][1])
    dense: list[DenseSettings] = []
    normalize = False
    for kind, folder in modules[2:]:
        if normalize or kind not in ("Dense", "Normalize"):
            raise UnsupportedModel(f"{path / MODULES}: a module {kind} is not supported here")
        if kind == "Dense":
            dense.append(reader.dense(folder, dense[-1].out_features if dense else width))
        normalize = kind == "Normalize"
    max_tokens, lower_case = reader.transformer()
    prompts, default = reader.prompts()
    if not include_prompt and any(prompts.values()) and pooling not in _WITHOUT_PROMPT:
        raise UnsupportedModel(f"{path}: prompts are left out of the pooling, which is not supported for {pooling!r}")
    return EmbeddingSettings(
        pooling=pooling, include_prompt=include_prompt, dense=tuple(dense), normalize=normalize, max_tokens=max_tokens,
        lower_case=lower_case, prompts=prompts, default_prompt=default, dimensions=reader.dimensions(),
        files=tuple(reader.read),
    )  # fmt: skip


def is_classifier(path: Path) -> bool:
    """Whether the first architecture of the folder's config.json has a head for labels of whole texts.

    Raises:
        UnsupportedModel: the file can't be read.
    """
    if not (path / "config.json").is_file():
        return False
    with usable(path / "config.json"):
        architectures = json.loads((path / "config.json").read_bytes()).get("architectures") or []
    return bool(architectures) and str(architectures[0]).endswith(_CLASSIFIER)


def required_settings(path: Path) -> EmbeddingSettings:
    """The settings of the encoder at `path`; raises `UnsupportedModel` where there are none, or as above."""
    settings = embedding_settings(path)
    if settings is None:
        raise UnsupportedModel(
            f"{path} is an encoder without pooling settings ({MODULES}), so nothing says what its vectors are"
        )
    return settings


class SettingsReader:
    """Reads the small files of one folder, and records their names."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.read: list[str] = []

    def modules(self) -> list[tuple[str, str]]:
        """Each module's class, by the last part of its name, and its folder."""
        listed = self._json(MODULES)
        if not isinstance(listed, list):
            raise self._wrong(MODULES, "must be a list of modules")
        found = []
        for module in listed:
            kind, folder = (module.get(key) if isinstance(module, dict) else None for key in ("type", "path"))
            if not isinstance(kind, str) or not isinstance(folder, str):
                raise self._wrong(MODULES, "each module must have a type and a path")
            if folder and (len(PurePosixPath(folder).parts) != 1 or folder in (".", "..") or "\\" in folder):
                raise self._wrong(MODULES, f"points outside its folder: {folder[:80]!r}")
            found.append((kind.rpartition(".")[2], folder.rstrip("/")))
        return found

    def pooling(self, folder: str) -> tuple[Pooling, bool, int | None]:
        """The mode, whether a prompt's tokens count, and the width of the hidden states."""
        name = f"{folder}/config.json"
        config = self.object(name)
        given = config.get("pooling_mode")
        if given is None:
            given = [mode for key, mode in _FLAGS.items() if config.get(key) is True] or ["mean"]
        modes = [given] if isinstance(given, str) else given
        if not isinstance(modes, list) or len(modes) != 1:
            raise self._wrong(name, "several poolings side by side are not supported")
        if modes[0] not in _MODES:
            raise self._wrong(name, f"pooling {str(modes[0])[:40]!r} is not known; known are {', '.join(_MODES)}")
        width = config.get("embedding_dimension", config.get("word_embedding_dimension"))
        if width is not None:
            width = self._size(name, "word_embedding_dimension", width)
        return _MODES[modes[0]], self._flag(name, config, "include_prompt", default=True), width

    def dense(self, folder: str, width: int | None) -> DenseSettings:
        """A dense layer whose input has `width` numbers."""
        name = f"{folder}/config.json"
        config = self.object(name)
        ins, outs = (self._size(name, key, config.get(key)) for key in ("in_features", "out_features"))
        if width is not None and ins != width:
            raise self._wrong(name, f"in_features is {ins}, but what comes in has {width}")
        where = config.get("module_input_name", "sentence_embedding"), config.get("module_output_name")
        if where[0] != "sentence_embedding" or where[1] not in (None, "sentence_embedding"):
            raise self._wrong(name, "a dense layer must be one of the pooled vector")
        if config.get("use_residual"):
            raise self._wrong(name, "use_residual is not supported")
        activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
        if not isinstance(activation, str) or not activation.startswith("torch.nn.modules."):
            raise self._wrong(name, f"activation_function {str(activation)[:80]!r} is not one of torch's")
        weights = self._root / folder / _SINGLE
        if not weights.is_file():
            raise self._wrong(name, f"its weights must be in {folder}/{_SINGLE}; pickles are not opened")
        self.read.append(f"{folder}/{_SINGLE}")
        bias = self._flag(name, config, "bias", default=True)
        return DenseSettings(weights, ins, outs, bias, activation.rpartition(".")[2])

    def transformer(self) -> tuple[int | None, bool]:
        """The longest input in tokens, and whether texts are lowered."""
        for name in _TRANSFORMER_FILES:
            if (self._root / name).is_file():
                config = self.object(name)
                longest = config.get("max_seq_length")
                if longest is not None:
                    longest = self._size(name, "max_seq_length", longest)
                return longest, self._flag(name, config, "do_lower_case", default=False)
        return None, False

    def prompts(self) -> tuple[dict[str, str], str | None]:
        """Prompts by name, and the default's name."""
        if not (self._root / PROMPTS).is_file():
            return {}, None
        config = self.object(PROMPTS)
        prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise self._wrong(PROMPTS, "prompts must be an object of texts")
        if default is not None and default not in prompts:
            raise self._wrong(PROMPTS, f"default_prompt_name {str(default)[:40]!r} is none of the prompts")
        return prompts, default

    def dimensions(self) -> tuple[int, ...] | None:
        """Return config.json's lengths that vectors may be truncated to."""
        given = self.object("config.json").get("matryoshka_dimensions")
        self.read.remove("config.json")
        if given is None:
            return None
        if not isinstance(given, list) or not given:
            raise self._wrong("config.json", "matryoshka_dimensions must be a list of sizes")
        return tuple(sorted(self._size("config.json", "matryoshka_dimensions", size) for size in given))

    def _size(self, name: str, key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
            raise self._wrong(name, f"{key} is {str(value)[:40]}, but must be from 1 to {_LARGEST_SIZE}")
        return value

    def _flag(self, name: str, config: Mapping[str, Any], key: str, *, default: bool) -> bool:
        value = config.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(name, f"{key} is {str(value)[:40]}, but must be true or false")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """The object that the file holds."""
        value = self._json(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "must hold an object")
        return value

    def _json(self, name: str) -> Any:
        path = self._root / name
        try:
            if path.stat().st_size > _LARGEST_FILE:
                raise self._wrong(name, f"is larger than {_LARGEST_FILE} bytes")
            value = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise self._wrong(name, f"can't be read: {' '.join(str(error).split())[:200]}") from error
        self.read.append(name)
        return value

    def _wrong(self, name: str, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._root / name}: {what}")
