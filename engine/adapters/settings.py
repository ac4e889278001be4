"""PEFT's adapter_config.json: what of it changes an answer, and what is refused.

The file is hostile input. Its regular expressions come from others and Python's have no time limit, so only those are
evaluated that can't take long; which modules have an adapter is read from the tensors themselves.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CorruptWeights, ModelNotFound, UnsupportedModel

CONFIG_FILE = "adapter_config.json"

MAX_RANK = 256

_MAX_BYTES = 1 << 20
_MAX_PATTERNS = 10_000
_MAX_ALPHA = 1e6
_PLAIN = re.compile(r"[\w.]+")
_MAX_PATTERN_LENGTH = 200
_SLOW = re.compile(r"\)[*+{?]|[*+}].*[*+}].*[*+}]|\\\d")
"""Of regular expressions that may take long: repeated groups, three repetitions or more, references to groups."""

_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "lora_bias (a bias of lora_B)",
    "modules_to_save": "modules_to_save (whole modules beside the adapter)",
    "trainable_token_indices": "trainable_token_indices (embeddings)",
    "target_parameters": "target_parameters (parameters of experts)",
    "fan_in_fan_out": "fan_in_fan_out (transposed weights)",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "arrow_config": "Arrow routing",
    "layer_replication": "layer_replication",
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations that also change the base's weights."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The settings of an adapter that its product depends on.

    Attributes:
        rank, alpha: of modules without a pattern.
        is_rank_stabilized: the factor is alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023, rsLoRA).
        ranks, alphas: patterns of modules' names -> their own.
        modules: names of modules that end so have an adapter; None: the file has a regular expression or "all-linear".
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    modules: tuple[str, ...] | None

    def rank_of(self, module: str) -> int:
        """Return the rank of a module by its full name, such as "model.layers.0.mlp.up_proj"."""
        return self.ranks.get(_first_match(module, self.ranks), self.rank)

    def factor(self, module: str) -> float:
        """Return the factor of a module's low-rank product."""
        alpha, rank = self.alphas.get(_first_match(module, self.alphas), self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def names(self, module: str) -> bool:
        """Whether the module may have an adapter."""
        return self.modules is None or any(module == name or module.endswith(f".{name}") for name in self.modules)


def read_settings(folder: Path) -> LoraSettings:
    """Read an adapter's settings.

    Raises:
        ModelNotFound: the file is missing.  UnsupportedModel: the adapter is of another kind, or does more than is
            supported; names it.  CorruptWeights: the file can't be read, or a value is none that it can have.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ModelNotFound(f"{folder} is no adapter: it has no {CONFIG_FILE} (PEFT's save_pretrained writes one)")
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise CorruptWeights(f"{file} is larger than {_MAX_BYTES} bytes")
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptWeights(f"{file} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise CorruptWeights(f"{file} is not a JSON object")
    _refuse_unsupported(file, config)
    return LoraSettings(
        rank=_rank(file, "r", config.get("r", 8)),
        alpha=_alpha(file, "lora_alpha", config.get("lora_alpha", 8)),
        is_rank_stabilized=bool(config.get("use_rslora")),
        ranks={key: _rank(file, "rank_pattern", value) for key, value in _patterns(file, config, "rank_pattern")},
        alphas={key: _alpha(file, "alpha_pattern", value) for key, value in _patterns(file, config, "alpha_pattern")},
        modules=_modules(file, config.get("target_modules")),
    )


def _refuse_unsupported(file: Path, config: Mapping[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedModel(f"{file}: peft_type is {kind!r}, but only LORA is supported")
    for name, described in _REFUSED.items():
        if config.get(name):
            raise UnsupportedModel(f"{file}: {described} is not supported; merge the adapter into its model instead")
    if (bias := config.get("bias", "none")) != "none":
        raise UnsupportedModel(f"{file}: bias is {bias!r}, but biases beside the adapter are not supported")
    initial = config.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        raise UnsupportedModel(
            f"{file}: init_lora_weights {initial!r} changed the base's weights, too; convert the adapter to plain LoRA "
            "(PEFT's save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _modules(file: Path, modules: object) -> tuple[str, ...] | None:
    if isinstance(modules, str):
        return None
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise CorruptWeights(f"{file}: target_modules is neither a list of names nor a string")
    return tuple(modules)


def _patterns(file: Path, config: Mapping[str, Any], name: str) -> list[tuple[str, object]]:
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
        raise CorruptWeights(f"{file}: {name} is not an object of at most {_MAX_PATTERNS} patterns")
    for pattern in patterns:
        if _PLAIN.fullmatch(pattern.removeprefix("^")):
            continue
        if len(pattern) > _MAX_PATTERN_LENGTH or _SLOW.search(pattern):
            raise UnsupportedModel(
                f"{file}: the pattern {pattern[:100]!r} of {name} is not supported: it may take long to match; name "
                "the modules, or use fewer repetitions"
            )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise CorruptWeights(f"{file}: {pattern!r} of {name} is no regular expression: {error}") from error
    return list(patterns.items())


def _first_match(module: str, patterns: Mapping[str, object]) -> str:
    """Return the first pattern that names the module, as PEFT finds it; else the module's own name."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), module)


def _rank(file: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise CorruptWeights(f"{file}: a rank ({name}) is {value!r}, but must be from 1 to {MAX_RANK}")
    return value


def _alpha(file: Path, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_MAX_ALPHA <= value <= _MAX_ALPHA:
        raise CorruptWeights(f"{file}: {name} is {value!r}, but must be a number of at most {_MAX_ALPHA:g}")
    return float(value)
