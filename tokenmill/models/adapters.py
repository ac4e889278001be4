"""The adapters of a command's model: each is a model of its own for requests, and one that is loaded serves all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.adapters.adapter import digest_adapter, open_adapter
from engine.adapters.merged import MergedWeights
from engine.config import EngineConfig
from engine.models.load import open_model
from engine.vllm.adapters import VLLMAdapters
from pipeline.models.catalog import BY_DIGEST
from schemas.models import EngineName, ModelPin
from tokenmill.errors import ModelError


def check_adapters(
    name: str, source: str | Path, engine: EngineName | None, num_models: int, config: EngineConfig
) -> tuple[bytes, ...]:
    """Check the adapters in these settings, against their model where it is computed by tokenmill's own code; vLLM does
    so when it loads them. Return what identifies each one's files.

    Args:
        name, source, engine: of the model.  num_models: of the command.

    Raises:
        ModelError: there are several models, transformers' code computes the model, or a name can't be an adapter's.
        What `open_adapter` raises, and `MergedWeights`.
    """
    adapters = config.lora.adapters
    if not adapters:
        return ()
    if num_models > 1:
        raise ModelError("--adapter is of one model; give one --model")
    for given, _ in adapters:
        if given == name:
            raise ModelError(f"adapter {given}: is the model's own name; give another one")
        if BY_DIGEST in given:
            raise ModelError(f"adapter {given}: {BY_DIGEST} names versions in requests; leave it out")
    if engine == "vllm":
        return tuple(VLLMAdapters(config.lora, on_cpu=False).digests.values())
    model = open_model(source) if engine == "tokenmill" else None
    if model is None or (decoder := model.decoder) is None:
        raise ModelError(f"{engine} computes {name}, and adapters are for tokenmill's own code and vLLM")
    found = tuple(open_adapter(given, Path(folder), decoder) for given, folder in adapters)
    if config.lora.merge:
        MergedWeights(model.weights, found[0], decoder, config.quantize)
    return tuple(adapter.digest for adapter in found)


def with_adapters(models: Sequence[ModelPin], config: EngineConfig) -> tuple[ModelPin, ...]:
    """The pins of a run's models, and of the adapters of its only one; one that is merged into it takes its place, so
    that no request gets its answers under the model's name. Raises as `check_adapters`."""
    base, lora = models[0], config.lora
    digests = check_adapters(base.name, base.source, base.engine, len(models), config)
    found = tuple(
        base.with_adapter(name, folder, digest.hex(), merged=lora.merge)
        for digest, (name, folder) in zip(digests, lora.adapters, strict=True)
    )
    return found if lora.merge else (*models, *found)


def adapters_of(pins: Sequence[ModelPin]) -> list[str]:
    """The adapters of a job as NAME=FOLDER. Raises `ModelError` if one of them has changed, or is gone."""
    found = []
    for pin in pins:
        if pin.adapter is None:
            continue
        digest = digest_adapter(Path(pin.adapter)).hex()
        if pin.without_adapter.with_adapter(pin.name, pin.adapter, digest, merged=pin.merged).digest != pin.digest:
            raise ModelError(f"{pin.adapter}: is not the adapter any more that answered as {pin.name}; put it back")
        found.append(f"{pin.name}={pin.adapter}")
    return found
