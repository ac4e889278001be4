"""`python -m tests.simulation`: run many histories, replay one, or make the smallest form of one that breaks.

python -m tests.simulation --seeds 2000           seeds 0 … 1999 of each kind over all cores; fails if a history breaks
python -m tests.simulation --kind root 4711       one seed, with its trace; kinds are "job" and "root"
python -m tests.simulation kept/NAME.json         a stored one
python -m tests.simulation 4711 --minimise FILE   the smallest scenario that breaks in the same way
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.simulation.campaign import KINDS, Summary, first_broken, minimise, read_scenario, run_scenario, run_seeds
from tests.simulation.history import Outcome


def main() -> int:
    """Run as the command line says; 1 when a history broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("which", nargs="?", help="a seed, or a file with a scenario")
    parser.add_argument("--kind", choices=KINDS, help="of histories: one job alone, or a whole root; of seeds: both")
    parser.add_argument("--seeds", type=int, help="run so many seeds")
    parser.add_argument("--from-seed", type=int, default=0)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--first", action="store_true", help="stop at the first history that breaks")
    parser.add_argument("--minimise", type=Path, metavar="FILE", help="write the smallest scenario that breaks there")
    given = parser.parse_args()
    if given.seeds is not None:
        seeds = range(given.from_seed, given.from_seed + given.seeds)
        kinds = [given.kind] if given.kind else list(KINDS)
        run = _first if given.first else lambda seeds, kind: _campaign(seeds, kind, given.processes)
        return max([run(seeds, kind) for kind in kinds])
    if given.which is None:
        parser.error("give a seed, a file, or --seeds")
    found = Path(given.which)
    scenario = (
        read_scenario(found.read_text())
        if found.suffix == ".json"
        else KINDS[given.kind or "job"].draw(int(given.which))
    )
    if given.minimise is not None:
        scenario = minimise(scenario)
        given.minimise.write_text(scenario.to_json())
    outcome = run_scenario(scenario)
    print("\n".join(outcome.trace))
    print(f"{outcome.broken or 'nothing broke'}\n{outcome.digest}")
    return int(outcome.broken is not None)


def _campaign(seeds: range, kind: str, processes: int | None) -> int:
    begun = time.monotonic()

    def report(summary: Summary, outcome: Outcome) -> None:
        if outcome.broken is not None:
            print(f"{kind} {outcome.seed}: {outcome.broken}", file=sys.stderr)
        if summary.histories % 500 == 0:
            print(f"{kind}: {summary.histories:,} of {len(seeds):,}, {len(summary.broken)} broken", file=sys.stderr)

    summary = run_seeds(seeds, kind=kind, processes=processes, on_outcome=report)
    seconds = time.monotonic() - begun
    print(f"-- {kind}")
    for line in summary.lines():
        print(line)
    print(f"{seconds:.0f} s, {summary.histories / seconds:.1f} histories a second")
    if summary.broken:
        print(f"broken: {', '.join(map(str, sorted(summary.broken)))}")
    if summary.missing:
        print(f"these faults never struck: {', '.join(summary.missing)}")
    return int(bool(summary.broken or summary.missing))


def _first(seeds: range, kind: str) -> int:
    outcome = first_broken(seeds, kind)
    if outcome is None:
        print(f"none of {len(seeds):,} histories broke")
        return 0
    print(f"seed {outcome.seed}: {outcome.broken}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
