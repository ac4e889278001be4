"""The adapters of a command's model: each is a model of its own for requests, and one that is loaded serves all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.adapters.adapter import Adapter, digest_adapter, open_adapter
from engine.adapters.merged import MergedWeights
from engine.config import EngineConfig
from engine.models.load import open_model
from pipeline.models.catalog import BY_DIGEST
from schemas.models import EngineName, ModelPin
from tokenmill.errors import ModelError


def open_adapters(
    name: str, source: str | Path, engine: EngineName | None, num_models: int, config: EngineConfig
) -> tuple[Adapter, ...]:
    """Open the adapters in these settings, and check them against their model.

    Args:
        name, source, engine: of the model.  num_models: of the command.

    Raises:
        ModelError: there are several models, another engine computes the model, or a name can't be an adapter's.
        What `open_adapter` raises, and `MergedWeights`.
    """
    adapters = config.lora.adapters
    if not adapters:
        return ()
    if num_models > 1:
        raise ModelError("--adapter is of one model; give one --model")
    model = open_model(source) if engine == "tokenmill" else None
    if model is None or (decoder := model.decoder) is None:
        raise ModelError(f"--adapter: {engine} computes {name}, and adapters are those of tokenmill's own code")
    for given, folder in adapters:
        if given == name:
            raise ModelError(f"--adapter {given}=…: is the model's own name; give another one")
        if BY_DIGEST in given:
            raise ModelError(f"--adapter {given}={folder}: {BY_DIGEST} names versions in requests; leave it out")
    found = tuple(open_adapter(given, Path(folder), decoder) for given, folder in adapters)
    if config.lora.merge:
        MergedWeights(model.weights, found[0], decoder, config.quantize)
    return found


def with_adapters(models: Sequence[ModelPin], config: EngineConfig) -> tuple[ModelPin, ...]:
    """The pins of a run's models, and of the adapters of its only one; one that is merged into it takes its place, so
    that no request gets its answers under the model's name. Raises as `open_adapters`."""
    base, lora = models[0], config.lora
    opened = open_adapters(base.name, base.source, base.engine, len(models), config)
    found = tuple(
        base.with_adapter(name, folder, one.digest.hex(), merged=lora.merge)
        for one, (name, folder) in zip(opened, lora.adapters, strict=True)
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
