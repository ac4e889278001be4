"""The first layers of a model, as a folder with its tokenizer: as much work as a slow machine can do in time.

    python benchmarks/cut_model.py MODEL.gguf --layers 6 --output FOLDER

What such a model says is of no use; how long it takes to say it is that of a model with so many layers. Times of
requests beside each other (`interactive.py`) are measured with it where the whole model is too much for the processor.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from engine.models.load import open_model


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    opened = open_model(args.model)
    config, weights = opened.config, opened.weights
    if not 0 < args.layers <= config.num_hidden_layers:
        parser.error(f"--layers is 1 to {config.num_hidden_layers}, of a model with layers")
    tensors = {}
    for name in weights.names:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) < args.layers:
            tensors[name] = torch.empty(weights.shape(name), dtype=torch.float32)
            weights.read(name, tensors[name])
            tensors[name] = tensors[name].to(torch.bfloat16)
    config.num_hidden_layers = args.layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: args.layers]
    args.output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.output / "model.safetensors", {"format": "pt"})
    config.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(str(args.model.parent), gguf_file=args.model.name).save_pretrained(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
