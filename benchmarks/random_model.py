"""A model of a known shape with random weights, as a folder with another model's tokenizer.

    python benchmarks/random_model.py llama-3.2-1b --tokenizer MODEL.gguf --output FOLDER

What such a model says is of no use; how long it takes to say it is that of the real one, whose weights need not be
fetched. Its tokenizer has to have no more tokens than the shape's vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

SHAPES: dict[str, dict[str, Any]] = {
    # 1,235,814,400 parameters; head and embedding are one
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
"""Name -> what a `LlamaConfig` says of it."""

STANDARD_DEVIATION = 0.02
"""Of all weights but the norms', which are 1: as models are initialized."""


def write_random_model(shape: str, tokenizer: Path, folder: Path, seed: int = 0) -> None:
    """Write config, bfloat16 weights and tokenizer; `tokenizer` is a GGUF file or a folder.

    Raises:
        ValueError: the tokenizer has more tokens than the shape.
    """
    config = LlamaConfig(**SHAPES[shape], dtype=torch.bfloat16, architectures=["LlamaForCausalLM"])
    if tokenizer.is_dir():
        tokens = AutoTokenizer.from_pretrained(str(tokenizer))
    else:
        tokens = AutoTokenizer.from_pretrained(str(tokenizer.parent), gguf_file=tokenizer.name)
    if len(tokens) > config.vocab_size:
        raise ValueError(f"{tokenizer}: {len(tokens)} tokens, and {shape} has {config.vocab_size}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():  # a tied head is the embedding, and named once
        weight = torch.ones(parameter.shape, dtype=torch.bfloat16)
        weights[name] = weight if weight.ndim == 1 else weight.normal_(0, STANDARD_DEVIATION, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    tokens.save_pretrained(folder)


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF file, or a folder with a tokenizer")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        write_random_model(args.shape, args.tokenizer, args.output, args.seed)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
