"""Runs one attack in a process of its own, which can be stopped and takes little processor time from its target.

python -m tests.hostile.attacker NAME < TARGET.json > ANSWERS.json
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Final

from tests.hostile.attack import Target, as_json, tally
from tests.hostile.table import ATTACKS

MEMORY_BYTES: Final = 4 << 30
NICENESS: Final = 10
"""The attacker represents remote machines, so it yields the processor to the deployment."""


def main() -> None:
    name = sys.argv[1]
    target = Target(**json.load(sys.stdin))
    os.nice(NICENESS)
    # The soft limit alone: an attack may start a worker, which has a limit of its own.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8_192)), hard))
    attack = next(attack for attack in ATTACKS if attack.name == name)
    json.dump(as_json(tally(attack.run(target))), sys.stdout)


if __name__ == "__main__":
    main()
