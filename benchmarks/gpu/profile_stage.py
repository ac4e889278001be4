"""Stage `profile`: where the device's time goes in steps of a full batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu import profiling, serve
from benchmarks.gpu.context import Context, Part, tried
from benchmarks.gpu.models import LLAMA

_SECONDS = 60.0


def run(context: Context) -> Iterator[Part]:
    """Decoding steps of a full batch, then steps with prompts in them."""
    cells = {
        "decoding": serve.Cell(context.sized(1000, 8), context.sized(1000, 64)),
        "prompts": serve.Cell(context.sized(2048, 24), context.sized(128, 4)),
    }
    context.need(context.sized(_SECONDS, 1.0))
    engine = serve.engine_for(context, context.sized(LLAMA, "tiny-llama"), serve.variants(context)[0], cells.values())
    for name, cell in cells.items():
        yield name, tried(partial(of_flow, serve.Flow(engine, cell, context), context))


def of_flow(flow: serve.Flow, context: Context) -> dict[str, Any]:
    """Some steps of a full batch."""
    try:
        flow.fill()
        return profiling.steps(flow.step, context.device, context.sized(30, 3))
    finally:
        flow.stop()
