"""tokenmill's engine: one model in one process, token ids in, token ids out.

from engine import Engine, EngineConfig, Request, SamplingParams, as_token_ids

engine = Engine.load("path/to/model")
request = Request("a", as_token_ids([1, 2, 3]), SamplingParams(max_tokens=8, temperature=0))
for completion in engine.run([request]):
    print(completion.choices[0].token_ids)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.config import CacheConfig, EngineConfig, ScheduleConfig, SpeculationConfig
from engine.request import (
    Choice,
    Completion,
    FinishReason,
    PartialChoice,
    Request,
    SamplingParams,
    TokenLogprobs,
    TokenMask,
    TokenWatcher,
    as_token_ids,
)

if TYPE_CHECKING:
    from engine.engine import Engine, EngineStats

__all__ = [
    "CacheConfig",
    "Choice",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "PartialChoice",
    "Request",
    "SamplingParams",
    "ScheduleConfig",
    "SpeculationConfig",
    "TokenLogprobs",
    "TokenMask",
    "TokenWatcher",
    "as_token_ids",
]


def __getattr__(name: str) -> Any:
    """`Engine` on first use: the scheduler and its simulation need no torch."""
    if name in ("Engine", "EngineStats"):
        return getattr(import_module("engine.engine"), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
