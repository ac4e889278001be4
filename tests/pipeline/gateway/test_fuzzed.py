"""A short look by schemathesis at all routes, always the same; `make fuzz-http` looks longer, each time elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.gateway.fuzzing import fuzz, fuzzed_house

SEED = 1
PHASES = "examples,fuzzing,stateful"


@pytest.mark.slow
@pytest.mark.parametrize("keys", [True, False], ids=["with keys", "without keys"])
def test_nothing_breaks_and_every_answer_is_as_documented(tmp_path: Path, keys: bool) -> None:
    with fuzzed_house(tmp_path) as house:
        found = fuzz(house, 3 if keys else 1, SEED, "--phases", PHASES if keys else "fuzzing", keys=keys)
    assert found.returncode == 0, found.stdout + found.stderr
    asked = {(method, path) for method, path, _ in house.witness.seen}
    assert asked == {(method, path) for method, path, _ in house.witness.documented()}
    assert {200, 400, 404} <= {status for _, _, status in house.witness.seen}
