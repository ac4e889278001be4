"""A short, deterministic run of schemathesis over all routes; `make fuzz-http` runs longer, with new seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.gateway.fuzzing import fuzz, fuzzed_harness

SEED = 1
PHASES = "examples,fuzzing,stateful"


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [pytest.param(True, id="with keys"), pytest.param(False, id="without keys", marks=pytest.mark.exhaustive)]
)
def test_no_fuzzed_request_gets_an_undocumented_response(tmp_path: Path, keys: bool) -> None:
    with fuzzed_harness(tmp_path) as harness:
        found = fuzz(harness, 3 if keys else 1, SEED, "--phases", PHASES if keys else "fuzzing", keys=keys)
    assert found.returncode == 0, found.stdout + found.stderr
    requested = {(method, path) for method, path, _ in harness.witness.seen}
    assert requested == {(method, path) for method, path, _ in harness.witness.documented()}
    assert {200, 400, 404} <= {status for _, _, status in harness.witness.seen}
