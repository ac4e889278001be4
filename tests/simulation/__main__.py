"""`python -m tests.simulation`: run many histories, replay one, or make the smallest form of one that breaks.

python -m tests.simulation --seeds 20000          seeds 0 … 19999 over all cores; fails if a history breaks
python -m tests.simulation 4711                   one seed, with its trace
python -m tests.simulation kept/NAME.json         one that was kept
python -m tests.simulation 4711 --minimise FILE   the smallest scenario that breaks in the same way
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.simulation.campaign import Summary, first_broken, minimise, run_seeds
from tests.simulation.history import Outcome, simulate
from tests.simulation.scenario import Scenario, draw


def main() -> int:
    """Run as told; 1 when a history broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("which", nargs="?", help="a seed, or a file with a scenario")
    parser.add_argument("--seeds", type=int, help="run so many seeds")
    parser.add_argument("--from-seed", type=int, default=0)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--first", action="store_true", help="stop at the first history that breaks")
    parser.add_argument("--minimise", type=Path, metavar="FILE", help="write the smallest scenario that breaks there")
    given = parser.parse_args()
    if given.seeds is not None:
        seeds = range(given.from_seed, given.from_seed + given.seeds)
        if given.first:
            return _first(seeds)
        return _campaign(seeds, given.processes)
    if given.which is None:
        parser.error("give a seed, a file, or --seeds")
    found = Path(given.which)
    scenario = Scenario.from_json(found.read_text()) if found.suffix == ".json" else draw(int(given.which))
    if given.minimise is not None:
        scenario = minimise(scenario)
        given.minimise.write_text(scenario.to_json())
    outcome = simulate(scenario)
    print("\n".join(outcome.trace))
    print(f"{outcome.broken or 'nothing broke'}\n{outcome.digest}")
    return int(outcome.broken is not None)


def _campaign(seeds: range, processes: int | None) -> int:
    begun = time.monotonic()

    def tell(summary: Summary, outcome: Outcome) -> None:
        if outcome.broken is not None:
            print(f"seed {outcome.seed}: {outcome.broken}", file=sys.stderr)
        if summary.histories % 500 == 0:
            print(f"{summary.histories:,} of {len(seeds):,}, {len(summary.broken)} broken", file=sys.stderr)

    summary = run_seeds(seeds, processes=processes, tell=tell)
    seconds = time.monotonic() - begun
    for line in summary.lines():
        print(line)
    print(f"{seconds:.0f} s, {summary.histories / seconds:.1f} histories a second")
    if summary.broken:
        print(f"broken: {', '.join(map(str, sorted(summary.broken)))}")
    if summary.missing:
        print(f"these faults never struck: {', '.join(summary.missing)}")
    return int(bool(summary.broken or summary.missing))


def _first(seeds: range) -> int:
    outcome = first_broken(seeds)
    if outcome is None:
        print(f"none of {len(seeds):,} histories broke")
        return 0
    print(f"seed {outcome.seed}: {outcome.broken}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
