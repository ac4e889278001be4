"""The bubble of a pipeline of stages over the number of micro-batches, against the formula (S - 1) / (M + S - 1).

    python -m benchmarks.stages [--stages 2] [--layers 8] [--hidden 768] [--steps 12] [--rounds 3] [--json OUT]

The model is random (Llama; float32) and made anew. Each stage is a process with one thread. Two loads: `prompts`, steps
of 16 new rows with 16 tokens each, and `decode`, steps of 64 rows with one token each; all steps of a load are alike.

Each process notes when it computes which micro-batch (of a clock that all processes share). A step's time is from the
first stage's first beginning to the last stage's last end; its bubble is the share of stages times time in which
no micro-batch is computed. So sending counts as bubble, but sampling and the scheduler don't, nor does the head,
which is read once a step, after the pipeline. Figures are medians over steps. Counts take turns, round by round.

From the times of all turns follow w and c, of w + c * tokens: w / c is `pipeline.BALANCE_TOKENS`, and the engine
chooses the count with the least (M + S - 1) (w + c T / M). The same loads run with tensor parallelism over as many
processes, too: the same operators, one thread each. Nothing here says how long a real link between machines takes: the
processes share one machine's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from throughput import machine
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig
from engine.parallel import rank, rank_group
from engine.parallel.decoder import RankDecoder

MODULE: Final = "benchmarks.stages"
TURNS: Final = "STAGES_TURNS"
"""Environment variable of the other ranks: the folder of their files of turns."""

COUNTS: Final = (1, 2, 4, 8, 16)
PROMPT_ROWS, PROMPT_TOKENS, DECODE_ROWS = 16, 16, 64


@dataclass(frozen=True, slots=True)
class Turn:
    """A micro-batch of so many tokens that one stage computed; nanoseconds of the monotonic clock."""

    tokens: int
    begun: int
    ended: int


class TurnRecorder:
    """Notes the turns of this process, step by step."""

    def __init__(self) -> None:
        self.steps: list[list[Turn]] = []

    @contextmanager
    def recorded(self, after_step: Callable[[list[Turn]], None] = lambda step: None) -> Iterator[None]:
        """Context in which ranks of this process note their turns."""
        through, compute = RankDecoder._through_stages, RankDecoder.forward_stage

        def logged_step(decoder: RankDecoder, *step: Any) -> Tensor:
            self.steps.append([])
            hidden = through(decoder, *step)
            after_step(self.steps[-1])
            return hidden

        def logged_turn(decoder: RankDecoder, entering: Tensor, *rest: Any) -> Tensor:
            begun = time.monotonic_ns()
            leaving = compute(decoder, entering, *rest)
            self.steps[-1].append(Turn(len(entering), begun, time.monotonic_ns()))
            return leaving

        with (
            mock.patch.object(RankDecoder, "_through_stages", logged_step),
            mock.patch.object(RankDecoder, "forward_stage", logged_turn),
        ):
            yield


def run_rank() -> None:
    """Run another rank's process, which appends its turns to a file, a step a line."""
    path = Path(os.environ[TURNS]) / str(os.getpid())
    with path.open("w", buffering=1) as file:

        def write(step: list[Turn]) -> None:
            file.write(json.dumps([(turn.tokens, turn.begun, turn.ended) for turn in step]) + "\n")

        with TurnRecorder().recorded(write):
            rank.main()


def read_turns(path: Path, count: int) -> list[list[Turn]]:
    """Read the file of a rank, which has so many steps, or will have them soon."""
    while len(lines := path.read_text().split("\n")[:-1]) < count:
        time.sleep(0.01)
    return [[Turn(*turn) for turn in json.loads(line)] for line in lines]


def bubble(stages: Sequence[Sequence[Turn]]) -> float:
    """Return the bubble of a step from the turns of each stage."""
    whole = max(turns[-1].ended for turns in stages) - min(turns[0].begun for turns in stages)
    busy = sum(turn.ended - turn.begun for turns in stages for turn in turns)
    return 1 - busy / (len(stages) * whole)


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """Write a random model."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def requests_of(load: str, steps: int, seed: int, vocab_size: int) -> list[Request]:
    """Return the requests whose steps are alike: `steps` of them, and one or two at each end that are not counted."""
    draw = np.random.default_rng(seed)
    if load == "prompts":
        rows, tokens, answer = PROMPT_ROWS * (steps + 2), PROMPT_TOKENS, 1
    else:
        rows, tokens, answer = DECODE_ROWS, 2, steps + 3
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return [
        Request(f"{seed}-{row}", draw.integers(1, vocab_size, tokens, dtype=np.int32), params) for row in range(rows)
    ]


def step_tokens(load: str) -> int:
    """Return the tokens of a step."""
    return PROMPT_ROWS * PROMPT_TOKENS if load == "prompts" else DECODE_ROWS


def config_of(load: str, **ranks: Any) -> EngineConfig:
    """Return the settings of a load."""
    rows = PROMPT_ROWS if load == "prompts" else DECODE_ROWS
    return EngineConfig(
        dtype="float32", device="cpu", max_model_len=256, attention="paged-sdpa",
        cache=CacheConfig(num_blocks=2 * rows, prefix_caching=False),
        schedule=ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=2 * step_tokens(load)), **ranks,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass.

    Attributes:
        seconds: until the leader had its hidden states.  stages: turns of each stage; none where there is one.
    """

    tokens: int
    seconds: float
    stages: tuple[list[Turn], ...]


class Stages:
    """Ranks that note their turns.

    Args:
        folder: for the files of turns.  stages, shards: of the pipeline, and of each of its stages.
    """

    def __init__(self, folder: Path, stages: int, shards: int) -> None:
        self._folder = folder
        self._num_steps = 0
        self._ranks = {"pipeline_parallel": stages, "tensor_parallel": shards}
        count = stages * shards
        with mock.patch.object(rank_group, "RANK_MODULE", MODULE), mock.patch.dict(os.environ, {TURNS: str(folder)}):
            self.rank_group = rank_group.RankGroupProcesses(count, torch.device("cpu"), threads=count, stages=stages)

    def run(self, model: Path, load: str, count: int | None, steps: int, seed: int) -> list[Step]:
        """Run a load in so many micro-batches, and return its steps."""
        config = config_of(load, **self._ranks, micro_batches=count)
        engine = Engine.load(model, config, self.rank_group)
        model_of_ranks: Any = engine._runner._inner._model  # type: ignore[attr-defined]
        forward, seconds = model_of_ranks.forward, []

        def timed(*inputs: Any) -> Tensor:
            begun = time.perf_counter()
            hidden: Tensor = forward(*inputs)
            seconds.append((len(inputs[0]), time.perf_counter() - begun))
            return hidden

        recorder = TurnRecorder()
        with recorder.recorded(), mock.patch.object(model_of_ranks, "forward", timed):
            for _ in engine.run(requests_of(load, steps, seed, engine.spec.vocab_size)):
                pass
        self._num_steps += len(recorder.steps)
        others = [read_turns(self._folder / str(pid), self._num_steps) for pid in self.rank_group.pids]
        first = self._num_steps - len(recorder.steps)
        turns: Any = zip(recorder.steps, *(other[first:] for other in others), strict=True)
        if not recorder.steps:  # there is one stage
            turns = [()] * len(seconds)
        made = [Step(*each, stages) for each, stages in zip(seconds, turns, strict=True)]
        return [step for step in made if step.tokens == step_tokens(load)][1 : 1 + steps]


def fit_turns(turns: Sequence[Turn]) -> tuple[float, float]:
    """Return w and c of turns' milliseconds w + c * tokens, by least squares over the medians of each size."""
    sizes = sorted({turn.tokens for turn in turns})
    medians = [statistics.median((t.ended - t.begun) / 1e6 for t in turns if t.tokens == size) for size in sizes]
    slope, constant = np.polyfit(sizes, medians, 1)
    return float(constant), float(slope)


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the median, and the quartiles on both sides of it."""
    low, median, high = statistics.quantiles(values, n=4)
    return [round(value, 4) for value in (median, low, high)]


def measure(args: argparse.Namespace, model: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure all counts of both loads."""
    found: dict[tuple[str, int | None], list[Step]] = {}
    pipeline, shards = Stages(folder, args.stages, 1), None
    try:
        for number in range(args.rounds):
            for load in ("prompts", "decode"):
                for count in COUNTS:
                    steps = pipeline.run(model, load, count, args.steps, number)
                    found.setdefault((load, count), []).extend(steps)
    finally:
        pipeline.rank_group.close()
    shards = Stages(folder, 1, args.stages)
    try:
        for number, load in ((number, load) for number in range(args.rounds) for load in ("prompts", "decode")):
            found.setdefault((load, None), []).extend(shards.run(model, load, None, args.steps, number))
    finally:
        shards.rank_group.close()
    results = []
    for (load, chosen), steps in found.items():
        result: dict[str, Any] = {
            "load": load, "tokens": step_tokens(load), "micro_batches": chosen, "steps": len(steps),
            "step_milliseconds": quartiles([1e3 * step.seconds for step in steps]),
        }  # fmt: skip
        if chosen is None:
            result = {"tensor_parallel": args.stages, **result}
        else:
            turns = [turn for step in steps for stage in step.stages for turn in stage]
            assert all(len(stage) == chosen for step in steps for stage in step.stages)
            result["bubble"] = quartiles([bubble(step.stages) for step in steps])
            result["formula"] = round((args.stages - 1) / (chosen + args.stages - 1), 4)
            result["turn_milliseconds"] = quartiles([(turn.ended - turn.begun) / 1e6 for turn in turns])
        results.append(result)
    for load in ("prompts", "decode"):
        of_load = [steps for (name, count), steps in found.items() if name == load and count is not None]
        constant, slope = fit_turns([turn for steps in of_load for s in steps for stage in s.stages for turn in stage])
        results.append(
            {
                "load": load, "w_milliseconds": round(constant, 3), "c_milliseconds": round(slope, 4),
                "balance_tokens": round(constant / slope, 1),
            }
        )  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--steps", type=int, default=12, help="of each load, count and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", args.layers, args.hidden)
        (Path(folder) / "turns").mkdir()
        results = measure(args, Path(folder) / "model", Path(folder) / "turns")
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    report = {"machine": machine(), "settings": settings, "load_average": os.getloadavg(), "results": results}
    text = json.dumps(report, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    if TURNS in os.environ:
        run_rank()
    else:
        main()
