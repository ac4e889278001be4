"""LoRA adapters as vLLM takes them: by a folder, and an id of its own for each.

On a CPU vLLM 0.32 computes a request without an adapter as if it had the one in its last place, where others of the
step have adapters (vllm-project/vllm#48421, open). So such requests get one that adds zeros there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file

from engine.adapters.adapter import WEIGHTS_FILE, check_weights_file, digest_adapter
from engine.adapters.places import AdapterPlaces
from engine.adapters.settings import CONFIG_FILE, read_settings
from engine.checkpoints.checkpoint import SafetensorsCheckpoint
from engine.config import LoraConfig
from engine.errors import CorruptWeights, EngineError, UnsupportedModel

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

MAX_RANKS: Final = (8, 16, 32, 64, 128, 256)
"""Of vLLM's max_lora_rank: each adapter takes the memory of the largest."""

NOTHING: Final = "\0"
"""Name of the adapter that adds zeros; no other can have it."""


class VLLMAdapters:
    """The adapters that requests may name. vLLM loads and evicts them.

    Args:
        config: `adapters`, `max_loras` (in a step) and `cache_bytes` (of host memory for others).
        on_cpu: see above.

    Attributes:
        digests: name -> 16 bytes that identify its files.

    Raises:
        EngineError: two have one name.  ModelNotFound, UnsupportedModel, CorruptWeights: as
            `engine.adapters.adapter.open_adapter`; the modules are checked by vLLM (`check`).
    """

    def __init__(self, config: LoraConfig, *, on_cpu: bool) -> None:
        self.digests: dict[str, bytes] = {}
        self._ids: dict[str, tuple[int, str]] = {}
        self._of_none: str | None = None
        self._max_loras = max(1, min(config.max_loras, len(config.adapters)))
        self._rank, largest = 1, 1
        for number, (name, folder) in enumerate(config.adapters, 1):
            if not name or name in self.digests:
                raise EngineError(
                    f"the adapter name {name!r} is {'given twice' if name else 'empty'}; names must differ"
                )
            settings = read_settings(Path(folder))
            largest = max(largest, check_weights_file(Path(folder)).stat().st_size)
            self._rank = max(self._rank, settings.rank, *settings.ranks.values())
            self.digests[name] = digest_adapter(Path(folder))
            self._ids[name] = (number, folder)
        if self._ids and on_cpu:
            self._zeros = TemporaryDirectory(prefix="tokenmill-adapter-")  # vLLM may read it again
            save_zeros(Path(config.adapters[0][1]), Path(self._zeros.name))
            self._of_none = NOTHING
            self._ids[NOTHING] = (len(self._ids) + 1, self._zeros.name)
            self._max_loras += 1
        self._in_memory = self._max_loras + min(len(self._ids), config.cache_bytes // largest)
        self._places = AdapterPlaces(self.digests)

    def arguments(self) -> Mapping[str, Any]:
        """Return what they add to the arguments of `EngineArgs`."""
        if not self._ids:
            return {}
        return {
            "enable_lora": True,
            "max_loras": self._max_loras,
            "max_lora_rank": next(rank for rank in MAX_RANKS if rank >= self._rank),
            "max_cpu_loras": self._in_memory,
        }

    def check(self, llm: LLMEngine) -> None:
        """Let vLLM load each of them once.

        Raises:
            UnsupportedModel: it refuses one; the message is vLLM's.
        """
        for name in self._ids:
            try:
                llm.add_lora(self._request(name))
            except Exception as error:  # its classes differ between versions
                text = " ".join(str(error).split())[:500]
                raise UnsupportedModel(f"vLLM can't take the adapter {name!r}: {text}") from error

    def of(self, name: str | None) -> LoRARequest | None:
        """Return vLLM's form of a request's adapter.

        Raises:
            RequestRefused: there is no such adapter; names those that there are.
        """
        self._places.check(name)
        name = self._of_none if name is None else name
        return None if name is None else self._request(name)

    def _request(self, name: str) -> LoRARequest:
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - the package is optional

        number, folder = self._ids[name]
        return LoRARequest(name, number, folder)


def save_zeros(like: Path, folder: Path) -> None:
    """Save an adapter that changes nothing, in one module that another adapter changes."""
    weights = SafetensorsCheckpoint(like, WEIGHTS_FILE)
    a = next((name for name in sorted(weights.names) if name.endswith(".lora_A.weight")), None)
    if a is None:
        raise UnsupportedModel(f"{like / WEIGHTS_FILE} holds no lora_A of a module")
    b = a.replace(".lora_A.", ".lora_B.")
    if b not in weights.names:
        raise CorruptWeights(f"{like / WEIGHTS_FILE} has no {b}")
    save_file({name: torch.zeros(weights.shape(name)) for name in (a, b)}, folder / WEIGHTS_FILE)
    module = a.removesuffix(".lora_A.weight").rpartition(".")[2]
    config = {"peft_type": "LORA", "r": weights.shape(a)[0], "lora_alpha": 1, "target_modules": [module]}
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
