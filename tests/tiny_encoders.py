"""Tiny random models that make embeddings, labels or scores, saved as sentence-transformers saves them: weights,
tokenizer, modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

VOCABULARY = 400
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_DISTIL = {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "pad_token_id": 0}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _SHAPE),
    "roberta": ("RobertaConfig", {**_SHAPE, "pad_token_id": 1, "max_position_embeddings": 66}),
    "xlm-roberta": ("XLMRobertaConfig", {**_SHAPE, "pad_token_id": 1, "max_position_embeddings": 66}),
    "mpnet": ("MPNetConfig", {**_SHAPE, "pad_token_id": 1, "max_position_embeddings": 66}),
    "distilbert": ("DistilBertConfig", {**_DISTIL, "max_position_embeddings": 64}),
    "modernbert": (
        "ModernBertConfig",
        {**_SHAPE, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
         "bos_token_id": 1, "eos_token_id": 2},
    ),
}  # fmt: skip
"""Family -> its transformers config class and shape."""

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {**_SHAPE, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 2}),
    "mistral": ("MistralConfig", {**_SHAPE, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 2}),
}
"""Family -> its transformers config class and shape, for decoders saved without a head."""

SPECIALS = ["<pad>", "<s>", "<end>", "<turn>"]
CORPUS = ["The quick brown fox jumps over the lazy dog. 0123456789", "query: passage: what is a river? A stream."] * 4


def make_embedding_model(
    family: str,
    folder: Path,
    *,
    pooling: str | None = "mean_tokens",
    normalize: bool = False,
    dense: Sequence[tuple[int, str]] = (),
    max_seq_length: int | None = None,
    lower_case: bool = False,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    include_prompt: bool = True,
    edit: Callable[[Any], None] | None = None,
    config_changes: dict[str, Any] | None = None,
) -> Path:
    """Save a random float32 model of `family` and return the folder.

    Args:
        pooling: None: without settings of any kind.  dense: (numbers, activation) of each layer behind the pooling.
    """
    class_name, shape = (ENCODERS | DECODERS)[family]
    config = getattr(transformers, class_name)(**{**shape, **(config_changes or {})})
    model = _random_model(AutoModel, config)
    if edit is not None:
        with torch.no_grad():
            edit(model)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if pooling is None:
        return folder
    modules = ["Transformer", "Pooling", *("Dense" for _ in dense), *(["Normalize"] if normalize else [])]
    paths = ["" if at == 0 else f"{at}_{kind}" for at, kind in enumerate(modules)]
    write(
        folder / "modules.json",
        [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (kind, path) in enumerate(zip(modules, paths, strict=True))
        ],
    )
    width = 32
    pooled = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": False, "include_prompt": include_prompt}
    write(folder / "1_Pooling" / "config.json", {**pooled, f"pooling_mode_{pooling}": True})
    for at, (size, activation) in enumerate(dense, start=2):
        layer = torch.nn.Linear(width, size)
        write(
            folder / f"{at}_Dense" / "config.json",
            {"in_features": width, "out_features": size, "bias": True, "activation_function": _class(activation)},
        )
        tensors = {f"linear.{name}": tensor.detach().contiguous() for name, tensor in layer.named_parameters()}
        save_file(tensors, folder / f"{at}_Dense" / "model.safetensors")
        width = size
    write(folder / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": lower_case})
    write(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts or {}, "default_prompt_name": default_prompt, "similarity_fn_name": "cosine"},
    )
    return folder


def make_classifier(
    family: str,
    folder: Path,
    *,
    labels: Sequence[str] = ("relevant",),
    has_types: bool = True,
    files: dict[str, Any] | None = None,
    **config_changes: Any,
) -> Path:
    """Save a random float32 model of `family` with a head for labels and return the folder.

    Args:
        has_types: the tokenizer gives token types.  files: further ones, by name, as JSON.
    """
    class_name, shape = (ENCODERS | DECODERS)[family]
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: at for at, label in enumerate(labels)}}
    config = getattr(transformers, class_name)(**{**shape, **names, **config_changes})
    _random_model(AutoModelForSequenceClassification, config).save_pretrained(folder)
    inputs = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    tokenizer(model_input_names=inputs).save_pretrained(folder)
    for name, value in (files or {}).items():
        write(folder / name, value)
    return folder


def make_reranker(folder: Path, *, template: str | None = None, **config_changes: Any) -> Path:
    """Save a random float32 Qwen3 that generates, with Qwen's special tokens and the words yes and no as tokens, and
    return the folder. `template`: the tokenizer's chat template."""
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.add_tokens(["yes", "no", "<think>", "</think>"])
    words.chat_template = template
    words.save_pretrained(folder)
    class_name, shape = DECODERS["qwen3"]
    changes = {"vocab_size": len(words), "max_position_embeddings": 1024, "tie_word_embeddings": True}
    config = getattr(transformers, class_name)(**{**shape, **changes, **config_changes})
    _random_model(AutoModelForCausalLM, config).save_pretrained(folder)
    return folder


def _random_model(auto: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            else:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
    return model.eval()


def tokenizer(**settings: Any) -> Any:
    """A byte-level tokenizer that puts <s> and <end> around a text, and whose file says to cut and to pad, as those of
    real models do."""
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A <end>", pair="<s> $A <end> $B:1 <end>:1", special_tokens=[("<s>", 1), ("<end>", 2)]
    )
    rust.enable_truncation(16)
    rust.enable_padding(length=16, pad_id=0, pad_token="<pad>")
    names = {"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=rust, **names, **settings)


def write(path: Path, value: Any) -> None:
    """JSON at `path`, whose folder is made."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def _class(activation: str) -> str:
    module = "linear" if activation == "Identity" else "activation"
    return f"torch.nn.modules.{module}.{activation}"


def pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    """One text's hidden states [positions, hidden] pooled, in float64: by definition."""
    hidden = hidden.double()
    count = len(hidden)
    weights = torch.arange(1, count + 1).double()[:, None]
    return {
        "cls_token": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "max_tokens": lambda: hidden.max(dim=0).values,
        "mean_tokens": lambda: hidden.sum(dim=0) / count,
        "mean_sqrt_len_tokens": lambda: hidden.sum(dim=0) / count**0.5,
        "weightedmean_tokens": lambda: (weights * hidden).sum(dim=0) / weights.sum(),
    }[mode]()
