"""A model of a known shape with random weights, as a folder with another model's tokenizer.

    python benchmarks/random_model.py llama-3.2-1b --tokenizer MODEL.gguf --output FOLDER
    python benchmarks/random_model.py mixture-32x4 --tokenizer MODEL.gguf --output FOLDER --gguf FILE

What such a model says is of no use; how long it takes to say it is that of the real one, whose weights need not be
fetched. Its tokenizer has to have no more tokens than the shape's vocabulary. `--gguf` writes the same weights for
llama.cpp, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SHAPES: dict[str, dict[str, Any]] = {
    # 1,235,814,400 parameters; head and embedding are one
    "llama-3.2-1b": {
        "model_type": "llama",
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
    # No published model's: small enough for a CPU, with as many experts, and as many of a token, as some have
    "mixture-32x4": {
        "model_type": "qwen3_moe",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""Name -> what its config says."""

STANDARD_DEVIATION = 0.02
"""Of all weights but the norms', which are 1: as models are initialized."""


def write_random_model(shape: str, tokenizer: Path, folder: Path, seed: int = 0) -> None:
    """Write config, bfloat16 weights and tokenizer; `tokenizer` is a GGUF file or a folder.

    Raises:
        ValueError: the tokenizer has more tokens than the shape.
    """
    config = AutoConfig.for_model(**SHAPES[shape], dtype=torch.bfloat16)
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
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)  # in the layout of published checkpoints
    tokens.save_pretrained(folder)


LAYER_TENSORS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
"""What llama.cpp calls a layer's weights -> what Qwen3-MoE does."""


def write_gguf(folder: Path, tokenizer: Path, path: Path) -> None:
    """Write the mixture in `folder` as a GGUF file in bfloat16, with the tokenizer of another GGUF file.

    Raises:
        ValueError: the model is no Qwen3-MoE, or the tokenizer no GGUF file.
    """
    config = AutoConfig.from_pretrained(folder)
    if config.model_type != "qwen3_moe" or tokenizer.is_dir():
        raise ValueError("a GGUF file is written of a Qwen3-MoE, with the tokenizer of a GGUF file")
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for field in gguf.GGUFReader(tokenizer).fields.values():
        if field.name.startswith("tokenizer.") and not field.name.endswith("chat_template"):
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=field.types[-1])

    weights = load_file(folder / "model.safetensors")

    def add(name: str, weight: torch.Tensor) -> None:
        if weight.ndim == 1 or name.endswith("ffn_gate_inp.weight"):  # llama.cpp wants norms and routers in float32
            writer.add_tensor(name, weight.float().numpy())
        else:
            raw = weight.contiguous().view(torch.uint8).numpy().view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    add("output.weight", weights["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        ours = f"model.layers.{layer}"
        for name, source in LAYER_TENSORS.items():
            add(f"blk.{layer}.{name}.weight", weights[f"{ours}.{source}.weight"])
        for part in ("gate", "up", "down"):
            of_experts = [f"{ours}.mlp.experts.{expert}.{part}_proj.weight" for expert in range(config.num_experts)]
            add(f"blk.{layer}.ffn_{part}_exps.weight", torch.stack([weights[name] for name in of_experts]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF file, or a folder with a tokenizer")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gguf", type=Path, help="write a mixture as this GGUF file, too")
    args = parser.parse_args()
    try:
        write_random_model(args.shape, args.tokenizer, args.output, args.seed)
        if args.gguf is not None:
            write_gguf(args.output, args.tokenizer, args.gguf)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
