"""A job's models in rotation in one process: one is loaded at a time, and computes its shards until its queue is empty.

A shard that is planned later may need an earlier model, which is then loaded again.
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Sequence
from itertools import count

from pipeline.ports import Clock, ShardQueue
from pipeline.worker_client.shard_client import ShardClient
from schemas.models import ModelPin
from tokenmill.processes.model_switching import ModelRotation, RotatingShardSource
from tokenmill.processes.runtime import frozen_heap
from workers.model.loaded_model import LoadedModel
from workers.observability.progress import WorkerObserver
from workers.settings import WorkerSettings
from workers.shards.worker import ShardWorker


def compute_in_rotation(
    models: Sequence[ModelPin],
    load: Callable[[ModelPin, int], LoadedModel],
    make_client: Callable[[Sequence[ModelPin]], ShardClient],
    observe: Callable[[int], WorkerObserver],
    queue: ShardQueue,
    clock: Clock,
    settings: WorkerSettings,
    stop: threading.Event,
    close: Callable[[LoadedModel], None] = LoadedModel.close,
) -> None:
    """Compute a job's shards until the job ends, or `stop` is set.

    Args:
        models: in order of rotation.
        load: loads a model for the turn of this number, from 0.
        make_client: creates the source and sink of the shards of a model and of its adapters.
        close: releases a model at the end of its turn, before the next one is loaded.
        observe: creates the observer of the turn of this number; a turn's counts begin at 0.

    Raises what loading and `ShardWorker.run` raise.
    """
    served: dict[str, list[ModelPin]] = {}  # names of the same weights share a queue, and adapters their model
    for pin in models:
        served.setdefault(pin.base_key, []).append(pin)
    adapters = {model: [pin.key for pin in pins if pin.key != model] for model, pins in served.items()}
    turns = ModelRotation(list(served), queue, None, clock, switch_after=math.inf, adapters=adapters)
    for turn in count():
        pins = served[turns.loaded]
        base = next((pin for pin in pins if pin.adapter is None), pins[0])
        model, client = load(base, turn), make_client(pins)
        turns.begin()
        with frozen_heap():
            source = RotatingShardSource(client, turns)
            ShardWorker(model, source, client, clock, settings, observe(turn)).run(stop)
        client.close()
        if stop.is_set() or client.finished():
            return  # the process ends soon, and the last model needn't be closed
        close(model)
        del model
        gc.collect()  # the next model needs the memory
