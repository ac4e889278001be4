"""Names of a process and of its machine."""

from __future__ import annotations

import socket

from tests.pipeline.simulation import SeededRandomness
from tokenmill.processes.runtime import machine_name, unique_name


def test_a_restart_changes_the_process_s_name_and_not_the_machine_s() -> None:
    draw = SeededRandomness()
    assert unique_name(draw) != unique_name(draw)
    assert machine_name(("b6bd5b0c", "a1")) == "b6bd5b0c"
    assert machine_name(()) == socket.gethostname()
