"""The models of a pipeline's steps. Steps with adapters of one model are computed by that one, loaded once with all of
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from schemas.models import ModelPin
from tokenmill.local.run_job import checked_pin
from tokenmill.local.run_plan import RunPlan
from tokenmill.models.adapters import with_adapters

StepPins = Mapping[str, tuple[ModelPin, ...]]
"""The pins of each step's job, by the step's name: its model and that one's adapters, or the merged one alone."""


def pin_models(plans: Mapping[str, RunPlan]) -> StepPins:
    """Pin the models of the steps with these plans. The weights of several steps are read once.

    Raises:
        ModelError: an adapter's name can't be one, or its model takes none.
        What pinning a model and reading an adapter raise.
    """
    known: list[tuple[object, ModelPin]] = []  # keys have parts without a hash
    found = {}
    for name, plan in plans.items():
        key = plan.models, plan.engine.without_adapters, plan.chat
        pin = next((pin for old, pin in known if old == key), None) or checked_pin(plan, plan.models[0])
        known.append((key, pin))
        found[name] = with_adapters([pin], plan.engine.config())
    return found


def plans_by_model(plans: Mapping[str, RunPlan], pins: StepPins) -> dict[str, RunPlan]:
    """A plan that loads each model for all of its steps, by the model's key (`ModelPin.base_key`): with the adapters of
    all of them, named by their keys, since steps may give one name to different files."""
    found = {}
    for name, plan in plans.items():
        key = pins[name][0].base_key
        steps = [other for other in plans if pins[other][0].base_key == key and plans[other].engine.adapters]
        beside = {
            pin.key: pin.adapter for other in steps for pin in pins[other] if pin.adapter is not None and not pin.merged
        }
        engine = plan.engine
        if beside:
            most = max(plans[other].engine.max_loras for other in steps)
            engine = replace(engine, adapters=tuple(beside.items()), max_loras=most)
        found[key] = replace(plan, engine=engine)
    return found
