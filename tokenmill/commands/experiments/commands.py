"""`tokenmill experiment`: sets of the scheduler's weights, compared on live traffic."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tokenmill import output
from tokenmill.commands.experiments.display import document, lines, present_arm, progress, show
from tokenmill.commands.experiments.options import make_experiment
from tokenmill.config.cli_options import Debug, Json, RootUrl, amount_of_time
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.experiments.registry import ExperimentRegistry, ExperimentState

app = typer.Typer(
    help="Experiments with the scheduler's weights (TOKENMILL_LANE__SLO__WEIGHT_…): workers compute by turns with each "
    "of several sets of weights, the arms, and the late tokens of each arm are compared.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

START_SECONDS = 15.0
"""Until the first slice: by then all workers have read the experiment."""

Arms = Annotated[
    list[str],
    typer.Option(
        "--arm",
        metavar="NAME[:TERM=WEIGHT,…]",
        help="An arm: weights of the terms ttft, itl, utilisation and drops; those left out are the settings'. The "
        "first arm is the control. Repeat, 2 to 4 times.",
    ),
]
By = Annotated[
    Literal["time", "worker"],
    typer.Option(
        help="time: all workers change their arm with each slice. worker: each worker has one arm throughout, which "
        "follows from its GPU, or from its host if it has none."
    ),
]
SliceTime = Annotated[
    timedelta | None,
    typer.Option("--slice", parser=amount_of_time, metavar="TIME", help="Length of a slice, 5s at least. Default: 5m."),
]
CarryOver = Annotated[float, typer.Option(min=0, max=0.9, help="Share of a slice, at its start, that is not measured.")]
MinBlocks = Annotated[
    int,
    typer.Option(
        min=4, max=10_000,
        help="Samples of the first interim test; each further one has twice as many. By time a sample is a slice of "
        "each arm, else a slice.",
    ),
]  # fmt: skip
MaxBlocks = Annotated[
    int, typer.Option(min=4, max=10_000, help="Samples of the last interim test; then the experiment ends.")
]
Alpha = Annotated[
    float,
    typer.Option(min=1e-5, max=0.49, help="Probability that any of equal arms is found different, all tests together."),
]
Objective = Annotated[
    str,
    typer.Option(
        metavar="TERM=WEIGHT,…", help="Weights by which all arms are judged; those left out are the settings'."
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, - and _.")]
Number = Annotated[
    int | None, typer.Argument(metavar="[NUMBER]", min=1, max=99_999, help="Of the experiment. Default: the last one.")
]


@app.command("start", short_help="Begin an experiment.")
def start(
    name: NameArgument,
    arm: Arms,
    by: By = "time",
    slice_time: SliceTime = None,
    carry_over: CarryOver = 0.2,
    min_blocks: MinBlocks = 8,
    max_blocks: MaxBlocks = 256,
    alpha: Alpha = 0.05,
    objective: Objective = "",
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Only workers of this model take part.")] = None,
    root_url: RootUrl = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Begin an experiment in the root: its workers take the arms in turn, without a restart, and a dispatcher ends it
    when all arms are found better or worse than the control, or after the last block."""
    from pipeline.experiments.registry import ExperimentRegistry
    from tokenmill.root import open_root

    settings = read_settings()
    with open_root(root_url, settings) as root:
        registry = ExperimentRegistry(root.world.store)
        experiment = make_experiment(
            settings.lane.slo, name, arm, by, slice_time, carry_over, min_blocks, max_blocks, alpha, objective, model,
            number=registry.next_number(), started_at=root.world.clock.now() + timedelta(seconds=START_SECONDS),
        )  # fmt: skip
        registry.begin(experiment)
    if as_json:
        output.print_json(experiment)
        return
    slices = f"{experiment.num_slices} slices of {output.duration(experiment.slice_seconds)}"
    output.say(f"experiment {experiment.number}, {name}: {', '.join(one.name for one in experiment.arms)}; {slices}")


@app.command("status", short_help="Which experiment is open.")
def status(root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """The last experiment of the root, and the arm of its present slice."""
    from pipeline.experiments.registry import ExperimentRegistry
    from tokenmill.root import open_root

    with open_root(root_url, read_settings(), read_only=True) as root:
        state, now = _find(ExperimentRegistry(root.world.store), None), root.world.clock.now()
    if as_json:
        output.print_json(document(state) | {"arm": present_arm(state, now)})
        return
    for line in (*lines(state, now), *(() if state.outcome is None else state.outcome.reasons)):
        print(line)


@app.command("stop", short_help="End the open experiment.")
def stop(root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """End the open experiment: within ten seconds its workers have their own weights again."""
    from pipeline.experiments.registry import ExperimentError, ExperimentRegistry, ExperimentState
    from schemas.experiments import ExperimentOutcome
    from tokenmill.root import open_root

    with open_root(root_url, read_settings()) as root:
        registry = ExperimentRegistry(root.world.store)
        state = _find(registry, None)
        if state.outcome is not None:
            raise ExperimentError(f"experiment {state.experiment.name} has ended already, by {state.outcome.by}")
        outcome = registry.end(state.experiment, ExperimentOutcome(by="operator", at=root.world.clock.now()))
    if as_json:
        output.print_json(document(ExperimentState(state.experiment, outcome)))
        return
    output.say(f"experiment {state.experiment.number}, {state.experiment.name}: ended by {outcome.by}")


@app.command("report", short_help="The arms' latencies and throughput, compared.")
def report(number: Number = None, root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """Compare the arms by the blocks that a dispatcher has closed so far, each a minute after its end.

    Intervals of differences are those of the last interim test, and remain valid however often they are looked at.
    The objective decides.
    """
    from pipeline.experiments.comparison import compare_arms
    from pipeline.experiments.registry import ExperimentRegistry
    from tokenmill.root import open_root

    with open_root(root_url, read_settings(), read_only=True) as root:
        registry, now = ExperimentRegistry(root.world.store), root.world.clock.now()
        state = _find(registry, number)
        compared = compare_arms(state.experiment, registry.closed_blocks(state.experiment))
        closed = range(compared.blocks * state.experiment.block_slices)
        late = max(0, registry.num_reports(state.experiment, closed) - compared.reports - compared.unusable)
    if as_json:
        output.print_json(document(state) | asdict(compared) | {"late": late})
        return
    for line in lines(state, now):
        print(line)
    show(state.experiment, compared, progress(state, compared, late, now))


@app.command("simulate", short_help="The same arms on a simulated worker.")
def simulate(
    arm: Arms,
    by: By = "time",
    slice_time: SliceTime = None,
    carry_over: CarryOver = 0.2,
    min_blocks: MinBlocks = 8,
    max_blocks: MaxBlocks = 8,
    alpha: Alpha = 0.05,
    objective: Objective = "",
    workers: Annotated[int, typer.Option(min=1, max=64, help="Workers, each with a load of its own.")] = 1,
    step_ms: Annotated[float, typer.Option(min=0.1, max=10_000, help="Duration of a step: a fixed part.")] = 5.0,
    token_ms: Annotated[float, typer.Option(min=1e-4, max=1_000, help="And a part for each of its tokens.")] = 1.0,
    rows: Annotated[int, typer.Option(min=1, max=1_024, help="Most requests of a step.")] = 96,
    rate: Annotated[float, typer.Option(min=1e-3, max=1_000, help="Interactive requests a second, on average.")] = 1.5,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=2_000, help="Mean of their prompts.")] = 40,
    answer_tokens: Annotated[int, typer.Option(min=1, max=2_000, help="Mean of their answers.")] = 60,
    seed: Annotated[int, typer.Option(help="Of the load: the same seed gives the same result.")] = 0,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Simulate an experiment before it is started: the engine's scheduler with the settings' latency targets, on a
    machine whose steps take simulated time. Interactive requests come in waves; batch work fills the rest. A slice of
    a minute takes about half a second."""
    from pipeline.adapters.folder.store import FolderStore
    from pipeline.experiments.blocks import close_block
    from pipeline.experiments.comparison import compare_arms
    from pipeline.experiments.registry import ExperimentRegistry, ExperimentState
    from tokenmill.config.engine_options import slo_config
    from tokenmill.errors import UserError
    from tokenmill.local.experiment_simulation import START, SimulatedMachine, simulate_worker
    from tokenmill.processes.logging import log_to_stderr

    log_to_stderr()
    settings = read_settings()
    slo = slo_config(settings)
    if slo is None:
        raise UserError("TOKENMILL_LANE__SLO__THROTTLE_BATCH is false: there is nothing to weigh")
    experiment = make_experiment(
        settings.lane.slo, "simulated", arm, by, slice_time or timedelta(minutes=1), carry_over, min_blocks, max_blocks,
        alpha, objective, None, number=1, started_at=START,
    )  # fmt: skip
    machine = SimulatedMachine(
        step_seconds=step_ms / 1000, token_seconds=token_ms / 1000, rows=rows, requests_per_second=rate,
        prompt_tokens=prompt_tokens, answer_tokens=answer_tokens,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, FolderStore(Path(folder)) as store:
        registry = ExperimentRegistry(store)
        registry.begin(experiment)
        for worker in range(workers):
            output.say(
                f"worker {worker + 1} of {workers}: {output.duration(experiment.num_slices * experiment.slice_seconds)}"
            )
            simulate_worker(experiment, registry, slo, machine, worker=f"worker-{worker + 1}", seed=seed)
        blocks = range(experiment.max_blocks)
        compared = compare_arms(experiment, (close_block(registry, experiment, block) for block in blocks))
    if as_json:
        output.print_json(document(ExperimentState(experiment, None)) | asdict(compared))
        return
    show(experiment, compared)


def _find(registry: ExperimentRegistry, number: int | None) -> ExperimentState:
    """The experiment with this number, or the last one. Raises `UserError`."""
    from tokenmill.errors import UserError

    state = registry.last() if number is None else registry.find(number)
    if state is None:
        raise UserError("there is no such experiment; 'tokenmill experiment start' begins one")
    return state
