"""EAGLE-3 heads for tests: random checkpoints, and a reference of the head after its paper.

The reference has no cache and no batch: it computes a whole text with full attention, in float32, each time anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

HEADS, KV_HEADS, HEAD_DIM, INNER, THETA, EPS = 4, 2, 12, 96, 10_000.0, 1e-6


def head_config(target: Any, *, draft_vocab: int, layers: list[int] | None, **changes: Any) -> dict[str, Any]:
    """A config as published heads have it."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 512,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
    }
    if layers is not None:
        config["eagle_aux_hidden_state_layer_ids"] = layers
    return {**config, **changes}


def random_weights(config: dict[str, Any], seed: int = 0, layer: str = "midlayer") -> dict[str, Tensor]:
    """Weights of a wide distribution, so that every input matters."""
    chance = torch.Generator().manual_seed(seed)
    hidden, vocab, draft = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]
    shapes = {
        "fc": (hidden, 3 * config.get("target_hidden_size", hidden)),
        f"{layer}.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * hidden),
        f"{layer}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        f"{layer}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        f"{layer}.self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj": (INNER, hidden),
        f"{layer}.mlp.up_proj": (INNER, hidden),
        f"{layer}.mlp.down_proj": (hidden, INNER),
        "lm_head": (draft, hidden),
        "embed_tokens": (vocab, hidden),
    }
    weights = {
        f"{name}.weight": torch.randn(shape, generator=chance) * (1.5 if name == "embed_tokens" else shape[1] ** -0.5)
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"{layer}.{name}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=chance)
    weights["norm.weight"] = 1 + 0.3 * torch.randn(hidden, generator=chance)
    known = torch.randperm(vocab, generator=chance)[:draft].sort().values
    weights["d2t"] = known - torch.arange(draft)
    weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
    return weights


def save_head(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


class Target:
    """The target model in transformers, in float32."""

    def __init__(self, path: Path, layers: Iterable[int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.layers = list(layers)

    @torch.no_grad()
    def states(self, tokens: list[int]) -> Tensor:
        """[tokens, layers * hidden]: what goes into these layers; behind the last one that is into the last norm."""
        inner, seen = self.model.model, []
        parts = [*inner.layers, inner.norm]
        hooks = [
            parts[layer].register_forward_pre_hook(lambda _, given: seen.append(given[0][0])) for layer in self.layers
        ]
        self.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return torch.cat(seen, dim=-1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, dim], positions from 0."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin, a, b = angles.cos()[:, None], angles.sin()[:, None], x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def layer_output(
    weights: dict[str, Tensor], joined: Tensor, next_tokens: Tensor, *, layer: str = "midlayer", first: bool = False
) -> Tensor:
    """The head's layer over a text: joined [n, hidden], the token behind each position -> [n, hidden], before the norm.

    Args:
        first: the residual is the normed input (norm_before_residual).
    """

    def w(name: str) -> Tensor:
        return weights[f"{layer}.{name}.weight"]

    n = len(joined)
    normed = norm(joined, w("hidden_norm"))
    both = torch.cat((norm(weights["embed_tokens.weight"][next_tokens], w("input_layernorm")), normed), dim=-1)
    q = rotated((both @ w("self_attn.q_proj").T).view(n, HEADS, HEAD_DIM))
    k = rotated((both @ w("self_attn.k_proj").T).view(n, KV_HEADS, HEAD_DIM)).repeat_interleave(HEADS // KV_HEADS, 1)
    v = (both @ w("self_attn.v_proj").T).view(n, KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
    hidden = (normed if first else joined) + seen @ w("self_attn.o_proj").T
    inner = norm(hidden, w("post_attention_layernorm"))
    gated = F.silu(inner @ w("mlp.gate_proj").T) * (inner @ w("mlp.up_proj").T)
    return hidden + gated @ w("mlp.down_proj").T


def logits_of(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    return norm(hidden, weights["norm.weight"]) @ weights["lm_head.weight"].T


def chain(
    weights: dict[str, Tensor],
    states: Tensor,
    tokens: list[int],
    length: int,
    choose: Callable[[Tensor, int], int],
    **kind: Any,
) -> list[int]:
    """The drafts of the head behind `tokens`, of which all but the last have states.

    Args:
        choose: (logits [vocab], -inf where the head has no token; position) -> token.  kind: as `layer_output`.
    """
    joined, known, drafts = states @ weights["fc.weight"].T, list(tokens), []
    for _ in range(length):
        output = layer_output(weights, joined, torch.tensor(known[1:]), **kind)
        logits = torch.full((len(weights["t2d"]),), -torch.inf)
        for own, value in enumerate(logits_of(weights, output[-1]).tolist()):
            logits[own + int(weights["d2t"][own])] = value
        token = choose(logits, len(known))
        known.append(token)
        drafts.append(token)
        joined = torch.cat((joined, output[-1:]))
    return drafts


def train(
    weights: dict[str, Tensor], target: Target, texts: list[list[int]], *, steps: int, lead: int, rate: float = 3e-3
) -> float:
    """Train the head to predict the next tokens of these texts of one length, from their own states and from its
    outputs in place of them (as in the paper's training-time test, one step of it). Returns the last loss.

    Args:
        lead: tokens of each text that are not predicted.
    """
    learned = [w.requires_grad_() for name, w in weights.items() if name not in ("d2t", "t2d", "embed_tokens.weight")]
    optimizer = torch.optim.Adam(learned, lr=rate)
    states = [target.states(text) for text in texts]
    chance = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = torch.zeros(())
        for pick in torch.randint(len(texts), (4,), generator=chance).tolist():
            text = torch.tensor(texts[pick])
            # Position p, with the token at p + 1, predicts p + 2; then its output serves as the state of p + 1.
            joined = states[pick][:-2] @ weights["fc.weight"].T
            output = layer_output(weights, joined, text[1:-1])
            loss = loss + F.cross_entropy(logits_of(weights, output)[lead:], text[2 + lead :])
            shifted = torch.cat((joined[:1], output[:-1]))
            again = layer_output(weights, shifted, text[1:-1])
            loss = loss + 0.5 * F.cross_entropy(logits_of(weights, again)[lead:], text[2 + lead :])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for weight in learned:
        weight.requires_grad_(False)
    return float(loss.detach()) / 4
