"""The pins of a run's adapters: each is a model of the job, and all are served by one that is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.adapters.adapter import digest_adapter, open_adapter
from engine.models.load import open_model
from schemas.models import ModelPin
from tokenmill.errors import ModelError


def adapter_pins(models: Sequence[ModelPin], adapters: Sequence[tuple[str, str]]) -> tuple[ModelPin, ...]:
    """Check adapters, as (name, folder), against the one model of a run, and pin them.

    Raises:
        ModelError: there are several models, another engine computes the model, or a name is the model's.
        What `open_adapter` raises.
    """
    if not adapters:
        return ()
    base = models[0]
    if len(models) > 1:
        raise ModelError("--adapter is of one model; give one --model")
    decoder = open_model(base.source).decoder if base.engine == "tokenmill" else None
    if decoder is None:
        raise ModelError(
            f"--adapter: {base.engine} computes {base.name}, and adapters are those of tokenmill's own code"
        )
    if any(name == base.name for name, _ in adapters):
        raise ModelError(f"--adapter {base.name}=…: is the model's own name; give another one")
    found = (open_adapter(name, Path(folder), decoder) for name, folder in adapters)
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
