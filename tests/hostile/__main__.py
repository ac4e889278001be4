"""Attacks a deployment with hostile input while a well-behaved tenant chats, and judges it.

    python -m tests.hostile [--form cluster|serve] [--worker null|demo] [--attacks 'parquet: *' …] [--json OUT.json]

Forms: `cluster`, a gateway, a dispatcher, an intake and a worker on Redis and S3; `serve`, everything in one process on
a folder. Exit code 1 where a criterion is broken: a process died, memory grew by more than 512 MiB, the well-behaved
tenant's TTFT p95 was more than three times its quiet one, its batch went wrong, or an attack was answered otherwise
than expected. Processes that die are restarted, so that the run completes.

Of the mutated Parquet files, some are uploaded and become batches, and the others are written to the inbox: 100 and
200 with the cluster, whose S3 server limits the rate, 100 and 1,600 with `serve`; 2,000 in all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.hostile.attack import FORMS, Form
from tests.hostile.deployment import deployed
from tests.hostile.report import document, markdown
from tests.hostile.run import Campaign, Options, Outcome
from tests.hostile.table import ATTACKS, chosen

UPLOADED: Final = 100
DROPPED: Final[dict[Form, int]] = {"cluster": 200, "serve": 1_600}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", action="append", choices=FORMS, help="may be repeated; default: both")
    parser.add_argument("--worker", choices=("null", "demo"), default="demo", help="of the cluster")
    parser.add_argument("--model", default="demo", help="that is served under the name demo")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn; default: any")
    parser.add_argument("--attacks", nargs="+", default=[], metavar="PATTERN", help="names as in a shell; default: all")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds before the attacks")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the processes")
    parser.add_argument("--folder", type=Path, help="for logs and data; default: one that is removed")
    parser.add_argument("--json", type=Path, help="where to write the run, and FILE.md next to it")
    parser.add_argument("--before", type=Path, help="the JSON of an earlier run, for the columns before")
    parser.add_argument("--list", action="store_true", help="only name the attacks")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{attack.name} ({', '.join(attack.forms)})" for attack in ATTACKS))
        return 0
    try:
        attacks = {form: chosen(form, args.attacks) for form in args.form or FORMS}
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes end, too
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    load, outcomes = os.getloadavg(), list[Outcome]()
    settings = dict(one.split("=", 1) for one in args.set)
    with tempfile.TemporaryDirectory() as temporary:
        for form, given in attacks.items():
            if not given:
                continue
            print(f"seed {seed}: {len(given)} attacks on {form}", file=sys.stderr, flush=True)
            folder = (args.folder or Path(temporary)).absolute() / form
            with deployed(form, folder, args.worker, args.model, settings) as deployment:
                options = Options(seed, args.quiet, UPLOADED, DROPPED[form])
                outcomes.append(Campaign(deployment, options).run(given))
    found = document(outcomes, args.worker, load)
    before = json.loads(args.before.read_text()) if args.before else None
    shown = markdown(found, before)
    print(shown)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        args.json.with_suffix(".md").write_text(shown)
    broken = [(outcome.form, one) for outcome in outcomes for one in outcome.verdicts() if not one.holds]
    for form, verdict in broken:
        print(f"BROKEN ({form}): {verdict.criterion}: {verdict.found}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
