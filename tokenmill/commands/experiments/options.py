"""An experiment from the options of `tokenmill experiment`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from schemas.experiments import ArmWeights, Experiment, ExperimentArm
    from schemas.settings.lane import SloOptions


def make_experiment(
    slo: SloOptions,
    name: str,
    arms: list[str],
    by: Literal["time", "worker"],
    slice_time: timedelta | None,
    carry_over: float,
    min_blocks: int,
    max_blocks: int,
    alpha: float,
    objective: str,
    model: str | None,
    *,
    number: int,
    started_at: datetime,
) -> Experiment:
    """The experiment of these options. Raises `typer.BadParameter`."""
    from pydantic import ValidationError

    from schemas.experiments import ArmWeights, Experiment

    own = ArmWeights(
        ttft=slo.weight_ttft, itl=slo.weight_itl, utilisation=slo.weight_utilisation, drops=slo.weight_drops
    )
    seconds = 300.0 if slice_time is None else slice_time.total_seconds()
    if seconds < 5:
        raise typer.BadParameter("--slice: 5s or more")
    try:
        return Experiment(
            number=number, name=name, arms=tuple(_arm(one, own) for one in arms), assignment=by, slice_seconds=seconds,
            carry_over=carry_over, objective=_weights(objective, own), alpha=alpha, min_blocks=min_blocks,
            max_blocks=max_blocks, model=model, started_at=started_at,
        )  # fmt: skip
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(map(str, detail["loc"]))
        raise typer.BadParameter(f"{where}: {detail['msg']}" if where else str(detail["msg"])) from error


def _arm(given: str, own: ArmWeights) -> ExperimentArm:
    """NAME or NAME:TERM=WEIGHT,…"""
    from schemas.experiments import ExperimentArm

    name, _, weights = given.partition(":")
    return ExperimentArm(name=name, weights=_weights(weights, own))


def _weights(given: str, own: ArmWeights) -> ArmWeights:
    """TERM=WEIGHT,… over the installation's own weights."""
    from schemas.experiments import ArmWeights

    pairs = [one.partition("=") for one in given.split(",") if one]
    for term, _, weight in pairs:
        if term not in ArmWeights.model_fields or not weight:
            raise typer.BadParameter(f"{given!r}: give TERM=WEIGHT; terms are {', '.join(ArmWeights.model_fields)}")
    return ArmWeights.model_validate(own.model_dump() | {term: weight for term, _, weight in pairs})
