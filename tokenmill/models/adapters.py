"""The adapters of a command's model: each is a model of its own for requests, and one that is loaded serves all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.adapters.adapter import Adapter, digest_adapter, open_adapter
from engine.models.load import open_model
from pipeline.models.catalog import BY_DIGEST
from schemas.models import EngineName, ModelPin
from tokenmill.errors import ModelError


def open_adapters(
    name: str, source: str | Path, engine: EngineName | None, num_models: int, adapters: Sequence[tuple[str, str]]
) -> tuple[Adapter, ...]:
    """Open adapters, given as (name, folder), and check them against their model.

    Args:
        name, source, engine: of the model.  num_models: of the command.

    Raises:
        ModelError: there are several models, another engine computes the model, or a name can't be an adapter's.
        What `open_adapter` raises.
    """
    if not adapters:
        return ()
    if num_models > 1:
        raise ModelError("--adapter is of one model; give one --model")
    decoder = open_model(source).decoder if engine == "tokenmill" else None
    if decoder is None:
        raise ModelError(f"--adapter: {engine} computes {name}, and adapters are those of tokenmill's own code")
    for given, folder in adapters:
        if given == name:
            raise ModelError(f"--adapter {given}=…: is the model's own name; give another one")
        if BY_DIGEST in given:
            raise ModelError(f"--adapter {given}={folder}: {BY_DIGEST} names versions in requests; leave it out")
    return tuple(open_adapter(given, Path(folder), decoder) for given, folder in adapters)


def adapter_pins(models: Sequence[ModelPin], adapters: Sequence[tuple[str, str]]) -> tuple[ModelPin, ...]:
    """Check adapters, as (name, folder), against the one model of a run, and pin them. Raises as `open_adapters`."""
    base = models[0]
    found = open_adapters(base.name, base.source, base.engine, len(models), adapters)
    return tuple(
        base.with_adapter(one.name, folder, one.digest.hex()) for one, (_, folder) in zip(found, adapters, strict=True)
    )


def adapters_of(pins: Sequence[ModelPin]) -> list[str]:
    """The adapters of a job as NAME=FOLDER. Raises `ModelError` if one of them has changed, or is gone."""
    bases = {pin.base_key: pin for pin in pins if pin.adapter is None}
    found = []
    for pin in pins:
        if pin.adapter is None:
            continue
        same = bases[pin.base_key].with_adapter(pin.name, pin.adapter, digest_adapter(Path(pin.adapter)).hex())
        if same.digest != pin.digest:
            raise ModelError(f"{pin.adapter}: is not the adapter any more that answered as {pin.name}; put it back")
        found.append(f"{pin.name}={pin.adapter}")
    return found
