"""Makes adapters as PEFT saves them, and merges them into a transformers model by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    model: nn.Module, folder: Path, seed: int, rank: int = 4, modules: Sequence[str] = ALL,
    ranks: Mapping[str, int] | None = None, strength: float = 1.0, **changes: Any,
) -> Path:  # fmt: skip
    """Save an adapter of random weights for the linear layers that end so. `ranks`: by the end of a module's name."""
    random = torch.Generator().manual_seed(seed)
    ranks = dict(ranks or {})
    tensors = {}
    for name, module in model.named_modules():
        end = name.rpartition(".")[2]
        if not isinstance(module, nn.Linear) or end not in modules:
            continue
        r = ranks.get(end, rank)
        a = torch.randn(r, module.in_features, generator=random) / module.in_features**0.5
        b = torch.randn(module.out_features, r, generator=random) * strength / r**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none",
        "rank_pattern": ranks, "use_rslora": False, "modules_to_save": None, "use_dora": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


@torch.no_grad()
def merge_adapter(model: nn.Module, folder: Path, sign: float = 1.0) -> None:
    """Add W += alpha / r * B A, with sign -1 take it away; alpha / sqrt(r) with rsLoRA."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = config.get("alpha_pattern", {}).get(module.rpartition(".")[2], config["lora_alpha"])
        factor = alpha / (len(a) ** 0.5 if config["use_rslora"] else len(a))
        weight = model.get_submodule(module).weight
        assert isinstance(weight, nn.Parameter)
        weight += (tensors[name.replace("lora_A", "lora_B")] @ a) * (sign * factor)
